"""Whether padded rows change the results of a function, found on its example before anybody relies on it."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphplat import tree
from graphplat.backends.numerics import TOLERANCES, Difference, tolerance
from graphplat.batch import Phase
from graphplat.buffers import bind_inputs
from graphplat.errors import CaptureError, GraphplatError
from graphplat.outputs import GraphOutput, copy_output

if TYPE_CHECKING:
    from graphplat.function_runner import FunctionRunner
    from graphplat.runners.eager import EagerRunner

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@attrs.define(eq=False)
class Holdings:
    """What a function holds on to beside its arguments: modules, tensors, random generators."""

    modules: dict[str, nn.Module] = attrs.field(factory=dict)
    """Every module within reach, by a name for messages."""
    tensors: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """Buffers of the modules, and tensors that the function closes over, by identity."""
    generators: list[torch.Generator] = attrs.field(factory=list)
    _versions: dict[int, int] = attrs.field(factory=dict)
    _seen: dict[int, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, function: Any) -> Holdings:
        """What *function*, its object, its closure and the globals that it names hold."""
        found = cls()
        found._reach("", function)
        if not isinstance(function, nn.Module):
            for name, value in _held(getattr(function, "__dict__", {})):
                found._reach(name, value)
        found._versions = {i: t._version for i, t in found.tensors.items() if not t.is_inference()}
        return found

    def _reach(self, name: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules(prefix=name):
                self.modules.setdefault(inner, module)
            self.tensors |= {id(buffer): buffer for buffer in value.buffers()}
        elif isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        else:
            for inner, reached in _behind(value):
                self._reach(inner, reached)

    def statistics(self) -> list[torch.Tensor]:
        """The buffers of modules whose running statistics change at each run."""
        return [b for m in self.modules.values() if _keeps_statistics(m) for b in m.buffers(recurse=False)]

    def written(self) -> list[torch.Tensor]:
        """The tensors that operators have written to since :meth:`of`, and those that do not tell.

        The kernels that update running statistics do not tell either; :meth:`statistics` has those.
        """
        return [t for i, t in self.tensors.items() if t.is_inference() or t._version != self._versions[i]]

    def in_training(self) -> list[str]:
        """The modules that do in training mode what no inference wants, and what that is."""
        told = []
        for name, module in self.modules.items():
            described = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            if _keeps_statistics(module):
                told.append(f"{described} normalises by its batch")
            elif _drops(module):
                told.append(f"{described} drops values at random")
        return told


def _behind(value: Any) -> Iterator[tuple[str, Any]]:
    """What a callable, or a list or dict that one holds, leads to, with names."""
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"[{index}]", item) for index, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
        yield "", value.__func__
        if not isinstance(value.__self__, nn.Module):
            yield from _held(getattr(value.__self__, "__dict__", {}))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                yield name, cell.cell_contents
        read = {step.argval for step in dis.get_instructions(value) if step.opname == "LOAD_GLOBAL"}
        known = value.__globals__
        yield from _held({n: known[n] for n in read if n in known})  # functions among them lead too far
    elif type(value) in (list, tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif type(value) is dict:
        yield from ((str(key), item) for key, item in value.items())


def _held(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((n, v) for n, v in values.items() if isinstance(v, (nn.Module, torch.Tensor, torch.Generator)))


def _keeps_statistics(module: nn.Module) -> bool:
    return module.training and isinstance(getattr(module, "running_mean", None), torch.Tensor)


def _drops(module: nn.Module) -> bool:
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.training and module.dropout > 0
    return module.training and isinstance(module, _DROPOUTS) and module.p > 0


@contextlib.contextmanager
def restored(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Put the contents of *tensors* back at the end."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(copy)


@attrs.define(eq=False)
class RowCheck:
    """Runs a captured function on a few rows of its example, alone and among padded rows.

    Both runs are eager, so that a difference can come from nothing else. Random states, and whatever
    *holdings* found the forward to write to, are as before afterwards; runs are not counted.
    """

    runner: FunctionRunner
    eager: EagerRunner
    holdings: Holdings

    def run(self) -> None:
        """Raise :class:`CaptureError` where padded rows change the results of real ones."""
        sizes = self._sizes()
        if sizes is None:
            return
        rows, bucket = sizes
        try:
            with self.eager.context.arena.lock, restored(self.holdings.written()), self._random_states_kept():
                self._compare(rows, bucket)
        except GraphplatError:
            raise
        except Exception as error:
            raise self._error(
                f"the function failed on {rows} rows of its example: {type(error).__name__}: {error}",
                bucket,
                "Give an example that it can run, or check=False",
            ) from error

    def _sizes(self) -> tuple[int, int] | None:
        """Rows to take from the example, and the bucket to pad them to; ``None`` where none are padded.

        The fewer rows are real, the more the padded ones weigh. Set-up has run three and two rows, or fewer
        where the largest bucket is less, so that the function can do with these.
        """
        settings = self.runner.graph_config.decode
        ladder = settings.ladder(Phase.DECODE)
        thinned = settings.max_graphs is not None or settings.memory_budget_gb is not None
        if ladder == tuple(range(1, len(ladder) + 1)) and not (thinned and len(ladder) > 1):
            return None
        rows = min(self.runner.rows, 2 if ladder[-1] > 2 else 1)
        bucket = next((size for size in ladder if size >= 2 * rows), ladder[-1])
        return (rows, bucket) if rows else None

    def _compare(self, rows: int, bucket: int) -> None:
        before = self._random_states()
        alone, padded = self._run(rows, rows), self._run(rows, bucket)
        found = {path: _difference(alone, padded, path) for path in alone}
        if all(_Limit(0, flips=False).admits(difference) for difference in found.values()):
            return
        with _Types() as met:
            again = self._run(rows, rows)
        if not all(map(torch.equal, before, self._random_states())):
            return  # a draw for more rows gives other numbers to each
        limit = self._limit(met.dtypes)
        for path, difference in found.items():
            if not limit.admits(difference) and limit.admits(_difference(alone, again, path)):
                raise self._influence(path, (rows, bucket), difference, limit)

    def _run(self, rows: int, size: int) -> dict[str, Any]:
        """The results of the example's first *rows*, run among as many padded rows as make *size*."""
        context = self.eager.context
        spec = context.spec(Phase.DECODE)
        host = tuple((path, rule.capture_values[0]) for path, rule in spec.hosts.items())
        key = self.eager.make_key(Phase.DECODE, size, None, frozenset(), host)
        bound = bind_inputs(spec, key, context.arena)
        leaves: dict[str, Any] = {}
        for path, leaf in tree.walk(self.runner.example):
            if path in spec.tensors:
                held = spec.tensors[path].shape(rows, rows)
                leaves[path] = leaf.detach()[tuple(slice(0, most) for most in held)]
        with torch.no_grad():
            bound.load(leaves, rows, rows)
            output = self.eager.forward(context.dummy_batch(key, bound.views()))
            real = GraphOutput(output, self.eager.row_axes(key), key).head(rows, rows)
            return dict(tree.walk(copy_output(real)))

    def _limit(self, dtypes: set[torch.dtype]) -> _Limit:
        """What rounding may do in *dtypes*: kernels for another number of rows add in another order."""
        modules, device = self.holdings.modules.values(), self.runner.device
        tensors: list[torch.Tensor] = [p for module in modules for p in module.parameters(recurse=False)]
        tensors += [leaf for _, leaf in tree.walk(self.runner.example) if isinstance(leaf, torch.Tensor)]
        dtypes = dtypes | {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        relative = tolerance([{str(dtype): torch.empty(0, dtype=dtype) for dtype in dtypes}], device)
        highest = torch.get_float32_matmul_precision() == "highest"
        if torch.float32 in dtypes and not (highest and device.type == "cpu"):
            # Devices may multiply in fewer bits, and do so for some sizes and not for others.
            relative = max(relative, TOLERANCES[torch.float16])
        return _Limit(relative, flips=not highest or not dtypes <= {torch.float32, torch.float64})

    def _random_states(self) -> list[torch.Tensor]:
        own = self.eager.context.platform.rng_state(self.runner.device)
        known = [torch.empty(0) if own is None else own, torch.get_rng_state()]
        return [*known, *(generator.get_state() for generator in self.holdings.generators)]

    @contextlib.contextmanager
    def _random_states_kept(self) -> Iterator[None]:
        own, host, *private = self._random_states()
        try:
            yield
        finally:
            if own.numel():
                self.eager.context.platform.set_rng_state(self.runner.device, own)
            torch.set_rng_state(host)
            for generator, state in zip(self.holdings.generators, private, strict=True):
                generator.set_state(state)

    def _influence(self, path: str, sizes: tuple[int, int], found: Difference, limit: _Limit) -> CaptureError:
        where = f"output {path!r}" if path else "the output"
        apart = f"by {found.relative:.2g} of the largest value, {limit.relative:.2g} allowed"
        training = "; ".join(self.holdings.in_training())
        return self._error(
            f"rows influence each other: {sizes[0]} of the example's give other results alone than padded "
            f"to {sizes[1]}; {where} differs {apart if found.relative else 'in whole numbers'}",
            sizes[1],
            (f"In training mode {training}: call eval(). " if training else "")
            + "Mask padded rows, which hold the fill values; or give each size from 1 on a bucket "
            "of its own; or set check=False, if such results will do",
            field=path or None,
        )

    def _error(self, what: str, bucket: int, hint: str, field: str | None = None) -> CaptureError:
        name = self.eager.context.platform.name
        return CaptureError(what, platform=name, phase=Phase.DECODE, bucket=bucket, field=field, hint=hint)


@attrs.frozen
class _Limit:
    """How far results may differ by rounding alone."""

    relative: float
    flips: bool
    """Whether whole numbers may differ, since near ties turn."""

    def admits(self, difference: Difference) -> bool:
        return difference.relative <= self.relative and (self.flips or not difference.flipped)


def _difference(expected: Mapping[str, Any], found: Mapping[str, Any], path: str) -> Difference:
    return Difference.between({path: expected[path]}, {path: found[path]})


class _Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the floating types that operators compute in, also inside the function."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run *func* and note the types of its results."""
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for _, leaf in tree.walk(result) if isinstance(leaf, torch.Tensor)]
        self.dtypes |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return result
