"""Static input buffers: one layout of the arena per shape key.

Each shape key packs its fields tightly from the arena's start, so that a batch in
host memory can travel as one copy. Layouts overlap: only the batch being run
is in the arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat.arena import StaticArena, field_bytes, packed_bytes
from graphplat.errors import InputError
from graphplat.inputs import InputSpec, TensorSpec

if TYPE_CHECKING:
    from graphplat.keys import ShapeKey
    from graphplat.staging import Staging


@attrs.define(eq=False)
class _Field:
    """One tensor input in one layout."""

    path: str
    spec: TensorSpec
    fill: Any
    static: torch.Tensor
    extent: tuple[int, ...] = ()
    """The shape last written; what lies outside it holds the fill value."""
    nbytes: int = 0
    """Bytes in the layout, padding included."""

    def head(self, whole: torch.Tensor, requests: int, tokens: int) -> torch.Tensor:
        """The real rows of *whole*, a tensor like the static one."""
        rows = self.spec.rows(requests, tokens)
        return whole if rows is None else whole[:rows]


@attrs.define(eq=False)
class _Plan:
    """How a batch of one real size goes into a layout."""

    shapes: tuple[torch.Size, ...]
    targets: tuple[torch.Tensor, ...]


@attrs.define(eq=False)
class BoundInputs:
    """The static buffers of one shape key."""

    arena: StaticArena
    key: ShapeKey
    fields: list[_Field]
    packed: torch.Tensor
    """The layout's bytes as they lie in the arena."""
    rows: tuple[int, int] | None = None
    """Requests and tokens last written, where every field was written to that extent."""
    staging: Staging | None = None
    volatile: bool = False
    """The forward writes to its inputs, so that padded rows must be reset at every step."""
    _plans: dict[tuple[int, int], _Plan] = attrs.field(factory=dict)

    def views(self) -> dict[str, torch.Tensor]:
        """The whole static tensors by path, padded rows included."""
        return {field.path: field.static for field in self.fields}

    def head(self, requests: int, tokens: int) -> dict[str, torch.Tensor]:
        """The real rows of the static tensors by path, for a runtime to write in place."""
        plan = self._plan(requests, tokens)
        return {field.path: target for field, target in zip(self.fields, plan.targets, strict=True)}

    @property
    def nbytes(self) -> int:
        """Bytes of the layout."""
        return self.packed.numel()

    def reset_outside(self, requests: int, tokens: int) -> None:
        """Make every row beyond *requests* and *tokens* hold its fill value, writing only where needed."""
        rows = self.rows
        foreign = self.arena.owner is not self or self.volatile
        if not foreign and rows is not None and rows[0] <= requests and rows[1] <= tokens:
            self.rows = (requests, tokens)
            return
        self.arena.owner = None  # until all is written, also if that is cut short
        for field, shape in zip(self.fields, self._plan(requests, tokens).shapes, strict=True):
            if rows is not None and not foreign:
                field.extent = field.spec.shape(*rows)
            self._reset_outside(field, tuple(shape), foreign=foreign)
        self.rows = (requests, tokens)
        self.arena.owner = self

    def fill(self) -> None:
        """Reset every row to its fill value."""
        for field in self.fields:
            field.static.fill_(0 if field.fill == "last" else field.fill)
            field.extent = tuple(0 for _ in field.static.shape)
        self.arena.owner = self
        self.rows = None

    def load(self, leaves: Mapping[str, Any], requests: int, tokens: int) -> None:
        """Copy checked *leaves* in and reset what lies beyond them."""
        foreign = self.arena.owner is not self or self.volatile
        self.arena.owner = None  # until all is written, also if that is cut short
        if self.rows is not None:
            for field in self.fields:
                field.extent = field.spec.shape(*self.rows)
            self.rows = None
        plan = self._plan(requests, tokens)
        targets, sources, extents = [], [], []
        for field, whole, shape in zip(self.fields, plan.targets, plan.shapes, strict=True):
            source = leaves[field.path]
            if source.is_conj() or source.is_neg():
                source = source.resolve_conj().resolve_neg()
            narrower = source.shape != shape  # in a varying dimension
            target = _corner(field.static, source.shape) if narrower else whole
            extent = tuple(source.shape)
            if source is not target and not _same_memory(source, target):
                if self.arena.contains(source):
                    source = source.clone()  # overlapping copies are undefined
                targets.append(target)
                sources.append(source)
            extents.append(extent)
        for field, extent in zip(self.fields, extents, strict=True):
            self._reset_outside(field, extent, foreign=foreign)
        _copy_all(targets, sources)
        for field in self.fields:
            if field.fill == "last":
                _repeat_last(field.static, field.extent[0])
        self.arena.owner = self

    def _reset_outside(self, field: _Field, extent: tuple[int, ...], *, foreign: bool) -> None:
        if foreign or any(old > new for old, new in zip(field.extent, extent, strict=True)):
            fill = 0 if field.fill == "last" else field.fill
            for axis, size in enumerate(extent):
                if size < field.static.shape[axis]:
                    inner = field.static
                    for outer in range(axis):
                        inner = inner.narrow(outer, 0, extent[outer])
                    inner.narrow(axis, size, inner.shape[axis] - size).fill_(fill)
        field.extent = extent

    def _plan(self, requests: int, tokens: int) -> _Plan:
        plan = self._plans.get((requests, tokens))
        if plan is None:
            if len(self._plans) >= 1024:  # bounds the cache where token counts vary widely
                self._plans.clear()
            with torch.inference_mode(False):
                targets = [field.head(field.static, requests, tokens) for field in self.fields]
            plan = _Plan(tuple(target.shape for target in targets), tuple(targets))
            self._plans[(requests, tokens)] = plan
        return plan


def bind_inputs(spec: InputSpec, key: ShapeKey, arena: StaticArena) -> BoundInputs:
    """Lay the tensor inputs of *key* out in *arena*, filled with their fill values."""
    arena.reserve(layout_bytes(spec, key))
    fields, offset = [], 0
    for path, tensor in present_tensors(spec, key).items():
        shape = tensor.shape(key.requests, key.tokens)
        fill = tensor.fill if tensor.fill == "last" else arena.platform.padding_fill(path, tensor.fill)
        size = field_bytes(shape, tensor.dtype)
        static = arena.carve(offset, shape, tensor.dtype)
        fields.append(_Field(path, tensor, fill, static, nbytes=size))
        offset += size
    bound = BoundInputs(arena, key, fields, arena.carve(0, (offset,), torch.uint8))
    bound.fill()
    return bound


def layout_bytes(spec: InputSpec, key: ShapeKey) -> int:
    """Bytes that the static inputs of *key* take."""
    return packed_bytes(
        [(s.shape(key.requests, key.tokens), s.dtype) for s in present_tensors(spec, key).values()]
    )


def present_tensors(spec: InputSpec, key: ShapeKey) -> dict[str, TensorSpec]:
    """The tensor inputs of *key*: all but the optional ones it lacks."""
    absent = set(spec.optional) - set(key.present)
    return {path: tensor for path, tensor in spec.tensors.items() if path not in absent}


def check_tensor(path: str, spec: TensorSpec, value: Any, requests: int, tokens: int) -> str | None:
    """Check one field; raises :class:`InputError`, or says which dimension is too large."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"expected a tensor, found {type(value).__name__}", field=path)
    if value.dtype != spec.dtype:
        raise InputError(
            f"expected {spec.dtype}, found {value.dtype}", field=path, hint="Convert it before the step"
        )
    if value.layout is not torch.strided or value.is_nested:
        raise InputError(f"expected a dense tensor, found layout {value.layout}", field=path)
    wanted, found = spec.shape(requests, tokens), tuple(value.shape)
    if len(wanted) != len(found):
        raise InputError(f"expected shape {_describe(spec, wanted)}, found {found}", field=path)
    over = None
    for axis, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if isinstance(spec.dims[axis], int | str):
            if want != have:
                raise InputError(
                    f"expected shape {_describe(spec, wanted)}, found {found}: axis {axis} differs",
                    field=path,
                )
        elif have > want:
            over = f"{path}: axis {axis} has {have}, graphs hold {want}"
    return over


def _describe(spec: TensorSpec, shape: tuple[int, ...]) -> str:
    parts = []
    for dim, size in zip(spec.dims, shape, strict=True):
        parts.append(
            f"{dim}={size}" if isinstance(dim, str) else f"{'' if isinstance(dim, int) else '<='}{size}"
        )
    return f"({', '.join(parts)})"


def _same_memory(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (
        source.data_ptr() == target.data_ptr()
        and source.stride() == target.stride()
        and source.device == target.device
    )


def _corner(static: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    with torch.inference_mode(False):
        return static[tuple(slice(0, size) for size in shape)]


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


def _repeat_last(static: torch.Tensor, rows: int) -> None:
    if 0 < rows < static.shape[0]:
        static[rows:].copy_(static[rows - 1 : rows].expand_as(static[rows:]))
