"""The floor of section ``host``: the same step of five fields, written by hand without graphplat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from graphplat.arena import carve, field_bytes, packed_bytes
from graphplat.batch import ForwardBatch, Phase
from graphplat.bench.fields import FIELDS, FiveFields
from graphplat.bench.hand import Hand
from graphplat.bench.measure import Clock, Way

Step = Callable[[int], torch.Tensor]


@attrs.define(eq=False)
class Floor:
    """A graph of *bucket* rows captured by hand, over static fields in one run of bytes.

    Its steps write *rows* of each field, replay, and return *rows* of the result.
    """

    clock: Clock
    runtime: FiveFields
    rows: int
    bucket: int
    raw: torch.Tensor
    """On the device; the static fields are views of it."""
    hand: Hand
    replay: Callable[[], None]
    output: torch.Tensor

    @classmethod
    def capture(cls, clock: Clock, runtime: FiveFields, rows: int, bucket: int) -> Floor:
        """Capture the forward of *runtime*."""
        nbytes = packed_bytes([((bucket,), dtype) for dtype in FIELDS.values()])
        raw = torch.zeros(nbytes, dtype=torch.uint8, device=clock.device)
        names, statics = list(FIELDS), _carved(raw, bucket)
        batch = ForwardBatch(
            phase=Phase.DECODE,
            num_requests=bucket,
            num_tokens=bucket,
            inputs=dict(zip(names, statics, strict=True)),
        )
        hand = Hand(clock)
        with hand.session():
            made = hand.capture(lambda: runtime.forward(batch), warmups=2)
        return cls(clock, runtime, rows, bucket, raw, hand, made.graph.replay, made.output[:rows])

    def ways(self, device: Sequence[ForwardBatch], host: Sequence[ForwardBatch]) -> list[Way]:
        """Steps that read batches of *device* tensors, and one that reads the same ones on the *host*."""
        return [
            Way("by hand: five copies", self._copies(device)),
            Way("by hand: one grouped copy", self._grouped(device)),
            Way("by hand: packed host batch", self._packed(host)),
        ]

    def release(self) -> None:
        """Destroy the graph; no step may run after it."""
        self.hand.release()

    def _copies(self, batches: Sequence[ForwardBatch]) -> Step:
        heads, columns, replay, output = self._heads(self.raw), _columns(batches), self.replay, self.output

        def step(index: int) -> torch.Tensor:
            for target, source in zip(heads, columns[index], strict=True):
                target.copy_(source)
            replay()
            return output

        return step

    def _grouped(self, batches: Sequence[ForwardBatch]) -> Step:
        heads, columns, replay, output = self._heads(self.raw), _columns(batches), self.replay, self.output

        def step(index: int) -> torch.Tensor:
            torch._foreach_copy_(heads, columns[index])
            replay()
            return output

        return step

    def _packed(self, batches: Sequence[ForwardBatch]) -> Step:
        if not self.clock.platform.capabilities.pinned_memory:
            return self._copies(batches)  # nothing to pack for: the bytes are the host's to write
        platform, device, raw = self.clock.platform, self.clock.device, self.raw
        columns, replay, output = _columns(batches), self.replay, self.output
        pinned = [torch.zeros(raw.numel(), dtype=torch.uint8).pin_memory() for _ in range(2)]
        heads = [self._heads(each) for each in pinned]
        sent: list[Any] = [None, None]
        turn = 0

        def step(index: int) -> torch.Tensor:
            nonlocal turn
            turn = 1 - turn
            if sent[turn] is not None:
                platform.synchronize_event(sent[turn])
            for target, source in zip(heads[turn], columns[index], strict=True):
                target.copy_(source)
            raw.copy_(pinned[turn], non_blocking=True)
            sent[turn] = platform.record_event(platform.current_stream(device))
            replay()
            return output

        return step

    def _heads(self, raw: torch.Tensor) -> list[torch.Tensor]:
        return [field[: self.rows] for field in _carved(raw, self.bucket)]


def _columns(batches: Sequence[ForwardBatch]) -> list[list[torch.Tensor]]:
    return [[batch.inputs[name] for name in FIELDS] for batch in batches]


def _carved(raw: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Each field's *rows* as views of *raw*."""
    fields, offset = [], 0
    for dtype in FIELDS.values():
        fields.append(carve(raw, offset, (rows,), dtype))
        offset += field_bytes((rows,), dtype)
    return fields
