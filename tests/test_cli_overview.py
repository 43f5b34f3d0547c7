"""The command itself: its version, its other name, and options that mean the same everywhere."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")

from typer.testing import CliRunner

import graphplat
from graphplat import hookimpl, registry
from graphplat.cli import main
from graphplat.errors import ConfigError
from graphplat.testing import conformance
from graphplat_cpu import CpuPlatform


def test_the_version_is_told() -> None:
    """Without a command."""
    result = CliRunner().invoke(main.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"graphplat {graphplat.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    """As the command does."""
    done = subprocess.run(
        [sys.executable, "-m", "graphplat", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"graphplat {graphplat.__version__}\n"), done.stderr


@pytest.mark.parametrize("name", list(main.SUMMARIES))
def test_options_mean_the_same_in_every_command(name: str) -> None:
    """``--json`` is a flag; ``--output`` names the file of the document."""
    if name == "demo":
        pytest.importorskip("transformers")
    command = importlib.import_module(f"graphplat.cli.{name}").command
    kinds = get_type_hints(command)
    assert kinds["json"] is bool
    assert inspect.signature(command).parameters["json"].default is False
    if "output" in kinds:
        assert kinds["output"] == Path | None


FAILING = {
    "demo": ["--device", "nonesuch"],
    "platforms": ["--nonesuch"],
    "bench": ["--device", "nonesuch"],
    "plan": ["{folder}/missing.json", "{folder}/missing.json"],
    "conformance": ["--device", "nonesuch"],
}
"""Arguments that each command refuses."""


@pytest.fixture
def run_main(monkeypatch, capfd) -> Any:
    """Runs the command in this process as its script does: status, stdout and stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["graphplat", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code, *capfd.readouterr()

    return run


@pytest.mark.parametrize("name", list(main.SUMMARIES))
def test_a_command_that_fails_prints_no_document(run_main, tmp_path, name: str) -> None:
    """With ``--json`` too stdout is empty; the error is on stderr, and the status is not 0."""
    if name == "demo":
        pytest.importorskip("transformers")
    arguments = [part.format(folder=tmp_path) for part in FAILING[name]]
    status, out, err = run_main(name, *arguments, "--json")
    assert status in {1, 2}
    assert out == ""
    assert "missing.json" in err or "nonesuch" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cuda", "cannot be installed: torch.cuda exists already"),
        ("npu:abc", "names no simulated device. Give NAME or NAME:COUNT"),
        ("npu:0", "names no simulated device"),
        (":2", "names no simulated device"),
        ("Npu", "names no simulated device"),
    ],
)
def test_a_simulated_device_that_cannot_be_is_one_line(run_main, monkeypatch, text: str, says: str) -> None:
    """Status 1, and what is wrong with ``GRAPHPLAT_SIMULATED``, for every command alike."""
    monkeypatch.setenv("GRAPHPLAT_SIMULATED", text)
    status, out, err = run_main("platforms")
    assert (status, out) == (1, "")
    assert err.startswith(f"graphplat: GRAPHPLAT_SIMULATED={text!r} {says}")
    assert err.count("\n") == 1


def test_a_name_that_only_torch_refuses_is_one_line() -> None:
    """An in-tree device type without a module in torch is refused by torch itself, in a new process here."""
    done = subprocess.run(
        [sys.executable, "-m", "graphplat", "platforms"],
        env={**os.environ, "GRAPHPLAT_SIMULATED": "hip"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("graphplat: GRAPHPLAT_SIMULATED='hip' cannot be installed: ")
    assert done.stderr.count("\n") == 1


class Absent(CpuPlatform):
    """A platform for hardware that is not there."""

    name = "absent"
    device_type = "absent"

    @classmethod
    def probe(cls) -> None:
        raise RuntimeError("no such card")


class AbsentPlugin:
    """Brings it."""

    @hookimpl
    def provide_platforms(self) -> list[type[CpuPlatform]]:
        return [Absent]


@pytest.fixture
def absent() -> Any:
    """A plugin whose platform cannot be used."""
    registry.register_plugin(AbsentPlugin(), "absent")
    yield
    registry.unregister_plugin("absent")


@pytest.mark.parametrize(
    ("name", "usable", "says"),
    [
        ("cpu", True, "GRAPHPLAT_PLATFORM=cpu can be used"),
        ("bogus", False, "GRAPHPLAT_PLATFORM=bogus cannot be used: no platform named 'bogus'"),
        ("absent", False, "GRAPHPLAT_PLATFORM=absent cannot be used: platform 'absent'"),
    ],
)
@pytest.mark.usefixtures("absent")
def test_the_platform_that_the_environment_demands_is_told(
    monkeypatch, name: str, usable: bool, says: str
) -> None:
    """Whether it can be used and why not, in one line and in the document; the status is 0 all the same."""
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", name)
    shown, printed = (CliRunner().invoke(main.app, ["platforms", *more]) for more in ([], ["--json"]))
    assert (shown.exit_code, printed.exit_code) == (0, 0)
    last = shown.stdout.splitlines()[-1]
    assert last.startswith(says)
    choice = json.loads(printed.stdout)["choice"]
    assert (choice["variable"], choice["name"], choice["usable"]) == ("GRAPHPLAT_PLATFORM", name, usable)
    assert bool(choice["reason"]) is not usable
    assert last.endswith(choice["reason"])
    assert "graphplat platforms" not in last
    if name == "absent":
        assert "no such card" in choice["reason"]


def test_without_a_demand_nothing_is_told_of_one(monkeypatch) -> None:
    """Unset or empty, the variable asks for nothing."""
    for value in (None, " "):
        if value is None:
            monkeypatch.delenv("GRAPHPLAT_PLATFORM", raising=False)
        else:
            monkeypatch.setenv("GRAPHPLAT_PLATFORM", value)
        assert "GRAPHPLAT_PLATFORM" not in CliRunner().invoke(main.app, ["platforms"]).stdout
        document = json.loads(CliRunner().invoke(main.app, ["platforms", "--json"]).stdout)
        assert document["choice"] is None


@pytest.mark.parametrize("option", ["--sections", "--buckets", "--prefill-buckets"])
def test_the_help_says_how_to_give_a_list(option: str) -> None:
    """Sizes and sections are separated by commas."""
    text = CliRunner().invoke(main.app, ["bench", "--help"]).stdout
    (told,) = [part for part in text.split("\n  --") if part.startswith(f"{option.removeprefix('--')} ")]
    assert "separated by commas" in " ".join(told.split())


def test_conformance_prints_one_document(tmp_path) -> None:
    """With ``--json``; what the tests print goes elsewhere, and a file gets the same document."""
    target = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--json", "--output", str(target), "-k", "padded"]
    done = subprocess.run(
        [sys.executable, "-m", "graphplat", "conformance", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(target.read_text())
    assert "passed" in done.stderr


def test_conformance_refuses_a_bad_output_at_once(monkeypatch, tmp_path) -> None:
    """Before any test runs."""

    def run(*arguments: Any, **settings: Any) -> int:
        return pytest.fail("the suite ran")

    monkeypatch.setattr(conformance, "run", run)
    target = tmp_path / "missing" / "report.json"
    result = CliRunner().invoke(main.app, ["conformance", "--device", "cpu", "--output", str(target)])
    assert isinstance(result.exception, ConfigError)
    assert "output" in str(result.exception)
