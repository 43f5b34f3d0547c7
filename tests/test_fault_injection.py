"""Every step of capture and replay fails once in every way: what the caller sees, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphplat import (
    CaptureError,
    InputSpec,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    guard,
    hookimpl,
    platform_for,
    registry,
)
from graphplat.errors import PluginError, ReplayError
from graphplat.recorded_trace import Recorder

SIZES = (2, 4, 8)
ERRORS = {
    "error": ZeroDivisionError("injected"),
    "memory": torch.OutOfMemoryError("injected"),
    "interrupt": KeyboardInterrupt("injected"),
}
CAPTURE = ("prepare", "warm-up", "post-warm-up", "begin", "forward", "end", "instantiate")


class Faults:
    """Raises *error* once at *point* while the bucket of four is captured or, at replay, in the next step."""

    def __init__(self) -> None:
        self.point: str | None = None
        self.error: BaseException = RuntimeError()
        self.bucket = 0
        self.met = 0

    def arm(self, point: str, error: BaseException) -> None:
        self.point, self.error, self.met = point, error, 0

    def disarm(self) -> None:
        self.point = None

    def hit(self, point: str, *, anywhere: bool = False) -> None:
        if point == self.point and not self.met and (anywhere or self.bucket == 4):
            self.met += 1
            raise self.error


@pytest.fixture
def faults(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Faults in the platform, the recorder and a plugin; the runtime adds its own."""
    made, platform = Faults(), platform_for(device)

    def patched(owner: Any, name: str, point: str) -> None:
        whole = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            made.hit(point)
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)

    patched(platform, "capture_begin", "begin")
    patched(platform, "capture_end", "end")
    patched(Recorder, "finish", "instantiate")

    class Plugin:
        @hookimpl
        def capture_participants(self, platform: Any, model_runner: Any, phase: Any) -> Any:
            @contextlib.contextmanager
            def around() -> Iterator[None]:
                made.hit("participant entering", anywhere=True)
                yield
                made.hit("participant leaving", anywhere=True)

            return around()

    registry.register_plugin(Plugin(), "faults")
    yield made
    registry.unregister_plugin("faults")


@pytest.fixture
def faulty(runtime: Any, device: torch.device, faults: Faults) -> Callable[..., Any]:
    """Capture a runtime that draws random numbers, has two inputs and meets the faults."""
    platform = platform_for(device)

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        y = x * 2 + torch.rand_like(x) * 0
        if x.shape[0] == 4:
            faults.hit("forward" if platform.is_capturing() else "warm-up")
        return y + batch.inputs["bias"]

    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=torch.float32),
        bias=TensorSpec(("requests", 3), dtype=torch.float32),
    )

    def make(**settings: Any) -> Any:
        toy = runtime(forward, spec, decode=PhaseConfig(buckets=SIZES, warmup="each", **settings))

        def prepare(batch: Any) -> None:
            faults.bucket = batch.num_requests
            faults.hit("prepare")

        toy.prepare_capture_batch = prepare
        toy.post_warmup = lambda: faults.hit("post-warm-up")
        return capture_cuda_graphs(model_runner=toy).decode_runner

    return make


@contextlib.contextmanager
def unchanged(runner: Any, device: torch.device) -> Iterator[None]:
    """Streams, captures, modes, random and collection state, hooks and locks are afterwards as before."""
    platform = platform_for(device)

    def state() -> Any:
        random = platform.rng_state(device)
        return (
            gc.isenabled(),
            platform.current_stream(device),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _get_current_dispatch_mode_stack(),
            None if random is None else random.tolist(),
            runner.context.forward_hooks.registered,
            platform.is_capturing(),
        )

    before = state()
    yield
    assert state() == before
    assert free(runner.context.arena.lock)
    assert free(guard.CAPTURE_LOCK)
    held = sum(len(graphs) for graphs in runner.device_graphs().values())
    assert runner.context.live_graphs == held, "a graph that no bucket owns is still alive"


def free(lock: Any) -> bool:
    """Whether another thread could take *lock*."""
    found = []

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def serves(runner: Any, decode: Any, rows: Any, *sizes: int) -> list[int | None]:
    """Every size gives the eager result; the buckets that served, ``None`` where none did."""
    served = []
    for size in sizes:
        x, bias = rows(size), rows(size)
        assert torch.equal(runner.execute(decode(size, x=x, bias=bias)), x * 2 + bias)
        key = runner.stats.last.key
        served.append(key.size if key else None)
    return served


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("point", CAPTURE)
def test_a_capture_that_fails_anywhere_costs_one_bucket(
    faulty: Any, faults: Faults, decode: Any, rows: Any, device: torch.device, point: str, kind: str
) -> None:
    """
    Guards against pytorch/pytorch#190308, #190348 and #108896, NVIDIA/warp#1957: under on_failure="eager" an
    error costs the bucket, an interrupt passes and costs that and later ones; the device is as before, the
    others replay, and a new capture works.
    """
    if point == "instantiate" and device.type != "cpu":
        pytest.skip("part of the end of a capture here")
    runner = faulty(on_failure="eager")
    faults.arm(point, ERRORS[kind])
    caught: Any = {
        "error": contextlib.nullcontext(),
        "memory": pytest.warns(match="too little memory for 1 of 3"),
        "interrupt": pytest.raises(KeyboardInterrupt, match="injected"),
    }[kind]
    with unchanged(runner, device), caught:
        runner.recapture()
    assert faults.met
    faults.disarm()
    reason = Reason.OUT_OF_MEMORY if kind == "memory" else Reason.CAPTURE_FAILED
    small = None if kind == "interrupt" else 2
    beyond = 8 if kind == "memory" else None
    assert serves(runner, decode, rows, 7, 4, 2, 8, 3) == [8, beyond, small, 8, beyond]
    if kind != "interrupt":
        assert [(skip.reason, skip.key.size) for skip in runner.context.skipped if skip.key] == [(reason, 4)]
        assert "injected" in next(skip.detail for skip in runner.context.skipped if skip.key)
    with unchanged(runner, device):
        runner.recapture()
    assert serves(runner, decode, rows, 4, 2, 8, 3) == [4, 2, 8, 4]


@pytest.mark.parametrize("point", CAPTURE)
def test_the_first_error_is_the_one_seen(
    faulty: Any, faults: Faults, decode: Any, rows: Any, device: torch.device, point: str
) -> None:
    """Under on_failure="raise" it is chained to an error that names the place; what was captured stays."""
    if point == "instantiate" and device.type != "cpu":
        pytest.skip("part of the end of a capture here")
    runner = faulty()
    faults.arm(point, ERRORS["error"])
    with unchanged(runner, device), pytest.raises(CaptureError, match="injected") as caught:
        runner.recapture()
    faults.disarm()
    assert ERRORS["error"] in chain(caught.value)
    assert (caught.value.phase, caught.value.bucket) == ("decode", 4)
    assert serves(runner, decode, rows, 8, 4, 2) == [8, None, None]
    runner.recapture()
    assert serves(runner, decode, rows, 4, 2, 8) == [4, 2, 8]


@pytest.mark.parametrize("point", ["begin", "forward", "end"])
@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_a_clean_up_that_fails_too_is_attached(
    faulty: Any,
    faults: Faults,
    decode: Any,
    rows: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    kind: str,
) -> None:
    """The first error stays the one seen, with a note about the second; another capture works."""
    runner, platform = faulty(), platform_for(device)
    whole = platform.abort_capture

    def failing(*args: Any, **kwargs: Any) -> bool:
        whole(*args, **kwargs)
        raise OSError("clean-up failed")

    faults.arm(point, ERRORS[kind])
    with monkeypatch.context() as patch:
        patch.setattr(platform, "abort_capture", failing)
        expected = KeyboardInterrupt if kind == "interrupt" else CaptureError
        with unchanged(runner, device), pytest.raises(expected) as caught:
            runner.recapture()
    faults.disarm()
    notes = [note for error in chain(caught.value) for note in getattr(error, "__notes__", [])]
    assert any("clean-up failed" in note for note in notes)
    runner.recapture()
    assert serves(runner, decode, rows, 4, 2, 8) == [4, 2, 8]


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("point", ["participant entering", "participant leaving"])
def test_a_participant_that_fails_is_named(
    faulty: Any, faults: Faults, decode: Any, rows: Any, device: torch.device, point: str, kind: str
) -> None:
    """
    Its error is the cause of what the caller sees, an interrupt passes. What was recorded before it left
    stays; without any, batches run eagerly. The next capture works.
    """
    runner = faulty()
    faults.arm(point, ERRORS[kind])
    expected = KeyboardInterrupt if kind == "interrupt" else PluginError
    with unchanged(runner, device), pytest.raises(expected, match="injected") as caught:
        runner.recapture()
    faults.disarm()
    assert ERRORS[kind] in chain(caught.value)
    left = [4, 2, 8] if point == "participant leaving" else [None] * 3
    assert serves(runner, decode, rows, 4, 2, 8) == left
    with unchanged(runner, device):
        runner.recapture()
    assert serves(runner, decode, rows, 4, 2, 8) == [4, 2, 8]


def breaking_copy(monkeypatch: Any, faults: Faults) -> None:
    """Let both ways of copying a batch in stop half-way."""
    from graphplat import buffers
    from graphplat.runners.steps import StepPlan

    def half(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        targets[0].copy_(sources[0])
        faults.met += 1
        raise faults.error

    def planned(self: Any, targets: Any, units: Any, sources: Any) -> None:
        half(targets, sources)

    monkeypatch.setattr(buffers, "_copy_all", half)
    monkeypatch.setattr(StepPlan, "_copy", planned)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("known", [False, True], ids=["first step", "later step"])
def test_a_copy_that_fails_leaves_the_next_step_right(
    faulty: Any,
    faults: Faults,
    decode: Any,
    rows: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    known: bool,
) -> None:
    """A batch that came in by half is no part of any later result, padded rows included; the error passes."""
    runner = faulty()
    if known:
        serves(runner, decode, rows, 3, 2)
    faults.error = ERRORS[kind]
    with monkeypatch.context() as patch:
        breaking_copy(patch, faults)
        with unchanged(runner, device), pytest.raises(type(ERRORS[kind]), match="injected"):
            runner.execute(decode(3, x=rows(3), bias=rows(3)))
    assert faults.met
    assert serves(runner, decode, rows, 1, 3, 2, 8, 4) == [2, 4, 2, 8, 4]


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("known", [False, True], ids=["first step", "later step"])
def test_a_replay_that_fails_leaves_the_next_step_right(
    faulty: Any,
    faults: Faults,
    decode: Any,
    rows: Any,
    device: torch.device,
    kind: str,
    known: bool,
) -> None:
    """A ReplayError is chained to the launch's own error, an interrupt passes; the others replay."""
    if device.type != "cpu":
        pytest.skip("the launch of a device graph cannot be broken from outside")
    runner = faulty()
    if known:
        serves(runner, decode, rows, 3, 2)
    (graph,) = next(graphs for key, graphs in runner.device_graphs().items() if key.size == 4)

    def failing(*_: Any) -> None:
        raise ERRORS[kind]

    calls = graph._recording.calls
    kept, calls[1] = calls[1], failing
    expected = KeyboardInterrupt if kind == "interrupt" else ReplayError
    with unchanged(runner, device), pytest.raises(expected, match="injected") as caught:
        runner.execute(decode(3, x=rows(3), bias=rows(3)))
    assert ERRORS[kind] in chain(caught.value)
    assert serves(runner, decode, rows, 2, 7) == [2, 8]
    calls[1] = kept
    assert serves(runner, decode, rows, 3, 4, 1) == [4, 4, 2]
    runner.recapture()
    assert serves(runner, decode, rows, 3, 4, 1) == [4, 4, 2]
