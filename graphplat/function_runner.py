"""The simple way in: replay a function or module from graphs, with no engine around it."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from graphplat import tree
from graphplat.batch import ForwardBatch, Phase
from graphplat.buffers import check_tensor
from graphplat.capture import CudaGraphsCapture, capture_cuda_graphs
from graphplat.config import GraphConfig, PhaseConfig
from graphplat.errors import ConfigError, InputError
from graphplat.function_arguments import FunctionArguments
from graphplat.inputs import HostSpec, InputSpec, TensorSpec, UpTo
from graphplat.model_runner import ModelRunner
from graphplat.outputs import copy_output
from graphplat.plugin_hooks import warn
from graphplat.report import Decision, RunnerStats
from graphplat.row_check import RowCheck, in_training, restored
from graphplat.runners.eager import EagerRunner

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
    rows hold, by argument name (0). Other arguments are constants, defaults too: a call with other
    constants, or with other arguments, runs *function* itself. *settings* are those of
    :class:`PhaseConfig` but variants, max_requests and max_padding.

    A call is padded to a bucket, so its rows must not feel the rows of *fill* beside them, as they do in
    a mean or softmax over rows, or in batch normalisation in training mode. With *check*, up to two rows
    of the example are run eagerly, alone and padded, and must agree but for rounding
    (``graphplat.backends.numerics.TOLERANCES``, by the least precise type among example and parameters;
    float32 counts as float16 where it may be multiplied in fewer bits, so on all devices but the CPU), and in
    whole numbers, unless what they are computed from has few bits. One row is enough; give rows like those
    to come: what the example's values do not show is not found, nor anything of a function that draws random
    numbers, nor whether a dimension ``UpTo`` may be widened. The check is skipped where every size from 1 on
    has a bucket of its own. A function that computes in fewer bits than its tensors have may need
    ``check=False``. With *check*, modules in training mode that drop values or normalise by their batch are
    warned of by :class:`GraphplatWarning`. Buffers of a module in training mode are as before afterwards.

    Results carry no gradient. A tensor that *function* closes over is read at its address
    of now; give a module, whose parameters and buffers are watched, where they may move.

    Raises :class:`InputError` for a *function* without named arguments, an example without a tensor of rows,
    whose tensors differ in rows or are not as *dims* says, and a name in *dims* or *fill* that is none of its
    tensors; :class:`ConfigError` for a bad setting; :class:`CaptureError` where padded rows change the
    results; and what :func:`capture_cuda_graphs` raises.
    """
    config = GraphConfig(decode=_settings(buckets, settings))
    runner = FunctionRunner(function, example, dims, {} if fill is None else fill)
    runner.graph_config = config
    with runner.statistics_kept():
        capture = capture_cuda_graphs(model_runner=runner)
        if check and capture.decode.runner is not None:
            _check_padding(RowCheck(runner, capture.eager_runner))
    return Graphed(runner, capture)


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
        self.arguments = FunctionArguments(function, example)
        self.example = self.arguments.example
        tensors = {p: leaf for p, leaf in tree.walk(self.example) if isinstance(leaf, torch.Tensor)}
        if not tensors:
            raise InputError("the example holds no tensor")
        _check_fill(fill, next(iter(tensors)))
        for setting, given in (("dims", dims), ("fill", fill)):
            _check_names(setting, given if isinstance(given, Mapping) else (), tensors)
        self.device = next(iter(tensors.values())).device
        self._spec = InputSpec(**tree.map_leaves(functools.partial(_declare, dims, fill), self.example))
        self.rows_paths = [p for p, s in self._spec.tensors.items() if s.row_dim == "requests"]
        if not self.rows_paths:
            raise InputError('no tensor of the example has the dimension "requests"', hint="Set dims")
        _check_rows({path: tensors[path].shape for path in self.rows_paths})
        self.rows = tensors[self.rows_paths[0]].shape[0]
        for path, tensor in tensors.items():
            _check_declared(path, self._spec.tensors[path], tensor, self.rows)

    def statistics_kept(self) -> contextlib.AbstractContextManager[None]:
        """Put buffers back at the end where the function runs several times for a capture.

        Modules in training mode count and average what they see there. Others have no reason to change,
        and may be as large as a cache.
        """
        trained = any(module.training for module in self.model.modules())
        buffers = [buffer for buffer in self.model.buffers() if buffer.layout is torch.strided]
        return restored(buffers if trained else [])

    def input_spec(self, phase: Phase) -> InputSpec:
        """The arguments, as the example declared them."""
        return self._spec

    def forward(self, batch: ForwardBatch) -> Any:
        """Call the function with the batch's inputs."""
        bound = self.arguments.complete(batch.inputs)
        return self.function(*bound.args, **bound.kwargs)


class Graphed:
    """A callable that replays graphs; ``stats`` counts what ran how, ``report`` says what was captured."""

    def __init__(self, model_runner: FunctionRunner, capture: CudaGraphsCapture) -> None:
        self._model_runner = model_runner
        self._arguments = model_runner.arguments
        self._eager_runner = capture.eager_runner
        self.runner = capture.decode_runner
        self.report = capture.report
        functools.update_wrapper(self, model_runner.function, updated=())

    @property
    def stats(self) -> RunnerStats:
        """Counts of this callable's calls."""
        return self.runner.stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; raises :class:`InputError` for a tensor that is not as declared."""
        inputs = self._arguments.bind(args, kwargs)
        unlike = self._arguments.unlike(inputs)
        if unlike is None:
            return self.runner.execute(self._batch(inputs))
        return self._run_eagerly(inputs, unlike)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """What a call with these arguments would do, without doing it; raises as a call does."""
        inputs = self._arguments.bind(args, kwargs)
        return self._arguments.unlike(inputs) or self.runner.explain(self._batch(inputs))

    def release(self) -> None:
        """Destroy the graphs; calls run eagerly until :meth:`recapture`."""
        self.runner.release()

    def recapture(self) -> None:
        """Destroy the graphs and record them again; raises :class:`CaptureError` as :func:`graphed` does."""
        with self._model_runner.statistics_kept():
            self.runner.recapture()

    def _run_eagerly(self, inputs: dict[str, Any], decision: Decision) -> Any:
        """Run a call unlike the example, as the runner runs any step without a graph."""
        arena, leaves = self._eager_runner.context.arena, dict(tree.walk(inputs))
        found = (_rows(leaves.get(path)) for path in self._model_runner.rows_paths)
        rows = next((count for count in found if count is not None), None)
        with arena.lock:
            self.stats.count(decision, rows)
            result = self._eager_runner.run(_batch(rows or 0, inputs), leaves)
            if isinstance(self.runner, EagerRunner):
                return result
            with torch.no_grad():
                view = self._model_runner.graph_config.decode.outputs == "view"
                return arena.copied_out(result) if view else copy_output(result)

    def _batch(self, inputs: dict[str, Any]) -> ForwardBatch:
        path = self._model_runner.rows_paths[0]
        value = inputs.get(path)
        if value is None:
            value = next((leaf for where, leaf in tree.walk(inputs) if where == path), None)
        return _batch(_rows(value) or 0, inputs)  # without rows the runner's check words the error


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
    if isinstance(given, str) or not isinstance(given, Sequence):
        hint = 'Write ("requests", 8), for instance'
        raise InputError(f"dims are a sequence of dimensions, found {given!r}", field=path, hint=hint)
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


def _check_fill(fill: object, name: str) -> None:
    if not isinstance(fill, Mapping):
        hint = f"Write fill={{{name!r}: {fill!r}}}"
        raise InputError(f"fill is a dict by argument name, found {fill!r}", field="fill", hint=hint)


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


def _rows(value: Any) -> int | None:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None


def _batch(rows: int, inputs: dict[str, Any]) -> ForwardBatch:
    return ForwardBatch(phase=Phase.DECODE, num_requests=rows, num_tokens=rows, inputs=inputs)


def _settings(buckets: Sequence[int] | None, settings: dict[str, Any]) -> PhaseConfig:
    """The settings of the one phase; raises :class:`ConfigError` for those that would do nothing."""
    for name in ("variants", "max_requests", "max_padding"):
        if name in settings:
            raise ConfigError(f"{name} means nothing to graphed()", field=name, hint="Leave it out")
    try:
        sizes = None if buckets is None else tuple(buckets)
    except TypeError as error:
        hint = f"Write buckets=({buckets!r},)"
        raise ConfigError(f"buckets are a sequence of sizes: {error}", field="buckets", hint=hint) from error
    return PhaseConfig(buckets=sizes, **settings)
