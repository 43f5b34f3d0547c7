"""Batches in host memory where the platform stages them: a small ring, gone round often, and faults."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

from graphplat import ForwardBatch, InputSpec, Phase, PhaseConfig, TensorSpec, staging

pytestmark = pytest.mark.filterwarnings("error")
SLOTS = 4
SIZES = (8, 8, 8, 8, 7, 3, 5, 1, 2, 8, 1, 6, 4, 4, 2, 1)
"""Shrinking and growing by turns, in each place of the ring."""


@pytest.fixture
def ring(rig, monkeypatch):
    """Few places, so that a short test goes round them often."""
    if not rig.platform.capabilities.pinned_memory:
        pytest.skip("this platform stages nothing")
    monkeypatch.setattr(staging, "_FEWEST", SLOTS)
    monkeypatch.setattr(staging, "_MOST", SLOTS)


@pytest.fixture(params=["at once", "deferred"])
def queue(request, ring, device):
    """How the device runs its work; deferred, where a simulated one can be told to."""
    if request.param == "at once":
        yield
        return
    if device.type == "cuda":
        pytest.skip("needs a simulated device")
    sim = request.getfixturevalue("sim")
    sim.set_deferred(True)
    yield
    sim.set_deferred(False)


def summing(rig):
    """The real rows, and a number that shows every padded one."""

    def forward(batch):
        x = rig.cut(batch.inputs["x"] * 2)
        return {"y": x, "sum": x.double().sum().reshape(1)}

    return forward


def start(rig):
    """A runner of one bucket of eight rows, whose sizes have all been met on the device."""
    runner = rig.start(summing(rig), InputSpec(x=rig.tensor(3, fill=5)), buckets=(8,))
    for n in range(1, 9):
        runner.execute(rig.batch(n, x=torch.ones(n, 3, device=rig.device)))
    return runner


class Steps:
    """Steps from host memory that the caller overwrites at once, looked at when all are queued."""

    def __init__(self, rig, runner):
        self.rig, self.runner, self.taken = rig, runner, []
        self.errors = []

    def run(self, sizes):
        for n in sizes:
            x = torch.full((n, 3), float(len(self.taken) + len(self.errors)))
            wanted = (x * 2, (x * 2).double().sum().reshape(1) + (8 - n) * 3 * 10)
            try:
                self.taken.append((self.runner.execute(self.rig.batch(n, x=x)), *wanted))
            except Exception as error:
                self.errors.append(error.with_traceback(None))
            x.fill_(-1e9)

    def check(self):
        for found, y, total in self.taken:
            assert torch.equal(found["y"].cpu(), y)
            assert torch.equal(found["sum"].cpu(), total)


def fail(monkeypatch, platform, name, nth):
    """Make the *nth* call of a platform's method fail, before the device learns of it; gives the error."""
    original, error = getattr(platform, name), OSError(f"{name} failed")
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == nth:
            raise error
        return original(*args)

    monkeypatch.setattr(platform, name, failing)
    return error


def test_sizes_that_shrink_leave_no_row_behind(rig, queue):
    """
    Guards against sgl-project/sglang#10892: a place of the ring that held a larger batch is sent with fill
    values beyond the smaller one, turn after turn, whether the device runs at once or lags.
    """
    runner = start(rig)
    steps = Steps(rig, runner)
    steps.run(SIZES * 3)
    assert steps.errors == []
    steps.check()
    assert runner.stats.replayed == 8 + len(steps.taken)


def test_requests_and_tokens_shrink_apart(rig, runtime, device, queue):
    """
    Guards against sgl-project/sglang#10892 and vllm-project/vllm-ascend#3909: where one count grows and the
    other shrinks, rows of the latter leave nothing behind either.
    """
    if rig.phase is Phase.DECODE:
        pytest.skip("decode has a fixed number of tokens for each request")

    def forward(batch):
        x, lengths = rig.cut(batch.inputs["x"] * 2), batch.inputs["lengths"]
        return {"y": x, "sum": (x.double().sum() + 1000 * lengths.sum()).reshape(1)}

    spec = InputSpec(
        x=TensorSpec(("tokens",), dtype=torch.float32, fill=5), lengths=TensorSpec(("requests",), fill=7)
    )
    config = PhaseConfig(backend=rig.backend, buckets=(8,), max_requests=4, max_padding=100.0)
    runner = rig.runner(runtime(forward, spec, decode=PhaseConfig(backend="disabled"), prefill=config))

    def step(requests, tokens, value, where):
        x, lengths = torch.full((tokens,), value), torch.full((requests,), int(value))
        wanted = 2 * x.sum() + (8 - tokens) * 10 + 1000 * (lengths.sum() + (4 - requests) * 7)
        inputs = {"x": x.to(where), "lengths": lengths.to(where)}
        found = runner.execute(
            ForwardBatch(phase=rig.phase, num_requests=requests, num_tokens=tokens, inputs=inputs)
        )
        x.fill_(-1e9)
        lengths.fill_(-1)
        return found["sum"], wanted

    counts = [(4, 4)] * SLOTS + [(1, 8), (2, 5), (4, 4), (1, 6)] + [(4, 8)] * SLOTS + [(1, 1), (4, 4)] * 4
    for requests, tokens in set(counts):
        step(requests, tokens, 1.0, device)
    taken = [step(*count, float(number), "cpu") for number, count in enumerate(counts * 2)]
    for found, wanted in taken:
        assert found.item() == wanted.item()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("name", ["record_event", "synchronize_event"])
def test_a_fence_that_fails_once_costs_one_step(rig, queue, monkeypatch, name, nth):
    """
    Guards against sgl-project/sglang-omni#1369: an event that cannot be recorded or waited for is the error
    of that step; all steps before and after it are right, though the ring goes round often, sizes are mixed
    and the caller overwrites what it gave.
    """
    steps = Steps(rig, start(rig))
    steps.run(SIZES[: SLOTS + 1])
    error = fail(monkeypatch, rig.platform, name, nth)
    steps.run(SIZES * 4)
    assert len(steps.errors) == 1
    assert steps.errors[0] is error
    steps.check()


def test_memory_that_the_device_may_still_read_is_kept(rig, queue, monkeypatch):
    """
    Guards against microsoft/onnxruntime#32121: where the stream cannot be waited for after a failed fence,
    the host memory it may read lives on.
    """
    runner = start(rig)
    steps = Steps(rig, runner)
    steps.run(SIZES[:1])
    (entry,) = runner.entries.values()
    ring = weakref.ref(entry.inputs.staging._ring)
    error = fail(monkeypatch, rig.platform, "record_event", 1)
    lost = fail(monkeypatch, rig.platform, "synchronize_stream", 1)
    steps.run(SIZES * 2)
    lost.__traceback__ = None  # whose frames would hold the ring
    assert steps.errors == [error]
    assert ring() is not None
    steps.check()


def test_memory_is_pinned_for_the_first_host_batch(rig, ring, monkeypatch):
    """Batches on the device pin nothing, at any size; many host batches of one bucket pin once."""
    original, pinned = torch.Tensor.pin_memory, []

    def pin(tensor, *args, **keywords):
        pinned.append(tensor.shape)
        return original(tensor, *args, **keywords)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    runner = start(rig)
    for n in range(1, 9):
        runner.execute(rig.batch(n, x=torch.ones(n, 3, device=rig.device)))
    assert pinned == []
    steps = Steps(rig, runner)
    steps.run(SIZES)
    steps.check()
    assert len(pinned) == 1


def test_where_nothing_can_be_pinned_host_batches_are_right(rig, queue, monkeypatch):
    """
    Guards against MooreThreads/torch_musa#97: memory that cannot be pinned is no error; batches on the device
    never notice, and host batches replay with right results, after one warning that says why.
    """
    tried = []

    def refuse(tensor, *args, **keywords):
        tried.append(tensor)
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    runner = start(rig)
    for n in (3, 8, 3):
        x = torch.ones(n, 3, device=rig.device)
        assert torch.equal(runner.execute(rig.batch(n, x=x))["y"].cpu(), torch.ones(n, 3) * 2)
    assert tried == []
    steps = Steps(rig, runner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps.run(SIZES * 2)
    assert [str(warning.message) for warning in caught] == [
        "host batches are copied field by field, since pinning memory failed: out of host memory"
    ]
    assert caught[0].filename == __file__
    assert steps.errors == []
    steps.check()
    assert len(tried) == 1
    assert runner.stats.replayed == 8 + 3 + len(steps.taken)


def test_inputs_without_a_byte_are_no_matter(rig, ring):
    """
    Guards against sgl-project/sglang#10892: where there is nothing to send, batches from the host replay as
    any others do.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] + 1), InputSpec(x=rig.tensor(0)), buckets=(8,))
    for where in (rig.device, "cpu", "cpu"):
        assert runner.execute(rig.batch(3, x=torch.ones(3, 0, device=where))).shape == (3, 0)
    assert runner.stats.replayed == 3


def test_the_ring_is_host_memory_whatever_the_default_device(rig, ring):
    """
    Guards against MooreThreads/torch_musa#97: with the device as torch's default, memory is pinned all the
    same, and host batches are staged.
    """
    with torch.device(rig.device):
        runner = start(rig)
    with torch.device(rig.device):
        x = torch.full((3, 3), 4.0, device="cpu")
        for _ in range(2):
            found = runner.execute(rig.batch(3, x=x))
    assert torch.equal(found["y"].cpu(), x * 2)
    (entry,) = runner.entries.values()
    assert entry.inputs.staging._ring.device.type == "cpu"
