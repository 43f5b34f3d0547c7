"""Settings, and which sizes get a graph."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphplat import ConfigError, GraphConfig, Phase, PhaseConfig
from graphplat import buckets as ladders


def test_defaults_decode_through_graphs_and_prefill_eagerly() -> None:
    """GraphConfig() alone means decode full on the default ladder and prefill disabled."""
    config = GraphConfig()
    assert config.decode.backend == "full"
    assert config.phase(Phase.DECODE).ladder(Phase.DECODE) == (1, 2, 4, *range(8, 129, 8))
    assert config.phase(Phase.PREFILL).ladder(Phase.PREFILL) == ()


@pytest.mark.parametrize(
    ("buckets", "maximum", "ladder"),
    [
        ((8, 4, 4, 999), 10, (4, 8, 10)),
        ((3, 1, 2), None, (1, 2, 3)),
        ((1, 2, 4, 8), 8, (1, 2, 4, 8)),
        ((50,), 10, (10,)),
        (None, 10, (1, 2, 4, 8, 10)),
        (None, 3, (1, 2, 3)),
        (None, 1, (1,)),
        (None, 24, (1, 2, 4, 8, 16, 24)),
    ],
)
def test_the_effective_ladder_is_sorted_clipped_and_holds_the_maximum(
    buckets: Any, maximum: int | None, ladder: tuple[int, ...]
) -> None:
    """
    Guards against InternLM/lmdeploy#4573, sgl-project/sglang#21005 and vllm-project/vllm#40734: the largest
    allowed batch always has a bucket.
    """
    assert PhaseConfig(buckets=buckets, max_size=maximum).ladder(Phase.DECODE) == ladder


@pytest.mark.parametrize("bad", [[], [-1], [0], ["4"], [True], [1.0], [None], "48", 4])
def test_a_list_that_is_no_list_of_sizes_is_refused(bad: Any) -> None:
    """
    Guards against the same reports: nothing but positive integers is a bucket, in code, dict and JSON alike.
    """
    with pytest.raises(ConfigError):
        PhaseConfig(buckets=bad)
    with pytest.raises(ConfigError):
        GraphConfig.from_dict({"decode": {"buckets": bad}})
    with pytest.raises(ConfigError):
        GraphConfig.from_json(msgspec.json.encode({"decode": {"buckets": bad}}))


@given(st.integers(1, 5000), st.sampled_from(list(Phase)))
def test_generated_ladders_are_well_formed_for_every_maximum(maximum: int, phase: Phase) -> None:
    """Ascending, unique, positive, ending in the maximum; prefill never more than doubles."""
    ladder = PhaseConfig(max_size=maximum).ladder(phase)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[0] == 1
    assert ladder[-1] == maximum
    if phase is Phase.DECODE:
        assert set(ladder) <= {1, 2, 4, maximum, *range(8, maximum + 1, 8)}
    else:
        assert all(high <= 2 * low for low, high in itertools.pairwise(ladder))


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=20),
    st.none() | st.integers(1, 300),
    st.integers(1, 350),
)
def test_the_smallest_bucket_that_holds_a_size_is_picked(
    buckets: list[int], maximum: int | None, size: int
) -> None:
    """In any order of the user's list; beyond the largest there is none."""
    ladder = PhaseConfig(buckets=tuple(buckets), max_size=maximum).ladder(Phase.DECODE)
    assert ladder == PhaseConfig(buckets=tuple(sorted(buckets)), max_size=maximum).ladder(Phase.DECODE)
    holding = [bucket for bucket in ladder if bucket >= size]
    assert ladders.fit(ladder, size) == (min(holding) if holding else None)
    assert ladder[ladders.index(ladder, size) :] == tuple(holding)


@given(st.integers(1, 60), st.integers(0, 70))
def test_thinning_keeps_both_ends_and_the_limit(count: int, limit: int) -> None:
    """
    Guards against vllm-project/vllm-ascend#9596: as many sizes as allowed, evenly spread, both ends among
    them where two fit.
    """
    ladder = tuple(range(1, count + 1))
    kept = ladders.thin(ladder, limit)
    assert len(kept) == min(count, limit)
    assert list(kept) == sorted(set(kept) & set(ladder))
    if kept:
        assert kept[-1] == ladder[-1]
    if len(kept) > 1:
        assert kept[0] == 1
        gaps = {high - low for low, high in itertools.pairwise(kept)}
        assert max(gaps) - min(gaps) <= 1


# Settings


SETTINGS = {
    "decode": {"backend": "full", "buckets": [4, 2], "outputs": "view", "variants": ["a"]},
    "prefill": {"backend": "breakable", "max_size": 64, "max_padding": 1.5},
    "on_unsupported": "raise",
}


def test_settings_can_be_keys() -> None:
    """Equal settings are one key of a dict, options of the compiler included."""
    options = {"max_autotune": True, "a": 1}
    one, other = (
        GraphConfig(decode=PhaseConfig(compile_options=given))
        for given in (options, dict(reversed(options.items())))
    )
    assert one == other
    assert len({one, other, GraphConfig()}) == 2


def test_settings_decode_alike_from_dict_json_and_toml() -> None:
    """The three ways, and construction in code, give equal settings."""
    toml = """
    on_unsupported = "raise"
    [decode]
    backend = "full"
    buckets = [4, 2]
    outputs = "view"
    variants = ["a"]
    [prefill]
    backend = "breakable"
    max_size = 64
    max_padding = 1.5
    """
    built = GraphConfig(
        decode=PhaseConfig(buckets=(2, 4), outputs="view", variants=("a",)),
        prefill=PhaseConfig(backend="breakable", max_size=64, max_padding=1.5),
        on_unsupported="raise",
    )
    assert GraphConfig.from_dict(SETTINGS) == built
    assert GraphConfig.from_json(msgspec.json.encode(SETTINGS)) == built
    assert GraphConfig.from_toml(toml) == built


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"decoed": {}}, "decoed"),
        ({"decode": {"bucket": [1]}}, "$.decode"),
        ({"decode": {"backend": "fast"}}, "$.decode.backend"),
        ({"decode": {"buckets": [1, "2"]}}, "$.decode.buckets[1]"),
        ({"decode": {"buckets": [0]}}, "$.decode"),
        ({"prefill": {"max_size": 0}}, "$.prefill.max_size"),
        ({"prefill": {"max_padding": -1.0}}, "$.prefill.max_padding"),
        ({"prefill": {"max_padding": 0.5}}, "$.prefill.max_padding"),
        ({"decode": {"memory_budget_gb": "1"}}, "$.decode.memory_budget_gb"),
        ({"decode": {"variants": ["a", "a"]}}, "$.decode"),
        ({"on_unsupported": "ignore"}, "$.on_unsupported"),
    ],
)
def test_an_unknown_or_ill_typed_setting_is_an_error_with_its_path(settings: Any, path: str) -> None:
    """The message says which setting, however it was given."""
    with pytest.raises(ConfigError) as caught:
        GraphConfig.from_dict(settings)
    assert path in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        GraphConfig.from_json(msgspec.json.encode(settings))
    assert path in str(caught.value)


@pytest.mark.parametrize("text", ["decode = [", "{"])
def test_text_that_cannot_be_parsed_is_a_config_error(text: str) -> None:
    """Neither TOML's nor JSON's own error type gets out."""
    with pytest.raises(ConfigError):
        GraphConfig.from_toml(text)
    with pytest.raises(ConfigError):
        GraphConfig.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [{"backend": "fast"}, {"outputs": "steal"}, {"max_graphs": 0}, {"variants": "ab"}, {"warmup": 3}],
)
def test_construction_in_code_is_checked_too(wrong: dict[str, Any]) -> None:
    """An ill-typed keyword raises where it is written, naming the field."""
    with pytest.raises(ConfigError) as caught:
        PhaseConfig(**wrong)
    assert caught.value.field == next(iter(wrong))


def test_settings_are_frozen() -> None:
    """Settings cannot change under a running engine."""
    with pytest.raises(AttributeError):
        GraphConfig().decode.outputs = "view"  # type: ignore[misc]
