"""Conformance: host values that a graph bakes in and a replay updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import (
    ForwardBatch,
    GraphplatError,
    HostSpec,
    InputSpec,
    Platform,
    Reason,
    TensorSpec,
    capture_decode_graph,
)
from graphplat.testing.suite_runtime import (
    SuiteRuntime,
    batch_of,
    captured,
    device_graphs,
    prepared,
)

HostOperator = tuple[str, Callable[..., torch.Tensor]]
_UPDATES = pytest.mark.requires("graph_capture", "update_after_capture")
_HEADS, _LENGTH, _DIM = 2, 6, 8


def attention_runtime(device: torch.device, host_operator: HostOperator, **settings: Any) -> SuiteRuntime:
    """Attends over keys that the runtime owns, to as many as each request's host length says."""
    name, attend = host_operator
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(8, _LENGTH, _HEADS, _DIM, generator=generator).to(device)

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> torch.Tensor:
        query = batch.inputs["query"]
        held = keys[: len(query)]
        once = attend(query, held, held, batch.inputs[name])
        return attend(once, held, held, batch.inputs[name])

    spec = InputSpec(
        query=TensorSpec(("requests", _HEADS, _DIM), dtype=torch.float32),
        **{name: HostSpec(update=True, fill=1)},
    )
    runtime = SuiteRuntime(device, forward, spec=spec, **settings)
    runtime.extra_tensors = lambda: {"keys": keys}  # type: ignore[method-assign]
    return runtime


def updated_step(
    runner: Any, runtime: SuiteRuntime, host_operator: HostOperator, lengths: list[int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step with *lengths*: its output and the eager one, both on the host."""
    rows = len(lengths)
    query = torch.randn(rows, _HEADS, _DIM, generator=torch.Generator().manual_seed(seed))
    batch = batch_of(runtime.device, query=query)
    batch.inputs[host_operator[0]] = lengths
    output = runner.execute(batch)
    with torch.no_grad():
        eager = runtime.step(runtime, batch)
    return output.to("cpu"), eager.to("cpu")


@_UPDATES
def test_updated_host_values_count_at_each_replay(
    platform: Platform, device: torch.device, host_operator: HostOperator
) -> None:
    """
    Each replay uses the lengths of its own batch, in every operator that took them, for full buckets and
    padded ones.
    """
    runtime = attention_runtime(device, host_operator, buckets=(1, 2, 4))
    runner = captured(platform, runtime)
    for seed, lengths in enumerate(([1, 2], [6, 5], [3, 1, 4], [2], [1, 1, 1, 6], [6, 5])):
        output, eager = updated_step(runner, runtime, host_operator, lengths, seed)
        assert torch.allclose(output, eager, atol=1e-5), f"lengths {lengths} of step {seed} were not used"
    assert runner.stats.replayed == 6
    runner.release()


@_UPDATES
def test_an_update_that_reaches_nothing_is_an_error(
    platform: Platform, device: torch.device, host_operator: HostOperator
) -> None:
    """
    A value that no recorded operator takes raises, instead of replaying stale ones.
    """
    runtime = attention_runtime(device, host_operator, buckets=(2,))
    runner = captured(platform, runtime)
    for graph in device_graphs(runner):
        with pytest.raises(Exception, match="surely_not_captured"):
            platform.update_graph(graph, {"surely_not_captured": [1, 1]})
    output, eager = updated_step(runner, runtime, host_operator, [4, 2])
    assert torch.allclose(output, eager, atol=1e-5), "the graph was harmed"
    runner.release()


@_UPDATES
def test_a_failing_update_reaches_the_caller(
    platform: Platform, device: torch.device, host_operator: HostOperator
) -> None:
    """
    Lengths that the graph cannot take raise from the step that brought them; the next step is right.
    """
    runtime = attention_runtime(device, host_operator, buckets=(2,))
    runner = captured(platform, runtime)
    (graph,) = device_graphs(runner)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever error the vendor gives
        platform.update_graph(graph, {host_operator[0]: [1, 1, 1]})
    output, eager = updated_step(runner, runtime, host_operator, [4, 2])
    assert torch.allclose(output, eager, atol=1e-5), "the graph was harmed"
    runner.release()


@pytest.mark.requires("graph_capture")
def test_without_updates_such_batches_run_eagerly(
    platform: Platform, device: torch.device, host_operator: HostOperator
) -> None:
    """
    A platform that cannot update graphs runs batches with updated host values eagerly, and says so.
    """
    if platform.capabilities.update_after_capture != "none":
        pytest.skip("this platform updates graphs")
    runtime = attention_runtime(device, host_operator, buckets=(2,))
    eager_runner = prepared(platform, runtime)
    capture = capture_decode_graph(model_runner=runtime, eager_runner=eager_runner)
    runner = capture.runner or eager_runner
    output, eager = updated_step(runner, runtime, host_operator, [4, 2])
    assert torch.allclose(output, eager, atol=1e-5)
    assert runner.stats.eager[Reason.HOST_VALUE] == 1
    with pytest.raises(GraphplatError):
        platform.update_graph(None, {host_operator[0]: [1]})  # type: ignore[arg-type]
