"""A capture or replay that fails: what the user sees, and that everything else is as before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphplat import (
    CaptureError,
    GraphplatError,
    PhaseConfig,
    Reason,
    capture_cuda_graphs,
    hookimpl,
    platform_for,
    registry,
)
from graphplat.errors import HostReadError, PluginError, ReplayError
from graphplat.guard import is_out_of_memory

EIGHT = (2, 4, 8)


class Fault:
    """A forward that fails at one bucket, in one way, at one moment."""

    def __init__(self, kind: str = "raise", bucket: int = 4, when: str = "capture") -> None:
        self.kind, self.bucket, self.when = kind, bucket, when
        self.platform = None
        self.active = True

    def __call__(self, batch: Any) -> Any:
        x = batch.inputs["x"]
        y = x * 2 + torch.rand_like(x) * 0
        capturing = self.platform is not None and self.platform.is_capturing()
        if self.active and x.shape[0] == self.bucket and capturing == (self.when == "capture"):
            self.fail(x)
        return y

    def fail(self, x: torch.Tensor) -> None:
        if self.kind == "raise":
            raise ZeroDivisionError("the model's own")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "memory":
            raise torch.OutOfMemoryError("no memory for this bucket")
        if self.kind == "host read":
            float(x.sum())
        if self.kind == "swallowed":
            with contextlib.suppress(Exception):
                float(x.sum())


@pytest.fixture
def faulty(runtime: Any, device: torch.device) -> Any:
    """Make a runtime whose forward fails; returns it and its fault."""

    def make(fault: Fault, **settings: Any) -> Any:
        fault.platform = platform_for(device)
        return runtime(fault, decode=PhaseConfig(buckets=EIGHT, **settings))

    return make


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """Streams, capture, random state and garbage collection are afterwards what they were before."""
    platform = platform_for(device)
    before = (gc.isenabled(), platform.current_stream(device), torch.is_grad_enabled())
    yield
    assert (gc.isenabled(), platform.current_stream(device), torch.is_grad_enabled()) == before
    assert not platform.is_capturing()


def serves(runner: Any, decode: Any, rows: Any, *sizes: int) -> None:
    """Every size gives the eager result."""
    for n in sizes:
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)


@pytest.mark.parametrize("kind", ["raise", "host read", "swallowed"])
def test_a_failed_capture_names_what_and_where(faulty: Any, device: torch.device, kind: str) -> None:
    """
    Guards against vllm-project/vllm#10416 and #9341: the error names platform, phase, bucket and, where it
    is known, the user's line; it is chained to the first cause, also if the model swallowed that.
    """
    toy = faulty(Fault(kind))
    with unchanged(device), pytest.raises(CaptureError) as caught:
        capture_cuda_graphs(model_runner=toy)
    error = caught.value
    assert (error.platform, error.phase, error.bucket) == (device.type, "decode", 4)
    assert 'on_failure="eager"' in str(error)
    assert error.__cause__ is not None
    if kind == "raise":
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert "the model's own" in str(error)
        assert "test_errors.py" in str(error)
        assert "in fail" in str(error)
    elif device.type == "cpu":
        assert isinstance(error.__cause__, HostReadError)


@pytest.mark.parametrize("kind", ["raise", "host read", "swallowed"])
def test_one_bucket_runs_eagerly_and_the_others_keep_their_graphs(
    faulty: Any, decode: Any, rows: Any, device: torch.device, kind: str
) -> None:
    """
    Guards against pytorch/pytorch#190308, #190348, NVIDIA/warp#1957 and NVIDIA/cuopt#1253: under
    on_failure="eager" the failed bucket gives right results eagerly, counted with its reason; a retry
    works.
    """
    fault = Fault(kind)
    with unchanged(device):
        capture = capture_cuda_graphs(model_runner=faulty(fault, on_failure="eager"))
    runner = capture.decode_runner
    assert runner.buckets == (2, 8)
    (skip,) = [skip for skip in capture.report.skipped if skip.key is not None]
    assert (skip.reason, skip.key.size) == (Reason.CAPTURE_FAILED, 4)
    serves(runner, decode, rows, 2, 4, 8, 3, 1, 7)
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 2}
    assert runner.stats.replays == {2: 2, 8: 2}
    assert "decode" in runner.explain(decode(4, x=rows(4))).detail
    fault.active = False
    runner.recapture()
    assert runner.buckets == EIGHT
    serves(runner, decode, rows, 4, 3, 8)
    assert runner.stats.ran_eagerly == 2


@pytest.mark.parametrize("when", ["capture", "warm-up"])
@pytest.mark.parametrize("kind", ["raise", "interrupt"])
def test_what_stops_a_capture_leaves_the_device_as_before(
    faulty: Any, decode: Any, rows: Any, device: torch.device, kind: str, when: str
) -> None:
    """
    Guards against pytorch/pytorch#190308 and #108896: after an exception or a KeyboardInterrupt in warm-up or
    capture the same runner can be captured again, and what was captured before stays.
    """
    fault = Fault(kind, when=when)
    fault.active = False
    runner = capture_cuda_graphs(model_runner=faulty(fault, warmup="each")).decode_runner
    fault.active = True
    for _ in range(2):
        with unchanged(device), pytest.raises(KeyboardInterrupt if kind == "interrupt" else CaptureError):
            runner.recapture()
        assert runner.buckets == (8,)
        fault.active = False
        serves(runner, decode, rows, 8, 2, 3)
        assert runner.stats.last.reason is Reason.CAPTURE_FAILED
        fault.active = True
    fault.active = False
    runner.recapture()
    assert runner.buckets == EIGHT
    serves(runner, decode, rows, 8, 2, 3)
    assert runner.stats.last.is_graph


@pytest.mark.filterwarnings("ignore:too little memory")
@pytest.mark.parametrize("policy", ["raise", "eager"])
def test_out_of_memory_drops_that_bucket_alone(
    faulty: Any, decode: Any, rows: Any, device: torch.device, policy: Any
) -> None:
    """
    Guards against vllm-project/vllm#57475 and #53013: what was captured stays, smaller buckets are still
    tried, and the report says what was dropped; too little memory is never a crash.
    """
    fault = Fault("memory", bucket=8)
    with unchanged(device):
        capture = capture_cuda_graphs(model_runner=faulty(fault, on_failure=policy))
    runner = capture.decode_runner
    assert runner.buckets == (2, 4)
    (skip,) = [skip for skip in capture.report.skipped if skip.key is not None]
    assert (skip.reason, skip.key.size) == (Reason.OUT_OF_MEMORY, 8)
    serves(runner, decode, rows, 2, 4, 8, 5)
    assert runner.stats.eager == {Reason.OUT_OF_MEMORY: 2}


@pytest.mark.filterwarnings("ignore:too little memory")
def test_out_of_memory_in_the_first_warm_up_drops_the_largest_bucket_alone(
    faulty: Any, decode: Any, rows: Any
) -> None:
    """A largest batch that does not even run eagerly does not stop the set-up."""
    fault = Fault("memory", bucket=8, when="warm-up")
    capture = capture_cuda_graphs(model_runner=faulty(fault))
    assert capture.decode_runner.buckets == (2, 4)
    fault.active = False
    serves(capture.decode_runner, decode, rows, 2, 4, 8)


def test_a_lazy_capture_that_fails_serves_the_batch_eagerly(faulty: Any, decode: Any, rows: Any) -> None:
    """
    Under on_failure="eager" the step that would have captured gives its result; it is not tried at every
    step.
    """
    fault = Fault("raise")
    runner = capture_cuda_graphs(model_runner=faulty(fault, on_failure="eager", capture="lazy")).decode_runner
    serves(runner, decode, rows, 3, 4, 8, 3)
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 3}
    assert runner.buckets == (8,)


def test_a_lazy_capture_that_fails_raises_by_default(faulty: Any, decode: Any, rows: Any) -> None:
    """Under on_failure="raise" the step raises, every other size works, and the same size can be retried."""
    fault = Fault("raise")
    runner = capture_cuda_graphs(model_runner=faulty(fault, capture="lazy")).decode_runner
    with pytest.raises(CaptureError):
        runner.execute(decode(3, x=rows(3)))
    serves(runner, decode, rows, 8, 2)
    fault.active = False
    serves(runner, decode, rows, 3, 4)
    assert runner.buckets == EIGHT


# Garbage collection


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_collection_is_off_in_a_capture_and_then_as_before(
    runtime: Any, device: torch.device, enabled: bool, fails: bool
) -> None:
    """
    Guards against pytorch/pytorch#161037, NVIDIA/TransformerEngine#2092, ROCm/ATOM#1322, #1339 and
    vllm-project/vllm#54646: no collection runs while a graph is recorded, whatever the threshold; the former
    state is restored exactly.
    """
    platform = platform_for(device)
    collected: list[bool] = []
    seen: list[bool] = []

    def watch(phase: str, info: Any) -> None:
        collected.append(platform.is_capturing())

    def forward(batch: Any) -> Any:
        capturing = platform.is_capturing()
        if capturing:
            seen.append(gc.isenabled())
        garbage: Any = [[] for _ in range(50)]
        garbage.append(garbage)
        if fails and capturing:
            raise ZeroDivisionError
        return batch.inputs["x"] * 2

    threshold, before = gc.get_threshold(), gc.isenabled()
    gc.callbacks.append(watch)
    try:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(1)
        with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
            capture_cuda_graphs(model_runner=runtime(forward))
        assert gc.isenabled() is enabled
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*threshold)
        (gc.enable if before else gc.disable)()
    assert seen
    assert not any(seen)
    assert collected
    assert not any(collected), "a finalizer may call the driver"


# Random state


def test_capturing_draws_nothing_from_the_default_generator(faulty: Any, device: torch.device) -> None:
    """A seed set before a recapture gives the same numbers after it, whether it succeeds or fails."""
    fault = Fault("raise")
    fault.active = False
    runner = capture_cuda_graphs(model_runner=faulty(fault)).decode_runner
    torch.manual_seed(5)
    wanted = torch.rand(4, device=device)
    for active in (False, True):
        fault.active = active
        torch.manual_seed(5)
        with contextlib.suppress(CaptureError):
            runner.recapture()
        assert torch.equal(torch.rand(4, device=device), wanted)


def test_capturing_draws_nothing_from_generators_of_the_runtime(runtime: Any, device: torch.device) -> None:
    """
    Guards against pytorch/pytorch#176752 and ace-step/ACE-Step-1.5#613: a private generator is as it was,
    too.
    """
    generator = torch.Generator(device).manual_seed(3)
    wanted = torch.rand(4, device=device, generator=generator)
    generator.manual_seed(3)

    def forward(batch: Any) -> Any:
        noise = torch.rand(batch.inputs["x"].shape, device=device, generator=generator)
        return batch.inputs["x"] + noise * 0

    runner = capture_cuda_graphs(model_runner=runtime(forward, generators=[generator])).decode_runner
    generator.manual_seed(3)
    runner.recapture()
    assert torch.equal(torch.rand(4, device=device, generator=generator), wanted)


# Replay


def test_a_replay_that_fails_says_where(runtime: Any, decode: Any, rows: Any) -> None:
    """A ReplayError names the bucket and is chained; the next step works."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] * 2)).decode_runner
    for _ in range(2):  # the first step of a size and those after it take different ways
        serves(runner, decode, rows, 3)
    graph = runner.backend.captured[runner.explain(decode(3, x=rows(3))).key].recording
    graph.reset()
    for _ in range(2):
        with pytest.raises(GraphplatError) as caught:
            runner.execute(decode(3, x=rows(3)))
        assert isinstance(caught.value, ReplayError)
    serves(runner, decode, rows, 8, 2)
    runner.recapture()
    serves(runner, decode, rows, 3)


# Participants


class Around:
    """A plugin whose context manager surrounds captures."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.enter: BaseException | None = None
        self.leave: BaseException | None = None
        self.swallow = False

    @hookimpl
    def capture_participants(self, platform: Any, model_runner: Any, phase: Any) -> Any:
        around = self

        class Manager(contextlib.AbstractContextManager[None]):
            def __enter__(self) -> None:
                if around.enter is not None:
                    raise around.enter

            def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
                around.seen.append(kind)
                if around.leave is not None:
                    raise around.leave
                return around.swallow

        return Manager()


@pytest.fixture
def around() -> Iterator[Around]:
    """One registered plugin for the test."""
    plugin = Around()
    registry.register_plugin(plugin, "around")
    yield plugin
    registry.unregister_plugin("around")


def test_a_participant_learns_whether_the_capture_failed(
    around: Around, faulty: Any, device: torch.device
) -> None:
    """It sees the exception of a failed capture, and none of a good one."""
    fault = Fault("raise")
    with unchanged(device), pytest.raises(CaptureError):
        capture_cuda_graphs(model_runner=faulty(fault))
    fault.active = False
    capture_cuda_graphs(model_runner=faulty(fault))
    assert around.seen == [CaptureError, None]


def test_a_participant_cannot_make_a_failure_vanish(
    around: Around, faulty: Any, device: torch.device
) -> None:
    """An __exit__ that returns True does not turn a failed capture into a good one."""
    around.swallow = True
    with unchanged(device), pytest.raises(CaptureError, match="the model's own") as caught:
        capture_cuda_graphs(model_runner=faulty(Fault("raise")))
    assert "tried to suppress" in caught.value.__notes__[0]


def test_a_participant_that_cannot_enter_is_named(
    around: Around, faulty: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """Its error is the cause of what the user sees; nothing was recorded, and a retry works."""
    fault = Fault("raise")
    fault.active = False
    runner = capture_cuda_graphs(model_runner=faulty(fault)).decode_runner
    around.enter = OSError("no allocator")
    with unchanged(device), pytest.raises(PluginError, match="no allocator") as caught:
        runner.recapture()
    assert isinstance(caught.value.__cause__, OSError)
    serves(runner, decode, rows, 3)
    around.enter = None
    runner.recapture()
    serves(runner, decode, rows, 3)
    assert runner.stats.last.is_graph


def test_a_participant_that_cannot_leave_never_replaces_the_first_error(
    around: Around, faulty: Any, device: torch.device
) -> None:
    """Its failure is attached to the capture's error; alone, it is the error itself."""
    around.leave = OSError("pool busy")
    fault = Fault("raise")
    with unchanged(device), pytest.raises(CaptureError, match="the model's own") as caught:
        capture_cuda_graphs(model_runner=faulty(fault))
    assert "pool busy" in caught.value.__notes__[0]
    fault.active = False
    with unchanged(device), pytest.raises(PluginError, match="pool busy") as alone:
        capture_cuda_graphs(model_runner=faulty(fault))
    assert isinstance(alone.value.__cause__, OSError)


def test_out_of_memory_is_known_through_its_chain() -> None:
    """Also behind other errors, and in a chain that bites its own tail."""
    error = RuntimeError("outer")
    error.__cause__ = torch.OutOfMemoryError("inner")
    assert is_out_of_memory(error)
    ring = RuntimeError("ring")
    ring.__cause__ = ring
    assert not is_out_of_memory(ring)


@pytest.mark.parametrize(("kind", "expected"), [(ValueError, False), (CaptureError, True)])
def test_a_fault_met_while_memory_was_short_is_a_fault(kind: type[Exception], expected: bool) -> None:
    """A model's own error while it handles a shortage is no shortage; one of this library's is."""
    error = kind("met meanwhile")
    error.__context__ = MemoryError()
    assert is_out_of_memory(error) is expected
