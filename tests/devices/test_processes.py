"""Runs this directory once per device name, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


NAMES = ["npu", "musa", "simxpu", "acme"]
FAULTS = HERE / "test_fault_matrix.py"


def run(name, *arguments):
    environment = {**os.environ, "GRAPHPLAT_SIMULATED": f"{name}:2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_platforms_work_on_the_simulated_device(name):
    """
    On the simulated device that poses as each vendor, the vendor's platform passes the conformance suite and
    runs the reference decoder through the vendor's exact API.
    """
    run(name, HERE, "--ignore", FAULTS)


@pytest.mark.parametrize("name", NAMES)
def test_platforms_bear_a_driver_that_fails(name):
    """
    On the same devices any call of the driver may fail in any way, and a thousand captures leave nothing.
    """
    run(name, FAULTS)


def test_every_plugin_says_why_it_cannot_be_used_here():
    """
    ``graphplat platforms`` explains each built-in platform that this machine lacks, and imports no vendor
    package to find out.
    """
    script = """
import sys
from graphplat.cli.main import app
app(["platforms", "--json"], standalone_mode=False)
loaded = sorted(name for name in sys.modules if name.startswith(("torch_npu", "torch_musa")))
print(loaded, file=sys.stderr)
"""
    environment = {**os.environ, "GRAPHPLAT_SIMULATED": "", "GRAPHPLAT_DISABLED_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    plugins = {record["name"]: record for record in json.loads(done.stdout)["plugins"]}
    assert {"cpu", "cuda", "musa", "npu", "xpu"} <= plugins.keys()
    assert done.stderr.strip().endswith("[]")
    for name, expected in (("npu", "torch_npu is not installed"), ("musa", "torch_musa is not installed")):
        assert expected in json.dumps(plugins[name]), plugins[name]
