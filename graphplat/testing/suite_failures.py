"""Conformance: a capture that fails anywhere leaves the device usable, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import CaptureError, ForwardBatch, Platform, Reason, capture_decode_graph
from graphplat.testing.suite_runtime import (
    SuiteRuntime,
    alive,
    assert_at_rest,
    assert_equal,
    batch_of,
    captured,
    expected,
    numbers,
    prepared,
    scaled,
    step,
    watched,
)

_GRAPHS = pytest.mark.requires("graph_capture")


class SuiteError(Exception):
    """Raised by the suite's own forward, in the middle of a capture."""


def _failing(platform: Platform, error: BaseException, size: int) -> Callable[..., Any]:
    """A forward that raises *error* in a capture of *size* rows, after some operators."""

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        output = scaled(runtime, batch)
        if len(output) == size and platform.is_capturing():
            raise error
        return output + 0

    return forward


@_GRAPHS
def test_a_failed_bucket_runs_eagerly(platform: Platform, device: torch.device) -> None:
    """
    With ``on_failure="eager"`` a bucket whose capture failed gives eager results, with the reason; the
    others replay.
    """
    before = platform.current_stream(device)
    failing = _failing(platform, SuiteError("by design"), 4)
    runner = captured(platform, SuiteRuntime(device, failing, on_failure="eager"))
    assert_at_rest(platform, device, before)
    assert runner.buckets == (1, 2, 8)
    for rows in (8, 2, 1, 5):
        assert_equal(step(runner, device, x=numbers(rows)), expected(numbers(rows)), f"{rows} rows")
    for rows in (3, 4):
        output = runner.execute(batch_of(device, x=numbers(rows)))
        assert_equal(output, expected(numbers(rows)), f"{rows} rows, eager")
    assert runner.stats.eager[Reason.CAPTURE_FAILED] == 2
    runner.release()


@_GRAPHS
@pytest.mark.parametrize("error", [SuiteError("by design"), KeyboardInterrupt("by design")], ids=type)
def test_a_failed_capture_leaves_the_device_usable(
    platform: Platform, device: torch.device, error: BaseException
) -> None:
    """
    The original error is what the caller sees, or the cause of it; the stream is as before, nothing
    captures, and the same runner can capture again.
    """
    before = platform.current_stream(device)
    runtime = SuiteRuntime(device, _failing(platform, error, 2), buckets=(2, 1))
    eager = prepared(platform, runtime)
    with pytest.raises((CaptureError, KeyboardInterrupt)) as caught:
        capture_decode_graph(model_runner=runtime, eager_runner=eager)
    met: list[BaseException] = [caught.value]
    while (cause := met[-1].__cause__) is not None:
        met.append(cause)
    assert error in met, f"the cause was lost: {met}"
    assert_at_rest(platform, device, before)
    assert_equal(numbers(4).to(device) + 1, numbers(4) + 1, "eager work after the failure")
    runtime.step = scaled
    runner = capture_decode_graph(model_runner=runtime, eager_runner=eager).runner
    assert runner is not None
    assert_equal(step(runner, device, x=numbers(2)), expected(numbers(2)), "captured after the failure")
    runner.release()


@_GRAPHS
def test_a_host_read_in_a_capture_is_refused(platform: Platform, device: torch.device) -> None:
    """
    A forward that reads a tensor on the host cannot be captured: that would freeze the value. The error
    names the bucket, and the device works on.
    """
    before = platform.current_stream(device)

    def reading(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        output = scaled(runtime, batch)
        return output * 2 if float(output.sum()) < 0 else output

    with pytest.raises(CaptureError, match="bucket 8"):
        captured(platform, SuiteRuntime(device, reading))
    assert_at_rest(platform, device, before)
    runner = captured(platform, SuiteRuntime(device, scaled))
    assert_equal(step(runner, device, x=numbers(4)), expected(numbers(4)), "captured after the failure")
    runner.release()


@_GRAPHS
def test_graphs_captured_before_a_failure_stay_usable(platform: Platform, device: torch.device) -> None:
    """
    Under ``on_failure="raise"`` the graphs that were there go on replaying, with memory of their own.
    """
    runtime = SuiteRuntime(device, _failing(platform, SuiteError("by design"), 2), buckets=(4, 2))
    good = captured(platform, SuiteRuntime(device, scaled))
    with pytest.raises(CaptureError):
        captured(platform, runtime)
    for rows in (8, 1, 3):
        assert_equal(step(good, device, x=numbers(rows)), expected(numbers(rows)), f"{rows} rows")
    graphs = watched(good)
    good.release()
    assert alive(graphs, platform, device) == 0, "graphs outlive their release"


def _forking(platform: Platform, device: torch.device, *, joined: bool) -> Callable[..., Any]:
    """A forward with half its work on a side stream, which it joins or forgets."""
    side: list[Any] = [platform.new_stream(device)]

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        here = platform.current_stream(device)
        platform.wait_stream(side[0], here)
        with platform.use_stream(side[0]):
            shifted = batch.inputs["x"] + 1
        if not joined and platform.is_capturing():
            return batch.inputs["x"] * runtime.scale
        platform.wait_stream(here, side[0])
        return batch.inputs["x"] * runtime.scale + shifted

    return forward


def _needs_streams(platform: Platform, device: torch.device) -> None:
    if platform.current_stream(device) is None:
        pytest.skip("the platform has no streams")


@_GRAPHS
def test_a_side_stream_that_joins_is_captured(platform: Platform, device: torch.device) -> None:
    """
    Work that forks to another stream and joins again is part of the graph.
    """
    _needs_streams(platform, device)
    runner = captured(platform, SuiteRuntime(device, _forking(platform, device, joined=True)))
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for rows in (8, 2, 5):
        x = numbers(rows, rows)
        assert_equal(step(runner, device, x=x), x * scale + x + 1, f"{rows} rows")
    runner.release()


@_GRAPHS
def test_a_side_stream_that_never_joins_is_refused(platform: Platform, device: torch.device) -> None:
    """
    Forked work that never joins fails the capture, with an error; the device works on.
    """
    _needs_streams(platform, device)
    before = platform.current_stream(device)
    with pytest.raises(CaptureError):
        captured(platform, SuiteRuntime(device, _forking(platform, device, joined=False), buckets=(2,)))
    assert_at_rest(platform, device, before)
    runner = captured(platform, SuiteRuntime(device, scaled))
    assert_equal(step(runner, device, x=numbers(4)), expected(numbers(4)), "captured after the failure")
    runner.release()
