"""A vendor that graphplat knows nothing about: found by its entry point, gone without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphplat import GraphConfig, PhaseConfig, Reason, capture_cuda_graphs, platform_for, registry
from graphplat.errors import AmbiguousPlatformError, PlatformError
from graphplat.testing.distributions import expose

PROJECT = Path(__file__).parents[2] / "plugins" / "graphplat-acme"
CONFIG = GraphConfig(decode=PhaseConfig(buckets=(1, 2)))


@pytest.fixture
def fresh():
    """The registry as in a new process, before and after."""
    registry.reset_registry()
    yield
    registry.reset_registry()


def test_it_captures_where_it_says_so(sim, reference):
    """
    With ``supports_cuda_graph`` true, decode is captured through the vendor's plugin.
    """
    capture = capture_cuda_graphs(model_runner=reference(sim.name, CONFIG))
    assert capture.decode.runner.buckets == (1, 2)
    assert capture.decode_runner is capture.decode.runner
    assert capture.decode.graph_mem_usage > 0
    capture.decode.runner.release()


def test_it_runs_eagerly_where_it_says_so(sim, reference, eagerly, monkeypatch):
    """
    With ``supports_cuda_graph`` false decode has no runner and runs eagerly, and the report says why.
    """
    monkeypatch.setenv("ACME_GRAPHS", "0")
    runtime = reference(sim.name, CONFIG)
    capture = capture_cuda_graphs(model_runner=runtime)
    assert capture.decode.runner is None
    assert capture.decode.graph_mem_usage == 0
    assert capture.decode_runner is capture.eager_runner
    assert capture.prefill_runner is capture.eager_runner
    reasons = {skip.phase: (skip.reason, skip.detail) for skip in capture.report.skipped}
    assert reasons["decode"][0] is Reason.UNSUPPORTED
    assert "'acme' does not support decode graphs" in reasons["decode"][1]
    batch = runtime.decode_batch([1, 2], [0, 0])
    assert capture.decode_runner.execute(batch).cpu().equal(eagerly(runtime, batch).cpu())


def test_asking_for_graphs_it_lacks_can_be_an_error(sim, reference, monkeypatch):
    """
    With ``on_unsupported="raise"`` graphs that cannot be had are an error that names the platform.
    """
    monkeypatch.setenv("ACME_GRAPHS", "0")
    config = GraphConfig(decode=CONFIG.decode, on_unsupported="raise")
    with pytest.raises(PlatformError, match="acme"):
        capture_cuda_graphs(model_runner=reference(sim.name, config))


def test_two_vendors_of_one_device_are_ambiguous(fresh, tmp_path, monkeypatch):
    """
    A second distribution for the same device gives an error that names both and the variable that decides;
    the variable does decide.
    """
    rival = tmp_path / "project"
    rival.mkdir()
    text = (PROJECT / "pyproject.toml").read_text()
    (rival / "pyproject.toml").write_text(
        text.replace('acme = "graphplat_acme"', 'acme-rival = "acme_rival"')
    )
    module = (PROJECT / "graphplat_acme.py").read_text()
    (rival / "acme_rival.py").write_text(module.replace('name = "acme"', 'name = "rival"'))
    monkeypatch.syspath_prepend(str(expose(rival, tmp_path / "site", name="rival-acme")))
    with pytest.raises(AmbiguousPlatformError) as caught:
        platform_for("acme")
    for part in ("graphplat-acme", "rival-acme", "GRAPHPLAT_PLATFORM"):
        assert part in str(caught.value)
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "rival")
    assert platform_for("acme").name == "rival"
    sys.modules.pop("acme_rival")


def test_nothing_is_left_without_the_distribution(tmp_path):
    """
    Where the distribution is not on the path, the device has no platform and nothing of the vendor is loaded.
    """
    script = """
import sys
from graphplat import platform_for
from graphplat.errors import PlatformError
from graphplat.testing.simulated import install_simulated
install_simulated("acme")
try:
    print(platform_for("acme").name)
except PlatformError as error:
    print("none:", error)
print(sorted(name for name in sys.modules if "acme" in name and not name.startswith("torch")))
"""
    without = _run(script, "")
    if without.startswith("acme"):
        pytest.skip("the distribution is installed in this environment")
    assert without.startswith("none: no platform for 'acme'")
    assert without.rstrip().endswith("[]")
    assert _run(script, str(expose(PROJECT, tmp_path / "site"))).startswith("acme\n")


def _run(script: str, path: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "GRAPHPLAT_SIMULATED"} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
