"""A budget of memory: what it keeps, what it takes, and what the report expects."""

from __future__ import annotations

import pytest
import torch

from graphplat import CaptureReport, GraphplatWarning, Reason


def wide(rig):
    """A forward whose intermediates are much larger than its inputs."""

    def forward(batch):
        x = batch.inputs["x"]
        return x + rig.cut((x.repeat(1, 4096) * 2 + 1).sum(1, keepdim=True))

    return forward


def known(rig):
    """Skip where nobody can say what a graph takes."""
    if rig.device.type != "cpu" and not rig.platform.capabilities.memory_counters:
        pytest.skip("this platform cannot say what a graph takes")


def took(report: CaptureReport) -> dict[int, int]:
    return {shape.key.size: shape.bytes for shape in report.shapes}


def right(rig, runner, rows):
    """Every size gives the eager result."""
    for size in (1, 3, 8, 12, 16):
        batch = rig.batch(size, x=rows(size))
        torch.testing.assert_close(runner.execute(batch), rig.eagerly(runner, batch))


def test_a_budget_keeps_what_saves_most(rig, rows):
    """
    Guards against vllm-project/vllm#57475, #57595 and #53013: what the graphs add is within the budget, the
    others are reported and their batches run in larger buckets or eagerly; it is the same choice each time.
    """
    known(rig)
    if rig.device.type == "cuda":
        pytest.skip("the allocator reserves blocks larger than all of these graphs")
    ladder = (4, 8, 12, 16)
    for _ in range(2):  # the first one also pays for what stays, such as a stream's workspace
        rig.start(wide(rig), buckets=ladder)
        whole = took(rig.capture.report)
        rig.close()
    budget = sum(whole.values()) - 1
    with pytest.warns(GraphplatWarning, match="too little memory for"):
        runner = rig.start(wide(rig), buckets=ladder, memory_budget_gb=budget / 2**30)
    report = rig.capture.report
    kept = runner.buckets
    assert 0 < len(kept) < 4
    assert sum(took(report).values()) <= budget
    assert sorted(took(report)) == sorted(kept)
    dropped = {skip.key.size for skip in report.skipped if skip.reason is Reason.MEMORY_BUDGET}
    assert dropped == set(ladder) - set(kept)
    right(rig, runner, rows)
    assert runner.stats.replayed
    with pytest.warns(GraphplatWarning, match="too little memory for"):
        runner.recapture()
    assert runner.buckets == kept
    right(rig, runner, rows)


def test_a_budget_for_nothing_means_eager(rig, rows):
    """
    Guards against vllm-project/vllm#57475: too little for any graph is a warning and eager steps, never an
    error; nothing stays allocated.
    """
    known(rig)
    with pytest.warns(GraphplatWarning, match="too little memory for 3 of 3"):
        runner = rig.start(wide(rig), buckets=(4, 8, 16), memory_budget_gb=1e-9)
    if runner is rig.capture.eager_runner:
        assert {skip.reason for skip in rig.capture.report.skipped if skip.key} == {Reason.MEMORY_BUDGET}
        return
    assert runner.buckets == ()
    assert runner.context.live_graphs == 0
    right(rig, runner, rows)
    assert set(runner.stats.eager) == {Reason.MEMORY_BUDGET}


def test_the_memory_of_what_did_not_fit_goes_back(sim, rig, rows):
    """
    Guards against vllm-project/vllm#57475: by the device's own counters, graphs hold no more than the budget
    after the choice.
    """
    known(rig)
    for _ in range(2):
        rig.start(wide(rig), buckets=(4, 8, 16))
        whole = took(rig.capture.report)
        rig.close()
    reserved = rig.platform.reserved_bytes(torch.device(sim.name, 0))
    budget = whole[16] - 1
    with pytest.warns(GraphplatWarning, match="too little memory for"):
        runner = rig.start(wide(rig), buckets=(4, 8, 16), memory_budget_gb=budget / 2**30)
    assert 16 not in runner.buckets
    assert runner.buckets
    after = rig.platform.reserved_bytes(torch.device(sim.name, 0))
    assert after - reserved <= budget + (1 << 20), "more than static and default memory beside the graphs"
    right(rig, runner, rows)


def test_the_estimate_stands_beside_the_measurement(rig):
    """Guards against vllm-project/vllm#57475 and #53013: it is within a factor of two of the measurement."""
    known(rig)
    rig.start(wide(rig), buckets=(2, 4, 8, 16, 32))
    report = rig.capture.report
    assert report.graph_bytes / 2 <= report.memory_estimate_bytes <= report.graph_bytes * 2


def test_there_is_no_estimate_where_nothing_is_known(rig):
    """
    Guards against vllm-project/vllm#53013: a platform that cannot say what a graph takes has no estimate, not
    a wrong one.
    """
    if rig.device.type == "cpu" or rig.platform.capabilities.memory_counters:
        pytest.skip("this platform can say")
    rig.start(wide(rig))
    assert rig.capture.report.memory_estimate_bytes is None
