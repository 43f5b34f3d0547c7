"""Memory of a recorded graph: which storages its operators touch, and where they live at replay.

A storage is *external* (it existed before the capture: weights, static inputs, caches), *kept* (made during
the capture and still held by someone at its end: outputs) or *planned* (dead at the end of the capture:
intermediates). External and kept storages stay where they are. Planned ones get an offset in an arena, so
that two of them share bytes unless some recorded operator needs both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field, frozen
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNMENT = 64
"""Bytes; what torch's own CPU allocator gives, so that kernels take the same path at replay."""


@define(eq=False)
class Slot:
    """One storage that recorded operators touch, from call ``first`` to call ``last`` inclusive."""

    ref: StorageWeakRef
    nbytes: int
    storage: torch.UntypedStorage | None = None
    external: bool = False
    constant: torch.Tensor | None = None
    written: bool = False
    frozen: bool = False
    first: int = -1
    last: int = -1
    offset: int = -1

    @property
    def used(self) -> bool:
        """Whether any recorded call touches this storage."""
        return self.last >= 0

    def touch(self, index: int, nbytes: int) -> None:
        """Note that call *index* needs this storage, which then holds *nbytes* bytes."""
        if self.first < 0:
            self.first = index
        self.last = max(self.last, index)
        self.nbytes = max(self.nbytes, nbytes)

    def settle(self) -> None:
        """Find out, at the end of a capture, whether this storage lives on; if so, hold it from now on."""
        if self.storage is None:
            # torch has no public way from a weak storage reference back to a storage.
            revived: Any = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
            self.storage = revived
        if self.storage is None and self.constant is not None and not self.written:
            self.storage = self.constant.untyped_storage()
            self.frozen = True


@frozen
class TensorRef:
    """Where a tensor lies in its storage: enough to make it again on other memory."""

    slot: Slot
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def build(self) -> torch.Tensor:
        """Make the tensor on its slot's storage; call in inference mode."""
        base: torch.Tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        storage: Any = self.slot.storage  # the stubs know only Tensor as a source
        made: torch.Tensor = base.set_(storage, self.offset, self.shape, self.stride)
        if self.conj:
            made = made.conj()
        return torch._neg_view(made) if self.neg else made


@define
class SlotTable:
    """Every storage seen during one capture, by identity.

    Weak references keep the identity of a freed storage from being reused, so a new storage is never taken
    for an old one at the same address.
    """

    _slots: dict[int, Slot] = field(factory=dict)

    def find(self, tensor: torch.Tensor) -> Slot | None:
        """Return the slot of *tensor*'s storage, or None if no recorded operator has seen it."""
        return self._slots.get(tensor.untyped_storage()._cdata)

    def adopt(self, tensor: torch.Tensor, *, external: bool) -> Slot:
        """Return the slot of *tensor*'s storage; a new one holds the storage alive if it is *external*."""
        storage = tensor.untyped_storage()
        slot = self._slots.get(storage._cdata)
        if slot is None:
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            held = storage if external else None
            slot = Slot(ref=ref, nbytes=storage.nbytes(), storage=held, external=external)
            self._slots[ref.cdata] = slot
        return slot

    def describe(self, tensor: torch.Tensor) -> TensorRef:
        """Describe *tensor*, whose storage is external unless it is already known."""
        return TensorRef(
            slot=self.adopt(tensor, external=True),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )

    def used(self) -> list[Slot]:
        """Return the slots that some recorded call touches."""
        return [slot for slot in self._slots.values() if slot.used]


def empty_storage() -> torch.UntypedStorage:
    """Return a storage of no bytes."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()


class Arena:
    """A block of bytes that storages are cut from."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = bytearray(nbytes + ALIGNMENT)
        address = torch.frombuffer(self._buffer, dtype=torch.uint8).data_ptr()
        self._start = -address % ALIGNMENT

    def cut(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of *nbytes* at *offset*; it keeps the block alive by itself.

        It is a storage of its own rather than a view, since some operators (``as_strided_scatter``) take
        offsets from the start of the storage.
        """
        if nbytes == 0:
            return empty_storage()
        start = self._start + offset
        window = memoryview(self._buffer)[start : start + nbytes]
        return torch.frombuffer(window, dtype=torch.uint8).untyped_storage()


class RecordedPool:
    """Memory shared by graphs of which only one replays at a time.

    Capture the graph that needs most first: the others then fit into its arena. A graph that does not fit
    adds an arena. An arena is freed when the last graph that uses it is reset or dropped.
    """

    def __init__(self) -> None:
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes reserved now for intermediates of all graphs of this pool."""
        return sum(arena.nbytes for arena in self._arenas)

    def reserve(self, nbytes: int) -> Arena | None:
        """Return the smallest arena that holds *nbytes*, adding one if none does; None for zero bytes."""
        if nbytes == 0:
            return None
        fitting = [arena for arena in self._arenas if arena.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda arena: arena.nbytes)
        arena = Arena(nbytes)
        self._arenas.add(arena)
        return arena


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _first_gap(live: Iterable[Slot], nbytes: int) -> int:
    """Return the lowest offset with *nbytes* free between *live* slots, which are sorted by offset."""
    offset = 0
    for slot in live:
        if offset + nbytes <= slot.offset:
            break
        offset = max(offset, slot.offset + _aligned(slot.nbytes))
    return offset


def plan(slots: Iterable[Slot]) -> int:
    """Give each slot an offset so that no two slots alive at one call overlap; return the bytes needed.

    First fit in order of birth, larger first among those born together.
    """
    total = 0
    live: list[Slot] = []
    for slot in sorted(slots, key=lambda slot: (slot.first, -slot.nbytes)):
        live = [other for other in live if other.last >= slot.first]
        slot.offset = _first_gap(live, _aligned(slot.nbytes))
        total = max(total, slot.offset + _aligned(slot.nbytes))
        if slot.nbytes:
            live.append(slot)
            live.sort(key=lambda other: other.offset)
    return total
