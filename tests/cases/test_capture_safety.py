"""Capture safety: nothing that Python, the host or a random generator does spoils a capture, or its graph."""

from __future__ import annotations

import gc

import pytest
import torch

from graphplat import CaptureError, HostSpec, InputSpec, Reason
from graphplat.guard import garbage_collection_held


@pytest.fixture
def eager_collector():
    """Collect at every chance, and put everything back."""
    threshold, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()


class Dead:
    """A cycle that owns something and notes, when it is finalized, whether a capture is open."""

    def __init__(self, seen, owned=None):
        self.me, self.seen, self.owned = self, seen, owned

    def __del__(self):
        self.seen()


def test_no_garbage_is_collected_inside_a_capture(rig, rows, eager_collector):
    """
    Guards against pytorch/pytorch#161037, NVIDIA/TransformerEngine#2092, ROCm/ATOM#1322, #1339 and
    vllm-project/vllm#54646: garbage from before a capture, owning an old graph, and garbage that the forward
    itself makes are never finalized inside the capture, though the collector runs at every chance.
    """
    platform, met = rig.platform, []

    def seen():
        met.append(platform.is_capturing())

    def forward(batch):
        for _ in range(20):
            Dead(seen)
        return rig.cut(batch.inputs["x"] * 2)

    gc.enable()
    old = rig.start(lambda batch: rig.cut(batch.inputs["x"] + 1), buckets=(2,))
    rig.runners.clear()
    Dead(seen, old)
    del old
    rig.capture = None
    runner = rig.start(forward)
    gc.collect()
    assert met
    assert True not in met
    x = rows(3)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", ["never", "in a bucket", "for the caller"])
def test_the_collector_is_afterwards_as_it_was(rig, enabled, fails, eager_collector):
    """
    Guards against pytorch/pytorch#161037: whether the collector was on or off, and however the capture
    ended, it is so again; it is off in between.
    """
    during = []

    def forward(batch):
        if rig.platform.is_capturing():
            during.append(gc.isenabled())
            if fails != "never":
                raise ZeroDivisionError
        return rig.cut(batch.inputs["x"] * 2)

    (gc.enable if enabled else gc.disable)()
    if fails == "for the caller":
        with pytest.raises(CaptureError):
            rig.start(forward)
    else:
        rig.start(forward, on_failure="eager")
    assert gc.isenabled() is enabled
    assert set(during) == {False}


def test_nested_windows_restore_what_the_outer_one_found():
    """
    Guards against pytorch/pytorch#161037: an inner window, left by an error too, does not turn the collector
    on inside the outer one.
    """
    assert gc.isenabled()
    with garbage_collection_held():
        with pytest.raises(ZeroDivisionError), garbage_collection_held():
            raise ZeroDivisionError
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), garbage_collection_held():
        raise ZeroDivisionError
    assert gc.isenabled()


def branching(rig, strict):
    """A forward that reads a device value on the host, as long as ``strict["on"]``."""

    def forward(batch):
        x, lengths = batch.inputs["x"], batch.inputs["lengths"]
        x = rig.cut(x * 2)
        if strict["on"] and int(lengths.max()) == 0:
            return x - 1
        return x + lengths[:, None]

    return forward, InputSpec(x=rig.tensor(3), lengths=rig.tensor(dtype=torch.int64, fill=1))


def test_a_host_decision_is_named_and_served_eagerly(rig, rows):
    """
    Guards against vllm-project/vllm#10416 and #9341: under on_failure="eager" a forward that branches on a
    device value gives the eager answer, each branch; once it no longer does, the same runner captures it.
    """
    strict = {"on": True}
    forward, spec = branching(rig, strict)
    runner = rig.start(forward, spec, on_failure="eager")
    assert runner.context.platform is rig.platform
    for fill in (0, 3):
        batch = rig.batch(3, x=rows(3), lengths=torch.full((3,), fill, device=rig.device))
        assert torch.equal(runner.execute(batch), rig.eagerly(runner, batch))
    strict["on"] = False
    if hasattr(runner, "missing"):
        assert {reason for reason, _ in runner.missing.values()} == {Reason.CAPTURE_FAILED}
        runner.recapture()
        assert runner.buckets == (1, 2, 4, 8)
        assert torch.equal(runner.execute(batch), rig.eagerly(runner, batch))
        assert runner.stats.replayed == 1


def test_a_host_decision_raises_with_its_cause(rig):
    """
    Guards against vllm-project/vllm#10416: under on_failure="raise" the error names phase and bucket, and is
    chained to the refused read; a later capture of the same process works.
    """
    strict = {"on": True}
    forward, spec = branching(rig, strict)
    with pytest.raises(CaptureError) as caught:
        rig.start(forward, spec)
    assert (caught.value.phase, caught.value.bucket) == (rig.phase, 8)
    assert caught.value.__cause__ is not None
    assert "test_capture_safety.py" in str(caught.value)
    strict["on"] = False
    assert rig.start(forward, spec).buckets == (1, 2, 4, 8)


def test_a_flag_known_on_the_host_selects_the_graph(rig, rows):
    """
    Guards against vllm-project/vllm#10416: a decision that the host knows is part of the key, so each value
    has graphs of its own, and none is taken for the other.
    """

    def forward(batch):
        x = rig.cut(batch.inputs["x"] * 2)
        return x - 1 if batch.inputs["empty"] else x + 1

    spec = InputSpec(x=rig.tensor(3), empty=HostSpec(values=(False, True)))
    runner = rig.start(forward, spec, buckets=(4,))
    for empty in (True, False, True):
        x = rows(3)
        assert torch.equal(runner.execute(rig.batch(3, x=x, empty=empty)), x * 2 + (-1 if empty else 1))
    assert runner.stats.replayed == 3


def noisy(rig, generator=None):
    """A forward that adds noise before and after the break."""

    def forward(batch):
        x = batch.inputs["x"]
        x = rig.cut(x + torch.rand(x.shape, device=x.device, generator=generator))
        return x + torch.rand(x.shape, device=x.device, generator=generator)

    return forward


@pytest.mark.parametrize("private", [False, True])
def test_replays_draw_fresh_numbers_and_repeat_after_reseeding(rig, rows, private):
    """
    Guards against ace-step/ACE-Step-1.5#613 and pytorch/pytorch#176752, #173421, #113541: two replays draw
    different numbers, reseeding repeats them, from the default generator and one of the runtime's own.
    """
    if private and not rig.platform.capabilities.generators_in_capture:
        pytest.skip("this platform cannot capture generators, and says so")
    generator = rig.generator() if private else None
    members = {"generators": [generator]} if private else {}
    runner = rig.start(noisy(rig, generator), buckets=(4,), **members)

    def seed():
        generator.manual_seed(5) if private else torch.manual_seed(5)

    batch = rig.batch(3, x=rows(3))
    seed()
    first = [runner.execute(batch) for _ in range(3)]
    seed()
    again = [runner.execute(batch) for _ in range(3)]
    assert runner.stats.replayed == 6
    assert not torch.equal(first[0], first[1])
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)


def test_generators_are_registered_once_for_each_graph(rig, monkeypatch):
    """
    Guards against pytorch/pytorch#172390 and #171263: each recorded graph learns each extra generator once,
    before it is captured; a platform that cannot do so refuses instead of repeating one draw for ever.
    """
    generator = rig.generator()
    if not rig.platform.capabilities.generators_in_capture:
        with pytest.raises(CaptureError, match="generator"):
            rig.start(noisy(rig, generator), generators=[generator])
        return
    registered = []
    monkeypatch.setattr(
        type(rig.platform),
        "register_generator",
        lambda self, graph, given, real=type(rig.platform).register_generator: (
            registered.append((id(graph), given)),
            real(self, graph, given),
        ),
    )
    runner = rig.start(noisy(rig, generator), generators=[generator], warmup="each", buckets=(2, 4))
    graphs = [graph for held in runner.device_graphs().values() for graph in held]
    assert registered == [(id(graph), generator) for graph in graphs]


def test_random_numbers_can_be_drawn_after_a_failed_capture(rig, rows):
    """
    Guards against pytorch/pytorch#114068 and ace-step/ACE-Step-1.5#613: a capture that fails after drawing
    leaves the generators where they were and usable, eagerly and in the next capture.
    """
    broken = {"on": True}

    def forward(batch):
        y = noisy(rig)(batch)
        if broken["on"] and rig.platform.is_capturing():
            raise ZeroDivisionError
        return y

    torch.manual_seed(3)
    expected = torch.rand(4, device=rig.device)
    torch.manual_seed(3)
    runtime = rig.runtime(forward, on_failure="eager", buckets=(4,))
    runner = rig.runner(runtime)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device=rig.device), expected)
    batch = rig.batch(3, x=rows(3))
    assert not torch.equal(runner.execute(batch), runner.execute(batch))
    if hasattr(runner, "recapture"):
        torch.manual_seed(3)
        runner.recapture()
        assert torch.equal(torch.rand(4, device=rig.device), expected)
        broken["on"] = False
        runner.recapture()
        assert not torch.equal(runner.execute(batch), runner.execute(batch))


def test_the_step_that_captures_is_computed_too(rig, rows):
    """
    Guards against isaac-sim/IsaacLab#4829: with capture on first use, the step that records gives this
    batch's result, although recording executes nothing; so do later ones.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1, capture="lazy")
    for n in (3, 3, 8, 1):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2 + 1)
    assert runner.stats.replayed == 4
