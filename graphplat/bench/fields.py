"""A runtime of five input fields and hardly any work: for host time and for numbers of buckets."""

from __future__ import annotations

import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.breaks import eager_on_graph
from graphplat.config import GraphConfig
from graphplat.inputs import InputSpec, TensorSpec
from graphplat.model_runner import ModelRunner

FIELDS = {
    "input_ids": torch.int64,
    "positions": torch.int64,
    "slots": torch.int32,
    "seq_lens": torch.int32,
    "mask": torch.bool,
}
_WIDTH = 16


class FiveFields(ModelRunner):
    """Sums five columns of mixed types and multiplies once; *breaks* eager parts do nothing on the way."""

    def __init__(self, device: torch.device, graph_config: GraphConfig, *, breaks: int = 0) -> None:
        self.device = device
        self.model = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device=device).requires_grad_(False)
        weight = torch.arange(_WIDTH * _WIDTH, dtype=torch.float32).cos().view(_WIDTH, _WIDTH)
        self.model.weight.data.copy_(weight)  # the same in every instance
        self.graph_config = graph_config
        self.breaks = breaks

    def input_spec(self, phase: Phase) -> InputSpec:
        """One number a request in each field."""
        del phase
        return InputSpec(**{name: TensorSpec(("requests",), dtype=dtype) for name, dtype in FIELDS.items()})

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """``(requests, 16)``."""
        columns = [batch.inputs[name].float() for name in FIELDS]
        total = torch.stack(columns).sum(0)[:, None].expand(-1, _WIDTH)
        result: torch.Tensor = self.model(total)
        for _ in range(self.breaks):
            _nothing(result)
            result = result + 1
        return result


@eager_on_graph
def _nothing(value: torch.Tensor) -> None:
    del value


def column_batch(requests: int, device: torch.device | str, seed: int) -> ForwardBatch:
    """Random numbers from one up, a tensor for each field."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randint(1, 1000, (len(FIELDS), requests), generator=generator)
    inputs = {name: column.to(dtype) for (name, dtype), column in zip(FIELDS.items(), columns, strict=True)}
    return ForwardBatch(
        phase=Phase.DECODE,
        num_requests=requests,
        num_tokens=requests,
        inputs={name: column.clone().to(device) for name, column in inputs.items()},
    )
