"""Failures of the driver at every point of a capture."""

import pytest
import torch
from torch.utils import _python_dispatch

from graphplat import CaptureError, GraphConfig, PhaseConfig, Reason, capture_cuda_graphs
from graphplat.errors import ReplayError
from graphplat.testing.simulated import faults, ledger


def config(**settings):
    return GraphConfig(decode=PhaseConfig(**{"buckets": (1, 2, 4)} | settings))


@pytest.mark.parametrize("point", ["begin", "forward", "end", "instantiate"])
def test_a_failure_costs_one_bucket(sim, dev, platform, reference, eagerly, point):
    """
    Whichever call fails in the capture of the middle bucket, that bucket runs eagerly and right, the others
    replay, and the driver is clean.
    """
    runtime = reference(sim.name, config(on_failure="eager"))
    nth = 2
    # A capture that was tried without a warm-up is tried once more with one.
    tries = 2 if platform.capabilities.memory_counters else 1
    if point == "forward":
        with faults.inject("forward", times=None, nth=10**9) as counter:
            capture = capture_cuda_graphs(model_runner=runtime)
        nth = counter.hits // 3 + 5  # in the second of three captures
        capture.decode.runner.release()
    with faults.inject(point, nth=nth, times=tries) as fault:
        capture = capture_cuda_graphs(model_runner=runtime)
    runner = capture.decode.runner
    assert fault.raised == tries
    assert ledger().captures == 0
    assert dev.current_stream().stream_id == 0
    assert not _python_dispatch._get_current_dispatch_mode_stack()
    assert runner.buckets == (1, 4)
    for count in (1, 2, 4):
        batch = runtime.decode_batch([5] * count, [0] * count)
        torch.testing.assert_close(runner.execute(batch), eagerly(runtime, batch))
    assert (runner.stats.replayed, runner.stats.eager[Reason.CAPTURE_FAILED]) == (2, 1)
    assert [skip.reason for skip in capture.report.skipped if skip.key] == [Reason.CAPTURE_FAILED]
    runner.recapture()
    assert runner.buckets == (1, 2, 4)
    runner.release()


@pytest.mark.parametrize("point", ["begin", "forward", "end", "instantiate"])
def test_an_interrupt_passes_and_leaves_nothing(sim, dev, reference, point):
    """
    A keyboard interrupt in a capture reaches the caller; no capture, stream or mode is left.
    """
    with faults.inject(point, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        capture_cuda_graphs(model_runner=reference(sim.name, config()))
    assert (ledger().captures, dev.current_stream().stream_id) == (0, 0)
    assert not _python_dispatch._get_current_dispatch_mode_stack()


def test_an_end_that_does_not_reach_the_device_leaves_no_capture(
    sim, dev, platform, reference, eagerly, monkeypatch
):
    """
    pytorch#190308: where ending a capture fails each time before the device is asked, the stream records no
    more all the same, and the next capture works.
    """

    def failing(graph):
        raise OSError("the library was unloaded")

    with monkeypatch.context() as patch:
        patch.setattr(platform, "capture_end", failing)
        with pytest.raises(CaptureError, match="unloaded"):
            capture_cuda_graphs(model_runner=reference(sim.name, config()))
    assert (ledger().captures, dev.current_stream().stream_id) == (0, 0)
    assert not platform._contexts, "the platform still holds the graph"
    runtime = reference(sim.name, config())
    batch = runtime.decode_batch([5] * 3, [0] * 3)
    runner = capture_cuda_graphs(model_runner=runtime).decode_runner
    torch.testing.assert_close(runner.execute(batch), eagerly(runtime, batch))
    assert runner.stats.replayed == 1


def test_a_capture_that_cannot_be_ended_is_reset_and_forgotten(
    sim, dev, platform, reference, eagerly, monkeypatch
):
    """
    pytorch#190308: where ending a capture fails, and ending it for the clean-up fails each time too, the
    graph is reset, the platform holds nothing of it, and the next capture works.
    """
    kind = getattr(dev, platform.api.graph_class)
    end, reset = kind.capture_end, kind.reset
    begun, ended, was_reset = [], [], []

    def ending(graph):
        ended.append(id(graph))
        if len(ended) < 3:
            raise OSError("the library was unloaded")
        end(graph)
        raise OSError("ended, and told so badly")

    def resetting(graph):
        was_reset.append(id(graph))
        reset(graph)

    def beginning(graph, **keywords):
        begun.append(id(graph))
        return capture_begin(graph, **keywords)

    capture_begin = platform.capture_begin
    with monkeypatch.context() as patch:
        patch.setattr(platform, "capture_begin", beginning)
        patch.setattr(kind, "capture_end", ending)
        patch.setattr(kind, "reset", resetting)
        with pytest.raises(CaptureError, match="unloaded") as caught:
            capture_cuda_graphs(model_runner=reference(sim.name, config(buckets=(4,), warmup="each")))
    (graph,) = begun
    assert len(ended) == 3
    assert graph in was_reset
    assert all(graph not in kept for kept in (platform._begun, platform._contexts, platform._generators))
    del caught
    assert (ledger().captures, dev.current_stream().stream_id) == (0, 0)
    runtime = reference(sim.name, config())
    batch = runtime.decode_batch([5] * 3, [0] * 3)
    runner = capture_cuda_graphs(model_runner=runtime).decode_runner
    torch.testing.assert_close(runner.execute(batch), eagerly(runtime, batch))
    assert runner.stats.replayed == 1


def test_an_error_names_what_failed(sim, reference):
    """
    The error names platform, phase and bucket, and is chained to the driver's own.
    """
    with faults.inject("end"), pytest.raises(CaptureError, match=r"decode.*bucket 4") as caught:
        capture_cuda_graphs(model_runner=reference(sim.name, config()))
    assert "injected" in str(caught.value.__cause__)


def test_a_failing_replay_reaches_the_caller(sim, reference, eagerly):
    """
    A launch that fails raises ``ReplayError``; the next step is right.
    """
    runtime = reference(sim.name, config())
    runner = capture_cuda_graphs(model_runner=runtime).decode.runner
    batch = runtime.decode_batch([5, 6], [0, 0])
    with faults.inject("replay"), pytest.raises(ReplayError, match="bucket 2"):
        runner.execute(batch)
    torch.testing.assert_close(runner.execute(batch), eagerly(runtime, batch))
    runner.release()


def test_running_out_of_memory_keeps_what_was_captured(sim, reference, eagerly):
    """
    Buckets that did not fit run eagerly; the others replay, and the report says which.
    """
    runtime = reference(sim.name, config())
    full = torch.OutOfMemoryError("full")
    with faults.inject("begin", full, nth=2), pytest.warns(UserWarning, match="too little memory for 1 of 3"):
        capture = capture_cuda_graphs(model_runner=runtime)
    assert capture.decode.runner.buckets == (1, 4)
    assert Reason.OUT_OF_MEMORY in [skip.reason for skip in capture.report.skipped]
    batch = runtime.decode_batch([5, 6], [0, 0])
    torch.testing.assert_close(capture.decode.runner.execute(batch), eagerly(runtime, batch))
    capture.decode.runner.release()


def test_the_devices_own_limit_on_graphs(sim, reference, eagerly, monkeypatch):
    """
    A device that holds fewer graphs than its platform thought fails that capture; what was captured stays.
    """
    sim.set_max_graphs(2)
    try:
        runtime = reference(sim.name, config(on_failure="eager"))
        runner = capture_cuda_graphs(model_runner=runtime).decode.runner
        assert runner.buckets == (2, 4)
        for count in (1, 2, 3):
            batch = runtime.decode_batch([5] * count, [0] * count)
            torch.testing.assert_close(runner.execute(batch), eagerly(runtime, batch))
        runner.release()
    finally:
        sim.set_max_graphs(None)
