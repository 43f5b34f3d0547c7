"""Conformance: other threads during a capture, and several threads in one runner."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graphplat import BaseRunner, ForwardBatch, Platform
from graphplat.testing.suite_runtime import (
    SuiteRuntime,
    assert_equal,
    batch_of,
    captured,
    expected,
    numbers,
    scaled,
    step,
)


@pytest.mark.requires("graph_capture", "thread_local_capture")
def test_other_threads_may_use_the_device_during_a_capture(platform: Platform, device: torch.device) -> None:
    """
    A thread that allocates, copies and synchronizes a stream of its own while this one captures is neither
    broken nor does it break the capture.
    """
    seen: list[torch.Tensor] = []

    def work() -> None:
        stream = platform.new_stream(device)
        with platform.use_stream(stream):
            grown = torch.zeros(1 << 21, device=device)
            moved = numbers(4).to(device) + grown[0]
            if platform.capabilities.pinned_memory:
                torch.zeros(1 << 12).pin_memory()
            platform.synchronize_stream(stream)
            seen.append(moved.to("cpu"))

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        hidden = batch.inputs["x"] * runtime.scale
        if platform.is_capturing():
            with ThreadPoolExecutor(1) as aside:
                aside.submit(work).result()
        return hidden + 1

    runner = captured(platform, SuiteRuntime(device, forward))
    assert len(seen) >= len(runner.buckets)
    for found in seen:
        assert_equal(found, numbers(4), "the other thread's own result")
    for rows in (8, 3, 1):
        assert_equal(step(runner, device, x=numbers(rows)), expected(numbers(rows)), f"{rows} rows")
    runner.release()


@pytest.mark.requires("graph_capture")
def test_threads_in_one_runner_never_mix(platform: Platform, device: torch.device) -> None:
    """
    Two threads that execute on one runner each get their own answers.
    """
    runner = captured(platform, SuiteRuntime(device, scaled))
    gate = threading.Barrier(2)

    def serve(start: int) -> list[str]:
        gate.wait()
        wrong = []
        for turn in range(25):
            x = numbers(1 + (turn + start) % 8, start + turn)
            found = runner.execute(batch_of(device, x=x)).to("cpu")
            if not torch.equal(found, expected(x)):
                wrong.append(f"thread {start}, turn {turn}: {found.tolist()}")
        return wrong

    with ThreadPoolExecutor(2) as pool:
        wrong = [error for errors in pool.map(serve, (0, 100)) for error in errors]
    assert not wrong, wrong[0]
    assert runner.stats.replayed == 50
    runner.release()


@pytest.mark.requires("graph_capture")
def test_two_runners_capture_one_after_the_other(platform: Platform, device: torch.device) -> None:
    """
    Two threads that capture at once never overlap, and both sets of graphs are right.
    """
    made: list[BaseRunner] = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: captured(platform, SuiteRuntime(device, scaled)))
        made.append(captured(platform, SuiteRuntime(device, scaled)))
        made.append(other.result())
    for runner in made:
        assert_equal(step(runner, device, x=numbers(5)), expected(numbers(5)))
        runner.release()
