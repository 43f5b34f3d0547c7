"""What prefill graphs retain: the whole batch, the capture-only tensors, or nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.bench.records import BenchReport, RetainedRow
from graphplat.bench.subject import Subject, hold
from graphplat.capture import capture_cuda_graphs
from graphplat.inputs import InputSpec
from graphplat.model_runner import ModelRunner

_RANKS = 8


class WholeBatch(ModelRunner):
    """A runtime that keeps every tensor of every batch it is captured with. Only to compare with."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.device, self.model, self.graph_config = inner.device, inner.model, inner.graph_config

    def input_spec(self, phase: Phase) -> InputSpec:
        """The inner one's."""
        spec: InputSpec = self.inner.input_spec(phase)
        return spec

    def forward(self, batch: ForwardBatch) -> Any:
        """The inner one's."""
        return self.inner.forward(batch)

    def extra_tensors(self) -> Mapping[str, torch.Tensor]:
        """The inner one's."""
        tensors: Mapping[str, torch.Tensor] = self.inner.extra_tensors()
        return tensors

    def prepare_capture_batch(self, batch: ForwardBatch) -> None:
        """Install a copy of all inputs, and of hidden states as an engine's batch has them."""
        self.inner.prepare_capture_batch(batch)
        kept = {name: tensor.clone() for name, tensor in batch.inputs.items()}
        rows = batch.num_tokens
        kept["hidden_states"] = torch.zeros(
            rows, self.inner.shape.hidden, dtype=self.inner.dtype, device=self.device
        )
        batch.capture_only.update(kept)


def retained(subject: Subject, report: BenchReport, sizes: Sequence[int]) -> None:
    """Add a row for each way; buckets are *sizes*."""
    settings = {
        "decode": {"backend": "disabled"},
        "prefill": {"backend": "full", "buckets": list(sizes), "max_requests": subject.slots},
    }
    plain = subject.under(**settings)
    parallel = copy.copy(plain)
    parallel.ranks = _RANKS
    runtimes = {
        "whole batch kept for each bucket": WholeBatch(parallel),
        f"capture-only tensors of {_RANKS} ranks": parallel,
        "no capture-only tensors": plain,
    }
    for way, runtime in runtimes.items():
        with ExitStack() as held:
            found = hold(held, capture_cuda_graphs(model_runner=runtime)).report
            row = RetainedRow(
                way=way,
                buckets=len(found.shapes),
                retained_bytes=sum(shape.retained_bytes for shape in found.shapes),
                graph_bytes=found.graph_bytes,
            )
        report.retained.append(row)
