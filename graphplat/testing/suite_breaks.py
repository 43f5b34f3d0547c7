"""Conformance: graphs that are broken around eager parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphplat import ForwardBatch, Platform, break_graph, eager_on_graph, fork_stream, live_batch
from graphplat.testing.suite_runtime import (
    SuiteRuntime,
    assert_equal,
    captured,
    numbers,
    step,
)

_BREAKS = pytest.mark.requires("graph_capture", "breakable")


@_BREAKS
def test_eager_parts_run_between_segments(platform: Platform, device: torch.device) -> None:
    """
    An eager part runs at every replay on what the segment before it computed, sees the live batch, and the
    segment after it reads its result.
    """
    sizes: list[int] = []

    @eager_on_graph(rows="requests")
    def middle(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(live_batch().num_requests)
        return hidden + float(hidden[:1, :1].to("cpu").sum())

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> torch.Tensor:
        hidden = batch.inputs["x"] * 2
        return middle(hidden) * runtime.scale

    runner = captured(platform, SuiteRuntime(device, forward, backend="breakable"))
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sizes.clear()
    for rows in (8, 3, 1, 5):
        x = numbers(rows, rows)
        assert_equal(step(runner, device, x=x), (x * 2 + x[0, 0] * 2) * scale, f"{rows} rows")
    assert sizes == [8, 3, 1, 5], "the eager part did not run once a replay, on the live batch"
    runner.release()


@_BREAKS
def test_memory_that_crosses_a_break_is_not_reused(platform: Platform, device: torch.device) -> None:
    """
    What a later segment reads of an earlier one survives the eager parts in between, which allocate.
    """

    @eager_on_graph
    def noise(hidden: torch.Tensor) -> torch.Tensor:
        litter = [torch.full_like(hidden, -99.0) for _ in range(8)]
        return hidden + litter[0] * 0

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        early = batch.inputs["x"] * runtime.scale
        later = early
        for _ in range(3):
            later = noise(later + 1)
        break_graph()
        return early + later

    runner = captured(platform, SuiteRuntime(device, forward, backend="breakable"))
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for rows in (8, 2, 7, 1):
        x = numbers(rows, rows)
        assert_equal(step(runner, device, x=x), x * scale * 2 + 3, f"{rows} rows")
    runner.release()


@_BREAKS
def test_side_streams_are_joined_before_a_segment_ends(platform: Platform, device: torch.device) -> None:
    """
    A stream forked into a segment is joined at the break, without the model's help.
    """
    side = platform.new_stream(device)
    if side is None:
        pytest.skip("the platform has no streams")
    memory = torch.zeros(8, 4).to(device)

    @eager_on_graph
    def middle(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> torch.Tensor:
        x = batch.inputs["x"]
        rows = memory[: len(x)]
        fork_stream(side)
        if platform.is_capturing():
            with platform.use_stream(side):
                torch.add(x, 1, out=rows)
        else:
            torch.add(x, 1, out=rows)
        return middle(x * 2) + rows

    runner = captured(platform, SuiteRuntime(device, forward, backend="breakable"))
    for rows in (8, 3):
        x = numbers(rows, rows)
        assert_equal(step(runner, device, x=x), x * 3 + 1, f"{rows} rows")
    runner.release()
