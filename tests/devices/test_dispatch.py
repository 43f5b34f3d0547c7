"""Which plugin serves the device, what it is given, and what it leaves alone."""

import sys
import types

import pytest
import torch

from graphplat import GraphConfig, PhaseConfig, capture_cuda_graphs
from graphplat.testing.simulated import faults, ledger

GRAPH_CLASSES = {"npu": "NPUGraph", "musa": "MUSAGraph", "simxpu": "XPUGraph", "acme": "AcmeGraph"}
DECODE = GraphConfig(decode=PhaseConfig(buckets=(1, 4)))


def test_the_devices_own_graph_class_is_used(sim, dev, reference, platform):
    """
    Graphs are of the vendor's class, captured with the keywords that it knows: thread-local mode where there
    are modes, one shared pool, one stream that is not the default one.
    """
    assert platform.is_out_of_tree() is (sim.name in {"acme", "simxpu"})
    assert type(platform).__module__ == f"graphplat_{sim.name}"
    sim.runtime.journal.clear()  # it forgets its oldest entries, so a position in it means nothing
    capture = capture_cuda_graphs(model_runner=reference(sim.name, DECODE))
    graphs = [graph for held in capture.decode.runner.device_graphs().values() for graph in held]
    assert [type(graph).__name__ for graph in graphs] == [GRAPH_CLASSES[sim.name]] * 2
    begins = [details for call, details in sim.journal if call == "capture_begin"]
    assert {begin["mode"] for begin in begins} == {"relaxed" if sim.name == "simxpu" else "thread_local"}
    assert len({begin["pool"] for begin in begins}) == 1
    assert 0 not in {begin["stream"] for begin in begins}
    capture.decode.runner.release()


def test_no_other_device_is_touched(sim, reference, monkeypatch):
    """
    Neither graphplat nor a plugin looks at any attribute of ``torch.cuda``.
    """
    real, touched = torch.cuda, []

    class Sentinel(types.ModuleType):
        def __getattr__(self, name):
            caller = sys._getframe(1).f_code.co_filename
            if "graphplat" in caller.rpartition("/tests/")[2]:
                touched.append(f"torch.cuda.{name} from {caller}")
            return getattr(real, name)

    monkeypatch.setattr(torch, "cuda", Sentinel("torch.cuda"))
    runtime = reference(sim.name, DECODE)
    capture = capture_cuda_graphs(model_runner=runtime)
    capture.decode.runner.execute(runtime.decode_batch([1], [0]))
    capture.decode.runner.release()
    assert not touched


def test_a_stream_synchronize_serves_where_a_device_wide_one_is_unsafe(sim, reference, platform):
    """
    A platform that declares no safe device-wide synchronize never asks for one, and works where it fails.
    """
    if platform.capabilities.device_synchronize:
        pytest.skip("a device-wide synchronize is safe here")
    before = ledger().device_synchronizations
    runtime = reference(sim.name, DECODE)
    with faults.inject("synchronize", times=None), faults.inject("empty_cache", times=None):
        capture = capture_cuda_graphs(model_runner=runtime)
        capture.decode.runner.execute(runtime.decode_batch([1], [0]))
        platform.synchronize(runtime.device)
    assert ledger().device_synchronizations == before
    capture.decode.runner.release()


def test_optional_calls_may_be_broken(sim, reference, platform):
    """
    Captures and replays need neither the memory query nor a debug dump.
    """
    if platform.capabilities.trusted_free_memory:
        pytest.skip("this platform trusts its memory query")
    runtime = reference(sim.name, DECODE)
    with faults.inject("mem_get_info", times=None), faults.inject("debug_dump", times=None):
        capture = capture_cuda_graphs(model_runner=runtime)
        capture.decode.runner.execute(runtime.decode_batch([1], [0]))
    capture.decode.runner.release()


def test_a_release_leaves_no_pool_behind(sim, reference, platform):
    """
    After a release the device holds no pool of ours, also where a graph's reset does not free it.
    """
    before = ledger()
    runtime = reference(sim.name, DECODE)
    capture = capture_cuda_graphs(model_runner=runtime)
    assert ledger().pools > before.pools
    capture.decode.runner.release()
    after = ledger()
    assert (after.pools, after.graphs, after.executables) == (before.pools, before.graphs, before.executables)
