"""Batches from host memory: packed into one pinned buffer, sent as one copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from graphplat.buffers import BoundInputs

_memmove = ctypes.memmove
_SLOTS = 8
_MOST_SPANS = 1024
_MOST_BYTES = 1 << 20
"""Larger layouts are copied field by field: the packing would cost more than the launches."""


@attrs.define(eq=False)
class _Slot:
    raw: torch.Tensor
    statics: list[torch.Tensor]
    rows: tuple[int, int] = (0, 0)
    """Requests and tokens that lie here; the rest holds fill values."""
    spans: dict[tuple[int, int], list[tuple[torch.Tensor, int, int]]] = attrs.field(factory=dict)
    """Per size: each field's real rows, their address and their bytes."""


@attrs.define(eq=False)
class Staging:
    """A ring of pinned copies of one layout.

    The caller's tensors are free as soon as :meth:`send` returns, since they were copied
    on the host. A slot is reused only after the device has read it: an event per half
    ring says so, which costs less than one per step.
    """

    bound: BoundInputs
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
            bound.staging = cls(bound)
        return bound.staging

    def send(
        self, sources: list[tuple[int, torch.Tensor]], addresses: list[int], requests: int, tokens: int
    ) -> None:
        """Pack *sources*, in field order, and copy the whole layout, padded rows included."""
        slot = self._free_slot()
        rows = (requests, tokens)
        spans = slot.spans.get(rows)
        if spans is None:
            if len(slot.spans) >= _MOST_SPANS:  # bounds the cache where token counts vary widely
                slot.spans.clear()
            spans = slot.spans[rows] = self._heads(slot, requests, tokens)
        if slot.rows[0] > requests or slot.rows[1] > tokens:
            self._fill(slot)
        slot.rows = rows
        for (view, target, nbytes), (_, source), address in zip(spans, sources, addresses, strict=True):
            if source.is_contiguous():
                # A plain memory copy: shapes and types were compared, and it costs half of copy_().
                _memmove(target, address, nbytes)
            else:
                view.copy_(source)
        bound = self.bound
        bound.arena.owner = bound
        bound.rows = rows
        bound.packed.copy_(slot.raw, non_blocking=True)
        self._fence()

    def _free_slot(self) -> _Slot:
        index = self._next
        if index == len(self._slots):
            self._slots.append(self._make_slot())
        elif index % (_SLOTS // 2) == 0 and (event := self._events.pop(index, None)) is not None:
            self.bound.arena.platform.synchronize_event(event)
        return self._slots[index]

    def _fence(self) -> None:
        half = _SLOTS // 2
        self._next += 1
        if self._next % half == 0:
            platform, device = self.bound.arena.platform, self.bound.arena.device
            self._events[self._next - half] = platform.record_event(platform.current_stream(device))
            self._next %= _SLOTS

    def _make_slot(self) -> _Slot:
        with torch.inference_mode(False):
            raw = torch.zeros(self.bound.nbytes, dtype=torch.uint8).pin_memory()
            statics, offset = [], 0
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

    def _heads(self, slot: _Slot, requests: int, tokens: int) -> list[tuple[torch.Tensor, int, int]]:
        heads = []
        with torch.inference_mode(False):
            for field, static in zip(self.bound.fields, slot.statics, strict=True):
                rows = field.spec.rows(requests, tokens)
                heads.append(static if rows is None else static[:rows])
        return [(head, head.data_ptr(), head.nbytes) for head in heads]
