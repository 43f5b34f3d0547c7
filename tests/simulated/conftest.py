"""The rules of the simulated device, one process per device name.

torch takes one simulated device per process, so the tests here run only where ``GRAPHPLAT_SIMULATED`` names
it; ``test_processes.py`` starts such processes. By hand: ``GRAPHPLAT_SIMULATED=npu pytest tests/simulated``.
"""

import gc
import os

import pytest

NAME = os.environ.get("GRAPHPLAT_SIMULATED", "").partition(":")[0]
collect_ignore = (
    []
    if NAME
    else [
        "test_capture.py",
        "test_faults.py",
        "test_memory.py",
        "test_models.py",
        "test_operators.py",
        "test_streams.py",
        "test_updates.py",
        "test_vendor_api.py",
    ]
)
if NAME:
    collect_ignore = ["test_processes.py"]
    import torch

    from graphplat.testing.simulated import install_from_environment, ledger

    torch.set_num_threads(1)
    SIM = install_from_environment()

    @pytest.fixture(scope="session", autouse=True)
    def _no_garbage_collection():
        """Collect only where a test asks for it.

        A graph of an earlier test that the collector finds would spoil the capture it falls into: that is
        one of the rules.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        yield
        gc.enable()

    @pytest.fixture(scope="session")
    def sim():
        """The installed device."""
        return SIM

    @pytest.fixture
    def dev(sim):
        """Its ``torch.<name>`` module."""
        return getattr(torch, sim.name)

    @pytest.fixture
    def graph_type(sim, dev):
        """The vendor's graph class."""
        if not sim.profile.graphs:
            pytest.skip("this device has no graphs")
        return getattr(dev, sim.profile.graph_class)

    @pytest.fixture
    def deferred(sim):
        """Queue all work until a synchronize."""
        sim.set_deferred(True)
        yield
        sim.recover()
        sim.set_deferred(False)

    @pytest.fixture(autouse=True)
    def _clean(sim, dev):
        """Every test leaves the driver at rest; one that does not is the one that fails."""
        yield
        left = (ledger().captures, ledger().queued, dev.current_stream().stream_id, dev.current_device())
        sim.recover()
        assert left == (0, 0, 0, 0), f"captures, queued work, stream, device left over: {left}"
