"""The short way of a step: fields of mixed types share one copy, byte for byte."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphplat import InputSpec, PhaseConfig, TensorSpec, capture_cuda_graphs
from graphplat.runners.steps import _units

TYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("mix", list(itertools.combinations(TYPES, 2)), ids=str)
def test_mixed_types_are_copied_as_whole_numbers(mix: tuple[torch.dtype, ...]) -> None:
    """A kernel may turn any byte of a flag into one, and quiet a NaN; whole numbers it leaves alone."""
    unit, views = _units([torch.zeros(4, dtype=dtype) for dtype in mix])
    assert unit in WHOLE
    assert {view.dtype for view in views} == {unit}


def test_device_batches_of_mixed_types_arrive_as_they_are(runtime, decode, device) -> None:
    """Flags beside large numbers, step after step, at one size."""
    spec = InputSpec(
        ids=TensorSpec(("requests",)),
        slots=TensorSpec(("requests",), dtype=torch.int32),
        flags=TensorSpec(("requests",), dtype=torch.bool),
        scales=TensorSpec(("requests",), dtype=torch.float16),
    )
    made = runtime(
        lambda batch: {name: tensor.clone() for name, tensor in batch.inputs.items()},
        spec,
        decode=PhaseConfig(buckets=(4,)),
    )
    runner = capture_cuda_graphs(model_runner=made).decode_runner
    for step in range(4):
        inputs = {
            "ids": torch.arange(3) * 123_456_789 + step,
            "slots": torch.arange(3, dtype=torch.int32) * 70_001 + step,
            "flags": torch.tensor([True, False, step % 2 == 0]),
            "scales": torch.tensor([0.5, 2.0, float(step)], dtype=torch.float16),
        }
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        found = runner.execute(decode(3, **inputs))
        assert all(torch.equal(found[name], tensor) for name, tensor in inputs.items())


def test_a_negated_host_tensor_arrives_as_its_values(runtime, decode, device) -> None:
    """A tensor whose bytes are not its values, as an imaginary part of a conjugate, is not copied raw."""
    spec = InputSpec(x=TensorSpec(("requests",), dtype=torch.float32))
    made = runtime(lambda batch: batch.inputs["x"] * 2, spec, decode=PhaseConfig(buckets=(4,)))
    runner = capture_cuda_graphs(model_runner=made).decode_runner
    for _ in range(3):
        x = torch.randn(3, dtype=torch.complex64).conj().imag
        assert x.is_neg()
        assert torch.equal(runner.execute(decode(3, x=x)).cpu(), x * 2)
