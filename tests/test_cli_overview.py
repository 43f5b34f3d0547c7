"""The command itself: its version, its other name, and options that mean the same everywhere."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")

from typer.testing import CliRunner

import graphplat
from graphplat.cli import main
from graphplat.errors import ConfigError
from graphplat.testing import conformance


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
