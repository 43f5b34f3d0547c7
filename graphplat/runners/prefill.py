"""Prefill: packed prompts of unequal lengths; buckets count tokens."""

from __future__ import annotations

from graphplat.batch import ForwardBatch, Phase
from graphplat.report import Decision, Reason
from graphplat.runners.graph import GraphRunner


class PrefillGraphRunner(GraphRunner):
    """Runs prefill steps through graphs of ``max_requests`` rows; unused rows are empty requests."""

    phase = Phase.PREFILL

    def size_of(self, batch: ForwardBatch) -> int:
        """Tokens."""
        return batch.num_tokens

    def refuse(self, batch: ForwardBatch, bucket: int) -> Decision | None:
        """Too many requests for the rows of *bucket*."""
        rows = self.eager_runner.request_rows(self.phase, bucket)
        if batch.num_requests > rows:
            return Decision(
                reason=Reason.OVER_MAX_REQUESTS, detail=f"{batch.num_requests} requests, graphs hold {rows}"
            )
        return None

    def refuse_bucket(self, size: int, bucket: int) -> Decision | None:
        """Too much padding."""
        if bucket > size * self.config.max_padding:
            return Decision(
                reason=Reason.PADDING_WASTE,
                detail=f"{size} tokens in a bucket of {bucket} exceed max_padding={self.config.max_padding}",
            )
        return None
