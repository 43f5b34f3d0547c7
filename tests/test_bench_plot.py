"""Charts of a benchmark: what they hold, and what is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
from matplotlib.figure import Figure
from typer.testing import CliRunner

from graphplat.bench.plot import plot
from graphplat.bench.records import BenchReport, Spread, StepRow
from graphplat.bench.run import Bench
from graphplat.cli.main import app
from graphplat.errors import ConfigError


def row(way: str, bucket: int, *, memory: int | None, timed: bool = True) -> StepRow:
    spread = Spread(median=float(bucket), low=1.0, high=2.0, samples=3) if timed else None
    return StepRow(way=way, bucket=bucket, step_us=spread, capture_bytes=memory)


def report(**rows: list[StepRow]) -> BenchReport:
    named = dict.fromkeys(("platform", "device", "device_name", "torch", "model", "dtype"), "x")
    return BenchReport(threads=1, **named, **rows)  # type: ignore[arg-type]


def steps() -> list[StepRow]:
    """Eager has no memory, one way no times, the others both."""
    ways: dict[str, dict[str, Any]] = {
        "eager": {"memory": None},
        "wrong": {"memory": 1 << 20, "timed": False},
        "bare graph": {"memory": 2 << 20},
        "graphplat full": {"memory": 3 << 20},
    }
    return [row(way, size, **chosen) for way, chosen in ways.items() for size in (1, 8)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    figures: list[Figure] = []
    honest = Figure.savefig

    def noting(self: Figure, *arguments: Any, **settings: Any) -> None:
        figures.append(self)
        honest(self, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", noting)
    return figures


def colours(axes: Any) -> dict[str, str]:
    return {line.get_label(): line.get_color() for line in axes.lines}


def test_a_way_has_one_colour_in_every_panel(drawn: list[Figure], tmp_path: Path) -> None:
    """Also where a way before it has no memory or no times, so that the one legend is right for all."""
    plot(report(decode=steps(), prefill=steps()[2:]), tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").stat().st_size > 1000
    latency, memory, _, *prefill, _ = drawn[0].axes
    assert list(colours(latency)) == ["eager", "bare graph", "graphplat full"]
    assert list(colours(memory)) == ["wrong", "bare graph", "graphplat full"]
    found: dict[str, set[str]] = {}
    for axes in (latency, memory, *prefill):
        for way, colour in colours(axes).items():
            found.setdefault(way, set()).add(colour)
    assert {len(of_one) for of_one in found.values()} == {1}
    assert len(set.union(*found.values())) == len(found) == 4


@pytest.mark.parametrize(
    ("sections", "titles"),
    [
        (("decode",), ["Decode step"]),
        (("prefill",), ["Prefill step"]),
        (("decode", "prefill"), ["Decode step", "Prefill step"]),
    ],
)
def test_each_measured_phase_is_drawn(drawn, tmp_path: Path, sections, titles: list[str]) -> None:
    """A line of panels for each."""
    plot(report(**{section: steps() for section in sections}), tmp_path / "bench.png")
    assert [axes.get_title() for axes in drawn[0].axes[::3]] == titles


def test_nothing_to_plot_is_an_error(tmp_path: Path) -> None:
    """No empty figure is written."""
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot(report(), tmp_path / "bench.png")
    assert not (tmp_path / "bench.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sections", "hf", "--plot", "x.png"], "nothing to plot"),
        (["--plot", "x.foo"], "no suffix of a known format"),
        (["--plot", "x"], "no suffix of a known format"),
        (["--plot", "nowhere/x.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_measuring(
    monkeypatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Nothing runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Bench, "run", lambda self: pytest.fail("something was measured"))
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    assert words in str(result.exception)
