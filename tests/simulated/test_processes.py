"""Runs this directory once per device name, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["npu", "musa", "simxpu", "simcuda", "acme"])
def test_the_simulated_device_keeps_its_rules(name):
    """
    Posing as each vendor, the device passes the tests of its rules and of that vendor's API.
    """
    environment = {**os.environ, "GRAPHPLAT_SIMULATED": f"{name}:2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_a_process_takes_one_device_and_says_so():
    """
    Installing the same device again gives the same object; another name, a torch device's name, or a count
    that differs is an error.
    """
    script = """
import torch
from graphplat.testing.simulated import PROFILES, SimulatedDeviceError, install_simulated
def refused(*args, **kwargs):
    try:
        install_simulated(*args, **kwargs)
    except SimulatedDeviceError as error:
        return str(error)
    raise AssertionError("accepted")
assert "exists already" in refused("cuda")
assert "exists already" in refused("xpu")
first = install_simulated("acme", devices=2)
assert install_simulated("acme", devices=2) is first
assert install_simulated("acme", profile=PROFILES["acme"], devices=2) is first
assert "'acme'" in refused("npu", devices=2)
assert "2 devices" in refused("acme", devices=3)
assert torch.device("acme:1").index == 1 and torch.acme.device_count() == 2
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)


def test_a_profile_shapes_the_device():
    """
    A vendor's own names and keywords, a device without graphs, and missing optional calls can be had.
    """
    script = """
import inspect, torch
from attrs import evolve
from graphplat.testing.simulated import SimProfile, install_simulated
profile = SimProfile(
    graph_class="WidgetGraph", graph_argument="widget", context_keywords=("stream",), begin_keywords=(),
    absent=frozenset({"empty_cache", "MemPool"}), deferred=True, record_only=False, memory_bytes=1 << 20,
)
install_simulated("widget", profile=profile)
assert str(inspect.signature(torch.widget.graph)) == "(widget, stream=None)"
assert not hasattr(torch.widget, "empty_cache") and not hasattr(torch.widget, "MemPool")
assert torch.widget.mem_get_info()[1] == 1 << 20
torch.widget.WidgetGraph()
x = torch.zeros(3, device="widget") + 1
assert not torch.widget.current_stream().query()
assert x.tolist() == [1, 1, 1]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)
    script = """
import torch
from graphplat.testing.simulated import SimProfile, install_simulated
install_simulated("plain", profile=SimProfile(graphs=False))
assert not hasattr(torch.plain, "graph") and not hasattr(torch.plain, "is_current_stream_capturing")
assert torch.ones(2, device="plain").sum().item() == 2
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)


def test_importing_the_package_installs_nothing():
    """
    Without a call, torch keeps its unnamed private device and no module is added.
    """
    script = """
import torch, graphplat.testing.simulated as simulated
assert simulated.installed() is None
assert simulated.install_from_environment("SURELY_NOT_SET") is None
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)
