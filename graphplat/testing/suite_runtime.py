"""The small runtime that the conformance suite drives every platform with.

All numbers are small integers in ``float32``, so that sums are exact in any order and every
comparison can demand equality, whatever kernels a device picks.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from graphplat import (
    BaseRunner,
    EagerRunner,
    ForwardBatch,
    GraphConfig,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    Platform,
    TensorSpec,
    capture_decode_graph,
)
from graphplat.registry import hooks_for

WIDTH = 4
BUCKETS = (1, 2, 4, 8)
Forward = Callable[["SuiteRuntime", ForwardBatch], Any]


class SuiteRuntime(ModelRunner):
    """Decodes with the function *step*; counts its calls.

    Its only weight is ``scale``, a vector of ``WIDTH`` integers. *settings* go to the
    decode phase. Without a *spec* there is one input ``x`` of ``(requests, WIDTH)``.
    """

    def __init__(
        self, device: torch.device, step: Forward, *, spec: InputSpec | None = None, **settings: Any
    ) -> None:
        self.device = device
        self.model = torch.nn.Module()
        self.model.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]).to(device))
        self.graph_config = GraphConfig(decode=PhaseConfig(**{"buckets": BUCKETS, **settings}))
        self.step = step
        self.spec = spec or InputSpec(x=TensorSpec(("requests", WIDTH), dtype=torch.float32))
        self.calls = 0
        self.prepare: Callable[[ForwardBatch], None] | None = None

    @property
    def scale(self) -> torch.Tensor:
        """The weight."""
        return self.model.scale  # type: ignore[return-value]

    def input_spec(self, phase: Phase) -> InputSpec:
        """As given."""
        return self.spec

    def forward(self, batch: ForwardBatch) -> Any:
        """Run the step."""
        self.calls += 1
        return self.step(self, batch)

    def prepare_capture_batch(self, batch: ForwardBatch) -> None:
        """Let a test install capture-only tensors."""
        if self.prepare is not None:
            self.prepare(batch)


def scaled(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
    """``x * scale + 1``, by rows."""
    return batch.inputs["x"] * runtime.scale + 1


def expected(x: torch.Tensor) -> torch.Tensor:
    """What :func:`scaled` makes of *x*, computed on the host."""
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 1


def numbers(rows: int, start: int = 0) -> torch.Tensor:
    """``(rows, WIDTH)`` small integers on the host, other ones for every *start*."""
    return (torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + 7 * start) % 61


def batch_of(device: torch.device, **inputs: Any) -> ForwardBatch:
    """A decode batch of host *inputs*, sent to *device*; rows are those of the first tensor."""
    rows = next(len(leaf) for leaf in inputs.values() if isinstance(leaf, torch.Tensor))
    moved = {
        name: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in inputs.items()
    }
    return ForwardBatch(phase=Phase.DECODE, num_requests=rows, num_tokens=rows, inputs=moved)


def prepared(platform: Platform, runtime: SuiteRuntime) -> EagerRunner:
    """The warmed-up eager runner of *runtime*, made as :func:`~graphplat.capture_cuda_graphs` does."""
    hooks = hooks_for(platform)
    eager = hooks.create_eager_runner(platform, runtime) or EagerRunner(platform, runtime)
    eager.context.hooks = hooks
    eager.warm_up()
    return eager


def captured(platform: Platform, runtime: SuiteRuntime) -> BaseRunner:
    """The decode runner of *runtime*, captured through *platform* and the hooks of its plugin."""
    runner = capture_decode_graph(model_runner=runtime, eager_runner=prepared(platform, runtime)).runner
    assert runner is not None, "the platform declares graph_capture, yet no decode graphs were captured"
    return runner


def step(runner: BaseRunner, device: torch.device, **inputs: Any) -> Any:
    """Run one batch that must replay a graph; the output."""
    before = runner.stats.replayed
    output = runner.execute(batch_of(device, **inputs))
    assert runner.stats.replayed == before + 1, f"the step ran eagerly: {runner.stats.last}"
    return output


def assert_equal(output: torch.Tensor, wanted: torch.Tensor, why: str = "") -> None:
    """Fail unless *output*, read back, holds exactly *wanted*."""
    found = output.to("cpu")
    assert tuple(found.shape) == tuple(wanted.shape), f"shape {tuple(found.shape)} {why}"
    assert torch.equal(found, wanted), f"{why}\nwanted {wanted.tolist()}\nfound  {found.tolist()}"


def assert_at_rest(platform: Platform, device: torch.device, stream: Any) -> None:
    """Fail unless nothing captures and *stream* is the current one again."""
    assert not platform.is_capturing(), "the stream is still being captured"
    assert platform.current_stream(device) == stream, "another stream was left current"


def device_graphs(runner: BaseRunner) -> list[Any]:
    """The device graphs of a graph runner."""
    graphs: Mapping[Any, Sequence[Any]] = getattr(runner, "device_graphs")()  # noqa: B009 - not of every runner
    return [graph for held in graphs.values() for graph in held]


def watched(runner: BaseRunner) -> list[weakref.ref[Any]]:
    """Weak references to the device graphs of *runner*."""
    try:
        return [weakref.ref(graph) for graph in device_graphs(runner)]
    except TypeError:
        pytest.skip("graph objects of this device cannot be watched")


def alive(references: Sequence[weakref.ref[Any]], platform: Platform, device: torch.device) -> int:
    """How many of them are still there once *device* is done with them, after a collection."""
    platform.synchronize(device)
    gc.collect()
    return sum(reference() is not None for reference in references)
