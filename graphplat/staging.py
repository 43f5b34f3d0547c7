"""Batches from host memory: packed into one pinned buffer, sent as one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import guard
from graphplat.arena import carve
from graphplat.plugin_hooks import warn

if TYPE_CHECKING:
    from graphplat.buffers import BoundInputs

_FEWEST, _MOST = 8, 32
_RING_BYTES = 1 << 18
_MOST_CUTS = 1024
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
    """A ring of pinned copies of one layout, allocated when the first host batch comes.

    The caller's tensors are free as soon as :meth:`send` returns, since they were copied
    on the host. A slot is reused only after the device has read it: an event per half
    ring says so, which costs less than one per step.
    """

    bound: BoundInputs
    _ring: torch.Tensor | None = None
    _slots: list[_Slot] = attrs.field(factory=list)
    _events: dict[int, Any] = attrs.field(factory=dict)
    """By the first slot of the half that each guards."""
    _half: int = 0
    """Slots in half a ring."""
    _next: int = 0
    _cuts: int = 0
    """Sizes remembered in all slots."""
    _given_up: list[torch.Tensor] = attrs.field(factory=list)
    """Rings that the device may still read."""

    @classmethod
    def of(cls, bound: BoundInputs) -> Staging | None:
        """The staging of *bound*, made once; ``None`` where the platform cannot use it."""
        capabilities = bound.arena.platform.capabilities
        if not capabilities.pinned_memory or not 0 < bound.nbytes <= _MOST_BYTES:
            return None
        if bound.staging is None:
            bound.staging = cls(bound)
        return bound.staging

    def send(self, values: list[torch.Tensor], requests: int, tokens: int) -> bool:
        """Pack *values*, one for each field in order, and copy the whole layout, padded rows included.

        Shapes and types must be those of the fields. Call after ``arena.enter_stream()``. Returns
        ``False``, with a warning at the first time, where no pinned memory is to be had.
        """
        if self._ring is None and not self._allocate():
            return False
        try:
            self._send(values, (requests, tokens))
        except BaseException as error:
            self._start_again(error)
            raise
        return True

    def _send(self, values: list[torch.Tensor], rows: tuple[int, int]) -> None:
        slot = self._free_slot()
        heads = slot.heads.get(rows)
        if heads is None:
            heads = self._cut(slot, rows)
        if slot.rows[0] > rows[0] or slot.rows[1] > rows[1]:
            self._fill(slot)
        slot.rows = rows
        torch._foreach_copy_(heads, values)
        bound = self.bound
        bound.arena.owner = None  # until all is written
        bound.packed.copy_(slot.raw, True)  # non_blocking; keywords take time
        bound.arena.owner = bound
        bound.rows = rows
        self._fence()

    def _allocate(self) -> bool:
        arena = self.bound.arena
        if not arena.pins:
            return False
        self._half = min(_MOST, max(_FEWEST, _RING_BYTES // max(self.bound.nbytes, 1))) // 2
        without = "host batches are copied field by field"
        self._ring = pinned_zeros(2 * self._half, self.bound.nbytes, dtype=torch.uint8, without=without)
        arena.pins = self._ring is not None
        return arena.pins

    def _start_again(self, error: BaseException) -> None:
        """After a step that *error* cut short: nothing is known of what the device has read."""
        ring, self._ring = self._ring, None
        self._slots.clear()
        self._events.clear()
        self._next = self._cuts = 0
        arena = self.bound.arena
        try:
            arena.platform.synchronize_stream(arena.stream)
        except Exception as late:  # noqa: BLE001 - the step's own error is the one to report
            error.add_note(f"the stream could not be waited for: {type(late).__name__}: {late}")
            self._given_up += [] if ring is None else [ring]

    def _free_slot(self) -> _Slot:
        index = self._next
        if index == len(self._slots):
            self._slots.append(self._make_slot(index))
        elif (event := self._events.get(index)) is not None:
            self.bound.arena.platform.synchronize_event(event)
            del self._events[index]
        return self._slots[index]

    def _fence(self) -> None:
        """Go on to the next slot; at the end of a half, record when the device has read it."""
        half, following = self._half, self._next + 1
        if following == half or following == 2 * half:
            arena = self.bound.arena
            self._events[following - half] = arena.platform.record_event(arena.stream)
            following %= 2 * half
        self._next = following

    def _make_slot(self, index: int) -> _Slot:
        assert self._ring is not None  # noqa: S101 - send() allocated it
        with torch.inference_mode(False):
            raw = self._ring[index]
        statics, offset = [], 0
        for field in self.bound.fields:
            statics.append(carve(raw, offset, field.static.shape, field.static.dtype))
            offset += field.nbytes
        slot = _Slot(raw, statics)
        self._fill(slot)
        return slot

    def _fill(self, slot: _Slot) -> None:
        for field, static in zip(self.bound.fields, slot.statics, strict=True):
            static.fill_(field.fill)

    def _cut(self, slot: _Slot, rows: tuple[int, int]) -> list[torch.Tensor]:
        if self._cuts >= _MOST_CUTS:  # bounds the memory where token counts vary widely
            for known in self._slots:
                known.heads.clear()
            self._cuts = 0
        with torch.inference_mode(False):
            fields = zip(self.bound.fields, slot.statics, strict=True)
            heads = [field.head(static, *rows) for field, static in fields]
        slot.heads[rows] = heads
        self._cuts += 1
        return heads


def pinned_zeros(*shape: int, dtype: torch.dtype, without: str) -> torch.Tensor | None:
    """Zeros in pinned memory; ``None`` where pinning fails, after a warning of what happens *without*."""
    try:
        # Not beside a capture of another thread, which some devices would end.
        with guard.CAPTURE_LOCK, torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device="cpu").pin_memory()
    except RuntimeError as error:
        warn(f"{without}, since pinning memory failed: {error}")
        return None
