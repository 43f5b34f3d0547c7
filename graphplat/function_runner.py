"""The simple way in: replay a function or module from graphs, with no engine around it."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from graphplat import tree
from graphplat.batch import ForwardBatch, Phase
from graphplat.buffers import check_tensor
from graphplat.capture import capture_cuda_graphs
from graphplat.config import GraphConfig, PhaseConfig
from graphplat.errors import InputError
from graphplat.inputs import HostSpec, InputSpec, TensorSpec, UpTo
from graphplat.model_runner import ModelRunner
from graphplat.plugin_hooks import warn
from graphplat.report import CaptureReport, Decision, Reason, RunnerStats
from graphplat.row_check import RowCheck, in_training, restored
from graphplat.runners import BaseRunner

Dims = Sequence[str | int | UpTo]


def graphed(
    function: Callable[..., Any],
    example: Any,
    *,
    dims: Dims | Mapping[str, Dims] | None = None,
    buckets: Sequence[int] | None = None,
    fill: Mapping[str, int | float | bool] | None = None,
    check: bool = True,
    **settings: Any,
) -> Graphed:
    """Capture *function* for each of *buckets* and return a callable with its signature.

    *example* holds the arguments of one call: a tensor, a tuple of positional ones or
    a dict of named ones. *dims* describes the tensors, for all or by argument name:
    ``"requests"`` first where rows vary, then numbers or :class:`UpTo`; by default axis 0 of
    every tensor counts rows and the rest is as in *example*. *fill* is what padded
    rows hold, by argument name (0). Other arguments are constants: a call with other
    constants, or with other arguments, runs *function* itself. *settings* are those of
    :class:`PhaseConfig`.

    A call is padded to a bucket, so its rows must not feel the rows of *fill* beside them, as they do in
    a mean or softmax over rows, or in batch normalisation in training mode. With *check*, up to two rows
    of the example are run eagerly, alone and padded, and must agree but for rounding
    (``graphplat.backends.numerics.TOLERANCES``, by the least precise type among example and parameters;
    float32 counts as float16 where it may be multiplied in fewer bits, so on all devices but the CPU), and in
    whole numbers, unless what they are computed from has few bits. One row is enough; give rows like those
    to come: what the example's values do not show is not found, nor anything of a function that draws random
    numbers, nor whether a dimension ``UpTo`` may be widened. The check is skipped where every size from 1 on
    has a bucket of its own. A function that computes in fewer bits than its tensors have may need
    ``check=False``. A module in training mode that drops values or normalises by its batch is warned of by
    :class:`GraphplatWarning`; its buffers are as before afterwards.

    Results carry no gradient. A tensor that *function* closes over is read at its address
    of now; give a module, whose parameters and buffers are watched, where they may move.

    Raises :class:`InputError` for an example without a tensor of rows, whose tensors
    differ in rows or are not as *dims* says, and for a name in *dims* or *fill* that is none of its
    tensors; :class:`CaptureError` where padded rows change the results; and what
    :func:`capture_cuda_graphs` raises.
    """
    runner = FunctionRunner(function, example, dims, fill or {})
    runner.graph_config = GraphConfig(
        decode=PhaseConfig(buckets=None if buckets is None else tuple(buckets), **settings)
    )
    # Set-up runs the function several times, which in training mode may change running statistics.
    buffers = [buffer for buffer in runner.model.buffers() if buffer.layout is torch.strided]
    with restored(buffers if runner.model.training else []):
        capture = capture_cuda_graphs(model_runner=runner)
        if check and capture.decode.runner is not None:
            _check_padding(RowCheck(runner, capture.eager_runner))
    return Graphed(runner, capture.decode_runner, capture.report)


class FunctionRunner(ModelRunner):
    """A runtime made of one function: a decode step whose requests are rows."""

    def __init__(
        self,
        function: Callable[..., Any],
        example: Any,
        dims: Dims | Mapping[str, Dims] | None,
        fill: Mapping[str, int | float | bool],
    ) -> None:
        self.function = function
        owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
        self.model = owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()
        called = function.forward if isinstance(function, torch.nn.Module) else function
        self.signature = inspect.signature(called)
        self.example = self._bind_example(example)
        tensors = {p: leaf for p, leaf in tree.walk(self.example) if isinstance(leaf, torch.Tensor)}
        if not tensors:
            raise InputError("the example holds no tensor")
        for setting, given in (("dims", dims), ("fill", fill)):
            _check_names(setting, given if isinstance(given, Mapping) else (), tensors)
        self.device = next(iter(tensors.values())).device
        self._spec = InputSpec(**tree.map_leaves(functools.partial(_declare, dims, fill), self.example))
        self.rows_path = next((p for p, s in self._spec.tensors.items() if s.row_dim == "requests"), None)
        if self.rows_path is None:
            raise InputError('no tensor of the example has the dimension "requests"', hint="Set dims")
        _check_rows({p: t.shape for p, t in tensors.items() if self._spec.tensors[p].row_dim == "requests"})
        self.rows = tensors[self.rows_path].shape[0]
        for path, tensor in tensors.items():
            _check_declared(path, self._spec.tensors[path], tensor, self.rows)

    def input_spec(self, phase: Phase) -> InputSpec:
        """The arguments, as the example declared them."""
        return self._spec

    def forward(self, batch: ForwardBatch) -> Any:
        """Call the function with the batch's inputs."""
        return self.call(batch.inputs)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function with *arguments* by name."""
        bound = inspect.BoundArguments(self.signature, cast("Any", dict(arguments)))
        return self.function(*bound.args, **bound.kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, as the function's signature takes them."""
        return dict(self.signature.bind(*args, **kwargs).arguments)

    def _bind_example(self, example: Any) -> dict[str, Any]:
        if isinstance(example, dict):
            return self.bind((), example)
        return self.bind(example if isinstance(example, tuple) else (example,), {})


class Graphed:
    """A callable that replays graphs; ``stats`` counts what ran how, ``report`` says what was captured."""

    def __init__(self, model_runner: FunctionRunner, runner: BaseRunner, report: CaptureReport) -> None:
        self._model_runner = model_runner
        self.runner = runner
        self.report = report
        functools.update_wrapper(self, model_runner.function, updated=())

    @property
    def stats(self) -> RunnerStats:
        """Counts of this callable's calls."""
        return self.runner.stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; raises :class:`InputError` for a tensor that is not as declared."""
        arguments = self._model_runner.bind(args, kwargs)
        unlike = self._unlike_example(arguments)
        if unlike is None:
            return self.runner.execute(self._batch(arguments))
        self.stats.eager[Reason.OPTIONAL_INPUTS] += 1
        self.stats.last = unlike
        with torch.no_grad():
            return self._model_runner.call(arguments)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """What a call with these arguments would do, without doing it; raises as a call does."""
        arguments = self._model_runner.bind(args, kwargs)
        return self._unlike_example(arguments) or self.runner.explain(self._batch(arguments))

    def release(self) -> None:
        """Destroy the graphs; calls run eagerly until :meth:`recapture`."""
        self.runner.release()

    def recapture(self) -> None:
        """Destroy the graphs and record them again; raises :class:`CaptureError` as :func:`graphed` does."""
        self.runner.recapture()

    def _unlike_example(self, arguments: Mapping[str, Any]) -> Decision | None:
        """Why *arguments* have no graph, if they are not those that the example gave."""
        expected = self._model_runner.example.keys()
        if arguments.keys() == expected:
            return None
        detail = f"arguments {list(arguments)} given, {list(expected)} in the example"
        return Decision(reason=Reason.OPTIONAL_INPUTS, detail=detail)

    def _batch(self, arguments: dict[str, Any]) -> ForwardBatch:
        rows = _rows(arguments, cast(str, self._model_runner.rows_path))
        return ForwardBatch(phase=Phase.DECODE, num_requests=rows, num_tokens=rows, inputs=arguments)


def _check_padding(check: RowCheck) -> None:
    """Warn of modules in training mode; where padding changes results, destroy the graphs and raise."""
    try:
        check.run()
    except BaseException as error:
        check.eager.context.release_all(error)
        raise
    if training := in_training(check.runner.model):
        warn(f"graphed() replays modules in training mode: {'; '.join(training)}. Call eval() before")


def _declare(
    dims: Dims | Mapping[str, Dims] | None, fill: Mapping[str, Any], path: str, leaf: Any
) -> TensorSpec | HostSpec:
    if not isinstance(leaf, torch.Tensor):
        return HostSpec(values=(leaf,))
    name = _argument(path)
    given = dims.get(path, dims.get(name)) if isinstance(dims, Mapping) else dims
    if given is None:
        given = ("requests", *leaf.shape[1:]) if leaf.dim() else ()
    return TensorSpec(cast("Any", tuple(given)), dtype=leaf.dtype, fill=fill.get(path, fill.get(name, 0)))


def _argument(path: str) -> str:
    """The name of the argument in which *path* lies."""
    return path.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0]


def _check_names(setting: str, given: Iterable[str], tensors: Iterable[str]) -> None:
    """Raise unless each name *given* in *setting* is an argument or a path of the example's *tensors*."""
    known = dict.fromkeys(name for path in tensors for name in (_argument(path), path))
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name), known, n=1)
        meant = f"Did you mean {close[0]!r}? " if close else ""
        raise InputError(
            f"{setting} names {name!r}, which is no tensor of the example",
            field=str(name),
            hint=f"{meant}Its tensors are {', '.join(map(repr, known))}",
        )


def _check_declared(path: str, spec: TensorSpec, tensor: torch.Tensor, rows: int) -> None:
    """Raise unless the example's *tensor* is as its own *spec* says; wider than graphs hold is no fault."""
    try:
        check_tensor(path, spec, tensor, rows, rows)
    except InputError as error:
        raise InputError(
            f"the example is not as dims says: {error.what}", field=path, hint=error.hint or "Correct dims"
        ) from error


def _check_rows(shapes: Mapping[str, torch.Size]) -> None:
    """Raise unless the tensors said to have rows, with their *shapes* in the example, have equally many."""
    if len({shape[:1] for shape in shapes.values()}) > 1:
        found = ", ".join(f"{path} {tuple(shape)}" for path, shape in shapes.items())
        raise InputError(
            f"the tensors of the example differ in rows: {found}",
            hint='Name those without rows in dims, such as dims={"weight": (8, 8)}',
        )


def _rows(arguments: dict[str, Any], path: str) -> int:
    """The rows of the tensor at *path*, or 0 where there is none; the runner's check words the error."""
    value: Any = arguments.get(path)
    if value is None:
        value = next((leaf for where, leaf in tree.walk(arguments) if where == path), None)
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 0
