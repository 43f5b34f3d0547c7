"""Host values in graphs of the NPU shape: who updates them, when, and what is refused."""

import gc
import weakref

import msgspec
import pytest
import torch
from torch.utils import _python_dispatch

from graphplat import (
    CaptureError,
    ForwardBatch,
    GraphConfig,
    HostSpec,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    TensorSpec,
    break_graph,
    capture_cuda_graphs,
    eager_on_graph,
)
from graphplat.errors import PlatformError, ReplayError
from graphplat.testing.simulated import faults, ledger
from graphplat.testing.suite_runtime import captured
from graphplat.testing.suite_updates import attention_runtime, updated_step
from graphplat_npu import NPUGraphRunner, NpuPlatform, NPUPrefillRunner, dispatch_records

pytestmark = pytest.mark.requires("update_after_capture")
FUSED = "actual_seq_lengths_kv"


def fused(query, key, value, lengths):
    return torch.ops.sim.fused_infer_attention(query, key, value, actual_seq_lengths_kv=lengths)


def paged(query, key, value, lengths):
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    return torch.ops.sim.paged_attention(query, key, value, context_lens=context_lens)


def decode(runtime):
    return capture_cuda_graphs(model_runner=runtime).decode.runner


@pytest.mark.parametrize("operator", [(FUSED, fused), ("context_lens", paged)], ids=["list", "tensor"])
def test_lengths_of_either_kind_are_updated(device, operator):
    """
    Lengths captured as a list are updated by lists, those captured as a host tensor by int32 tensors, in
    every record.
    """
    runtime = attention_runtime(device, operator, buckets=(2, 4))
    runner = decode(runtime)
    assert type(runner) is NPUGraphRunner
    for seed, lengths in enumerate(([1, 6], [3, 2, 5, 1], [4])):
        output, eager = updated_step(runner, runtime, operator, lengths, seed)
        torch.testing.assert_close(output, eager)
    records = [len(dispatch_records(graph)) for held in runner.device_graphs().values() for graph in held]
    assert records == [2, 2]
    runner.release()


def test_each_replay_has_one_update_behind_a_fence(device, sim, deferred):
    """
    With a slow device, fifty steps in a row issue fifty updates, none before the replay ahead of it has read
    its values.
    """
    runtime = attention_runtime(device, (FUSED, fused), buckets=(2,))
    runner = decode(runtime)
    before = ledger()
    batches = [batch_for(device, Phase.DECODE, [1 + turn % 6, 1 + turn % 4]) for turn in range(50)]
    outputs = [runner.execute(batch) for batch in batches]  # nothing is read back meanwhile
    after = ledger()
    assert (after.updates - before.updates, after.replays - before.replays) == (50, 50)
    for batch, output in zip(batches, outputs, strict=True):
        torch.testing.assert_close(output.cpu(), runtime.step(runtime, batch).cpu())
    runner.release()


def test_without_declared_updates_nothing_is_dispatched(sim, reference):
    """
    A runtime that declares no updated host value gets graphs that replay without any update.
    """
    runtime = reference(sim.name, GraphConfig(decode=PhaseConfig(buckets=(2,))))
    runner = decode(runtime)
    before = ledger().updates
    runner.execute(runtime.decode_batch([1, 2], [0, 0]))
    assert ledger().updates == before
    assert [dispatch_records(graph) for graph in next(iter(runner.device_graphs().values()))] == [[]]
    runner.release()


@pytest.mark.parametrize("name", [FUSED, "misnamed"])
def test_a_host_value_that_reaches_no_operator_is_refused(device, name):
    """
    A declared host value that no updatable operator took under its name would stay stale: the capture is
    refused, naming the value.
    """

    def unused(query, key, value, lengths):
        return query + key[:, 0] if name == FUSED else fused(query, key, value, lengths)

    runtime = attention_runtime(device, (name, unused), buckets=(2,))
    with pytest.raises(CaptureError, match=f"{name}.*reached no operator") as caught:
        decode(runtime)
    assert (caught.value.platform, caught.value.bucket) == ("npu", 2)


def test_a_failing_update_reaches_the_caller(device):
    """
    An update that the driver refuses raises from the step, chained; nothing is replayed with old values, and
    the next step is right.
    """
    operator = (FUSED, fused)
    runtime = attention_runtime(device, operator, buckets=(2,))
    runner = decode(runtime)
    replays = ledger().replays
    with faults.inject("update"), pytest.raises(ReplayError, match=FUSED) as caught:
        updated_step(runner, runtime, operator, [1, 2])
    assert "injected" in str(caught.value.__cause__)
    assert ledger().replays == replays
    torch.testing.assert_close(*updated_step(runner, runtime, operator, [5, 2]))
    runner.release()


def test_the_number_of_values_is_checked(device, platform):
    """
    A list of another length than the captured one is refused before the driver sees it, which in old
    releases cuts it short.
    """
    runner = decode(attention_runtime(device, (FUSED, fused), buckets=(2,)))
    (graph,) = next(iter(runner.device_graphs().values()))
    before = ledger().updates
    with pytest.raises(PlatformError, match="3 values given"):
        platform.update_graph(graph, {FUSED: [1, 2, 3]})
    assert ledger().updates == before
    runner.release()


@pytest.mark.parametrize("point", ["begin", "forward", "end", "instantiate"])
def test_a_failed_capture_leaves_no_dispatch_mode(device, point):
    """
    Where the vendor's context leaves its mode on, it is taken off, so that later operators are no records.
    """
    runtime = attention_runtime(device, (FUSED, fused), buckets=(4, 2), on_failure="eager")
    with faults.inject(point):
        runner = decode(runtime)
    assert not _python_dispatch._get_current_dispatch_mode_stack()
    assert runner.buckets == (2,)
    torch.testing.assert_close(*updated_step(runner, runtime, (FUSED, fused), [5, 2]))
    runner.release()


def test_a_graph_is_not_taken_for_a_dead_updatable_one():
    """
    Whether a graph is updatable is known of the graph itself: nothing of it outlives it, which one made
    later, perhaps at its address, could be taken for.
    """
    platform = NpuPlatform()
    graph = platform.create_graph(updatable=True)
    assert "auto_dispatch_capture" in platform.context_keywords(graph)
    assert "auto_dispatch_capture" not in platform.context_keywords(platform.create_graph())
    gone = weakref.ref(graph)
    assert len(platform._updatable) == 1
    del graph
    gc.collect()
    assert gone() is None
    assert not len(platform._updatable)


class LoggingPlatform(NpuPlatform):
    """Notes the order of updates and replays; its updates may come with the replay."""

    name = "npu_with_replay"
    capabilities = msgspec.structs.replace(NpuPlatform.capabilities, update_after_capture="with_replay")

    def __init__(self):
        super().__init__()
        self._log = []

    def update_graph(self, graph, values):
        self._log.append("update")
        super().update_graph(graph, values)

    def replay(self, graph):
        self._log.append("replay")
        super().replay(graph)


class UpdateFirst(LoggingPlatform):
    """The same with updates before replays."""

    name = "npu_update_first"
    capabilities = NpuPlatform.capabilities


def logged(platform_class, runtime):
    platform = platform_class()
    return captured(platform, runtime), platform._log


@pytest.mark.parametrize(
    ("kind", "order"), [(UpdateFirst, ["update", "replay"]), (LoggingPlatform, ["replay", "update"])]
)
@pytest.mark.parametrize("timing", ["immediate", "deferred"])
def test_the_order_is_the_declared_one(device, sim, kind, order, timing):
    """
    Updates come before or with their replay, as the platform declares; both give the right answers, also on
    a slow device.
    """
    operator = (FUSED, fused)
    runtime = attention_runtime(device, operator, buckets=(2,))
    runner, log = logged(kind, runtime)
    sim.set_deferred(timing == "deferred")
    try:
        for turn in range(5):
            log.clear()
            output, eager = updated_step(runner, runtime, operator, [1 + turn, 6 - turn], turn)
            assert log == order
            torch.testing.assert_close(output, eager)
    finally:
        sim.set_deferred(False)
    runner.release()


def test_an_update_that_fails_after_its_replay_was_launched(device):
    """
    The waiting replay is let go with the values of the capture; the step raises, and the next one is right.
    """
    operator = (FUSED, fused)
    runtime = attention_runtime(device, operator, buckets=(2,))
    runner, _ = logged(LoggingPlatform, runtime)
    with faults.inject("update"), pytest.raises(ReplayError, match=FUSED):
        updated_step(runner, runtime, operator, [1, 2])
    assert ledger().queued == 0
    torch.testing.assert_close(*updated_step(runner, runtime, operator, [5, 2]))
    runner.release()


class Packed(ModelRunner):
    """Attends twice with an eager part in between; a prompt of tokens is one request each."""

    def __init__(self, device, backend):
        self.device = device
        self.model = torch.nn.Module()
        self.middle = halve if backend == "breakable" else halve_on_device
        self.keys = torch.randn(8, 6, 2, 8, generator=torch.Generator().manual_seed(1)).to(device)
        self.graph_config = GraphConfig(
            decode=PhaseConfig(backend=backend, buckets=(2, 4)),
            prefill=PhaseConfig(backend=backend, buckets=(4,), max_requests=4, max_padding=4.0),
        )

    def input_spec(self, phase):
        rows = "requests" if phase is Phase.DECODE else "tokens"
        return InputSpec(
            query=TensorSpec((rows, 2, 8), dtype=torch.float32),
            actual_seq_lengths_kv=HostSpec(update=True, per=rows, fill=1),
        )

    def forward(self, batch):
        query, lengths = batch.inputs["query"], batch.inputs["actual_seq_lengths_kv"]
        keys = self.keys[: len(query)]
        middle = self.middle(fused(query, keys, keys, lengths))
        break_graph()
        return fused(middle, keys, keys, lengths) + 1

    def extra_tensors(self):
        return {"keys": self.keys}


def halve_on_device(hidden):
    return hidden / 2


@eager_on_graph
def halve(hidden):
    return hidden / 2 + float(hidden.to("cpu").isnan().any())


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_both_phases_and_backends_update(device, backend, eagerly):
    """
    Prefill too is updated, and so is every segment of a graph that is broken around eager parts.
    """
    runtime = Packed(device, backend)
    capture = capture_cuda_graphs(model_runner=runtime)
    assert type(capture.prefill_runner) is NPUPrefillRunner
    for phase, runner in ((Phase.PREFILL, capture.prefill_runner), (Phase.DECODE, capture.decode.runner)):
        for lengths in ([1, 6, 2], [5, 4], [3]):
            batch = batch_for(device, phase, lengths)
            torch.testing.assert_close(runner.execute(batch).cpu(), eagerly(runtime, batch).cpu())
        assert runner.stats.replayed == 3
        runner.release()


def batch_for(device, phase, lengths):
    query = torch.randn(len(lengths), 2, 8, generator=torch.Generator().manual_seed(len(lengths)))
    return ForwardBatch(
        phase=phase,
        num_requests=len(lengths),
        num_tokens=len(lengths),
        inputs={"query": query.to(device), FUSED: lengths},
    )
