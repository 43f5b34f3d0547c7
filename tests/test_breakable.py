"""Graphs that break around functions which run eagerly between captured segments."""

from __future__ import annotations

import dataclasses
import gc
import types
import warnings
import weakref
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from graphplat import (
    CaptureError,
    ForwardBatch,
    GraphplatError,
    InputSpec,
    PhaseConfig,
    PlatformError,
    Reason,
    TensorSpec,
    break_graph,
    capture_cuda_graphs,
    capture_decode_graph,
    capture_prefill_graph,
    eager_on_graph,
    fork_stream,
    live_batch,
    platform_for,
)
from graphplat.backends.bridge import Bridges
from graphplat.errors import ContractError, ReplayError
from graphplat.runners import EagerRunner
from graphplat_cpu import CpuPlatform

BUCKETS = (2, 4, 8)

on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)
on_cuda = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)


def breakable(**settings: Any) -> PhaseConfig:
    return PhaseConfig(**({"backend": "breakable", "buckets": BUCKETS} | settings))


def captured(runtime: Any, forward: Any, **settings: Any) -> Any:
    """The decode runner of a runtime with this forward, captured under ``breakable``."""
    return capture_cuda_graphs(model_runner=runtime(forward, decode=breakable(**settings))).decode_runner


def churn(device: torch.device) -> None:
    """Let every free block of common sizes be handed out and overwritten."""
    gc.collect()
    junk = [
        torch.full((size,), float("nan"), device=device) for size in (3, 6, 12, 24, 48, 96) for _ in range(64)
    ]
    del junk


def segments(runner: Any) -> list[int]:
    return [shape.segments for shape in runner.backend.captured.values()]


def test_a_backend_driven_by_hand_says_which_shapes_it_can_run(runtime, decode, rows):
    """A captured shape can be run inside a session, until it is dropped; another size never can."""
    runner = captured(runtime, lambda batch: batch.inputs["x"] * 2)
    backend = runner.backend
    key = next(key for key in runner.entries if key.size == 4)
    other = msgspec.structs.replace(key, size=3)
    assert (backend.can_run(key), backend.can_run(other)) == (True, False)
    x = rows(4)
    with backend.replay_session():
        runner.buffers(4)["x"].copy_(x)
        output = backend.replay(key)
    assert torch.equal(output.head(4, 4), x * 2)
    backend.drop(key)
    assert not backend.can_run(key)
    assert backend.can_run(next(key for key in runner.entries if key.size == 8))


# What an eager part is


def test_a_function_runs_again_at_every_replay_between_two_segments(runtime, decode, rows):
    """The work before and after is captured once; the marked function is called at each step."""
    calls: list[str] = []

    @eager_on_graph
    def middle(x: torch.Tensor) -> torch.Tensor:
        calls.append("middle")
        return x * 3

    def forward(batch: Any) -> torch.Tensor:
        calls.append("forward")
        return middle(batch.inputs["x"] + 1) - 2

    runner = captured(runtime, forward)
    assert segments(runner) == [2, 2, 2]
    for count in (1, 2, 3, 8, 5):
        x = rows(count)
        calls.clear()
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 3 - 2)
        assert calls == ["middle"]


def test_a_method_is_bound_to_its_object(runtime, decode, rows):
    """A marked method sees its own object, as it is at replay, also where that object is a dataclass."""

    @dataclasses.dataclass
    class Scale:
        factor: float

        @eager_on_graph
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    scale = Scale(2.0)
    runner = captured(runtime, lambda batch: scale.apply(batch.inputs["x"] + 1))
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), (x + 1) * 2)
    scale.factor = 5.0
    assert torch.equal(runner.execute(decode(3, x=x)), (x + 1) * 5)
    assert torch.equal(scale.apply.run_eager(x), x * 5)


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Meta:
    scale: torch.Tensor
    shift: dict[str, torch.Tensor]


def test_nested_structures_cross_a_break_both_ways(runtime, decode, rows):
    """Tensors inside dicts, lists, named tuples and dataclasses hold this step's values on the other side."""

    @eager_on_graph
    def mix(pair: Pair, *, meta: Meta) -> dict[str, Any]:
        total = pair.first + pair.second[0] - pair.second[1]
        return {
            "out": Meta(scale=total * meta.scale, shift={"by": meta.shift["by"] + 1}),
            "pair": (total, None),
        }

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"]
        found = mix(Pair(x + 1, [x * 2, x - 1]), meta=Meta(scale=x + 3, shift={"by": x * 5}))
        assert isinstance(found["out"], Meta)
        assert found["pair"][1] is None
        return found["out"].scale + found["out"].shift["by"] * 2 + found["pair"][0]

    def expected(x: torch.Tensor) -> torch.Tensor:
        total = x + 1 + x * 2 - (x - 1)
        return total * (x + 3) + (x * 5 + 1) * 2 + total

    runner = captured(runtime, forward)
    for count in (2, 5, 3):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), expected(x))


def test_a_container_changed_after_the_call_is_replayed_as_it_was(runtime, decode, rows):
    """What the forward later puts into a list that it passed does not reach the earlier eager part."""

    @eager_on_graph
    def total(items: list[torch.Tensor]) -> torch.Tensor:
        return items[0] + 0

    def forward(batch: Any) -> torch.Tensor:
        items = [batch.inputs["x"] + 1]
        first = total(items)
        items[0] = batch.inputs["x"] * 10
        return first + total(items)

    runner = captured(runtime, forward)
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), x + 1 + x * 10)


def test_a_stub_stands_in_for_the_body_during_capture(runtime, decode, rows):
    """The body is not called while the graph is recorded, and is called at replay."""
    called: list[str] = []

    def stub(x: torch.Tensor) -> torch.Tensor:
        called.append("stub")
        return torch.zeros_like(x)

    @eager_on_graph(capture_stub=stub)
    def body(x: torch.Tensor) -> torch.Tensor:
        called.append("body")
        return x * 2

    runner = captured(runtime, lambda batch: body(batch.inputs["x"] + 1))
    assert called.count("stub") >= len(BUCKETS)
    called.clear()
    x = rows(4)
    assert torch.equal(runner.execute(decode(4, x=x)), (x + 1) * 2)
    assert called == ["body"]


def test_run_eager_never_breaks(runtime, decode, rows):
    """``run_eager`` inside a forward is captured like any other code."""
    called: list[str] = []

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        called.append("body")
        return x * 2

    runner = captured(runtime, lambda batch: body.run_eager(batch.inputs["x"] + 1))
    called.clear()
    x = rows(4)
    assert segments(runner) == [1, 1, 1]
    assert torch.equal(runner.execute(decode(4, x=x)), (x + 1) * 2)
    assert called == []


def test_outside_a_breakable_capture_the_marks_do_nothing():
    """A marked function just runs, with its name and docstring kept, and a break is no error."""

    @eager_on_graph(rows="tokens", copy_inputs=("x",))
    def body(x: Any) -> Any:
        """Give it back."""
        return x

    thing = object()
    assert body(thing) is thing
    assert (body.__name__, body.__doc__) == ("body", "Give it back.")
    assert break_graph() is None
    assert fork_stream(None) is None
    with pytest.raises(GraphplatError, match="no batch is being run"):
        live_batch()


def test_the_full_backend_captures_through_the_marks(runtime, decode, rows):
    """Under ``full`` a marked function is recorded with the rest."""
    called: list[str] = []

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        called.append("body")
        return x * 2

    def forward(batch: Any) -> torch.Tensor:
        break_graph()
        return body(batch.inputs["x"] + 1)

    runner = captured(runtime, forward, backend="full")
    called.clear()
    x = rows(4)
    assert segments(runner) == [1, 1, 1]
    assert torch.equal(runner.execute(decode(4, x=x)), (x + 1) * 2)
    assert called == []


def test_break_graph_splits_a_segment(runtime, decode, rows):
    """Two segments do what one did."""

    def forward(batch: Any) -> torch.Tensor:
        held = batch.inputs["x"] + 1
        break_graph()
        return held * 2

    runner = captured(runtime, forward)
    assert segments(runner) == [2, 2, 2]
    for count in (8, 3):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 2)


def test_breaks_with_nothing_between_them_launch_nothing(runtime, decode, rows):
    """An empty segment is not kept: neither before the first operator nor between two breaks."""

    @eager_on_graph
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def forward(batch: Any) -> torch.Tensor:
        break_graph()
        held = batch.inputs["x"] + 1
        return double(double(held)) + 1

    runner = captured(runtime, forward)
    assert segments(runner) == [2, 2, 2]
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), (x + 1) * 4 + 1)


def test_a_marked_function_inside_another_is_part_of_it(runtime, decode, rows):
    """The outer one breaks the graph; the inner one just runs, at capture and at replay."""

    @eager_on_graph
    def inner(x: torch.Tensor) -> torch.Tensor:
        break_graph()
        return x + 5

    @eager_on_graph
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    runner = captured(runtime, lambda batch: outer(batch.inputs["x"] + 1) - 1)
    assert segments(runner) == [2, 2, 2]
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), (x + 6) * 2 - 1)


def test_a_misspelt_input_to_copy_is_refused_at_once():
    """``copy_inputs`` names parameters, and says so where the function is defined."""
    with pytest.raises(ContractError, match=r"copy_inputs names querry, no argument of .*attend"):

        @eager_on_graph(copy_inputs=("querry",))
        def attend(query: torch.Tensor) -> torch.Tensor:
            return query


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": "token"}, "rows='token' counts nothing.*\"tokens\""),
        ({"rows": True}, "rows=True counts nothing"),
        ({"writes": "out"}, r"writes takes several names, found 'out'. Write \('out',\)"),
        ({"copy_inputs": "query"}, "copy_inputs takes several names, found 'query'"),
    ],
)
def test_an_option_of_a_break_that_means_nothing_is_refused_at_once(options: dict[str, Any], says: str):
    """A misspelt ``rows`` would count requests where tokens were meant, and cut results without a word."""
    with pytest.raises(ContractError, match=says):
        eager_on_graph(**options)


def test_misspelt_and_contradictory_writes_are_refused_at_once():
    """``writes`` names parameters, none of them a copied one, and says so where the function is defined."""
    with pytest.raises(ContractError, match=r"writes names outt, no argument of .*attend"):

        @eager_on_graph(rows="tokens", writes=("outt",))
        def attend(query: torch.Tensor, out: torch.Tensor) -> None: ...

    with pytest.raises(ContractError, match=r"copy_inputs and writes of .*attend both name out"):

        @eager_on_graph(rows="tokens", writes=("out",), copy_inputs=("out",))
        def attend(query: torch.Tensor, out: torch.Tensor) -> None: ...


# Live state


def test_live_state_is_that_of_the_batch_being_run(runtime, decode, rows):
    """An eager part sees the caller's own batch at replay, and the dummy one of bucket size at capture."""
    seen: list[Any] = []

    @eager_on_graph
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(live_batch())
        return x.clone()

    runner = captured(runtime, lambda batch: look(batch.inputs["x"] + 1))
    assert {batch.num_requests for batch in seen} >= set(BUCKETS)
    for count in (3, 1):
        seen.clear()
        batch = decode(count, x=rows(count))
        runner.execute(batch)
        assert len(seen) == 1
        assert seen[0] is batch
    seen.clear()
    over = decode(9, x=rows(9))
    runner.execute(over)
    assert seen == [over], "a batch that runs eagerly is live too"
    with pytest.raises(GraphplatError):
        live_batch()


# Lifetime


def test_a_large_bucket_stays_right_after_smaller_ones_were_captured(runtime, decode, rows, device):
    """
    Arguments and results of eager parts keep their memory: neither later captures nor other
    allocations write into it. Everything here is a temporary that nobody else holds.
    """

    @eager_on_graph
    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    @eager_on_graph
    def two(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return parts["a"] + 1, parts["b"] - parts["a"]

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"]
        crossing = x * 7  # read only after both breaks
        early = one(x + 1, x + 2)
        a, b = two({"a": early * 3, "b": x + 4})
        return a + b + early + crossing

    def expected(x: torch.Tensor) -> torch.Tensor:
        early = (x + 1) * 2 + x + 2
        return early * 3 + 1 + x + 4 - early * 3 + early + x * 7

    runner = captured(runtime, forward, capture="lazy")
    for count in (8, 4, 2, 8, 3, 7, 1, 8):
        churn(device)
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), expected(x)), count


def test_one_result_may_feed_many_breaks(runtime, decode, rows, device):
    """A result that later eager parts read is not written over by theirs."""

    @eager_on_graph
    def add(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x + by

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"]
        first = add(x, x)
        second = add(first, x + 1)
        third = add(second, first)
        return first * 100 + second * 10 + third

    runner = captured(runtime, forward)
    for count in (8, 2, 8):
        churn(device)
        x = rows(count)
        first, second = 2 * x, 3 * x + 1
        assert torch.equal(runner.execute(decode(count, x=x)), first * 100 + second * 10 + first + second)


def test_what_crossed_a_break_is_freed_with_the_graph(runtime, decode, rows):
    """An argument lives as long as the graph; after ``release()`` it is gone, and bridge memory too."""
    seen: list[weakref.ref[torch.Tensor]] = []

    @eager_on_graph
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(x))
        return x * 2

    runner = captured(runtime, lambda batch: look(batch.inputs["x"] + 1) + 1)
    runner.execute(decode(3, x=rows(3)))
    held = seen[-1]
    gc.collect()
    assert held() is not None
    assert runner.backend.bridges.nbytes > 0
    runner.release()
    gc.collect()
    assert held() is None
    assert runner.backend.bridges.nbytes == 0


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_capture_and_steps_may_mix_inference_mode(runtime, decode, rows, first, lazy):
    """What was captured in inference mode is replayed outside it, and the other way round."""

    @eager_on_graph(rows="tokens", writes=("out",))
    def attend(x: torch.Tensor, out: torch.Tensor) -> None:
        out[: len(x)].copy_(x * 2)

    @eager_on_graph
    def more(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def forward(batch: ForwardBatch) -> torch.Tensor:
        x = batch.inputs["x"] + 0
        out = torch.empty_like(x)
        attend(x, out)
        return more(out) * 3

    toy = runtime(forward, decode=breakable(buckets=(2, 4), capture="lazy" if lazy else "startup"))
    with first():
        runner = capture_cuda_graphs(model_runner=toy).decode_runner
    second = torch.inference_mode if first is torch.no_grad else torch.no_grad
    for mode, count in ((first, 3), (second, 3), (second, 1), (first, 2), (second, 4), (first, 4)):
        x = rows(count)
        with mode():
            assert torch.equal(runner.execute(decode(count, x=x)), (x * 2 + 1) * 3)
    assert runner.stats.ran_eagerly == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bridge_memory_is_handed_on_when_nothing_reads_it(device, mode):
    """
    The memory of a result serves a later one, also a smaller one, once the forward has dropped every
    view of it; as long as any view lives it is left alone.
    """
    bridges, like = Bridges(), torch.ones(4, 4, device=device)
    with mode():
        parts = [bridges.hold(like)]
        view = parts[0].view(16)[3:5]
        parts.append(bridges.hold(like))
        assert parts[1].data_ptr() != parts[0].data_ptr()
        del view
        parts += [bridges.hold(like[:2]), bridges.hold(like)]
        assert {part.data_ptr() for part in parts} == {parts[0].data_ptr(), parts[1].data_ptr()}
        result = parts[0].view(4, 4)
        parts.clear()
        assert bridges.hold(like).data_ptr() != result.data_ptr()
        assert bridges.nbytes == 2 * 64


@on_cuda
def test_bridge_memory_does_not_grow_with_breaks_or_buckets(runtime):
    """Breaks one after another, and smaller buckets, use the memory of the largest bucket's first break."""

    @eager_on_graph(copy_inputs=("x",))
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"]
        for _ in range(12):
            x = double(x + 1) + 1
        return x

    spec = InputSpec(x=TensorSpec(("requests", 1024), dtype=torch.float32))
    sizes = []
    for buckets in ((64,), (16, 32, 64)):
        runner = capture_cuda_graphs(
            model_runner=runtime(forward, spec, decode=breakable(buckets=buckets))
        ).decode_runner
        sizes.append(runner.backend.bridges.nbytes)
    assert sizes == [2 * 64 * 1024 * 4] * 2


# Padded rows


def totals(eager: Any) -> Any:
    """A forward whose second output sums all rows, padded ones included."""

    def forward(batch: Any) -> dict[str, torch.Tensor]:
        found = eager(batch.inputs["x"] + 1)
        return {"rows": found + 0, "total": found.sum(0)}

    return forward


def _fresh(x: torch.Tensor) -> torch.Tensor:
    live = live_batch().num_requests
    out = torch.full_like(x, float("nan"))
    out[:live] = x[:live] * 2
    return out


def _in_place(x: torch.Tensor) -> torch.Tensor:
    live = live_batch().num_requests
    x[:live].mul_(2)
    x[live:].fill_(float("nan"))
    return x


def _shorter(x: torch.Tensor) -> torch.Tensor:
    return x[: live_batch().num_requests] * 2


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        (_fresh, {"rows": "requests"}),
        (_fresh, {"rows": "tokens"}),
        (_in_place, {"rows": "requests"}),
        (_shorter, {}),
    ],
    ids=["fresh", "tokens", "in place", "fewer rows"],
)
def test_padded_rows_behind_an_eager_part_are_zero(runtime, decode, rows, body, settings):
    """
    Whatever the body leaves in rows beyond the batch, a reduction over all rows counts the real ones
    alone; nothing of an earlier, larger batch is left.
    """
    runner = captured(runtime, totals(eager_on_graph(**settings)(body)))
    for count in (4, 3, 8, 5, 1):
        x = rows(count)
        found = runner.execute(decode(count, x=x))
        assert torch.equal(found["rows"], (x + 1) * 2)
        assert torch.equal(found["total"], ((x + 1) * 2).sum(0))


@pytest.mark.parametrize("nested", [False, True])
def test_rows_behind_an_argument_written_in_place_are_zero(runtime, decode, rows, nested):
    """
    A body that returns nothing and names what it writes leaves no row of an earlier batch beyond the
    real ones, whether the argument is a tensor or holds tensors.
    """

    @eager_on_graph(rows="requests", writes=("out",))
    def attend(x: torch.Tensor, out: Any) -> None:
        live = live_batch().num_requests
        (out["o"] if nested else out)[:live] = x[:live] * 2

    def forward(batch: Any) -> dict[str, torch.Tensor]:
        x = batch.inputs["x"] + 0
        out = torch.empty_like(x)
        attend(x, out={"o": out} if nested else out)
        return {"rows": out + 0, "total": out.sum(0)}

    runner = captured(runtime, forward, buckets=(8,))
    for count in (8, 3, 5, 1):
        x = rows(count)
        found = runner.execute(decode(count, x=x))
        assert torch.equal(found["rows"], x * 2)
        assert torch.equal(found["total"], (x * 2).sum(0))


def test_padded_rows_are_fill_again_where_a_body_writes_its_input_at_replays_alone(runtime, decode, rows):
    """What a body does to an input only for some live batches reaches no padded row of the next step."""
    seen = []

    @eager_on_graph
    def shift(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        if live_batch().num_requests == 3:
            x.add_(1)
        return x + 0

    runner = captured(runtime, lambda batch: shift(batch.inputs["x"]) * 2, buckets=(4,))
    for _ in range(3):
        x = rows(3)
        seen.clear()
        assert torch.equal(runner.execute(decode(3, x=x)), (x + 1) * 2)
        assert torch.equal(seen[0][3], torch.zeros_like(x[0]))


def test_rows_of_nothing_are_refused_at_capture(runtime):
    """A body with ``rows`` that neither returns a tensor nor names one it writes fails, with the remedy."""

    @eager_on_graph(rows="requests")
    def attend(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"] + 0
        out = torch.empty_like(x)
        attend(x, out)
        return out + 0

    with pytest.raises(CaptureError, match=r"attend returned no tensor.*writes=\('out',\)"):
        captured(runtime, forward)


def test_a_view_of_an_argument_is_a_copy(runtime, decode, rows):
    """What the forward writes into a returned view of an argument does not reach the argument."""

    @eager_on_graph
    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)

    def forward(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        held = batch.inputs["x"] + 0
        view = flat(held)
        view.mul_(3)
        return held + 0, view.view_as(held) + 0

    runner = captured(runtime, forward)
    for count in (4, 2):
        x = rows(count)
        held, view = runner.execute(decode(count, x=x))
        assert torch.equal(held, x)
        assert torch.equal(view, x * 3)


def test_results_of_one_path_are_refused(runtime):
    """Two results whose paths read alike could not be told apart at replay: the capture fails."""

    @eager_on_graph
    def two(x: torch.Tensor) -> dict[Any, torch.Tensor]:
        return {0: x + 1, "0": x + 2}

    with pytest.raises(CaptureError, match="two results have the path '0'"):
        captured(runtime, lambda batch: two(batch.inputs["x"] * 1)[0] + 0)


def test_an_argument_is_left_alone_when_a_part_of_it_is_returned(runtime, decode, rows):
    """A shorter view of an argument is a result of its own: the argument keeps all its rows."""

    @eager_on_graph
    def head(x: torch.Tensor) -> torch.Tensor:
        return x[: max(1, live_batch().num_requests - 1)]

    def forward(batch: Any) -> dict[str, torch.Tensor]:
        held = batch.inputs["x"] + 1
        first = head(held)
        return {"held": held * 1, "first": first.sum(0)}

    runner = captured(runtime, forward)
    for count in (8, 3):
        x = rows(count)
        found = runner.execute(decode(count, x=x))
        assert torch.equal(found["held"], x + 1)
        assert torch.equal(found["first"], (x + 1)[: count - 1].sum(0))


# In place, and copied inputs


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "not returned"])
def test_an_argument_written_in_place_is_read_where_it_is(runtime, decode, rows, returns):
    """No memory is added for it, and the next segment reads what the eager part wrote."""

    @eager_on_graph
    def double(x: torch.Tensor) -> torch.Tensor | None:
        x.mul_(2)
        return x if returns else None

    def forward(batch: Any) -> torch.Tensor:
        held = batch.inputs["x"] + 1
        double(held)
        return held + 1

    runner = captured(runtime, forward)
    assert runner.backend.bridges.nbytes == 0
    for count in (8, 3):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 2 + 1)


def test_an_output_argument_returned_as_another_tensor_is_still_filled(runtime, decode, rows):
    """A body that gives back its argument at capture, and a new tensor at replay, is right both ways."""
    runs: list[int] = []

    @eager_on_graph
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.mul_(2) if len(runs) % 2 else x * 2

    def forward(batch: Any) -> torch.Tensor:
        return sometimes(batch.inputs["x"] + 1) + 1

    runner = captured(runtime, forward)
    for count in (3, 3, 4, 4):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 2 + 1)


def test_copied_inputs_serve_one_break_each(runtime, decode, rows):
    """
    Breaks share the memory of copied inputs, so that a result which is one of them, or a view
    of one, is copied out before the next break writes there.
    """

    @eager_on_graph(copy_inputs=("x",))
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    @eager_on_graph(copy_inputs=("parts",))
    def first(parts: list[torch.Tensor], scale: float) -> torch.Tensor:
        return parts[0] * scale - parts[1]

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"]
        a, b = same(x + 1), same(x * 3)
        return a * 100 + b + first([x + 2, x], 3.0)

    runner = captured(runtime, forward)
    for count in (8, 3, 2):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 100 + x * 3 + (x + 2) * 3 - x)


# Failure


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :2], r"returned \(4, 2\) of torch.float32, captured \(4, 3\)"),
        (lambda x: x.double(), r"returned \(4, 3\) of torch.float64"),
        (lambda x: torch.cat((x, x)), "returned 8 rows"),
        (lambda x: None, "returned another structure"),
        (lambda x: [x], "returned another structure"),
    ],
    ids=["columns", "dtype", "more rows", "none", "list"],
)
def test_a_result_unlike_the_captured_one_is_an_error(runtime, decode, rows, change, message):
    """The step fails and names the function; the next one is right."""
    wrong: list[bool] = []

    @eager_on_graph
    def body(x: torch.Tensor) -> Any:
        return change(x) if wrong else x * 2

    runner = captured(runtime, lambda batch: body(batch.inputs["x"] + 1) + 1)
    wrong.append(True)
    with pytest.raises(ReplayError, match=message) as failure:
        runner.execute(decode(3, x=rows(3)))
    assert "body" in str(failure.value)
    wrong.clear()
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), (x + 1) * 2 + 1)


def test_an_error_of_the_body_at_replay_reaches_the_caller(runtime, decode, rows):
    """It is chained to a ReplayError; nothing stays half done and the next step is right."""
    broken: list[bool] = []

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if broken:
            raise ValueError("no such table")
        return x * 2

    runner = captured(runtime, lambda batch: body(batch.inputs["x"] + 1) + 1)
    broken.append(True)
    with pytest.raises(ReplayError, match="no such table") as failure:
        runner.execute(decode(3, x=rows(3)))
    assert isinstance(failure.value.__cause__, ValueError)
    with pytest.raises(GraphplatError, match="no batch is being run"):
        live_batch()
    broken.clear()
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), (x + 1) * 2 + 1)


def failing_stub(bad: list[int], swallow: bool) -> Any:
    """A forward whose second eager part fails during capture at the sizes in *bad*."""

    def stub(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] in bad:
            raise ValueError(f"cannot do {x.shape[0]}")
        return x

    @eager_on_graph(capture_stub=stub)
    def second(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @eager_on_graph
    def first(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(batch: Any) -> torch.Tensor:
        x = first(batch.inputs["x"] + 1) + 1
        try:
            return second(x) + 1
        except ValueError:
            if not swallow:
                raise
            return x * 3 + 1

    return forward


@pytest.mark.parametrize("swallow", [False, True], ids=["raised", "swallowed"])
def test_a_failure_inside_an_eager_part_leaves_nothing_half_open(runtime, decode, rows, device, swallow):
    """
    A failure between two segments fails that bucket's capture, also if the forward goes on after
    it. No capture stays active, collection is as before, other buckets have graphs, and
    the bucket can be captured later.
    """
    bad = [4]
    platform = platform_for(device)
    runner = captured(runtime, failing_stub(bad, swallow), on_failure="eager")
    assert not platform.is_capturing()
    assert gc.isenabled()
    assert runner.buckets == (2, 8)
    for count in (3, 2, 7):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), ((x + 1) * 2 + 1) * 3 + 1), count
    bad.clear()
    runner.recapture()
    assert runner.buckets == (2, 4, 8)
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), ((x + 1) * 2 + 1) * 3 + 1)


def test_a_failure_inside_an_eager_part_is_named(runtime, device):
    """The error says platform and bucket, and is chained to what the body raised."""
    with pytest.raises(CaptureError, match="cannot do 4") as failure:
        captured(runtime, failing_stub([4], swallow=False))
    assert isinstance(failure.value.__cause__, ValueError)
    assert (failure.value.platform, failure.value.bucket) == (device.type, 4)
    with pytest.raises(CaptureError, match="went on after an eager part had failed"):
        captured(runtime, failing_stub([8], swallow=True))
    assert not platform_for(device).is_capturing()


def test_a_failure_inside_a_later_segment_leaves_nothing_half_open(runtime, decode, rows, device):
    """The open segment is ended, those before it are destroyed, and the next capture is sound."""
    bad = [4]
    platform = platform_for(device)

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(batch: Any) -> torch.Tensor:
        x = body(batch.inputs["x"] + 1) + 1
        if platform.is_capturing() and x.shape[0] in bad:
            raise ValueError("in the second segment")
        return x

    runner = captured(runtime, forward, on_failure="eager")
    assert not platform.is_capturing()
    assert runner.buckets == (2, 8)
    bad.clear()
    runner.recapture()
    assert runner.buckets == (2, 4, 8)
    for count in (8, 4, 1):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 2 + 1)


class Unbreakable(CpuPlatform):
    """Can capture, but not in pieces; notes whatever is made."""

    capabilities = msgspec.structs.replace(CpuPlatform.capabilities, breakable=False)

    def create_graph(self, *, updatable: bool = False) -> Any:
        raise AssertionError("a graph was made")

    def graph_pool(self) -> Any:
        raise AssertionError("a pool was made")

    def new_stream(self, device: torch.device) -> Any:
        raise AssertionError("a stream was made")


@on_cpu
def test_a_platform_without_the_ability_is_refused_before_anything_is_allocated(runtime):
    """The error names platform and capability; no graph, pool, stream or static buffer was made."""
    toy = runtime(lambda batch: batch.inputs["x"] + 1, decode=breakable())
    eager = EagerRunner(Unbreakable(), toy)
    toy.graph_config = msgspec.structs.replace(toy.graph_config, on_unsupported="raise")
    with pytest.raises(PlatformError, match="breakable") as failure:
        capture_decode_graph(model_runner=toy, eager_runner=eager)
    assert failure.value.platform == "cpu"
    assert eager.context.arena.nbytes == 0
    assert eager.context.live_graphs == 0


class TenGraphs(CpuPlatform):
    """Holds ten device graphs."""

    capabilities = msgspec.structs.replace(CpuPlatform.capabilities, max_graphs=10)


@on_cpu
def test_the_graph_limit_counts_segments(runtime, decode, rows):
    """
    vllm-ascend#1168: where a shape takes three graphs, ten serve three shapes: the largest,
    and both ends of the rest; the others run in a larger bucket, and the report says why.
    """

    @eager_on_graph
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    toy = runtime(
        lambda batch: middle(middle(batch.inputs["x"] + 1) + 1) + 1,
        decode=breakable(buckets=tuple(range(1, 9))),
    )
    eager = EagerRunner(TenGraphs(), toy)
    with pytest.warns(match="the device allows too few graphs for 5 of 8 shapes"):
        runner = capture_decode_graph(model_runner=toy, eager_runner=eager).runner
    assert runner is not None
    assert runner.buckets == (1, 7, 8)
    assert eager.context.live_graphs == 9
    assert {skip.key.size for skip in eager.context.skipped if skip.reason is Reason.GRAPH_LIMIT} == set(
        range(2, 7)
    )
    for count in (1, 3, 8):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), ((x + 1) * 2 + 1) * 2 + 1)
    assert runner.stats.replays == {1: 1, 7: 1, 8: 1}


class FourGraphs(CpuPlatform):
    """Holds four device graphs."""

    capabilities = msgspec.structs.replace(CpuPlatform.capabilities, max_graphs=4)


@on_cpu
def test_lazy_captures_stay_within_the_devices_graphs(runtime, decode, rows):
    """
    Where a shape takes two graphs of the device's four, a third one takes the place of the oldest; no step
    runs eagerly for it.
    """

    @eager_on_graph
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    toy = runtime(
        lambda batch: middle(batch.inputs["x"] + 1) + 1,
        decode=breakable(buckets=(1, 2, 4, 8), capture="lazy"),
    )
    eager = EagerRunner(FourGraphs(), toy)
    runner = capture_decode_graph(model_runner=toy, eager_runner=eager).runner
    for count in (1, 2, 4, 8, 1):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 2 + 1)
        assert eager.context.live_graphs <= 4
    assert runner.buckets == (1, 8)
    assert runner.stats.ran_eagerly == 0


@on_cpu
def test_a_lazy_capture_without_room_leaves_the_graphs_of_the_other_phase(runtime, decode, rows):
    """Where the other phase holds what a shape would need, nothing is evicted: the step says so and runs."""

    @eager_on_graph
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    toy = runtime(
        lambda batch: middle(batch.inputs["x"] + 1) + 1,
        InputSpec(x=TensorSpec(("tokens", 3), dtype=torch.float32)),
        decode=breakable(buckets=(1, 2), capture="lazy"),
        prefill=breakable(buckets=(4, 8)),
    )
    eager = EagerRunner(FourGraphs(), toy)
    runner = capture_decode_graph(model_runner=toy, eager_runner=eager).runner
    prefill = capture_prefill_graph(model_runner=toy, eager_runner=eager)
    assert eager.context.live_graphs == 4
    x = rows(2)
    with pytest.warns(match="the device allows too few graphs for 1 of 1 shapes"):
        assert torch.equal(runner.execute(decode(2, x=x)), (x + 1) * 2 + 1)
    assert torch.equal(runner.execute(decode(2, x=x)), (x + 1) * 2 + 1)
    assert runner.stats.eager == {Reason.GRAPH_LIMIT: 2}
    assert prefill.buckets == (4, 8)


# Side streams


class Streams(CpuPlatform):
    """A cpu platform that pretends to have streams and notes their order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def current_stream(self, device: torch.device) -> Any:
        return "current"

    def new_stream(self, device: torch.device) -> Any:
        return "capture"

    def wait_stream(self, waiting: Any, awaited: Any) -> None:
        self.log.append((waiting, awaited))

    def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
        self.log.append("begin")
        super().capture_begin(graph, pool=pool, stream=stream)

    def capture_end(self, graph: Any) -> None:
        self.log.append("end")
        super().capture_end(graph)


@on_cpu
def test_side_streams_are_joined_before_a_segment_ends(runtime, decode, rows):
    """A stream forked inside a segment waits for it, and is waited for at the break."""

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(batch: Any) -> torch.Tensor:
        held = batch.inputs["x"] + 1
        fork_stream("side")
        fork_stream("other")
        return body(held) + 1

    platform = Streams()
    toy = runtime(forward, decode=breakable(buckets=(2,)))
    eager = EagerRunner(platform, toy)
    eager.warm_up()
    runner = capture_decode_graph(model_runner=toy, eager_runner=eager).runner
    assert runner is not None
    start = platform.log.index("begin")
    segment = platform.log[start : platform.log.index("end")]
    assert segment[:3] == ["begin", ("side", "capture"), ("other", "capture")]
    assert sorted(segment[3:]) == [("capture", "other"), ("capture", "side")]
    rest = platform.log[platform.log.index("end") :]
    assert rest[:3] == ["end", "begin", "end"]
    x = rows(2)
    assert torch.equal(runner.execute(decode(2, x=x)), (x + 1) * 2 + 1)


@on_cpu
def test_side_streams_are_joined_when_a_capture_fails(runtime):
    """The capture is ended with nothing left outside it."""

    def forward(batch: Any) -> torch.Tensor:
        if live_batch().num_requests == 2 and platform.is_capturing():
            fork_stream("side")
            raise ValueError("beside the point")
        return batch.inputs["x"] + 1

    platform = Streams()
    toy = runtime(forward, decode=breakable(buckets=(2,)))
    with pytest.raises(CaptureError, match="beside the point"):
        capture_decode_graph(model_runner=toy, eager_runner=EagerRunner(platform, toy))
    start = platform.log.index("begin")
    assert platform.log[start : start + 3] == ["begin", ("side", "capture"), ("capture", "side")]


@on_cuda
def test_work_on_a_real_side_stream_is_captured_and_joined(runtime, decode, rows):
    """The next segment and the eager part read what the side stream wrote."""
    side = torch.cuda.Stream()

    @eager_on_graph
    def body(x: torch.Tensor, aside: torch.Tensor) -> torch.Tensor:
        return x * 2 - aside

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"]
        capturing = torch.cuda.is_current_stream_capturing()
        side.wait_stream(torch.cuda.current_stream())
        fork_stream(side)
        with torch.cuda.stream(side):
            aside = x * 5
            for _ in range(50):
                aside = aside + 1
        if not capturing:
            torch.cuda.current_stream().wait_stream(side)
        return body(x + 1, aside) + 2 * aside

    runner = captured(runtime, forward)
    for count in (8, 3):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), (x + 1) * 2 + x * 5 + 50)


@on_cpu
def test_a_warning_inside_a_capture_still_comes_out(runtime):
    """Ending a segment looks for one warning and lets all others pass."""

    class Warns(CpuPlatform):
        def capture_end(self, graph: Any) -> None:
            super().capture_end(graph)
            warnings.warn("The device Graph is empty. Nothing was recorded.", UserWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)

    toy = runtime(lambda batch: batch.inputs["x"] + 1, decode=breakable(buckets=(2,)))
    eager = EagerRunner(Warns(), toy)
    with pytest.warns(UserWarning, match="something else") as caught:
        capture_decode_graph(model_runner=toy, eager_runner=eager)
    assert not [warning for warning in caught if "empty" in str(warning.message)]


def test_a_bound_method_is_an_eager_function_itself():
    """What a method call goes through has ``run_eager`` too, bound to the object."""

    class Layer:
        @eager_on_graph
        def attend(self, x: int) -> tuple[Any, int]:
            return self, x

    layer = Layer()
    assert layer.attend(3) == (layer, 3)
    assert layer.attend.run_eager(4) == (layer, 4)
    assert Layer.attend(layer, 5) == (layer, 5)
    assert isinstance(Layer().attend.body, types.MethodType)
