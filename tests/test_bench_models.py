"""The benchmark on models of transformers: folders, sections that need none, and what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphplat.bench import generate
from graphplat.bench.generate import Generation, compiles_static_cache
from graphplat.bench.records import BenchReport
from graphplat.bench.run import Bench
from graphplat.errors import ConfigError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama without a tokenizer."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def bench(model: Path | str, **settings: Any) -> BenchReport:
    usual: dict[str, Any] = {
        "buckets": (1, 2),
        "max_len": 32,
        "budget": 0.01,
        "new_tokens": 4,
        "compiler": False,
    }
    return Bench(model=str(model), **usual | settings).run()


def failures(report: BenchReport) -> list[tuple[str, str]]:
    return [(skip.what, skip.why) for skip in report.skipped if skip.failed]


def test_a_folder_needs_no_tokenizer(folder) -> None:
    """Tokens are drawn at random."""
    report = bench(folder, sections=("decode", "hf"))
    assert failures(report) == []
    assert "graphplat full" in {row.way for row in report.decode}
    assert "graphplat full, fused norms" in {row.way for row in report.generate}


def test_a_model_whose_norms_cannot_be_fused_skips_that_way(tmp_path) -> None:
    """Gemma scales by one more than the weight: the reason is named, and the run does not fail."""
    config = transformers.GemmaConfig(**SIZES, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    transformers.GemmaForCausalLM(config).save_pretrained(tmp_path)
    report = bench(tmp_path, sections=("hf",))
    assert failures(report) == []
    why = {skip.what: skip.why for skip in report.skipped}
    assert "norm" in why["graphplat full, fused norms"]
    assert "graphplat full" in {row.way for row in report.generate}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"sections": ("decode",), "max_len": 65}, "max_len"),
        ({"sections": ("hf",), "new_tokens": 33}, "new_tokens"),
    ],
)
def test_positions_that_a_model_does_not_know_are_refused(monkeypatch, folder, settings, field) -> None:
    """Before anything is measured, with how many it knows."""
    monkeypatch.setattr(Bench, "_run_section", lambda self, section, measured: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=rf"65 tokens .* only 64 positions .*'{field}'"):
        bench(folder, **settings)


def test_sections_that_need_no_cache_bound_no_positions(folder) -> None:
    """The cache's length is that of sections that have one."""
    assert bench(folder, sections=(), max_len=4096).skipped == []


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    """Before anything is measured."""
    with pytest.raises(ConfigError, match="cannot load"):
        bench(tmp_path, sections=("decode",))


def test_a_cpu_compiles_no_static_cache(folder) -> None:
    """So the way is named without the compiler, and stays when that is left out; its tokens are equal."""
    report = bench(folder, sections=("hf",))
    rows = {row.way: row for row in report.generate}
    assert rows["generate(), static cache"].same_tokens == rows["generate(), static cache"].tokens == 16
    assert not [skip for skip in report.skipped if "static" in skip.what]


def test_a_static_cache_that_is_compiled_says_so(folder, monkeypatch) -> None:
    """As transformers decides; without the compiler that way is left out."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert not compiles_static_cache(model)
    model.generation_config.compile_config = transformers.CompileConfig()
    model.generation_config.compile_config._compile_all_devices = True
    assert compiles_static_cache(model)
    monkeypatch.setattr(generate, "compiles_static_cache", lambda model: True)
    report = bench(folder, sections=("hf",))
    why = {skip.what: skip.why for skip in report.skipped}
    assert "as asked" in why["generate(), static cache, its default compile"]


def lying(way: str, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ways made by *way* give another third token from their *after*-th answer on."""
    honest = getattr(Generation, way)

    def make(self: Generation, *arguments: Any, **settings: Any) -> Any:
        run, answers = honest(self, *arguments, **settings), []
        if settings.get("cache_implementation"):
            return run

        def lie(prompt: list[int]) -> list[int]:
            tokens = run(prompt)
            answers.append(tokens)
            return [*tokens[:2], -1, *tokens[3:]] if len(answers) > after else tokens

        return lie

    monkeypatch.setattr(Generation, way, make)


@pytest.mark.parametrize(("after", "timed"), [(0, False), (2, True)])
def test_wrong_tokens_of_the_same_kernels_fail_the_run(monkeypatch, folder, after: int, timed: bool) -> None:
    """In float32. The first answer is compared before anything is timed; later ones afterwards."""
    lying("_engine", monkeypatch, after)
    measured: list[str] = []
    honest = Generation._measure
    monkeypatch.setattr(
        Generation,
        "_measure",
        lambda self, ways, prompts: (measured.extend(way.name for way in ways), honest(self, ways, prompts)),
    )
    report = bench(folder, sections=("hf",))
    assert [what for what, _ in failures(report)] == ["graphplat full"]
    assert f"new token 2 of prompt {after}" in failures(report)[0][1]
    assert ("graphplat full" in measured) is timed
    rows = {row.way: row for row in report.generate}
    assert "graphplat full" not in rows
    # Other kernels may differ: near ties fall either way.
    assert rows["graphplat full, fused norms"].same_tokens < rows["graphplat full, fused norms"].tokens == 16


def test_wrong_tokens_in_lower_precision_are_counted(monkeypatch, folder) -> None:
    """Near ties fall either way there."""
    lying("_engine", monkeypatch, 0)
    report = bench(folder, sections=("hf",), dtype="bfloat16")
    assert failures(report) == []
    rows = {row.way: row for row in report.generate}
    assert rows["graphplat full"].same_tokens <= 2 * 4
    assert rows["graphplat full"].tokens == 16


def test_all_ways_answer_the_same_prompts_and_none_twice(monkeypatch, folder) -> None:
    """An answer that a cache kept would not count as generated."""
    asked: dict[int, list[tuple[int, ...]]] = {}
    honest = Generation._prepared

    def noting(self: Generation, prompt: list[int]) -> Any:
        for way in honest(self, prompt):
            asked[id(way)] = [tuple(prompt)]
            run = way.run
            way.run = lambda prompt, run=run, way=way: (asked[id(way)].append(tuple(prompt)), run(prompt))[1]
            yield way

    monkeypatch.setattr(Generation, "_prepared", noting)
    bench(folder, sections=("hf",))
    first, *others = asked.values()
    assert len(set(first)) == 4
    assert others
    assert all(other == first for other in others)


def test_a_way_that_goes_wrong_leaves_the_others(monkeypatch, folder) -> None:
    """It is a failure; a way that is not there is not."""
    honest = Generation._engine

    def make(self: Generation, backend: str, **settings: Any) -> Any:
        if settings:
            raise NotImplementedError("not here")
        if backend == "full":
            raise torch.OutOfMemoryError("no room")
        return honest(self, backend, **settings)

    monkeypatch.setattr(Generation, "_engine", make)
    report = bench(folder, sections=("hf",))
    assert failures(report) == [("graphplat full", "OutOfMemoryError: no room")]
    assert {row.way for row in report.generate} == {"generate(), dynamic cache", "generate(), static cache"}
