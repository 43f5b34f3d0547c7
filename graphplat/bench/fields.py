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


class FiveFields(ModelRunner):
    """Adds five columns of mixed types; *breaks* eager parts do nothing on the way.

    So little work that the host never waits for the device. The model has so many *weights*, whose
    addresses are watched at each step.
    """

    def __init__(
        self, device: torch.device, graph_config: GraphConfig, *, breaks: int = 0, weights: int = 1
    ) -> None:
        self.device = device
        held = (torch.nn.Parameter(torch.zeros(1, device=device), False) for _ in range(weights))
        self.model = torch.nn.ParameterList(held)
        self.graph_config = graph_config
        self.breaks = breaks

    def input_spec(self, phase: Phase) -> InputSpec:
        """One number a request in each field."""
        del phase
        return InputSpec(**{name: TensorSpec(("requests",), dtype=dtype) for name, dtype in FIELDS.items()})

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """``(requests,)``, whole numbers."""
        columns = [batch.inputs[name] for name in FIELDS]
        result: torch.Tensor = columns[0] + columns[1]
        for column in columns[2:]:
            result = result + column
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
