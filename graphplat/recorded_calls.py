"""Recorded operators, and how they become bare calls on fixed memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch._ops import OpOverload

from graphplat.errors import ReplayError
from graphplat.recorded_memory import Arena, RecordedPool, Slot, TensorRef, empty_storage, plan
from graphplat.recorded_ops import OutVariant, is_collective, mapped, tensors_in

_copy = torch.ops.aten.copy_.default
_COPIES = frozenset({"aten::clone", "aten::_to_copy"})


@define
class Call:
    """One operator to run again, its tensors described rather than held, so that they can die meanwhile."""

    func: OpOverload
    args: Any
    kwargs: dict[str, Any]
    outputs: dict[int, TensorRef] = field(factory=dict)
    """Fresh outputs by their place among the tensors of the result; empty if the call works in place."""
    variant: OutVariant | None = None
    literal: Slot | None = None
    """Set if this call only restores the values of a tensor made from Python numbers."""


@frozen
class Recording:
    """A finished capture: calls bound to memory, which lives as long as this does."""

    calls: list[Callable[[], object]]
    names: list[str]
    pool: RecordedPool
    arena: Arena | None
    nbytes: int


def bind(calls: Sequence[Call], slots: Iterable[Slot], pool: RecordedPool) -> Recording:
    """Place every storage and bind every call to it."""
    slots = list(slots)
    for slot in slots:
        slot.settle()
    planned = [slot for slot in slots if slot.storage is None]
    kept = [slot for slot in slots if slot.storage is not None and not slot.external]
    nbytes = plan(planned)
    arena = pool.reserve(nbytes)
    for slot in planned:
        slot.storage = arena.cut(slot.offset, slot.nbytes) if arena else empty_storage()
    with torch.inference_mode():
        bound = _Binder().bind_all(calls)
    return Recording(
        calls=[call for _, call in bound],
        names=[name for name, _ in bound],
        pool=pool,
        arena=arena,
        nbytes=nbytes + sum(slot.nbytes for slot in kept),
    )


@define
class _Binder:
    """Makes each described tensor once."""

    _made: dict[TensorRef, torch.Tensor] = field(factory=dict)

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        if ref not in self._made:
            self._made[ref] = ref.build()
        return self._made[ref]

    def bind_all(self, calls: Sequence[Call]) -> list[tuple[str, Callable[[], object]]]:
        return [
            (str(call.func), self._bind(index, call))
            for index, call in enumerate(calls)
            if call.literal is None or not call.literal.frozen
        ]

    def _bind(self, index: int, call: Call) -> Callable[[], object]:
        args = mapped(call.args, TensorRef, self._tensor)
        kwargs = mapped(call.kwargs, TensorRef, self._tensor)
        outputs = {place: self._tensor(ref) for place, ref in call.outputs.items()}
        if call.func._schema.name in _COPIES and outputs:
            return functools.partial(
                _callable(_copy), _writable(outputs[0]), _writable_like(args[0], outputs[0])
            )
        if call.variant is not None:
            out_kwargs = call.variant.kwargs(kwargs, list(outputs.values()))
            return functools.partial(_callable(call.variant.overload), *args, **out_kwargs)
        run: Callable[[], object] = functools.partial(_callable(call.func), *args, **kwargs)
        if is_collective(call.func):
            run = functools.partial(_run_and_wait, run)
        needed = {place: outputs[place] for place, ref in call.outputs.items() if _is_read(ref.slot, index)}
        return functools.partial(_run_and_copy, run, needed) if needed else run


def _callable(func: OpOverload) -> Callable[..., object]:
    """Return the compiled function behind *func*: calling it saves a Python frame per operator."""
    bare: Callable[..., object] = getattr(func, "_op", func)
    return bare


def _is_read(slot: Slot, index: int) -> bool:
    return slot.offset < 0 or slot.last > index


def _run_and_wait(run: Callable[[], object]) -> object:
    """Run a collective to its end: nothing later in a replay would wait for it."""
    result = run()
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, torch.ScriptObject):
            torch.distributed.Work.unbox(item).wait()
    for tensor in tensors_in(result):
        torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def _run_and_copy(run: Callable[[], object], outputs: dict[int, torch.Tensor]) -> None:
    """Run a functional operator and copy its results to where later calls look for them."""
    results = list(tensors_in(run()))
    for place, target in outputs.items():
        result = results[place]
        if result.shape != target.shape:
            raise ReplayError(
                f"the operator gave shape {tuple(result.shape)}, but {tuple(target.shape)} at capture",
                hint="Its output shape depends on values; keep it out of the captured forward",
            )
        _writable(target).copy_(_writable_like(result, target))


def _writable_like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the part of *source* that :func:`_writable` leaves of *target*."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            source = source.narrow(dim, 0, 1)
    return source


def _writable(target: torch.Tensor) -> torch.Tensor:
    """Return *target* without repetition: torch refuses to write one element twice."""
    return _writable_like(target, target)
