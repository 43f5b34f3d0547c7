"""Threads: the lock of a runner is what keeps steps apart, and captures stop nobody else."""

from __future__ import annotations

import threading

import pytest
import torch

PATIENCE = 30
"""Seconds until a thread counts as stuck."""


class Thread:
    """A thread whose error is the caller's."""

    def __init__(self, body):
        self.error = None
        self.body = body
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            self.body()
        except BaseException as error:
            self.error = error

    def join(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "a thread is stuck"
        if self.error is not None:
            raise self.error


class Open:
    """No lock at all."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize("locked", [True, False], ids=["as it is", "without its lock"])
def test_the_lock_is_what_keeps_two_threads_apart(rig, rows, monkeypatch, locked):
    """
    Guards against sgl-project/sglang-omni#1369: a second step that comes between the copy-in and the launch
    of a first one waits. Without the lock the first one gets the second one's rows, which shows that
    mixing would be seen.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1, buckets=(4,))
    first, second = rows(4), rows(4) + 100
    between, other_done = threading.Event(), threading.Event()
    runner.execute(rig.batch(4, x=first))
    arena = runner.context.arena
    if not locked:
        arena.lock = Open()
    replay, mine = type(runner.backend).replay, threading.get_ident()

    def paused(backend, *step):
        if threading.get_ident() == mine:
            between.set()
            other_done.wait(PATIENCE if not locked else 0.2)  # with the lock the other one cannot come
        return replay(backend, *step)

    monkeypatch.setattr(type(runner.backend), "replay", paused)
    runner._plans.clear()  # so that the step takes the way that is paused

    def other():
        assert between.wait(PATIENCE)
        found = runner.execute(rig.batch(4, x=second))
        other_done.set()
        assert torch.equal(found, second * 2 + 1)

    thread = Thread(other)
    found = runner.execute(rig.batch(4, x=first))
    thread.join()
    assert torch.equal(found, (first if locked else second) * 2 + 1)


def test_a_runner_replays_while_another_one_captures(rig, rows):
    """
    Guards against vllm-project/vllm#48053: steps of one runtime go on while a thread captures for another on
    first use, and even from within that capture's own time.
    """
    if not rig.platform.capabilities.thread_local_capture:
        pytest.skip("captures of this platform bar other threads from the device, and it says so")
    serving = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2), buckets=(4,))
    serving.execute(rig.batch(4, x=rows(4)))
    started, replayed = threading.Event(), threading.Event()

    def forward(batch):
        if rig.platform.is_capturing() and not replayed.is_set():
            started.set()
            assert replayed.wait(PATIENCE), "no step came through during the capture"
        return rig.cut(batch.inputs["x"] * 3)

    lazy = rig.start(forward, buckets=(4,), capture="lazy")
    x, y = rows(3), rows(4)

    def capture():
        assert torch.equal(lazy.execute(rig.batch(3, x=x)), x * 3)

    thread = Thread(capture)
    assert started.wait(PATIENCE)
    assert torch.equal(serving.execute(rig.batch(4, x=y)), y * 2)
    replayed.set()
    thread.join()
    assert lazy.stats.replayed == 1


def test_a_step_waits_for_the_capture_of_its_own_runner(rig, rows):
    """
    Guards against vllm-project/vllm#48053: a step of the runtime that is being captured is computed
    afterwards, and both are right.
    """
    inside, order = threading.Event(), []

    def forward(batch):
        if rig.platform.is_capturing() and not inside.is_set():
            inside.set()
            gate.wait(0.2)  # time for the other step to come, if it could
            order.append("captured")
        return rig.cut(batch.inputs["x"] * 3)

    gate = threading.Event()
    runner = rig.start(forward, buckets=(2, 4), capture="lazy")
    x, y = rows(3), rows(2)

    def other():
        assert inside.wait(PATIENCE)
        assert torch.equal(runner.execute(rig.batch(2, x=y)), y * 3)
        order.append("stepped")
        gate.set()

    thread = Thread(other)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 3)
    thread.join()
    assert order == ["captured", "stepped"]


def test_two_runtimes_work_in_two_threads(rig):
    """
    Guards against vllm-project/vllm#48053: each captures, steps, releases and captures again on its own, and
    every result is right.
    """
    gate = threading.Barrier(2)

    def work(factor):
        runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * factor), capture="lazy")
        gate.wait(PATIENCE)
        for turn in range(40):
            size = 1 + turn % 8
            x = torch.full((size, 3), float(turn), device=rig.device)
            assert torch.equal(runner.execute(rig.batch(size, x=x)), x * factor)
            if turn == 20:
                runner.recapture()
        assert runner.stats.replayed == 40

    threads = [Thread(lambda factor=factor: work(factor)) for factor in (2, 3)]
    for thread in threads:
        thread.join()
