"""Host values of a captured graph, rewritten at replay."""

import threading

import pytest
import torch

from graphplat.testing.simulated import DeviceHangError, SimulatedDeviceError, faults

KEY = "actual_seq_lengths_kv"


@pytest.fixture
def built(sim, dev, graph_type):
    """A captured pair of attentions with lengths as host values: graph, output, eager reference."""
    if "update" not in sim.profile.graph_methods:
        pytest.skip("this vendor cannot update a graph")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 8), torch.randn(2, 6, 3, 8), torch.randn(2, 6, 3, 8)
    there = [t.to(sim.name) for t in (q, k, v)]
    op = torch.ops.sim.fused_infer_attention

    def forward(q, k, v, first, second):
        return op(op(q, k, v, **{KEY: first}), k, v, **{KEY: second})

    graph = graph_type()
    with dev.graph(graph, auto_dispatch_capture=True):
        out = forward(*there, [1, 1], [1, 1])
    graph.inputs = there  # a graph keeps addresses, not owners
    return graph, out, lambda first, second: forward(q, k, v, first, second)


def test_update_then_replay(built):
    """
    Each update sets the lengths of the next replay, one entry per record, or one for all.
    """
    graph, out, eager = built
    for first, second in (([2, 3], [4, 1]), ([6, 5], [1, 2])):
        graph.update(cpu_update_input=[{KEY: first}, {KEY: second}])
        graph.replay()
        assert torch.equal(out.cpu(), eager(first, second))
    graph.update(cpu_update_input=[{KEY: [3, 3]}])
    graph.replay()
    assert torch.equal(out.cpu(), eager([3, 3], [3, 3]))


def test_replay_then_update(built):
    """
    A replay waits on the device for its update, which another thread may issue.
    """
    graph, out, eager = built
    graph.replay()
    worker = threading.Thread(target=lambda: graph.update(cpu_update_input=[{KEY: [5, 2]}]))
    worker.start()
    worker.join()
    assert torch.equal(out.cpu(), eager([5, 2], [5, 2]))


def test_a_replay_without_update_hangs_loudly(built, dev):
    """
    Where a real device would block for ever, waiting for the stream raises.
    """
    graph, out, eager = built
    graph.update(cpu_update_input=[{KEY: [5, 2]}])
    graph.replay()
    graph.replay()
    with pytest.raises(DeviceHangError, match="replay of graph"):
        out.cpu()
    with pytest.raises(DeviceHangError):
        dev.synchronize()
    graph.update(cpu_update_input=[{KEY: [1, 2]}])
    assert torch.equal(out.cpu(), eager([1, 2], [1, 2]))


def test_two_updates_for_one_replay_are_refused(built):
    """
    An update that would overwrite values no replay has used yet raises.
    """
    graph, out, eager = built
    graph.update(cpu_update_input=[{KEY: [5, 2]}])
    with pytest.raises(SimulatedDeviceError, match="overtakes"):
        graph.update(cpu_update_input=[{KEY: [1, 1]}])
    graph.replay()
    assert torch.equal(out.cpu(), eager([5, 2], [5, 2]))


def test_an_update_that_overtakes_a_pending_replay_is_refused(built, dev, sim):
    """
    With work queued, the next update has to wait until the previous replay has read its values.
    """
    graph, out, eager = built
    sim.set_deferred(True)
    try:
        graph.update(cpu_update_input=[{KEY: [5, 2]}])
        graph.replay()
        with pytest.raises(SimulatedDeviceError, match="overtakes"):
            graph.update(cpu_update_input=[{KEY: [1, 1]}])
        dev.current_stream().synchronize()
        graph.update(cpu_update_input=[{KEY: [1, 1]}])
        graph.replay()
        assert torch.equal(out.cpu(), eager([1, 1], [1, 1]))
    finally:
        sim.set_deferred(False)


def test_wrong_updates(built):
    """
    A list of another length, or the wrong number of entries, raises; an unknown key is ignored without a
    word, so that the old lengths stay.
    """
    graph, out, eager = built
    with pytest.raises(RuntimeError, match="3 values given, 2 were captured"):
        graph.update(cpu_update_input=[{KEY: [1, 2, 3]}])
    with pytest.raises(RuntimeError, match="3 entries for 2 records"):
        graph.update(cpu_update_input=[{KEY: [1, 2]}] * 3)
    graph.update(cpu_update_input=[{KEY: [4, 2]}])
    graph.replay()
    graph.update(cpu_update_input=[{"context_lens": [1, 1]}])
    graph.replay()
    assert torch.equal(out.cpu(), eager([4, 2], [4, 2]))
    with pytest.raises(TypeError):
        graph.update(cpu_update_inputs=[{KEY: [1, 2]}])


def test_a_failing_update_changes_nothing(built):
    """
    An injected failure leaves the graph waiting for a good update.
    """
    graph, out, eager = built
    with faults.inject("update"), pytest.raises(RuntimeError, match="injected"):
        graph.update(cpu_update_input=[{KEY: [4, 2]}])
    graph.update(cpu_update_input=[{KEY: [1, 2]}])
    graph.replay()
    assert torch.equal(out.cpu(), eager([1, 2], [1, 2]))


def test_lengths_in_a_cpu_tensor(sim, dev, graph_type):
    """
    Paged attention takes its lengths as a CPU tensor, and its update too.
    """
    if "update" not in sim.profile.graph_methods:
        pytest.skip("this vendor cannot update a graph")
    q, k = torch.randn(2, 3, 8), torch.randn(2, 6, 3, 8)
    op = torch.ops.sim.paged_attention
    graph, there = graph_type(), (q.to(sim.name), k.to(sim.name))
    with dev.graph(graph, auto_dispatch_capture=True):
        out = op(*there, there[1], context_lens=torch.ones(2, dtype=torch.int32))
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    graph.update(cpu_update_input=[{"context_lens": lengths}])
    graph.replay()
    assert torch.equal(out.cpu(), op(q, k, k, context_lens=lengths))
    with pytest.raises(TypeError, match="context_lens"):
        graph.update(cpu_update_input=[{"context_lens": [1, 2]}])


def test_without_auto_dispatch_there_is_nothing_to_update(sim, dev, graph_type):
    """
    A graph captured plainly keeps its lengths and refuses an update.
    """
    if "update" not in sim.profile.graph_methods:
        pytest.skip("this vendor cannot update a graph")
    q, k = torch.randn(2, 3, 8), torch.randn(2, 6, 3, 8)
    graph, there = graph_type(), (q.to(sim.name), k.to(sim.name))
    with dev.graph(graph):
        out = torch.ops.sim.fused_infer_attention(*there, there[1], actual_seq_lengths_kv=[2, 3])
    graph.replay()
    want = torch.ops.sim.fused_infer_attention(q, k, k, actual_seq_lengths_kv=[2, 3])
    assert torch.equal(out.cpu(), want)
    with pytest.raises(RuntimeError, match="auto_dispatch_capture"):
        graph.update(cpu_update_input=[{KEY: [1, 1]}])
