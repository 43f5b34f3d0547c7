"""Conformance: who owns memory, how long, and what a release gives back."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import msgspec
import pytest
import torch

from graphplat import ForwardBatch, GraphplatWarning, Platform, Reason, capture_decode_graph
from graphplat.testing.suite_runtime import (
    BUCKETS,
    WIDTH,
    SuiteRuntime,
    alive,
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


@_GRAPHS
def test_capture_goes_from_large_to_small(platform: Platform, device: torch.device) -> None:
    """
    Whatever order the buckets are given in, the largest is captured first, so that the others fit into its
    memory.
    """
    runner = captured(platform, SuiteRuntime(device, scaled, buckets=(2, 8, 1, 4)))
    sizes = [shape.key.size for shape in runner.context.shapes]
    assert sizes == sorted(sizes, reverse=True)
    runner.release()


@pytest.mark.requires("graph_capture", "shared_pool")
def test_small_buckets_share_the_pool(platform: Platform, device: torch.device) -> None:
    """
    A ladder of graphs takes hardly more memory than its largest graph alone.
    """

    def wide(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        grown = batch.inputs["x"].repeat(1, 1 << 18) + 1
        return grown[:, :WIDTH] * runtime.scale

    runner = captured(platform, SuiteRuntime(device, wide))
    runner.recapture()  # what the warm-up took from the device is there by now
    sizes = [shape.bytes for shape in runner.context.shapes]
    runner.release()
    if None in sizes:
        pytest.skip("the platform cannot say what a graph takes")
    known = [size for size in sizes if size is not None]
    if platform.reserved_bytes(device) is None:
        assert known == sorted(known, reverse=True), f"bytes by bucket: {known}"
        return
    assert sum(known) <= 1.5 * max(known), f"bytes by bucket, largest first: {known}"


@_GRAPHS
def test_capture_only_tensors_live_as_long_as_the_graph(platform: Platform, device: torch.device) -> None:
    """
    A tensor that the runtime installs for capture alone is kept, and read at every replay, until the graph
    is gone.
    """
    held: list[weakref.ref[torch.Tensor]] = []

    def install(batch: ForwardBatch) -> None:
        batch.global_num_tokens_gpu = torch.full((WIDTH,), 5.0).to(device)
        held.append(weakref.ref(batch.global_num_tokens_gpu))

    def weighted(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        counts = batch.global_num_tokens_gpu
        return batch.inputs["x"] * (5.0 if counts is None else counts)

    runtime = SuiteRuntime(device, weighted, buckets=(4, 2))
    runtime.prepare = install
    runner = captured(platform, runtime)
    gc.collect()
    kept = [reference for reference in held if reference() is not None]
    assert len(kept) == 2, f"{len(kept)} capture-only tensors live for 2 graphs"
    poison = [torch.full((WIDTH,), -1.0).to(device) for _ in range(64)]
    assert_equal(step(runner, device, x=numbers(2)), numbers(2) * 5, "what the graph reads was recycled")
    assert_equal(step(runner, device, x=numbers(4)), numbers(4) * 5, "what the graph reads was recycled")
    del poison
    runner.release()
    gc.collect()
    assert [reference() for reference in kept] == [None, None], "kept after the graph was released"


@_GRAPHS
def test_nothing_is_retained_without_need(platform: Platform, device: torch.device) -> None:
    """
    Without capture-only tensors a graph keeps none alive.
    """
    runner = captured(platform, SuiteRuntime(device, scaled))
    assert [shape.retained_bytes for shape in runner.context.shapes] == [0] * len(BUCKETS)
    runner.release()


@_GRAPHS
def test_release_and_recapture(platform: Platform, device: torch.device) -> None:
    """
    After a release steps run eagerly, with the reason; after a recapture they replay again.
    """
    runtime = SuiteRuntime(device, scaled)
    runner = captured(platform, runtime)
    graphs = watched(runner)
    runner.release()
    assert alive(graphs, platform, device) == 0, "graphs outlive their release"
    assert runner.context.live_graphs == 0
    assert_equal(runner.execute(batch_of(device, x=numbers(3))), expected(numbers(3)), "released")
    assert runner.stats.eager[Reason.RELEASED] == 1
    runner.recapture()
    assert_equal(step(runner, device, x=numbers(5)), expected(numbers(5)), "recaptured")
    runner.release()


@_GRAPHS
def test_fifty_cycles_leave_counts_constant(platform: Platform, device: torch.device) -> None:
    """
    Capturing and releasing fifty times leaves no graph and no byte behind.
    """
    runtime = SuiteRuntime(device, scaled, buckets=(1, 2))
    runner = captured(platform, runtime)
    runner.release()
    platform.synchronize(device)
    gc.collect()
    before = platform.allocated_bytes(device)
    graphs = []
    for _ in range(50):
        runner.capture()
        graphs += watched(runner)
        runner.release()
    assert alive(graphs, platform, device) == 0, "graphs outlive their release"
    assert platform.allocated_bytes(device) == before, "allocated bytes grew"
    runner.capture()
    assert_equal(step(runner, device, x=numbers(2)), expected(numbers(2)), "the 51st capture")
    runner.release()


@pytest.mark.requires("graph_capture", "memory_counters")
def test_the_memory_ledger_balances(platform: Platform, device: torch.device) -> None:
    """
    What the report says a capture took is what the device counts, and a release gives it back.
    """
    runtime = SuiteRuntime(device, scaled)
    runner = captured(platform, runtime)
    runner.release()
    gc.collect()
    platform.synchronize(device)
    platform.empty_cache()
    before = platform.reserved_bytes(device)
    assert before is not None
    runner.capture()
    during = platform.reserved_bytes(device)
    told = sum(shape.bytes or 0 for shape in runner.context.shapes)
    assert during is not None
    assert told <= during, f"reported {told} of {during} bytes"
    runner.release()
    gc.collect()
    platform.synchronize(device)
    platform.empty_cache()
    after = platform.reserved_bytes(device)
    assert after is not None
    assert after <= before, f"{after - before} bytes stay reserved after the release"


@_GRAPHS
def test_a_limit_on_graphs_keeps_both_ends(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Where fewer graphs are allowed than there are buckets, the smallest and the largest stay, the report
    names what was dropped, and every batch still gets the right answer.
    """
    fewer = msgspec.structs.replace(platform.capabilities, max_graphs=3)
    monkeypatch.setattr(platform, "capabilities", fewer)
    ladder = tuple(range(1, 9))
    eager = prepared(platform, SuiteRuntime(device, scaled, buckets=ladder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphplatWarning)  # of those that the limit leaves without a graph
        runner = capture_decode_graph(model_runner=eager.context.model_runner, eager_runner=eager).runner
    assert runner is not None
    assert len(runner.buckets) == 3, f"{runner.buckets} for a limit of 3"
    assert (runner.buckets[0], runner.buckets[-1]) == (1, 8)
    assert [skip.reason for skip in eager.context.skipped] == [Reason.GRAPH_LIMIT]
    for rows in ladder:
        output = runner.execute(batch_of(device, x=numbers(rows)))
        assert_equal(output, expected(numbers(rows)), f"{rows} rows")
    runner.release()
