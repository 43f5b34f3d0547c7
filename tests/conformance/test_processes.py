"""Faults of platforms with streams, pools and updates, on simulated devices in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["acme", "npu"])
def test_faults_are_caught_on_the_simulated_device(name):
    """
    Platforms that are broken in what only a device has (streams, pools, updates) fail the suite too.
    """
    environment = {**os.environ, "GRAPHPLAT_SIMULATED": f"{name}:2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
