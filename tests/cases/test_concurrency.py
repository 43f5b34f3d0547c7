"""Concurrency: threads and streams neither spoil a capture nor mix their batches."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch

from graphplat import (
    ForwardBatch,
    HostSpec,
    InputSpec,
    Phase,
    PhaseConfig,
    ReplayError,
    TensorSpec,
    capture_cuda_graphs,
)
from graphplat.guard import CAPTURE_LOCK
from graphplat_cpu import CpuPlatform

PATIENCE = 60


def in_thread(body):
    """Start *body*; returns a function that waits for it and raises what it raised."""
    failed = []

    def run():
        try:
            body()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(PATIENCE)
        assert not thread.is_alive()
        if failed:
            raise failed[0]

    return join


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_another_threads_work_is_unharmed_and_harmless(rig, rows, capture):
    """
    Guards against vllm-project/vllm#48053, LibreYOLO/libreyolo#681, roboflow/inference#2866,
    pytorch/pytorch#104555 and InternLM/lmdeploy#2544: a thread that allocates, copies, reads and
    synchronizes its stream all the while survives captures at start-up and on first use, and they
    survive it; both have right numbers.
    """
    if not rig.platform.capabilities.thread_local_capture:
        pytest.skip("captures of this platform bar other threads from the device, and it says so")
    stop, rounds = threading.Event(), []

    def busy():
        while not stop.is_set():
            host = torch.arange(64.0)
            there = host.to(rig.device)
            assert float((there * 2).sum()) == 64 * 63
            rig.platform.synchronize_stream(rig.platform.current_stream(there.device))
            rounds.append(1)

    join = in_thread(busy)
    try:
        while not rounds:
            time.sleep(0.001)
        runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2), capture=capture)
        for n in (8, 3, 2, 1):
            x = rows(n)
            assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2)
        assert runner.stats.replayed == 4
    finally:
        stop.set()
        join()


def test_captures_of_one_process_never_overlap(runtime, device, rows, decode):
    """
    Guards against vllm-project/vllm#48053: two threads that set up their own runtimes take turns, at start-up
    and on first use, and both work.
    """
    inside, met = [], []

    def make(capture):
        def forward(batch):
            x = batch.inputs["x"] * 2
            if platform_capturing():
                inside.append(1)
                met.append(len(inside))
                time.sleep(0.005)
                inside.pop()
            return x

        return runtime(forward, decode=PhaseConfig(buckets=(1, 2, 4), capture=capture))

    from graphplat import platform_for

    platform_capturing = platform_for(device).is_capturing
    done = []

    def work(capture):
        runner = capture_cuda_graphs(model_runner=make(capture)).decode_runner
        for n in (1, 2, 3):
            x = torch.full((n, 3), float(n), device=device)
            assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
        done.append(runner)

    joins = [in_thread(lambda capture=capture: work(capture)) for capture in ("startup", "lazy")]
    for join in joins:
        join()
    assert set(met) == {1}
    for runner in done:
        runner.release()
    done.clear()


def test_the_capture_lock_is_held_while_recording(rig):
    """
    Guards against roboflow/inference#2866: whoever else captures in this process, and heeds the lock, waits.
    """
    taken = []

    def forward(batch):
        if rig.platform.is_capturing():
            probe = threading.Thread(target=lambda: taken.append(CAPTURE_LOCK.acquire(blocking=False)))
            probe.start()
            probe.join()
        return rig.cut(batch.inputs["x"] * 2)

    rig.start(forward, buckets=(2, 4))
    assert taken
    assert set(taken) == {False}


def test_every_capture_of_a_device_is_thread_local(sim, rig, rows):
    """
    Guards against vllm-project/vllm#48053: where the device has modes, every path begins its captures in the
    thread-local one, captures on first use among them; one stream that is not the default serves all.
    """
    sim.runtime.journal.clear()  # it forgets its oldest entries, so a position in it means nothing
    for capture in ("startup", "lazy"):
        runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2), capture=capture)
        runner.execute(rig.batch(3, x=rows(3)))
    begins = [details for call, details in sim.journal if call == "capture_begin"]
    local = rig.platform.capabilities.thread_local_capture
    assert {begin["mode"] for begin in begins} == {"thread_local" if local else "relaxed"}
    assert 0 not in {begin["stream"] for begin in begins}


def test_a_workspace_of_the_warm_up_stream_is_found(rig, rows):
    """
    Guards against vllm-project/vllm#53818 and #52538: a workspace that is made for a stream in the warm-up is
    found in the capture, which uses the same stream; afterwards the caller's is current again.
    """
    platform, device = rig.platform, torch.zeros(1, device=rig.device).device
    spaces = {}

    def forward(batch):
        x = batch.inputs["x"]
        stream = str(platform.current_stream(device))
        if platform.is_capturing():
            return rig.cut(x * spaces[stream])
        space = spaces.setdefault(stream, torch.full((3,), 2.0, device=device))
        return rig.cut(x * space)

    before = platform.current_stream(device)
    runner = rig.start(forward)
    assert runner.buckets == (1, 2, 4, 8)
    assert platform.current_stream(device) == before
    x = rows(3)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2)
    assert platform.current_stream(device) == before


@pytest.mark.parametrize("drained", ["the capture stream", "the caller's"])
def test_capture_follows_and_precedes_the_callers_work(sim, dev_stream, rig, drained):
    """
    Guards against vllm-project/vllm#53818: the capture stream waits for what the caller's stream holds, and
    the caller's stream waits for it, so that on a device that queues all work either one can be waited for.
    """
    platform, device = rig.platform, torch.zeros(1, device=rig.device).device
    scale = torch.ones(3, device=device)
    made = {}

    def forward(batch):
        stream = str(platform.current_stream(device))
        if not platform.is_capturing() and stream not in made:
            made[stream] = scale * 1
        return rig.cut(batch.inputs["x"] * 2)

    with dev_stream:
        caller = platform.current_stream(device)
        scale.fill_(3.0)
        runner = rig.start(forward, buckets=(4,), warmup="each")
        waited = caller if drained == "the caller's" else runner.context.stream
        waited.synchronize()
    warm = made[str(runner.context.stream)]
    assert str(runner.context.stream) != str(caller)
    assert torch.equal(warm.cpu(), torch.full((3,), 3.0))  # read on a third stream, which waits for neither


@pytest.fixture
def dev_stream(sim, device):
    """A stream of the device's own as current, and work that queues until it is waited for."""
    module = getattr(torch, sim.name)
    sim.set_deferred(True)
    yield module.stream(module.Stream(device=device))
    sim.set_deferred(False)


class Updating(CpuPlatform):
    """The cpu as a device that can rewrite host values, slowly, and that checks the order."""

    name = "updating"
    capabilities = msgspec.structs.replace(CpuPlatform.capabilities, update_after_capture="before_replay")
    fails = False

    def __init__(self):
        self._ready = set()
        self._values = []

    def is_out_of_tree(self):
        """A vendor's own."""
        return True

    def update_graph(self, graph, values):
        """Take a while, then be ready."""
        if self.fails:
            raise OSError("the driver refused")
        time.sleep(0.002)
        self._values.append(dict(values))
        self._ready.add(id(graph))

    def replay(self, graph):
        """Refuse to run without a fresh update."""
        if id(graph) not in self._ready:
            raise RuntimeError("replayed before its update was done")
        self._ready.discard(id(graph))
        graph.replay()


def test_a_host_update_is_done_before_its_replay(vendor, runtime, rows, decode, monkeypatch):
    """
    Guards against sgl-project/sglang#16498: host values are rewritten, padded, before the replay that uses
    them, however long that takes; an update that fails reaches the caller, nothing is replayed with old
    values, and the next step is right.
    """
    platform = vendor(Updating)
    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=torch.float32), lengths=HostSpec(update=True, fill=1)
    )
    toy = runtime(lambda batch: batch.inputs["x"] * 2, spec)
    toy.device = torch.device("cpu")
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "updating")
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n in (3, 4, 1):
        x = rows(n).cpu()
        assert torch.equal(runner.execute(decode(n, x=x, lengths=[7] * n)), x * 2)
    assert platform._values == [
        {"lengths": [7, 7, 7, 1]},
        {"lengths": [7, 7, 7, 7]},
        {"lengths": [7]},
    ]
    platform.fails = True
    with pytest.raises(ReplayError, match=r"could not be updated.*driver refused") as caught:
        runner.execute(decode(3, x=x.expand(3, 3), lengths=[7] * 3))
    assert isinstance(caught.value.__cause__, OSError)
    platform.fails = False
    assert torch.equal(runner.execute(decode(1, x=x, lengths=[7])), x * 2)


def test_two_threads_in_one_runner_never_mix(rig):
    """
    Guards against sgl-project/sglang-omni#1369 and sgl-project/sglang#26380: threads with streams of their
    own alternate on one runner; each gets its own values, copied out late, a hundred times each.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1)
    platform, device = rig.platform, torch.zeros(1, device=rig.device).device

    def work(base):
        stream = platform.new_stream(device)
        kept = []
        with platform.use_stream(stream):
            for step in range(100):
                n = 1 + (step + base) % 8
                value = float(base * 1000 + step)
                x = torch.full((n, 3), value, device=device)
                kept.append((value, runner.execute(rig.batch(n, x=x))))
            for value, found in kept:
                assert torch.all(found == value * 2 + 1)

    for join in [in_thread(lambda base=base: work(base)) for base in (1, 2)]:
        join()
    assert runner.stats.replayed == 200


def test_two_threads_in_one_eager_runner_never_mix(runtime, device, decode):
    """
    Guards against sgl-project/sglang-omni#1369: steps take turns where there are no graphs, too, so that a
    forward which keeps memory of its own reads back what it wrote, whichever other thread wants to step.
    """
    kept = torch.zeros(4, 3, device=device)
    met = [threading.Event(), threading.Event()]

    def forward(batch):
        x = batch.inputs["x"]
        kept[: x.shape[0]].copy_(x)
        me = int(x[0, 0])
        met[me].set()
        met[1 - me].wait(0.2)  # the other thread writes now, if anything lets it in
        return kept[: x.shape[0]] * 2

    runner = capture_cuda_graphs(
        model_runner=runtime(forward, decode=PhaseConfig(backend="disabled"))
    ).decode_runner
    found = {}

    def work(me):
        x = torch.full((3, 3), float(me), device=device)
        found[me] = runner.execute(decode(3, x=x))

    for join in [in_thread(lambda me=me: work(me)) for me in (0, 1)]:
        join()
    assert torch.all(found[0] == 0)
    assert torch.all(found[1] == 2)
    assert runner.stats.sizes == {3: 2}


def test_an_eager_step_beside_a_capture_runs_with_its_forward_hooks(runtime, device, decode):
    """
    Guards against vllm-project/vllm#48053: hooks are off while a graph is recorded on first use. An eager
    step of another phase in another thread waits for the end of that, and its hooks are called.
    """
    model = torch.nn.Linear(3, 3).to(device)
    called, inside, stepped = [], threading.Event(), threading.Event()
    inside.set()

    def forward(batch):
        if batch.phase is Phase.DECODE and not inside.is_set():
            inside.set()
            stepped.wait(0.2)  # the other thread steps now, if anything lets it in
        return model(batch.inputs["x"])

    def hook(*_):
        called.append(threading.get_ident())

    spec = {
        phase: InputSpec(x=TensorSpec((rows, 3), dtype=torch.float32))
        for phase, rows in ((Phase.DECODE, "requests"), (Phase.PREFILL, "tokens"))
    }
    lazy = PhaseConfig(buckets=(2,), capture="lazy")
    capture = capture_cuda_graphs(
        model_runner=runtime(forward, spec, model=model, decode=lazy, forward_hooks=[("", hook)])
    )
    x = torch.ones(2, 3, device=device)
    inside.clear()
    join = in_thread(lambda: capture.decode_runner.execute(decode(2, x=x)))
    assert inside.wait(PATIENCE)
    called.clear()
    capture.prefill_runner.execute(
        ForwardBatch(phase="prefill", num_requests=1, num_tokens=2, inputs={"x": x})
    )
    stepped.set()
    join()
    assert called.count(threading.get_ident()) == 1
    capture.decode_runner.release()


def test_a_queued_step_is_not_overwritten_by_the_next_stream(sim, rig):
    """
    Guards against sgl-project/sglang-omni#1369: on a device that queues work, a step on another stream
    waits until the buffers of the last one were read.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1)
    module = getattr(torch, sim.name)
    streams = [module.Stream(device=torch.device(sim.name, 0)) for _ in range(2)]
    sim.set_deferred(True)
    try:
        kept = []
        for step in range(12):
            with module.stream(streams[step % 2]):
                x = torch.full((3, 3), float(step), device=rig.device)
                kept.append(runner.execute(rig.batch(3, x=x)))
        streams[1].synchronize()  # the last step's; all others must be done before it
        for step, found in enumerate(kept):
            assert torch.all(found.cpu() == step * 2 + 1)
    finally:
        sim.set_deferred(False)
