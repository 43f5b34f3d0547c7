"""Batches from host memory: packed into one pinned buffer, sent as one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from graphplat.buffers import BoundInputs

_FEWEST, _MOST = 8, 32
_RING_BYTES = 1 << 18
_MOST_SPANS = 1024
_MOST_BYTES = 1 << 20
"""Larger layouts are copied field by field: the packing would cost more than the launches."""


@attrs.define(eq=False)
class _Slot:
    raw: torch.Tensor
    statics: list[torch.Tensor]
    rows: tuple[int, int] = (0, 0)
    """Requests and tokens that lie here; the rest holds fill values."""
    heads: dict[tuple[int, int], list[torch.Tensor]] = attrs.field(factory=dict)
    """Each field's real rows, by requests and tokens."""


@attrs.define(eq=False)
class Staging:
    """A ring of pinned copies of one layout.

    The caller's tensors are free as soon as :meth:`send` returns, since they were copied
    on the host. A slot is reused only after the device has read it: an event per half
    ring says so, which costs less than one per step.
    """

    bound: BoundInputs
    _ring: torch.Tensor
    _slots: list[_Slot] = attrs.field(factory=list)
    _events: dict[int, Any] = attrs.field(factory=dict)
    _next: int = 0

    @classmethod
    def of(cls, bound: BoundInputs) -> Staging | None:
        """The staging of *bound*, made once; ``None`` where the platform cannot use it."""
        capabilities = bound.arena.platform.capabilities
        if not capabilities.pinned_memory or bound.nbytes > _MOST_BYTES or not bound.fields:
            return None
        if bound.staging is None:
            slots = min(_MOST, max(_FEWEST, _RING_BYTES // max(bound.nbytes, 1))) // 2 * 2
            with torch.inference_mode(False):
                ring = torch.zeros(slots, bound.nbytes, dtype=torch.uint8).pin_memory()
            bound.staging = cls(bound, ring)
        return bound.staging

    def send(self, values: list[torch.Tensor], requests: int, tokens: int) -> None:
        """Pack *values*, one for each field in order, and copy the whole layout, padded rows included.

        Shapes and types must be those of the fields. Call after ``arena.enter_stream()``.
        """
        slot = self._free_slot()
        rows = (requests, tokens)
        heads = slot.heads.get(rows)
        if heads is None:
            if len(slot.heads) >= _MOST_SPANS:  # bounds the cache where token counts vary widely
                slot.heads.clear()
            heads = slot.heads[rows] = self._heads(slot, requests, tokens)
        if slot.rows[0] > requests or slot.rows[1] > tokens:
            self._fill(slot)
        slot.rows = rows
        torch._foreach_copy_(heads, values)
        bound = self.bound
        bound.arena.owner = None  # until all is written
        bound.packed.copy_(slot.raw, non_blocking=True)
        bound.arena.owner = bound
        bound.rows = rows
        self._fence()

    def _free_slot(self) -> _Slot:
        index = self._next
        if index == len(self._slots):
            self._slots.append(self._make_slot(index))
        elif self._events and (event := self._events.pop(index, None)) is not None:
            self.bound.arena.platform.synchronize_event(event)
        return self._slots[index]

    def _fence(self) -> None:
        half = len(self._ring) // 2
        self._next += 1
        if self._next % half == 0:
            arena = self.bound.arena
            self._events[self._next - half] = arena.platform.record_event(arena.stream)
            self._next %= 2 * half

    def _make_slot(self, index: int) -> _Slot:
        statics, offset = [], 0
        with torch.inference_mode(False):
            raw = self._ring[index]
            for field in self.bound.fields:
                size = field.static.numel() * field.static.element_size()
                view = raw[offset : offset + size].view(field.static.dtype).view(field.static.shape)
                statics.append(view)
                offset += field.nbytes
        slot = _Slot(raw, statics)
        self._fill(slot)
        return slot

    def _fill(self, slot: _Slot) -> None:
        for field, static in zip(self.bound.fields, slot.statics, strict=True):
            static.fill_(field.fill)

    def _heads(self, slot: _Slot, requests: int, tokens: int) -> list[torch.Tensor]:
        heads = []
        with torch.inference_mode(False):
            for field, static in zip(self.bound.fields, slot.statics, strict=True):
                rows = field.spec.rows(requests, tokens)
                heads.append(static if rows is None else static[:rows])
        return heads
