"""Conformance: what a replay computes, whatever the batch and the order of the steps."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from graphplat import ForwardBatch, GraphplatError, InputSpec, Platform, TensorSpec
from graphplat.testing.suite_runtime import (
    BUCKETS,
    WIDTH,
    SuiteRuntime,
    assert_equal,
    batch_of,
    captured,
    device_graphs,
    expected,
    numbers,
    scaled,
    step,
)

_GRAPHS = pytest.mark.requires("graph_capture")


@_GRAPHS
@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
def test_every_size_equals_the_reference(platform: Platform, device: torch.device, inference: bool) -> None:
    """
    Each size up to the largest bucket replays and gives the rows of the reference, no more and no fewer,
    inside and outside of inference mode.
    """
    runner = captured(platform, SuiteRuntime(device, scaled))
    assert runner.buckets == BUCKETS
    with torch.inference_mode(inference):
        for rows in range(1, BUCKETS[-1] + 1):
            output = step(runner, device, x=numbers(rows, rows))
            assert_equal(output, expected(numbers(rows, rows)), f"for {rows} rows")
    runner.release()


@_GRAPHS
def test_replays_read_fresh_inputs(platform: Platform, device: torch.device) -> None:
    """
    A replay computes from what its input holds now, not from what it held at capture or in the step before,
    and runs none of the model's Python.
    """
    runtime = SuiteRuntime(device, scaled)
    runner = captured(platform, runtime)
    calls = runtime.calls
    for start in range(4):
        assert_equal(step(runner, device, x=numbers(2, start)), expected(numbers(2, start)), f"step {start}")
    assert runtime.calls == calls, "a replay ran the model's Python"
    runner.release()


@_GRAPHS
def test_inputs_may_come_from_the_host(platform: Platform, device: torch.device) -> None:
    """
    A batch of host tensors, and one of strided views, gives the same as a contiguous one on the device.
    """
    runner = captured(platform, SuiteRuntime(device, scaled))
    for start in range(12):  # more than any ring of staging buffers holds
        x = numbers(3 - start % 2, start)
        assert_equal(step(runner, torch.device("cpu"), x=x), expected(x), f"from the host, step {start}")
    x = numbers(3, 5)
    strided = batch_of(device, x=x.repeat(1, 2))
    strided.inputs["x"] = strided.inputs["x"][:, ::2]
    assert_equal(runner.execute(strided), expected(x.repeat(1, 2)[:, ::2]), "from a strided view")
    runner.release()


@_GRAPHS
def test_interleaved_buckets_do_not_disturb_each_other(platform: Platform, device: torch.device) -> None:
    """
    Graphs that share a pool may replay in any order, also other than the one they were captured in.
    """
    runner = captured(platform, SuiteRuntime(device, _two_layers))
    for start, rows in enumerate((1, 8, 2, 4, 8, 1, 4, 2, 1, 8)):
        wanted = expected(expected(numbers(rows, start)))
        assert_equal(step(runner, device, x=numbers(rows, start)), wanted, f"step {start} of {rows} rows")
    runner.release()


def _two_layers(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
    hidden = batch.inputs["x"] * runtime.scale + 1
    return hidden * runtime.scale + 1


@_GRAPHS
def test_padded_rows_hold_their_fill(platform: Platform, device: torch.device) -> None:
    """
    Rows beyond the real batch hold the declared fill value, also after a larger batch has left its own
    numbers there.
    """
    spec = InputSpec(
        x=TensorSpec(("requests", WIDTH), dtype=torch.float32, fill=5),
        ends=TensorSpec(("requests",), dtype=torch.int64, fill="last"),
    )

    def total(runtime: SuiteRuntime, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        x, ends = batch.inputs["x"], batch.inputs["ends"]
        return {"rows": x + 1, "sum": x.sum(0), "ends": ends.sum(0, keepdim=True)}

    runner = captured(platform, SuiteRuntime(device, total, spec=spec))
    fill = platform.padding_fill("x", 5)
    for rows in (8, 5, 8, 7):
        x, ends = numbers(rows, rows), torch.arange(1, rows + 1)
        output = step(runner, device, x=x, ends=ends)
        padded = 8 - rows
        assert_equal(output["rows"], x + 1, f"{rows} rows")
        assert_equal(output["sum"], x.sum(0) + padded * fill, f"padded rows of x after {rows} rows")
        assert_equal(
            output["ends"], (ends.sum() + padded * rows).view(1), f"padded rows of ends, {rows} rows"
        )
    runner.release()


@_GRAPHS
def test_outputs_survive_later_steps(platform: Platform, device: torch.device) -> None:
    """
    A result kept from one step is intact after later steps, of the same bucket and of others.
    """
    runner = captured(platform, SuiteRuntime(device, scaled))
    kept = [(numbers(rows, rows), step(runner, device, x=numbers(rows, rows))) for rows in (2, 2, 1, 8, 3)]
    for x, output in kept:
        assert_equal(output, expected(x), f"a kept result of {len(x)} rows")
    runner.release()


@attrs.frozen
class Lengths:
    """A nested input."""

    first: Any
    rest: Any


@_GRAPHS
def test_nested_and_keyword_inputs_are_refreshed(platform: Platform, device: torch.device) -> None:
    """
    Tensors inside dicts, lists and classes are inputs like any other, whatever the order of the keys.
    """
    row = TensorSpec(("requests",), dtype=torch.float32)
    spec = InputSpec(x=row, meta={"lens": Lengths(row, [row, row]), "tail": (row,)})

    def combine(runtime: SuiteRuntime, batch: ForwardBatch) -> torch.Tensor:
        meta = batch.inputs["meta"]
        lens = meta["lens"]
        return torch.add(
            input=batch.inputs["x"],
            other=lens.first + 2 * lens.rest[0] + 3 * lens.rest[1] + 4 * meta["tail"][0],
        )

    runner = captured(platform, SuiteRuntime(device, combine, spec=spec))
    for start in range(3):
        a, b, c, d, e = (numbers(5, start + shift)[:, 0].contiguous() for shift in range(5))
        batch = batch_of(device, x=a)
        batch.inputs["meta"] = {
            "tail": (e.to(device),),
            "lens": Lengths(b.to(device), [c.to(device), d.to(device)]),
        }
        assert_equal(runner.execute(batch), a + b + 2 * c + 3 * d + 4 * e, f"step {start}")
    assert runner.stats.replayed == 3
    runner.release()


@_GRAPHS
def test_every_output_comes_back_cut(platform: Platform, device: torch.device) -> None:
    """
    Nested outputs keep their structure: each tensor of rows is cut to the real ones, and what is none stays.
    """

    def nested(runtime: SuiteRuntime, batch: ForwardBatch) -> dict[str, Any]:
        y = batch.inputs["x"] * runtime.scale
        return {"y": y, "parts": [y + 1, (y[:, 0] + 2, None)], "bias": runtime.scale + 3, "name": "nested"}

    runner = captured(platform, SuiteRuntime(device, nested))
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for rows in (3, 1, 8):
        x = numbers(rows, rows)
        output = step(runner, device, x=x)
        assert sorted(output) == ["bias", "name", "parts", "y"]
        assert_equal(output["y"], x * scale, "field y")
        assert_equal(output["parts"][0], x * scale + 1, "field parts[0]")
        assert_equal(output["parts"][1][0], (x * scale)[:, 0] + 2, "field parts[1][0]")
        assert_equal(output["bias"], scale + 3, "field bias")
        assert output["parts"][1][1] is None
        assert output["name"] == "nested"
    runner.release()


@_GRAPHS
def test_a_platforms_graph_replays_on_its_own(platform: Platform, device: torch.device) -> None:
    """
    The graphs that a runner holds are the platform's own: ``Platform.replay`` on one recomputes its output.
    """
    seen: list[torch.Tensor] = []

    def count(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        runtime.scale.add_(1)
        return batch.inputs["x"] * 1

    runtime = SuiteRuntime(device, count, buckets=(2,))
    runner = captured(platform, runtime)
    step(runner, device, x=numbers(2))
    seen.append(runtime.scale.to("cpu", copy=True))
    for graph in device_graphs(runner):
        platform.replay(graph)
    seen.append(runtime.scale.to("cpu", copy=True))
    assert_equal(seen[1], seen[0] + 1, "the captured in-place operator ran once more")
    runner.release()


@_GRAPHS
def test_weights_updated_in_place_are_seen(platform: Platform, device: torch.device) -> None:
    """
    A weight written in place counts at the next replay; one that moved is found before the replay.
    """
    runtime = SuiteRuntime(device, scaled)
    runner = captured(platform, runtime)
    x = numbers(2)
    runtime.scale.copy_(torch.tensor([2.0, 2.0, 2.0, 2.0]).to(device))
    assert_equal(step(runner, device, x=x), x * 2 + 1, "after an update in place")
    runtime.model.register_buffer("scale", torch.tensor([3.0, 3.0, 3.0, 3.0]).to(device))
    assert_equal(runner.execute(batch_of(device, x=x)), x * 3 + 1, "after the weight was replaced")
    runner.release()


@_GRAPHS
def test_a_bad_batch_changes_nothing(platform: Platform, device: torch.device) -> None:
    """
    A batch that is not what was declared is refused before any buffer is touched.
    """
    runner = captured(platform, SuiteRuntime(device, scaled))
    step(runner, device, x=numbers(3, 1))
    with pytest.raises(GraphplatError, match="x"):
        runner.execute(batch_of(device, x=numbers(3, 2).double()))
    assert_equal(step(runner, device, x=numbers(3, 3)), expected(numbers(3, 3)), "the next good batch")
    runner.release()


@pytest.mark.requires("graph_capture")
def test_random_numbers_are_drawn_anew(platform: Platform, device: torch.device) -> None:
    """
    Two replays draw different numbers, the same state gives the same numbers again, and eager drawing works
    on.
    """
    if platform.rng_state(device) is None:
        pytest.skip("the platform does not tell its random state")

    def noisy(runtime: SuiteRuntime, batch: ForwardBatch) -> torch.Tensor:
        return torch.empty_like(batch.inputs["x"]).uniform_()

    runner = captured(platform, SuiteRuntime(device, noisy, buckets=(8,)))
    state = _state(platform, device)
    draws = [step(runner, device, x=numbers(8)).to("cpu") for _ in range(2)]
    assert not torch.equal(draws[0], draws[1]), "two replays drew the same numbers"
    platform.set_rng_state(device, state)
    assert torch.equal(step(runner, device, x=numbers(8)).to("cpu"), draws[0]), "the state was not honoured"
    runner.release()
    eager = [torch.rand(WIDTH, device=device).to("cpu") for _ in range(2)]
    assert not torch.equal(eager[0], eager[1]), "eager drawing stands still after a capture"


def _state(platform: Platform, device: torch.device) -> torch.Tensor:
    platform.synchronize(device)
    state = platform.rng_state(device)
    assert state is not None
    return state.clone()


@pytest.mark.requires("graph_capture", "generators_in_capture")
def test_private_generators_can_be_captured(platform: Platform, device: torch.device) -> None:
    """A generator that the runtime names may be drawn from in a graph, anew at each replay."""
    generator = _generator(device)

    def noisy(runtime: SuiteRuntime, batch: ForwardBatch) -> Any:
        return batch.inputs["x"].clone().uniform_(generator=generator)

    runtime = SuiteRuntime(device, noisy, buckets=(8,))
    runtime.generators = [generator]
    runner = captured(platform, runtime)
    platform.synchronize(device)
    generator.manual_seed(7)
    draws = [step(runner, device, x=numbers(8)).to("cpu") for _ in range(2)]
    assert not torch.equal(draws[0], draws[1]), "two replays drew the same numbers"
    generator.manual_seed(7)
    assert torch.equal(step(runner, device, x=numbers(8)).to("cpu"), draws[0]), "the seed was not honoured"
    runner.release()


def _generator(device: torch.device) -> torch.Generator:
    try:
        return torch.Generator(device)
    except RuntimeError:  # a device written in Python draws from generators of the host
        return torch.Generator("cpu")
