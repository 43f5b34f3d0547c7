"""What a forward makes inside a recording and keeps lies in memory that other graphs may write to."""

import contextlib
import sys
import types

import pytest
import torch

from graphplat import (
    ForwardBatch,
    InputSpec,
    Phase,
    PhaseConfig,
    PlatformCapabilities,
    TensorSpec,
    capture_cuda_graphs,
)
from graphplat.plugin_hooks import GraphplatWarning
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform
from graphplat.testing.simulated import ledger

TABLE = 64
"""Values of a table: as large as what lies between the steps of larger buckets."""


class KeepsAtFour:
    """Keeps a table made at its first step of four rows; larger steps use memory of the same size between."""

    def __init__(self, rig):
        self.rig, self.kept = rig, []

    def __call__(self, batch):
        x = batch.inputs["x"]
        wide = x.repeat(1, TABLE)
        if len(x) == 4:
            if not self.kept:
                self.kept.append(torch.full((4, TABLE * 3), 5.0, device=x.device))
            wide = self.kept[0] + 0
        return self.rig.cut(x + wide[:, :3] * 2 - wide[:, -3:])

    def wanted(self, x, bucket):
        """Rows of *x*, computed in *bucket*."""
        return x + 5.0 if bucket == 4 else x * 2


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_what_a_forward_keeps_at_one_size_survives_replays_of_all_others(rig, rows, capture):
    """
    Guards against huggingface/transformers#30775: a table that only one bucket makes and keeps, inside its
    recording, holds its values after every other bucket was replayed, for graphs and for eager steps.
    """
    forward = KeepsAtFour(rig)
    runner = rig.start(forward, capture=capture, buckets=(2, 4, 6, 8))
    for n in (8, 6, 2, 4, 8, 4, 6, 4, 2, 4, 3, 8, 4):
        x = rows(n)
        bucket = min(size for size in (2, 4, 6, 8) if size >= n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), forward.wanted(x, bucket))
        x = rows(4)
        assert torch.equal(rig.eagerly(runner, rig.batch(4, x=x)), forward.wanted(x, 4))
    assert runner.stats.replayed == 13
    assert bool((forward.kept[0] == 5.0).all())


def test_what_a_failed_recording_kept_is_warned_of(rig, rows):
    """
    Guards against huggingface/transformers#30775: a recording that fails never runs, so what the forward had
    kept by then holds no values; the warning says so, and how to have that size run first. Then nothing is
    kept, and every step is right.
    """
    forward = KeepsAtFour(rig)

    def reads_once(batch):
        first = len(batch.inputs["x"]) == 4 and not forward.kept
        result = forward(batch)
        if first:
            float(batch.inputs["x"].sum())
        return result

    counted = rig.platform.capabilities.memory_counters and rig.backend == "full"
    with pytest.warns(GraphplatWarning, match='warmup="each"') if counted else contextlib.nullcontext():
        rig.start(reads_once, buckets=(4, 6, 8))
    rig.close()
    forward.kept.clear()
    runner = rig.start(reads_once, buckets=(4, 6, 8), warmup="each")
    for n in (4, 6, 4, 8, 4):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), forward.wanted(x, n))
    assert runner.stats.replayed == 5


def test_graphs_of_another_phase_are_recorded_anew_beside_it(runtime, device, rows):
    """
    Guards against huggingface/transformers#30775: what decode keeps does not lie where prefill's graphs,
    recorded before into the same pool, write; those are recorded again, still replay, and leave it alone.
    """
    kept = []

    def forward(batch):
        x = batch.inputs["x"]
        if batch.phase is Phase.PREFILL:
            return x.repeat(1, TABLE)[:, :3] * 2
        if len(x) == 4:
            if not kept:
                kept.append(torch.full((8, TABLE * 3), 5.0, device=x.device))
            return x + kept[0][:4, :3]
        return x * 3

    spec = {
        Phase.PREFILL: InputSpec(x=TensorSpec(("tokens", 3), dtype=torch.float32)),
        Phase.DECODE: InputSpec(x=TensorSpec(("requests", 3), dtype=torch.float32)),
    }
    config = {
        "prefill": PhaseConfig(backend="full", buckets=(8, 16), max_padding=100.0),
        "decode": PhaseConfig(buckets=(2, 4, 8)),
    }
    model_runner = runtime(forward, spec, **config)
    capture = capture_cuda_graphs(model_runner=model_runner)
    prefill, decode = capture.prefill_runner, capture.decode_runner

    def step(runner, phase, n):
        x = rows(n)
        requests = n if phase is Phase.DECODE else 1
        batch = ForwardBatch(phase=phase, num_requests=requests, num_tokens=n, inputs={"x": x})
        return x, runner.execute(batch)

    for _ in range(3):
        for n in (8, 16, 5):
            x, found = step(prefill, Phase.PREFILL, n)
            assert torch.equal(found, x * 2)
        for n in (4, 8, 2, 4):
            x, found = step(decode, Phase.DECODE, n)
            assert torch.equal(found, x + 5 if n == 4 else x * 3)
    assert (prefill.stats.replayed, decode.stats.replayed) == (9, 12)
    assert [shape.key.size for shape in capture.report.shapes] == [16, 8, 8, 4, 2]
    for runner in (prefill, decode):
        runner.release()


def test_the_first_graph_after_a_failed_one_counts_its_bytes(rig):
    """
    Guards against pytorch/pytorch#190308: where the largest bucket fails, the report counts what the next one
    takes, not what the failed one gave back meanwhile.
    """
    if not rig.platform.capabilities.memory_counters:
        pytest.skip("this platform counts no memory")
    warm = []

    def forward(batch):
        x = batch.inputs["x"]
        large = torch.ones(4 << 20, device=x.device)
        if len(x) == 8:
            if warm:
                raise RuntimeError("not in a graph")
            warm.append(True)
        return rig.cut(x * 2 + large[:1])

    runtime = rig.runtime(forward, buckets=(4, 8), on_failure="eager")
    runner = rig.runner(runtime)
    (shape,) = runner.context.shapes
    assert shape.key.size == 4
    assert shape.bytes >= 16 << 20


def test_workspaces_are_dropped_around_each_recording(rig, rows, monkeypatch):
    """
    Guards against pytorch/pytorch#170646 and sgl-project/sglang-omni#579: what torch keeps for a math library
    is dropped right before and right after each recording, never inside one, so that each graph's workspace
    lies in the graphs' own pool.
    """
    platform, log = rig.platform, []
    if not isinstance(platform, StreamGraphPlatform):
        pytest.skip("records no stream")
    monkeypatch.setitem(
        vars(platform), "_clear_workspaces", lambda: log.append(("drop", platform.is_capturing()))
    )
    for name in ("capture_begin", "capture_end"):
        verb = getattr(platform, name)

        def logged(graph, name=name, verb=verb, **keywords):
            log.append(name)
            return verb(graph, **keywords)

        monkeypatch.setattr(platform, name, logged)
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2), buckets=(2, 4))
    assert log.count("capture_begin") == log.count("capture_end") >= runner.context.live_graphs > 0
    followers = {name: {log[i + 1] for i, entry in enumerate(log[:-1]) if entry == name} for name in log}
    assert followers["capture_begin"] == followers["capture_end"] == {("drop", False)}
    assert ("drop", True) not in log


@pytest.mark.parametrize(
    "function", ["blas_of_a_vendor.clear", "blas_of_a_vendor.of_a_later_release", "moved_elsewhere.clear"]
)
def test_workspaces_are_dropped_by_the_function_that_the_api_names(function, monkeypatch):
    """
    Guards against MooreThreads/torch_musa#97: the device's API names the function in full; a release without
    it has no workspaces to drop.
    """
    called = []
    module = types.ModuleType("blas_of_a_vendor")
    module.clear = lambda: called.append(True)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Vendor(StreamGraphPlatform):
        name = device_type = "vendor"
        capabilities = PlatformCapabilities(graph_capture=True)
        api = StreamGraphApi(module="vendor", graph_class="Graph", clear_workspaces=function)

        def is_out_of_tree(self):
            return True

    Vendor().drop_workspaces()
    assert called == [True] * (function == "blas_of_a_vendor.clear")


def test_the_bytes_of_a_recording_that_was_thrown_away_count_for_the_next(decode_rig, rows, sim):
    """
    Guards against pytorch/pytorch#190308: where a cold recording fails after it made the pool grow, the one
    that follows uses that memory and reports it; the report's bytes are the growth of the pool.
    """
    rig = decode_rig
    if not rig.platform.capabilities.memory_counters:
        pytest.skip("this platform counts no memory")
    failed = []

    def forward(batch):
        x = batch.inputs["x"]
        wide = x.repeat(1, 1 << 16) * 2
        if len(x) == 6 and not failed:
            failed.append(True)
            raise RuntimeError("not in a graph")
        return rig.cut(x + wide[:, :3])

    runner = rig.start(forward, buckets=(2, 6, 8), capture="lazy", on_failure="eager")
    for n in (2, 6):
        x, before = rows(n), ledger().pool_bytes
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 3)
        shape = runner.context.shapes[-1]
        assert shape.key.size == n
        assert shape.bytes == ledger().pool_bytes - before > n * 3 << 18
    assert failed == [True]
