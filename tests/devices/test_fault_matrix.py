"""Any single call to the driver fails, anywhere in a capture or a step, in every way; and nothing is left."""

import gc
import warnings

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphplat import (
    ForwardBatch,
    GraphConfig,
    GraphplatError,
    GraphplatWarning,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    eager_on_graph,
)
from graphplat.testing.reference import ReferenceRunner
from graphplat.testing.simulated import faults, ledger
from graphplat.testing.suite_updates import attention_runtime, updated_step

ERRORS = {"error": RuntimeError, "memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt}
CAPTURE = ("begin", "op", "forward", "end", "instantiate", "alloc", "replay")
STEP = ("op", "alloc", "replay")
SAMPLES = 4
"""Calls of each kind that fail in turn, spread evenly over all of them."""


class Subject:
    """A reference runtime on the device and what it gives without graphs."""

    def __init__(self, sim, backend):
        self.sim = sim
        self.phase = Phase.PREFILL if backend == "breakable" else Phase.DECODE
        small = PhaseConfig(backend=backend, buckets=(4, 8), max_requests=4, on_failure="eager")
        config = {"decode": PhaseConfig(backend="disabled"), str(self.phase): small}
        self.runtime = ReferenceRunner(
            "tiny", device=sim.name, graph_config=GraphConfig(**config), slots=8, max_len=32
        )
        capture = capture_cuda_graphs(model_runner=self.runtime)
        self.runner = capture.prefill_runner if backend == "breakable" else capture.decode.runner
        self.wanted = {size: self.eagerly(size) for size in (3, 4, 7)}

    def batch(self, size):
        if self.phase is Phase.PREFILL:
            return self.runtime.prefill_batch([list(range(1, size + 1))])
        return self.runtime.decode_batch([5 + i for i in range(size)], [0] * size)

    def eagerly(self, size):
        with torch.no_grad():
            return self.runner.eager_runner.execute(self.batch(size)).cpu()

    def serves(self):
        """Every size is right; the buckets that served it."""
        served = []
        for size, wanted in self.wanted.items():
            torch.testing.assert_close(self.runner.execute(self.batch(size)).cpu(), wanted)
            key = self.runner.stats.last.key
            served.append(key.size if key else None)
        return served

    def calls(self, point, action):
        """How often *action* comes by *point*."""
        with faults.inject(point, nth=10**9) as counter:
            action()
        return counter.hits

    def emptied(self):
        """What is left without graphs, errors and cached memory."""
        self.runner.release()
        gc.collect()
        getattr(torch, self.sim.name).empty_cache()
        now = ledger()
        figures = ("graphs", "executables", "pools", "pool_bytes", "allocated_bytes", "reserved_bytes")
        return {name: getattr(now, name) for name in figures}

    def state(self):
        dev = getattr(torch, self.sim.name)
        runner = self.runner
        return {
            "captures": ledger().captures,
            "stream": dev.current_stream().stream_id,
            "device": dev.current_device(),
            "modes": _get_current_dispatch_mode_stack(),
            "collects": gc.isenabled(),
            "random": dev.get_rng_state().tolist(),
            "grad": torch.is_grad_enabled(),
            "graphs without an owner": ledger().graphs - sum(map(len, runner.device_graphs().values())),
        }


@pytest.fixture(params=["full", "breakable"])
def subject(sim, request):
    made = Subject(sim, request.param)
    yield made
    made.runner.release()


def failing(subject, point, nth, kind, action):
    """Run *action* with one call failing; the error that came out, if any."""
    before = subject.state()
    caught = None
    with warnings.catch_warnings(), faults.inject(point, ERRORS[kind]("injected"), nth=nth) as fault:
        warnings.simplefilter("ignore", GraphplatWarning)
        try:
            action()
        except BaseException as error:
            caught = error
    assert fault.raised == 1
    assert subject.state() == before
    return caught


def root(error):
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("point", CAPTURE)
def test_any_call_of_a_capture_may_fail(subject, point, kind):
    """
    Guards against pytorch/pytorch#190308, #190348, #108896 and NVIDIA/warp#1957: an interrupt passes, an
    error is dealt with or is the cause of what the caller sees; the driver is at rest, results are right,
    another capture works, and memory is back after release.
    """
    count = subject.calls(point, subject.runner.recapture)
    if not count:
        pytest.skip("no such call here")
    empty = subject.emptied()
    for nth in sorted({1 + turn * (count - 1) // (SAMPLES - 1) for turn in range(SAMPLES)}):
        caught = failing(subject, point, nth, kind, subject.runner.capture)
        if kind == "interrupt":
            assert isinstance(caught, KeyboardInterrupt), f"call {nth}"
        elif caught is not None:
            assert isinstance(caught, GraphplatError), f"call {nth}"
            assert str(root(caught)) == "injected", f"call {nth}"
        caught = None
        subject.serves()
        subject.runner.recapture()
        assert subject.serves() == [4, 4, 8], f"call {nth}"
        subject.runner.release()
    caught = None
    assert subject.emptied() == empty


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("point", STEP)
def test_any_call_of_a_step_may_fail(subject, point, kind):
    """The error reaches the caller, chained where it was the launch; every size is right afterwards."""
    for known in (False, True):
        subject.runner.recapture()
        if known:
            subject.serves()
        count = subject.calls(point, lambda: subject.runner.execute(subject.batch(3)))
        for nth in range(1, min(count, SAMPLES) + 1):
            if not known:
                subject.runner.recapture()
            caught = failing(subject, point, nth, kind, lambda: subject.runner.execute(subject.batch(3)))
            assert caught is not None, f"call {nth} failed unseen"
            assert str(root(caught)) == "injected", f"call {nth}"
            assert subject.serves() == [4, 4, 8], f"call {nth}"


@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_a_release_that_fails_can_be_finished(subject, kind):
    """The error passes; steps run eagerly, nothing stays alive, and another capture works."""
    with faults.inject("reset", ERRORS[kind]("injected")), pytest.raises(ERRORS[kind], match="injected"):
        subject.runner.release()
    assert subject.serves() == [None] * 3
    assert subject.runner.stats.last.reason is Reason.RELEASED
    subject.runner.release()
    gc.collect()
    assert ledger().graphs == 0
    subject.runner.recapture()
    assert subject.serves() == [4, 4, 8]


@pytest.mark.requires("update_after_capture")
@pytest.mark.parametrize("kind", ERRORS)
def test_an_update_that_fails_reaches_the_caller(sim, kind):
    """Guards against sgl-project/sglang#16498: no replay uses stale values, and the next step is right."""

    def fused(query, key, value, lengths):
        return torch.ops.sim.fused_infer_attention(query, key, value, actual_seq_lengths_kv=lengths)

    operator = ("actual_seq_lengths_kv", fused)
    runtime = attention_runtime(torch.device(sim.name, 0), operator, buckets=(2, 4))
    runner = capture_cuda_graphs(model_runner=runtime).decode.runner
    for _ in range(2):
        with faults.inject("update", ERRORS[kind]("injected")):
            with pytest.raises((GraphplatError, KeyboardInterrupt)) as caught:
                updated_step(runner, runtime, operator, [1, 6, 2], 3)
        assert str(root(caught.value)) == "injected"
        for seed, lengths in enumerate(([3, 2, 5], [4], [1, 6])):
            output, eager = updated_step(runner, runtime, operator, lengths, seed)
            torch.testing.assert_close(output, eager)
    runner.release()


class Doubling(ModelRunner):
    """One operator on each side of a break."""

    def __init__(self, device, backend):
        self.device = torch.device(device)
        self.model = torch.nn.Module()
        self.graph_config = GraphConfig(decode=PhaseConfig(backend=backend, buckets=(1, 2), warmup="auto"))

    def input_spec(self, phase):
        return InputSpec(x=TensorSpec(("requests", 3), dtype=torch.float32))

    def forward(self, batch):
        return negated(batch.inputs["x"] * 2) + 1


@eager_on_graph
def negated(x):
    return -x


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_thousand_captures_and_releases_leave_nothing(sim, backend):
    """
    Guards against NVIDIA/warp#1957: after a thousand cycles of capture, step and release the counts of
    graphs, pools, tensors and bytes are what they were after the first.
    """
    if sim.name not in ("acme", "musa"):
        pytest.skip("two devices are enough: one whose graphs release their pool, and one whose do not")
    runner = capture_cuda_graphs(model_runner=Doubling(sim.name, backend)).decode.runner
    figures = ("graphs", "executables", "pools", "pool_bytes", "allocated_bytes", "reserved_bytes")
    x = torch.ones(2, 3, device=sim.name)
    batch = ForwardBatch(phase=Phase.DECODE, num_requests=2, num_tokens=2, inputs={"x": x})

    def rest():
        runner.release()
        gc.collect()
        now = ledger()
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        return {name: getattr(now, name) for name in figures} | {"tensors": tensors}

    runner.execute(batch)
    rest()
    getattr(torch, sim.name).empty_cache()  # what other tests left; from here on the runner does it
    first, begins = rest(), ledger().begins
    for _ in range(1000):
        runner.capture()
        runner.execute(batch)
        runner.release()
    assert runner.stats.replayed == 1001
    assert ledger().begins - begins >= 2000
    assert rest() == first
    assert runner.context.shapes == []
