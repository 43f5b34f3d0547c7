"""What counts as failed: whatever is there and goes wrong. What is not there is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphplat.bench import decode
from graphplat.bench.records import BenchReport
from graphplat.bench.run import Bench
from graphplat.bench.subject import Subject


def bench() -> BenchReport:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"buckets": (1, 2), "max_len": 16, "budget": 0.01}
    return Bench(model="tiny", sections=("decode",), compiler=False, **sizes).run()


def ways(report: BenchReport) -> set[tuple[str, int]]:
    return {(row.way, row.bucket) for row in report.decode if row.step_us is not None}


OTHERS = {(way, size) for way in ("eager", "graphplat full", "graphplat breakable") for size in (1, 2)}


@pytest.mark.parametrize(
    ("error", "failed", "why"),
    [
        (torch.OutOfMemoryError("no room\nfor it"), True, "OutOfMemoryError: no room"),
        (RuntimeError("device lost"), True, "RuntimeError: device lost"),
        (NotImplementedError("no such function"), False, "no such function"),
    ],
)
def test_a_baseline_that_goes_wrong_fails_the_run(monkeypatch, error, failed: bool, why: str) -> None:
    """Even the bare graph, the limit that all is held against; the other ways are measured."""

    def breaking(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(decode, "bare_graph", breaking)
    report = bench()
    assert [(skip.why, skip.failed) for skip in report.skipped if skip.what == "bare graph"] == [
        (why, failed)
    ]
    assert report.failed is failed
    assert ways(report) == OTHERS


def test_a_capture_that_runs_out_of_memory_leaves_the_others(monkeypatch) -> None:
    """Whatever kind of error it is."""
    honest = Subject.capture

    def breaking(self: Subject, **settings: Any) -> Any:
        if settings["decode"]["backend"] == "full":
            raise torch.OutOfMemoryError("no room")
        return honest(self, **settings)

    monkeypatch.setattr(Subject, "capture", breaking)
    report = bench()
    assert [(skip.what, skip.why) for skip in report.skipped if skip.failed] == [
        ("graphplat full", "OutOfMemoryError: no room")
    ]
    assert {way for way, _ in ways(report)} == {"eager", "bare graph", "graphplat breakable"}


def test_a_step_that_goes_wrong_leaves_the_others(monkeypatch) -> None:
    """It has no row of that size, and the failure names way and size."""
    honest = decode.worst_difference

    def breaking(way: Any, expected: Any) -> float:
        if way.name == "graphplat full" and len(expected[0]) == 2:
            raise RuntimeError("device lost")
        return honest(way, expected)

    monkeypatch.setattr(decode, "worst_difference", breaking)
    report = bench()
    assert [(skip.what, skip.why) for skip in report.skipped if skip.failed] == [
        ("graphplat full at 2", "RuntimeError: device lost")
    ]
    assert OTHERS - ways(report) == {("graphplat full", 2)}


def test_kernels_of_the_compiler_need_not_be_equal(monkeypatch) -> None:
    """By the backend, not by how a way is called."""
    monkeypatch.setattr(decode, "GRAPHPLAT", {"uncompiled": {"backend": "full"}})
    monkeypatch.setattr(decode, "worst_difference", lambda way, expected: 1e-7 * (way.name != "eager"))
    report = bench()
    assert "graphplat uncompiled at 1" in {skip.what for skip in report.skipped if skip.failed}
