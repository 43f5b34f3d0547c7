"""What the platform cannot say of memory is unknown everywhere, and nowhere zero."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from graphplat.report import total_bytes

SIMULATED = """
import json
import msgspec, torch
from graphplat import capture_cuda_graphs, GraphConfig
from graphplat.bench.fields import FiveFields
from graphplat.bench.run import Bench
from graphplat.testing.simulated import install_simulated

install_simulated("npu")
torch.set_num_threads(1)
capture = capture_cuda_graphs(model_runner=FiveFields(torch.device("npu:0"), GraphConfig()))
report = Bench(
    device="npu", model="tiny", sections=("capture", "scaling", "prefill"), buckets=(1, 2), max_len=16,
    dtype="float32", prefill_buckets=(8,), budget=0.01, compiler=False,
).run()
print(json.dumps({
    "shapes": [shape.bytes for shape in capture.report.shapes],
    "graph_bytes": capture.report.graph_bytes,
    "graph_mem_usage": capture.decode.graph_mem_usage,
    "bench": msgspec.to_builtins(report),
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A capture and a benchmark on a simulated device whose platform does not know what a graph takes."""
    done = subprocess.run([sys.executable, "-c", SIMULATED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_a_report_says_that_bytes_are_unknown(found) -> None:
    """The sum of unknown bytes is unknown, and so is what decode graphs took."""
    assert set(found["shapes"]) == {None}
    assert found["graph_bytes"] is None
    assert found["graph_mem_usage"] is None


@pytest.mark.parametrize(
    ("section", "field"), [("capture", "bytes"), ("scaling", "bytes"), ("retained", "graph_bytes")]
)
def test_a_benchmark_says_that_bytes_are_unknown(found, section: str, field: str) -> None:
    """Whether graphs were captured by hand or through graphplat."""
    rows = found["bench"][section]
    assert rows
    assert [row[field] for row in rows] == [None] * len(rows)


def test_one_unknown_makes_the_sum_unknown() -> None:
    """A part of the bytes would read like all of them; of nothing the sum is zero."""
    one, two, unknown = (SimpleNamespace(bytes=size) for size in (1, 2, None))
    assert total_bytes([one, two]) == 3
    assert total_bytes([one, unknown]) is None
    assert total_bytes([]) == 0
