"""What a capture permits, what it refuses, and what it leaves behind."""

import gc
import threading

import pytest
import torch

from graphplat.testing.simulated import CaptureViolationError, SimulatedDeviceError, ledger

MODES = [torch.no_grad, torch.inference_mode]


@pytest.fixture
def x(sim):
    return torch.arange(4.0, device=sim.name)


class Capturing:
    """A capture by hand, which ends also after an error and then restores the stream."""

    def __init__(self, dev, graph, **settings):
        self.dev, self.graph, self.settings = dev, graph, settings
        self.stream = dev.Stream()

    def __enter__(self):
        self.context = self.dev.stream(self.stream)
        self.context.__enter__()
        self.graph.capture_begin(**self.settings)
        return self

    def __exit__(self, *error):
        try:
            self.graph.capture_end()
        except SimulatedDeviceError:
            if error[0] is None:
                raise
        finally:
            self.context.__exit__(*error)


@pytest.mark.parametrize("mode", MODES)
def test_replay_equals_eager_on_fresh_inputs(dev, graph_type, x, mode):
    """
    A replay computes from what the inputs hold now, without running Python again.
    """
    calls = []

    def forward():
        calls.append(1)
        y = torch.nn.functional.softmax(x.view(2, 2) @ x.view(2, 2).t(), -1)
        y[0].mul_(3)
        return torch.cat([y, y.new_zeros(1, 2)]).cumsum(0)

    with mode():
        graph = graph_type()
        with dev.graph(graph):
            y = forward()
        for seed in range(3):
            x.copy_(torch.randn(4, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            calls.clear()
            assert not calls
            assert torch.equal(y.cpu(), forward().cpu())


def test_nothing_executes_during_capture(dev, graph_type, x):
    """
    Until the first replay results are poison and inputs are untouched.
    """
    graph = graph_type()
    with dev.graph(graph):
        y = x * 2
        n = torch.arange(3, device=x.device)
        x.add_(1)
    assert y.isnan().all().item()
    assert (n > 2**60).all().item()
    assert x.tolist() == [0, 1, 2, 3]
    graph.replay()
    assert (y.tolist(), n.tolist(), x.tolist()) == ([0, 2, 4, 6], [0, 1, 2], [1, 2, 3, 4])


def test_executing_captures_can_be_had(sim, dev, graph_type, x):
    """
    With ``record_only`` off a capture executes as it records.
    """
    sim.set_record_only(False)
    try:
        graph = graph_type()
        with dev.graph(graph):
            y = (x * 2).add_(1)
        assert y.tolist() == [1, 3, 5, 7]
    finally:
        sim.set_record_only(True)
    x.zero_()
    graph.replay()
    assert y.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x[0]),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.repeat_interleave(torch.ones(4, dtype=torch.int64, device=x.device)),
        lambda x: f"{x[0]:.1f}",
        lambda x: torch.empty(4).copy_(x),
    ],
    ids=lambda read: "read",
)
def test_host_reads_are_refused(dev, graph_type, x, mode, read):
    """
    Reading a value on the host during a capture raises, spoils the capture, and the next one is fine.
    """
    graph = graph_type()
    with mode(), pytest.raises(CaptureViolationError, match="not permitted when stream is capturing"):
        with Capturing(dev, graph):
            read(x)
    with Capturing(dev, graph):
        y = x + 1
    graph.replay()
    assert y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "upload",
    [
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.ones(4).to(x.device),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
    ],
)
def test_uploads_from_pageable_memory_are_refused(dev, graph_type, x, upload):
    """
    A capture cannot record a copy out of pageable host memory.
    """
    with pytest.raises(CaptureViolationError), Capturing(dev, graph_type()):
        upload(x)


def test_uploads_from_pinned_memory_are_read_again(dev, graph_type, x):
    """
    A recorded upload reads the pinned buffer at each replay, and reads garbage once the buffer is gone.
    """
    staging = torch.ones(4).pin_memory()
    assert staging.is_pinned()
    graph = graph_type()
    with Capturing(dev, graph):
        x.copy_(staging, non_blocking=True)
        y = x * 2
    staging.fill_(5)
    graph.replay()
    assert y.tolist() == [10, 10, 10, 10]
    del staging
    graph.replay()
    assert y.isnan().all().item()


def test_synchronization_is_refused(dev, graph_type, x):
    """
    Waiting for the device, the stream, or an event of the capture is illegal during a capture.
    """

    def event(capture):
        mark = dev.Event()
        mark.record()
        mark.synchronize()

    for wait in (
        lambda c: dev.synchronize(),
        lambda c: c.stream.synchronize(),
        lambda c: c.stream.query(),
        event,
    ):
        with pytest.raises(CaptureViolationError):
            with Capturing(dev, graph_type()) as capture:
                wait(capture)


def test_a_spoilt_capture_stays_set_until_ended(dev, graph_type, x):
    """
    After an error the stream still captures and accepts no more work; ending it raises and clears it.
    """
    graph, stream = graph_type(), dev.Stream()
    with dev.stream(stream):
        graph.capture_begin()
        with pytest.raises(CaptureViolationError):
            x.sum().item()
        assert dev.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            x + 1
        assert ledger().captures == 1
        with pytest.raises(RuntimeError, match="host read"):
            graph.capture_end()
        assert not dev.is_current_stream_capturing()
        assert x.sum().item() == 6
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()
    with pytest.raises(RuntimeError, match="pool"):
        graph.pool()


def test_the_vendor_context_does_not_clean_up(dev, graph_type, x):
    """
    As in the real modules, a capture that fails inside ``graph(...)`` leaves its stream current.
    """
    before = dev.current_stream()
    with pytest.raises(RuntimeError, match="previous error"):
        with dev.graph(graph_type()):
            x.sum().item()
    assert dev.current_stream() != before
    dev.set_stream(before)


def test_begin_is_checked(sim, dev, graph_type, x):
    """
    The default stream, a graph that owns one already, an unknown mode, a malformed pool and a second
    capture are refused.
    """
    graph = graph_type()
    if sim.profile.refuses_default_stream:
        with pytest.raises(RuntimeError, match="non-default stream"):
            graph.capture_begin()
    with Capturing(dev, graph):
        x + 1
    with dev.stream(dev.Stream()):
        with pytest.raises(RuntimeError, match="already owns"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="pool handle"):
            graph_type().capture_begin(pool=(1, 1))
        if "capture_error_mode" in sim.profile.begin_keywords:
            with pytest.raises(RuntimeError, match="Unknown capture error mode"):
                graph_type().capture_begin(capture_error_mode="careful")
    with Capturing(dev, graph_type()):
        x + 1
        with dev.stream(dev.Stream()), pytest.raises(RuntimeError, match="one at a time"):
            graph_type().capture_begin()


def test_end_is_checked(dev, graph_type, x):
    """
    A capture ends on its own stream, once.
    """
    graph = graph_type()
    with pytest.raises(RuntimeError, match="without capture_begin"):
        graph.capture_end()
    with Capturing(dev, graph):
        x + 1
        with dev.stream(dev.Stream()), pytest.raises(RuntimeError, match="same stream"):
            graph.capture_end()
        with pytest.raises(RuntimeError, match="during capture"):
            graph.reset()


def test_an_empty_graph_is_warned_about(dev, graph_type):
    """
    A capture without an operator warns, as torch does.
    """
    with pytest.warns(UserWarning, match="graph is empty"), dev.graph(graph_type()):
        pass


def test_an_unjoined_side_stream_fails_the_capture(dev, graph_type, x):
    """
    Work forked to a side stream belongs to the capture and has to be joined before its end.
    """
    side = dev.Stream()

    def fork():
        side.wait_stream(dev.current_stream())
        with dev.stream(side):
            assert dev.is_current_stream_capturing()
            x + 1

    with pytest.raises(RuntimeError, match="unjoined"), Capturing(dev, graph_type()):
        fork()
    assert not ledger().captures
    graph = graph_type()
    with Capturing(dev, graph) as capture:
        side.wait_stream(capture.stream)
        with dev.stream(side):
            y = x + 1
        capture.stream.wait_stream(side)
        z = y * 2
    graph.replay()
    assert z.tolist() == [2, 4, 6, 8]


def test_a_side_stream_that_never_forked_is_not_captured(dev, graph_type, x):
    """
    Work on a stream that did not wait for the capture runs at once and is not replayed.
    """
    side = dev.Stream()
    graph = graph_type()
    with Capturing(dev, graph):
        y = x + 1
        with dev.stream(side):
            assert not dev.is_current_stream_capturing()
            z = y + 1
    assert z.isnan().all().item()
    graph.replay()
    assert z.isnan().all().item()


def test_waiting_for_work_from_before_is_refused(dev, graph_type, x):
    """
    A capture cannot depend on another stream's uncaptured work.
    """
    mark = dev.Event()
    mark.record()
    with pytest.raises(RuntimeError, match="uncaptured work"), Capturing(dev, graph_type()):
        mark.wait()


def test_a_finalizer_in_the_window_spoils_the_capture(sim, dev, graph_type, x):
    """
    A graph that the garbage collector destroys during a capture makes a driver call that is illegal then.
    """
    old = graph_type()
    with Capturing(dev, old):
        x + 1
    old.myself = old
    del old
    if sim.profile.default_error_mode == "relaxed":
        with Capturing(dev, graph_type()):
            gc.collect()
            x + 1
        return
    graph = graph_type()
    with pytest.raises(RuntimeError, match="finalizer"), Capturing(dev, graph):
        gc.collect()


def in_thread(function):
    """Run *function* in a thread; what it raised, or ``None``."""
    caught = []

    def run():
        try:
            function()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


@pytest.mark.parametrize("call", ["synchronize", "pin_memory", "empty_cache", "malloc", "event query"])
def test_another_threads_call_and_the_error_mode(sim, dev, graph_type, x, call):
    """
    In global mode an unsafe call of another thread fails there and spoils the capture; in thread-local mode
    it is harmless.
    """
    if "capture_error_mode" not in sim.profile.begin_keywords:
        pytest.skip("this vendor has no capture error mode")
    mark = dev.Event()
    calls = {
        "synchronize": dev.synchronize,
        "pin_memory": lambda: torch.ones(3).pin_memory(),
        "empty_cache": dev.empty_cache,
        "malloc": lambda: torch.empty(1 << 20, device=sim.name),
        "event query": mark.query,
    }
    graph = graph_type()
    with pytest.raises(RuntimeError, match="previous error"):
        with Capturing(dev, graph, capture_error_mode="global"):
            assert isinstance(in_thread(calls[call]), CaptureViolationError)
    with Capturing(dev, graph, capture_error_mode="thread_local"):
        y = x + 1
        assert in_thread(calls[call]) is None
    graph.replay()
    assert y.tolist() == [1, 2, 3, 4]


def test_another_threads_operators_are_not_captured(sim, dev, graph_type, x):
    """
    Streams are per thread: what another thread computes meanwhile is right and is no part of the graph.
    """
    graph, seen = graph_type(), []
    with Capturing(dev, graph):
        y = x + 1
        assert in_thread(lambda: seen.append((x * 10).tolist())) is None
    graph.replay()
    assert seen == [[0, 10, 20, 30]]
    assert y.tolist() == [1, 2, 3, 4]


def test_a_busy_thread_beside_many_captures(sim, dev, graph_type):
    """
    In thread-local mode another thread may allocate, pin, copy and synchronize during captures: its numbers
    and the graphs' are right.
    """
    if "capture_error_mode" not in sim.profile.begin_keywords:
        pytest.skip("this vendor has no capture error mode")
    stop, rounds = threading.Event(), []

    def work():
        with dev.stream(dev.Stream()):
            while not stop.is_set():
                y = torch.full((100,), 2.0, device=sim.name)
                staging = torch.ones(100).pin_memory()
                y.add_(staging.to(sim.name, non_blocking=True))
                rounds.append(y.sum().item())
                dev.empty_cache()
                dev.synchronize()

    x = torch.ones(64, device=sim.name)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for step in range(20):
            graph = graph_type()
            with Capturing(dev, graph, capture_error_mode="thread_local"):
                y = (x + 1) * 2
            x.fill_(step)
            graph.replay()
            assert y.tolist() == [2.0 * step + 2] * 64
    finally:
        stop.set()
        thread.join()
    assert set(rounds) <= {300.0}


def test_captured_random_numbers_are_drawn_again(sim, dev, graph_type):
    """
    Two replays draw different numbers, reseeding gives the same again, and a foreign generator has to be
    registered where the vendor can register one.
    """
    graph = graph_type()
    with Capturing(dev, graph):
        noise = torch.randn(4, device=sim.name)
    draws = []
    for _ in range(2):
        dev.manual_seed(3)
        for _ in range(2):
            graph.replay()
            draws.append(noise.tolist())
    assert draws[0] != draws[1]
    assert draws[:2] == draws[2:]
    own = torch.Generator().manual_seed(1)
    with pytest.raises(RuntimeError, match="Offset increment"), Capturing(dev, graph_type()):
        torch.empty(4, device=sim.name).normal_(generator=own)
    if "register_generator_state" in sim.profile.graph_methods:
        graph = graph_type()
        graph.register_generator_state(own)
        with Capturing(dev, graph):
            noise = torch.empty(4, device=sim.name).normal_(generator=own)
        graph.replay()
        assert not noise.isnan().any().item()


def test_host_scalars_are_frozen(dev, graph_type, x):
    """
    A 0-dimensional CPU tensor is read when it is captured.
    """
    scale = torch.tensor(2.0)
    graph = graph_type()
    with Capturing(dev, graph):
        y = x * scale
    scale.fill_(100)
    graph.replay()
    assert y.tolist() == [0, 2, 4, 6]


def test_a_graph_replays_on_its_own_device(sim, dev, graph_type, deferred):
    """
    A graph of device 1 replays there, on that device's current stream, also when another device is current.
    """
    graph = graph_type()
    with dev.device(1):
        x = torch.ones(3, device=sim.name)
        with dev.graph(graph, stream=dev.Stream()):
            y = x + 1
    dev.synchronize(1)
    assert y.device.index == 1
    graph.replay()
    dev.synchronize(0)
    assert ledger().queued > 0
    assert y.tolist() == [2, 2, 2]


def test_replay_goes_to_the_current_stream(dev, graph_type, x, deferred):
    """
    A replay is queued on the stream that is current then, which may be the default one.
    """
    graph = graph_type()
    dev.synchronize()
    with Capturing(dev, graph):
        y = x + 1
    other = dev.Stream()
    with dev.stream(other):
        graph.replay()
    dev.default_stream().synchronize()
    assert y.isnan().all().item()
    other.synchronize()
    assert y.tolist() == [1, 2, 3, 4]
