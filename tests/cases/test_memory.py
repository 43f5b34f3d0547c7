"""Memory: one pool, largest first, within what is there, and the report says what it took."""

from __future__ import annotations

import msgspec
import pytest
import torch

from graphplat import PhaseConfig, Reason, capture_cuda_graphs, platform_for
from graphplat.testing.simulated import faults


def wide(rig, width=4096):
    """A forward whose intermediates are much larger than its inputs."""

    def forward(batch):
        x = batch.inputs["x"]
        y = x.repeat(1, width)
        y = rig.cut((y * 2 + 1).sum(1, keepdim=True))
        return x + y

    return forward


@pytest.mark.parametrize("given", [(1, 8, 2, 64, 4), (64, 8, 4, 2, 1)])
def test_capture_goes_from_the_largest_to_the_smallest(rig, rows, given):
    """
    Guards against NVIDIA/TensorRT-LLM#3116, lightseekorg/tokenspeed#1065, vllm-project/vllm#5074 and #9724:
    whatever order the user gave, captures descend, share one pool, and write results to one buffer as large
    as the largest, or to the pool where memory can be aliased.
    """
    runner = rig.start(wide(rig), buckets=given)
    assert [shape.key.size for shape in rig.capture.report.shapes] == [64, 8, 4, 2, 1]
    buffer = 0 if rig.platform.capabilities.memory_aliases else 64 * 3 * 4
    assert rig.capture.report.output_buffer_bytes == buffer
    x = rows(5)
    assert torch.equal(runner.execute(rig.batch(5, x=x)), rig.eagerly(runner, rig.batch(5, x=x)))


def test_many_buckets_take_little_more_than_the_largest(rig):
    """
    Guards against NVIDIA/TensorRT-LLM#3116 and vllm-project/vllm#5074: seven buckets from 64 down reserve
    less than 1.3 times what that of 64 alone does, by the platform's own counters.
    """
    if not rig.platform.capabilities.memory_counters and rig.device.type != "cpu":
        pytest.skip("this platform cannot say what a graph takes")

    def reserved(buckets):
        runner = rig.start(wide(rig), buckets=buckets)
        if rig.device.type == "cpu":
            return runner.context.pool.bytes  # the cpu has no counters; its pool knows
        return rig.capture.report.graph_bytes

    alone = reserved((64,))
    rig.close()
    assert alone > 64 * 4096 * 3 * 4
    assert reserved((1, 2, 4, 8, 16, 32, 64)) < 1.3 * alone


def test_running_out_of_memory_costs_those_buckets_alone(rig, rows):
    """
    Guards against vllm-project/vllm#57475, #57595 and #53013: where memory runs out at the third bucket, what
    was captured stays usable, the rest runs eagerly or in a larger bucket, nothing crashes, a warning says
    so, and the report lists both.
    """
    platform, captures = rig.platform, []

    def forward(batch):
        x = rig.cut(batch.inputs["x"] * 2)
        if platform.is_capturing() and x.shape[0] in (1, 2):
            captures.append(x.shape[0])
            raise torch.OutOfMemoryError("no memory is left")
        return x

    with pytest.warns(match="too little memory for 2 of 4"):
        runner = rig.start(forward)
    assert captures
    assert runner.buckets == (4, 8)
    report = rig.capture.report
    assert [shape.key.size for shape in report.shapes] == [8, 4]
    assert [(skip.key.size, skip.reason) for skip in report.skipped if skip.key] == [
        (2, Reason.OUT_OF_MEMORY),
        (1, Reason.OUT_OF_MEMORY),
    ]
    for n in (1, 2, 3, 8):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2)


def test_a_device_that_is_full_captures_less(sim, rig, rows):
    """
    Guards against vllm-project/vllm#57475: the driver's own out-of-memory error, at any allocation of a
    capture, costs that bucket.
    """
    with faults.inject("begin", torch.OutOfMemoryError("full"), nth=3, times=None):
        with pytest.warns(match="too little memory"):
            runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2))
    # The third recording cannot begin: that of bucket 2, or of 4 where each takes two segments.
    assert runner.buckets == ((8,) if rig.backend == "breakable" else (4, 8))
    for n in (1, 3, 8):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2)


@pytest.mark.parametrize("budget", [5, 1, 0])
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_limit_on_graphs_thins_the_ladder(runtime, device, rows, decode, monkeypatch, budget, backend):
    """
    Guards against vllm-project/vllm-ascend#1168, #9596, #9564 and #8585: thirty buckets on a device that
    holds five graphs: five are captured, evenly spread, both ends among them, and a warning and the report
    say so; with room for none everything runs eagerly, and nothing fails.
    """
    platform = platform_for(device)
    limited = msgspec.structs.replace(platform.capabilities, max_graphs=budget)
    monkeypatch.setattr(type(platform), "capabilities", limited)
    toy = runtime(
        lambda batch: batch.inputs["x"] * 2,
        decode=PhaseConfig(backend=backend, buckets=tuple(range(1, 31))),
    )
    with pytest.warns(match=f"the device allows too few graphs for {30 - budget} of 30 shapes"):
        capture = capture_cuda_graphs(model_runner=toy)
    runner = capture.decode_runner
    assert len(runner.buckets) == budget
    assert (capture.decode.runner is None) is (budget == 0)
    if budget:
        assert runner.buckets[-1] == 30
        assert budget == 1 or runner.buckets[0] == 1
    assert [skip.reason for skip in capture.report.skipped if skip.phase == "decode"] == [Reason.GRAPH_LIMIT]
    for n in (1, 8, 30):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
    assert (runner.stats.replayed > 0) is bool(budget)
    runner.release()


def test_capture_and_release_leave_nothing(rig, rows):
    """
    Guards against NVIDIA/warp#1957: after any number of captures and releases the counts of graphs, and
    memory where it is counted, are where they began.
    """
    runner = rig.start(wide(rig, 64), buckets=(2, 4))
    platform, x = rig.platform, rows(3)
    wanted = rig.eagerly(runner, rig.batch(3, x=x))

    def level():
        return platform.allocated_bytes(rig.device), runner.context.live_graphs

    runner.release()
    low = level()
    for _ in range(20):
        runner.recapture()
        assert torch.equal(runner.execute(rig.batch(3, x=x)), wanted)
        runner.release()
    assert level() == low
    assert low[1] == 0
