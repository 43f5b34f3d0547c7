"""Error recovery: whatever step of a capture fails, everything else is as if it had never begun."""

from __future__ import annotations

import gc

import pytest
import torch

from graphplat import CaptureError, Phase, Reason
from graphplat.testing.simulated import faults
from graphplat_cpu import CpuPlatform


class Faulty(CpuPlatform):
    """The cpu as a vendor whose driver fails where it is told to."""

    name = "faulty"
    at = None
    error = RuntimeError

    def __init__(self):
        super().__init__()
        self.opened = self.closed = 0
        self.open = set()

    def is_out_of_tree(self):
        """A vendor's own."""
        return True

    def _meet(self, point):
        if self.at == point:
            raise self.error(f"{point} failed")

    def capture_begin(self, graph, *, pool, stream):
        """Begin, or fail before or after."""
        self._meet("begin")
        super().capture_begin(graph, pool=pool, stream=stream)
        self.opened += 1
        self.open.add(id(graph))
        self._meet("begun")

    def capture_end(self, graph):
        """End, or fail before or after."""
        self._meet("end")
        super().capture_end(graph)
        self._close(graph)
        self._meet("instantiate")

    def abort_capture(self, graph, *, pool, stream):
        """Note that the capture was closed, if it was open."""
        self._close(graph)
        return super().abort_capture(graph, pool=pool, stream=stream)

    def _close(self, graph):
        if id(graph) in self.open:
            self.open.remove(id(graph))
            self.closed += 1


POINTS = ["begin", "begun", "forward", "end", "instantiate"]


@pytest.fixture
def faulty(vendor, rig, monkeypatch):
    """The faulty platform in the rig's place."""
    if rig.device.type != "cpu":
        pytest.skip("simulated drivers have faults of their own")
    platform = vendor(Faulty)
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "faulty")
    yield platform
    rig.close()


def at_bucket(rig, platform, bucket, point):
    """A forward that arms the fault of *point* when *bucket* is run, and trips it where that is its own."""
    state = {"on": True}

    def forward(batch):
        x = batch.inputs["x"]
        hit = state["on"] and x.shape[0] == bucket
        platform.at = point if hit else None
        y = rig.cut(x * 2)
        if hit and point == "forward" and platform.is_capturing():
            raise platform.error("forward failed")
        return y + 1

    return forward, state


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_step_costs_one_bucket(rig, rows, faulty, point):
    """
    Guards against pytorch/pytorch#190308, #190348, #108896, NVIDIA/warp#1957 and NVIDIA/cuopt#1253: whichever
    step of the capture of one bucket fails, that bucket runs eagerly and right, the others replay, nothing
    captures any more, the collector and random numbers work as before, and a retry succeeds.
    """
    forward, state = at_bucket(rig, faulty, 4, point)
    enabled = gc.isenabled()
    runner = rig.start(forward, buckets=(2, 4, 8), on_failure="eager")
    faulty.at = None
    assert not faulty.is_capturing()
    assert gc.isenabled() is enabled
    torch.rand(1)
    assert 8 in runner.buckets
    assert len(runner.buckets) == 2
    state["on"] = False
    for n in (2, 3, 8):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2 + 1)
    assert runner.stats.replayed == 2
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 1}
    runner.recapture()
    assert runner.buckets == (2, 4, 8)
    for n in (2, 3, 8):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2 + 1)
    assert faulty.opened == faulty.closed > 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("point", POINTS)
def test_whatever_stops_a_capture_is_what_the_caller_sees(rig, rows, faulty, point, error):
    """
    Guards against pytorch/pytorch#190308: an error is chained and located, an interrupt passes as it is, and
    both leave no capture open, no graph behind, and a process in which the next capture works.
    """
    faulty.error = error
    forward, state = at_bucket(rig, faulty, 8, point)
    if error is MemoryError:
        with pytest.warns(match="too little memory"):
            runner = rig.start(forward, buckets=(8,))
        assert runner.context.live_graphs == 0
    else:
        with pytest.raises(CaptureError if error is RuntimeError else KeyboardInterrupt) as caught:
            rig.start(forward, buckets=(8,))
        if error is RuntimeError:
            assert (caught.value.platform, caught.value.bucket) == ("faulty", 8)
            assert f"{point} failed" in str(caught.value.__cause__)
    faulty.at = None
    state["on"] = False
    assert not faulty.is_capturing()
    x = rows(5)
    runner = rig.start(forward, buckets=(8,))
    assert torch.equal(runner.execute(rig.batch(5, x=x)), x * 2 + 1)
    assert runner.stats.replayed == 1


@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
@pytest.mark.parametrize("how", ["works", "fails", "fails in the capture"])
def test_set_up_draws_from_no_generator(rig, how, private):
    """
    Guards against pytorch/pytorch#114068: whether set-up works or fails, at its first run or in a capture,
    the random state of the device and of the runtime's own generators is afterwards what it was before.
    """
    if private and not rig.platform.capabilities.generators_in_capture:
        pytest.skip("this platform cannot capture generators, and says so")
    own = rig.generator() if private else None

    def forward(batch):
        x = batch.inputs["x"]
        drawn = torch.rand(x.shape, device=x.device, generator=own)
        if how == "fails" or (how != "works" and rig.platform.is_capturing()):
            raise ZeroDivisionError
        return rig.cut(x + drawn)

    def states():
        kept = [rig.platform.rng_state(rig.device), own and own.get_state()]
        return [state.tolist() for state in kept if state is not None]

    more = {"generators": [own]} if private else {}
    runtime = rig.runtime(forward, buckets=(2, 4), **more)
    torch.rand(1, device=rig.device)
    before = states()
    if how == "works":
        assert rig.runner(runtime).buckets == (2, 4)
    else:
        with pytest.raises(CaptureError):
            rig.runner(runtime)
    assert states() == before


def test_a_lazy_capture_that_fails_still_answers(rig, rows):
    """
    Guards against NVIDIA/cuopt#1253: under on_failure="eager" the step whose capture fails gives the eager
    result, the capture is not tried at every step, and a later recapture brings the graph.
    """
    tries = []
    broken = {"on": True}

    def forward(batch):
        if rig.platform.is_capturing():
            tries.append(1)
            if broken["on"]:
                raise ZeroDivisionError
        return rig.cut(batch.inputs["x"] * 2)

    runner = rig.start(forward, capture="lazy", on_failure="eager", warmup="each")
    for _ in range(3):
        x = rows(3)
        assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2)
    assert len(tries) == 1
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 3}
    broken["on"] = False
    runner.recapture()
    x = rows(3)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2)
    assert runner.stats.replayed == 1


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize("point", ["begin", "forward", "end", "instantiate"])
def test_a_driver_that_fails_is_left_at_rest(sim, rig, rows, point, error):
    """
    Guards against pytorch/pytorch#190308 and NVIDIA/warp#1957 on a device that remembers: after the driver's
    own failure at each step, or an interrupt there, no capture, stream, graph or pool is left, and the next
    set-up works.
    """
    from graphplat.testing.simulated import ledger

    runtime = rig.runtime(lambda batch: rig.cut(batch.inputs["x"] * 2), buckets=(4,), warmup="each")
    with faults.inject(point, error), pytest.raises(CaptureError if error is None else error) as caught:
        rig.runner(runtime)
    if error is None:
        assert caught.value.phase == rig.phase
    del caught
    gc.collect()
    left = ledger()
    assert (left.captures, left.graphs) == (0, 0)
    assert getattr(torch, sim.name).current_stream().stream_id == 0
    x = rows(3)
    runner = rig.runner(runtime)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2)
    assert runner.stats.replayed == 1


def test_failed_captures_keep_no_memory(rig):
    """
    Guards against NVIDIA/warp#1957 and pytorch/pytorch#190308: thirty captures that fail reserve no more than
    one does, where the platform counts, and leave no graph anywhere.
    """

    def forward(batch):
        y = rig.cut(batch.inputs["x"].repeat(1, 500) * 2)
        if rig.platform.is_capturing():
            raise ZeroDivisionError
        return y

    runtime = rig.runtime(forward, buckets=(8,), on_failure="eager")
    runner = rig.runner(runtime)
    if not hasattr(runner, "missing"):
        assert rig.phase is Phase.PREFILL
        return
    levels = []
    for _ in range(30):
        runner.recapture()
        rig.platform.empty_cache()
        levels.append((rig.platform.allocated_bytes(rig.device), rig.platform.reserved_bytes(rig.device)))
    assert levels[-1] == levels[2]
    assert runner.context.live_graphs == 0
