"""Conformance: other threads during a capture, and several threads in one runner."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from graphplat import ForwardBatch, Platform
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


def _run_aside(work: Callable[[], None]) -> None:
    """Run *work* in a thread to its end; its error becomes the caller's."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


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

    def forward(runtime: SuiteRuntime, batch: ForwardBatch) -> torch.Tensor:
        hidden = batch.inputs["x"] * runtime.scale
        if platform.is_capturing():
            _run_aside(work)
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
    wrong: list[str] = []

    def serve(start: int) -> None:
        gate.wait()
        for turn in range(25):
            rows = 1 + (turn + start) % 8
            x = numbers(rows, start + turn)
            found = runner.execute(batch_of(device, x=x)).to("cpu")
            if not torch.equal(found, expected(x)):
                wrong.append(f"thread {start}, turn {turn}: {found.tolist()}")

    threads = [threading.Thread(target=serve, args=(start,)) for start in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert runner.stats.replayed == 50
    runner.release()


@pytest.mark.requires("graph_capture")
def test_two_runners_capture_one_after_the_other(platform: Platform, device: torch.device) -> None:
    """
    Two threads that capture at once never overlap, and both sets of graphs are right.
    """
    made = []

    def work() -> None:
        made.append(captured(platform, SuiteRuntime(device, scaled)))

    thread = threading.Thread(target=work)
    thread.start()
    made.append(captured(platform, SuiteRuntime(device, scaled)))
    thread.join()
    assert len(made) == 2, "a capture failed"
    for runner in made:
        assert_equal(step(runner, device, x=numbers(5)), expected(numbers(5)))
        runner.release()
