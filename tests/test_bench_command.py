"""``graphplat bench``: refused before anything is measured, stopped half way, and written all the same."""

from __future__ import annotations

import io
import json
import sys
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphplat.bench import host
from graphplat.bench.capturing import Ladder
from graphplat.bench.run import Bench
from graphplat.errors import ConfigError

pytest.importorskip("typer")
from typer.testing import CliRunner

from graphplat.cli import main

TINY = ["bench", "--model", "tiny", "--buckets", "1", "--max-len", "16", "--budget", "0.01"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a section is run."""
    monkeypatch.setattr(Bench, "_run_section", lambda self, section, measured: pytest.fail("measured"))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, [*TINY, *arguments])


@pytest.mark.parametrize("device", ["gpu", "npu", "npu:0"])
@pytest.mark.usefixtures("unmeasured")
def test_a_device_without_platform_is_one_message(monkeypatch, capsys, device: str) -> None:
    """The registry's, which says what is lacking; torch's own error about the device never shows."""
    monkeypatch.setattr(sys, "argv", ["graphplat", *TINY, "--device", device])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("graphplat: no platform for ")
    assert repr(device.partition(":")[0]) in error


def test_a_cpu_with_an_index_is_measured_in_float32() -> None:
    """The precision goes by the type of the device, unless one is asked for."""
    arguments = ("--sections", "host", "--device", "cpu:0", "--json")
    assert json.loads(invoke(*arguments).stdout)["dtype"] == "float32"
    assert json.loads(invoke(*arguments, "--dtype", "float16").stdout)["dtype"] == "float16"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["missing/x.json", "."])
def test_an_output_that_cannot_be_written_is_refused_at_once(monkeypatch, tmp_path, name: str) -> None:
    """A folder that is not there, or one in the place of the file."""
    monkeypatch.chdir(tmp_path)
    result = invoke("--output", name)
    assert isinstance(result.exception, ConfigError)
    assert "output" in str(result.exception)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("arguments", [("--budget", "-1"), ("--budget", "0"), ("--time-limit", "0")])
def test_times_that_cannot_be_are_refused(arguments) -> None:
    """As a usage error, which names the option."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def stop(*arguments: Any, **settings: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_keeps_what_was_measured(monkeypatch, tmp_path) -> None:
    """Tables and the document of the finished sections; the others are named. The status is 130."""
    monkeypatch.setattr(Ladder, "run", stop)
    target = tmp_path / "bench.json"
    result = invoke("--sections", "host,capture,decode", "--output", str(target))
    assert result.exit_code == 130, result.output
    assert "Host time of a step" in result.stdout
    document = json.loads(target.read_text())
    assert document["host"]
    assert document["interrupted"]
    assert [(skip["section"], skip["what"], skip["why"]) for skip in document["skipped"]] == [
        ("capture", "the rest of it", "interrupted"),
        ("decode", "all of it", "interrupted"),
    ]


def test_an_interrupt_while_the_model_loads_skips_everything(monkeypatch) -> None:
    """No section is begun, so none is said to have a rest."""
    monkeypatch.setattr("graphplat.bench.subject.Subject.load", stop)
    report = Bench(model="tiny", sections=("host", "decode")).run()
    assert [(skip.section, skip.what) for skip in report.skipped] == [
        ("host", "all of it"),
        ("decode", "all of it"),
    ]


def test_an_output_that_fails_late_does_not_keep_the_chart_from_it(monkeypatch, tmp_path) -> None:
    """Both are tried, and what could not be written is an error."""
    pytest.importorskip("matplotlib")
    target, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    honest = Bench._decode

    def filling(self: Bench, measured: Any) -> None:
        honest(self, measured)
        target.mkdir()  # as a full disk would, after all was measured

    monkeypatch.setattr(Bench, "_decode", filling)
    result = invoke("--sections", "decode", "--no-compiler", "--output", str(target), "--plot", str(chart))
    assert isinstance(result.exception, ConfigError)
    assert str(target) in str(result.exception)
    assert chart.stat().st_size > 1000


def test_sections_without_a_model_load_none(monkeypatch) -> None:
    """Host times and numbers of buckets are of a runtime of five fields."""
    monkeypatch.setattr("graphplat.bench.subject.Subject.load", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr(host, "scaling", lambda clock, report: None)
    report = Bench(model="tiny", sections=("host", "scaling")).run()
    assert report.host
    assert not report.failed


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_sees_what_is_compiled(monkeypatch, terminal: bool) -> None:
    """A bar while the compiler is at work; a pipe gets lines alone."""
    from rich import console

    from graphplat.cli import bench as command

    seen: list[str] = []
    out = io.StringIO()

    class Terminal(console.Console):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings | {"file": out, "force_terminal": terminal})

    def capturing(self: Bench) -> Any:
        from graphplat import GraphConfig, capture_cuda_graphs
        from graphplat.bench.fields import FiveFields

        with self.watch():
            capture_cuda_graphs(model_runner=FiveFields(torch.device("cpu"), GraphConfig()))
        seen.append(out.getvalue())
        return honest(self)

    honest = Bench.run
    monkeypatch.setattr(console, "Console", Terminal)
    monkeypatch.setattr(Bench, "run", capturing)
    command._run(Bench(model="tiny", sections=()), json=False, output=None, plot=None)
    assert ("captured decode" in seen[0]) is terminal


def test_compilers_are_watched_and_captures_are_not() -> None:
    """A bar that is drawn while a capture is timed would be timed too."""
    said: list[str] = []
    watched: list[str] = []

    @contextmanager
    def watch() -> Any:
        watched.append(said[-1])
        yield

    Bench(
        model="tiny", sections=("decode",), buckets=(1,), max_len=16, budget=0.01, compiler=False,
        say=said.append, watch=watch,
    ).run()  # fmt: skip
    assert watched == []
