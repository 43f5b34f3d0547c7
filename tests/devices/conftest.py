"""Built-in and out-of-tree platforms on the simulated device, one process per device name.

torch takes one simulated device per process, so the tests here run only where ``GRAPHPLAT_SIMULATED`` names
it; ``test_processes.py`` starts such processes. By hand::

    GRAPHPLAT_SIMULATED=npu pytest tests/devices
"""

import gc
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAME = os.environ.get("GRAPHPLAT_SIMULATED", "").partition(":")[0]
PROJECTS = {"acme": HERE.parents[1] / "plugins" / "graphplat-acme", "simxpu": HERE / "simxpu"}
"""Plugins that do not come with graphplat; used as they lie here unless they are installed."""

collect_ignore = (
    ["test_processes.py"]
    if NAME
    else [p.name for p in HERE.glob("test_*.py") if p.name != "test_processes.py"]
)

if NAME and NAME != "npu":
    collect_ignore += ["test_updates.py"]
if NAME and NAME != "acme":
    collect_ignore += ["test_out_of_tree.py"]

if NAME:
    import importlib.metadata
    import sys
    import tempfile

    import torch

    from graphplat import Phase, platform_for, registry
    from graphplat.testing.distributions import expose
    from graphplat.testing.plugin import _declared, host_operator  # noqa: F401 - also where it is not loaded
    from graphplat.testing.reference import ReferenceRunner
    from graphplat.testing.simulated import install_from_environment, ledger

    torch.set_num_threads(1)
    SIM = install_from_environment()
    if NAME in PROJECTS and not importlib.metadata.entry_points(group="graphplat", name=NAME):
        SITE = tempfile.TemporaryDirectory()
        sys.path.insert(0, str(expose(PROJECTS[NAME], Path(SITE.name))))
    registry.reset_registry()
    gc.collect()
    gc.freeze()  # what exists now never dies: it need not be looked through before each capture

    @pytest.fixture(scope="session")
    def sim():
        """The installed device."""
        return SIM

    @pytest.fixture
    def dev(sim):
        """Its ``torch.<name>`` module."""
        return getattr(torch, sim.name)

    @pytest.fixture
    def platform(sim):
        """The platform that graphplat picks for the device."""
        return platform_for(sim.name)

    @pytest.fixture
    def device(sim):
        """Not the current device, so that nothing can rely on that."""
        return torch.device(sim.name, 1)

    @pytest.fixture
    def deferred(sim):
        """Queue all work until a synchronize."""
        sim.set_deferred(True)
        yield
        sim.set_deferred(False)

    @pytest.fixture
    def reference():
        """Makes reference runtimes, equal on every device."""

        def make(device, config, **settings):
            return ReferenceRunner(
                "tiny", device=device, graph_config=config, slots=4, max_len=32, **settings
            )

        return make

    @pytest.fixture
    def eagerly():
        """Runs a batch on a runtime without any graph."""
        from graphplat import EagerRunner

        def run(runtime, batch):
            with torch.no_grad():
                return EagerRunner(platform_for(runtime.device), runtime).execute(batch)

        return run

    @pytest.fixture
    def phases():
        """Both phases."""
        return Phase

    @pytest.fixture(autouse=True)
    def _at_rest(sim, dev):
        """Every test leaves the driver at rest, without live graphs."""
        yield
        if ledger().graphs:
            gc.collect()
        left = (ledger().captures, dev.current_stream().stream_id, dev.current_device())
        graphs = ledger().graphs
        sim.recover()
        assert left == (0, 0, 0), f"captures, stream, device left over: {left}"
        assert graphs == 0, f"{graphs} graphs left over"
