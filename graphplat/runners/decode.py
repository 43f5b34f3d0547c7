"""Decode: every request brings the same number of new tokens; buckets count requests."""

from __future__ import annotations

from graphplat.batch import ForwardBatch, Phase
from graphplat.runners.graph import GraphRunner


class DecodeGraphRunner(GraphRunner):
    """Runs decode steps through graphs."""

    phase = Phase.DECODE

    def size_of(self, batch: ForwardBatch) -> int:
        """Requests."""
        return batch.num_requests
