"""The conformance kit itself: on the CPU, or on the simulated device that ``GRAPHPLAT_SIMULATED`` names."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from graphplat import platform_for, registry
from graphplat.testing.distributions import expose
from graphplat.testing.plugin import _declared, device, host_operator  # noqa: F401 - also where it is not loaded

NAME = os.environ.get("GRAPHPLAT_SIMULATED", "").partition(":")[0] or "cpu"
ROOT = Path(__file__).parents[2]
PROJECTS = {"acme": ROOT / "plugins" / "graphplat-acme", "simxpu": ROOT / "tests" / "devices" / "simxpu"}
collect_ignore = (
    []
    if NAME == "cpu"
    else [
        "test_processes.py",
        "test_command.py",
        "test_vendors_page.py",
        "test_cpu.py",
    ]
)
SIM = None

if NAME != "cpu":
    import importlib.metadata

    from graphplat.testing.simulated import install_from_environment

    torch.set_num_threads(1)
    SIM = install_from_environment()
    if NAME in PROJECTS and not importlib.metadata.entry_points(group="graphplat", name=NAME):
        SITE = tempfile.TemporaryDirectory()
        sys.path.insert(0, str(expose(PROJECTS[NAME], Path(SITE.name))))
    registry.reset_registry()
    gc.collect()
    gc.freeze()


@pytest.fixture
def sound():
    """The platform that is broken in one way after the other."""
    return platform_for(NAME)


@pytest.fixture
def sim():
    """The simulated device, or ``None``."""
    return SIM
