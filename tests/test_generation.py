"""Generation that looks ahead: the next decode step begins before the tokens of the last one are read.

These tests run on the cpu, on a GPU where there is one, and once more in processes where a
simulated device stands in and runs nothing until it is waited for: one without pinned memory,
one with it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from graphplat import (
    ContractError,
    ForwardBatch,
    GraphConfig,
    GraphplatWarning,
    InputError,
    PhaseConfig,
    capture_cuda_graphs,
    platform_for,
    registry,
)
from graphplat.integrations.generation import Completion, Engine
from graphplat.integrations.transformers import CausalLMRunner
from graphplat.testing.distributions import expose
from graphplat.testing.simulated import install_from_environment

SIMULATED = install_from_environment()
VENDOR = Path(__file__).parents[1] / "plugins" / "graphplat-acme"
if (
    SIMULATED
    and SIMULATED.name == "acme"
    and not importlib.metadata.entry_points(group="graphplat", name="acme")
):
    SITE = tempfile.TemporaryDirectory()
    sys.path.insert(0, str(expose(VENDOR, Path(SITE.name))))
    registry.reset_registry()

PROMPTS = [[5, 9, 33], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19], [90, 2, 41, 8, 8], [60, 61], [4] * 10]
MAX_LEN = 16


@pytest.fixture(
    params=[SIMULATED.name] if SIMULATED else ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each real device, or the simulated one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _lagging():
    """A simulated device runs nothing until it is waited for."""
    if SIMULATED is not None:
        SIMULATED.set_deferred(True)
    yield
    if SIMULATED is not None:
        SIMULATED.set_deferred(False)


@pytest.fixture(scope="module")
def model() -> Any:
    """A small Llama that never stops by itself; wide weights keep the best two logits apart."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def alone(model: Any) -> Callable[[list[int], int], tuple[int, ...]]:
    """The new tokens of a prompt by itself, by transformers on the cpu."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        new = MAX_LEN + 1 - len(prompt)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        found[tuple(prompt)] = tuple(output[0, len(prompt) :].tolist())
    return lambda prompt, count: found[tuple(prompt)][:count]


class Runner(CausalLMRunner):
    """Counts the decode batches that are built on the host."""

    built = 0

    def decode_batch(self, *args: Any, **kwargs: Any) -> ForwardBatch:
        self.built += 1
        return super().decode_batch(*args, **kwargs)


class Spy:
    """Runs decode steps on *inner* and notes each in *log*."""

    def __init__(self, inner: Any, runner: CausalLMRunner, log: list[Any]) -> None:
        self.inner, self.runner, self.log = inner, runner, log
        self.fails_at = -1
        self.steps = 0

    def execute(self, batch: ForwardBatch) -> Any:
        if self.steps == self.fails_at:
            raise ArithmeticError("as asked")
        self.steps += 1
        self.log.append("step")
        return self.inner.execute(batch)


Make = Callable[..., tuple[Engine, Spy, list[Any]]]


@pytest.fixture
def make(model: Any, device: torch.device) -> Make:
    """Make an engine of three slots, and what notes its steps; tokens can be noted in the same log."""

    def build(
        decode: str = "full", outputs: str = "copy", *, returns: Any = "tokens", **settings: Any
    ) -> Any:
        config = GraphConfig(
            decode=PhaseConfig(backend=decode, max_size=3, outputs=outputs),  # type: ignore[arg-type]
            prefill=PhaseConfig(backend="disabled"),
        )
        on_device = copy.deepcopy(model).to(device)
        runner = Runner(on_device, max_requests=3, max_len=MAX_LEN, graph_config=config, returns=returns)
        capture = capture_cuda_graphs(model_runner=runner)
        log: list[Any] = []
        spy = Spy(capture.decode_runner, runner, log)
        settings = {"stop_tokens": frozenset(), "lookahead": True} | settings
        return Engine(runner, capture.prefill_runner, spy, **settings), spy, log

    return build


@pytest.mark.parametrize("returns", ["tokens", "logits"])
@pytest.mark.parametrize(("decode", "outputs"), [("full", "view"), ("full", "copy"), ("disabled", "copy")])
def test_looking_ahead_changes_no_result(make, alone, decode, outputs, returns):
    """
    Six prompts share three slots; some stop in the middle, others run to their length; one
    or two new tokens are possible too. Each gets what it gets alone, with lookahead and without.
    """
    stops = frozenset([alone(PROMPTS[0], 7)[3], alone(PROMPTS[3], 7)[1]])
    engine, _, _ = make(decode, outputs, returns=returns, stop_tokens=stops)
    for count in (1, 2, 7):
        expected = [ended(prompt, alone(prompt, count), stops) for prompt in PROMPTS]
        for engine.lookahead in (True, False):
            assert engine.generate(PROMPTS, count) == expected
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    assert len({len(one.tokens) for one in expected}) > 2


def ended(prompt: list[int], tokens: tuple[int, ...], stops: frozenset[int]) -> Completion:
    """What a prompt gets whose tokens would be *tokens* if nothing stopped it."""
    place = next((place for place, token in enumerate(tokens) if token in stops), None)
    kept = tokens if place is None else tokens[: place + 1]
    return Completion(tuple(prompt), kept, "length" if place is None else "stop")


def test_the_next_step_is_launched_before_tokens_are_handed_out(make):
    """After the first token, each token is handed out while the step after its own is under way."""
    engine, _, log = make(outputs="view")
    engine.generate(PROMPTS[:1], 5, on_token=lambda index, token: log.append("token"))
    assert log == ["token", "step", "step", "token", "step", "token", "step", "token", "token"]
    log.clear()
    engine.lookahead = False
    engine.generate(PROMPTS[:1], 5, on_token=lambda index, token: log.append("token"))
    assert log == ["token", *["step", "token"] * 4]


def test_looking_ahead_is_for_devices_that_work_beside_the_host(make, device):
    """Unless it is set, there is no lookahead on a cpu, where it would gain nothing."""
    engine, _, log = make(lookahead=None)
    engine.generate(PROMPTS[:1], 3, on_token=lambda index, token: log.append("token"))
    assert (log[1:3] == ["step", "step"]) == (device.type != "cpu")


def test_no_step_is_launched_beyond_a_length(make):
    """Requests that end by length cost the steps that they need, and one batch is built for each change."""
    for lookahead in (True, False):
        engine, spy, _ = make(lookahead=lookahead)
        engine.generate(PROMPTS[:3], 1)
        assert spy.steps == 0
        engine.generate(PROMPTS[:3], 5)
        assert spy.steps == engine.decode_timing.steps == 4
        assert engine.decode_timing.tokens == 12
        assert engine.runner.built == 1
        engine.generate(PROMPTS[:4], 2)  # three, then the one that waited
        assert spy.steps == 4 + 2
        assert engine.runner.built == 3


def test_a_step_beyond_a_stop_token_leaves_nothing_behind(make, alone):
    """
    It counts as a step, its token is neither handed out nor counted, and its write lands in the
    request's own slot.
    """
    engine, spy, _ = make(stop_tokens=frozenset([alone(PROMPTS[0], 4)[3]]))
    engine.runner.store.data.fill_(7.0)
    seen = []
    (found,) = engine.generate(PROMPTS[:1], 9, on_token=lambda index, token: seen.append(token))
    assert found == Completion(tuple(PROMPTS[0]), alone(PROMPTS[0], 4), "stop")
    assert tuple(seen) == found.tokens
    assert spy.steps == engine.decode_timing.steps == 4
    assert engine.decode_timing.tokens == 3
    written = (engine.runner.store.data != 7.0).any(dim=-1)[0, 0, :3, 0].cpu()
    assert written[0].sum() == len(PROMPTS[0]) + 4
    assert not written[1:].any()


def test_a_step_beyond_a_stop_token_stays_within_the_slot(make, alone):
    """A request that stops with its slot full but for one place: nothing is written behind that."""
    prompt = PROMPTS[2]
    longest = MAX_LEN + 1 - len(prompt)
    tokens = alone(prompt, longest)
    for count in (longest - 1, longest):
        engine, spy, _ = make(stop_tokens=frozenset([tokens[count - 1]]))
        place = tokens.index(tokens[count - 1])  # where it really stops
        (found,) = engine.generate([prompt], longest)
        assert found.tokens == tokens[: place + 1]
        assert spy.steps == min(place + 1, longest - 1)


def test_others_keep_what_a_step_beyond_a_stop_token_gave_them(make, alone):
    """One of three stops; the step that was under way then is thrown away for that one alone."""
    stop = alone(PROMPTS[0], 3)[2]
    prompts = [PROMPTS[0], *(prompt for prompt in PROMPTS[1:] if stop not in alone(prompt, 6))][:3]
    assert len(prompts) == 3
    engine, spy, _ = make(stop_tokens=frozenset([stop]))
    found = engine.generate(prompts, 6)
    assert [one.tokens for one in found] == [alone(prompts[0], 3), *(alone(one, 6) for one in prompts[1:])]
    assert spy.steps == 5


def test_what_is_done_with_a_token_cannot_disturb_the_next_step(make, alone):
    """With views of the graphs' memory too: steps that ``on_token`` runs overwrite those."""
    engine, spy, _ = make(outputs="view")
    other = engine.runner.decode_batch([1, 2, 3], [14, 14, 14])

    def disturb(index: int, token: int) -> None:
        spy.inner.execute(other)

    prompts = PROMPTS[:2]
    found = engine.generate(prompts, 5, on_token=disturb)
    assert [one.tokens for one in found] == [alone(prompt, 5) for prompt in prompts]


def test_tokens_that_arrive_early_wait_to_be_read(make, alone):
    """Those of the next step, too, may be on the host when a step's are read."""
    if SIMULATED is not None:
        SIMULATED.set_deferred(False)
    engine, _, _ = make(outputs="view")
    assert [one.tokens for one in engine.generate(PROMPTS, 5)] == [alone(prompt, 5) for prompt in PROMPTS]


@pytest.mark.parametrize("where", ["step", "first token", "later token"])
def test_a_failure_leaves_nothing_in_flight(make, alone, device, where):
    """Whether a step fails with another under way, or ``on_token`` does; the next call is right."""
    engine, spy, _ = make()
    tokens: list[int] = []

    def hand_out(index: int, token: int) -> None:
        tokens.append(token)
        if len(tokens) == {"step": 0, "first token": 1, "later token": 3}[where]:
            raise ArithmeticError("as asked")

    spy.fails_at = 2 if where == "step" else -1
    with pytest.raises(ArithmeticError, match="as asked"):
        engine.generate(PROMPTS[:1], 6, on_token=hand_out)
    if device.type != "cpu":
        assert getattr(torch, device.type).current_stream(device).query()
    spy.fails_at = -1
    assert [one.tokens for one in engine.generate(PROMPTS, 5)] == [alone(prompt, 5) for prompt in PROMPTS]


def test_one_call_at_a_time_uses_a_cache(make, alone):
    """A call within ``on_token``, by another engine too, is refused and harms nothing; the next works."""
    engine, _, _ = make()
    second = Engine(engine.runner, engine.prefill, engine.decode, stop_tokens=frozenset())

    for inner in (engine, second):
        with pytest.raises(ContractError, match="another call"):
            engine.generate(PROMPTS[:1], 3, on_token=lambda *_, inner=inner: inner.generate(PROMPTS[1:2], 1))
    assert [one.tokens for one in engine.generate(PROMPTS, 5)] == [alone(prompt, 5) for prompt in PROMPTS]


def test_the_capture_of_another_runner_is_refused(make):
    """Its graphs would run the other model on the other cache, and nobody would see it."""
    (mine, _, _), (other, _, _) = make(), make()
    capture = capture_cuda_graphs(model_runner=other.runner)
    with pytest.raises(ContractError, match="the capture was made of another runner"):
        Engine.from_capture(mine.runner, capture)
    assert Engine.from_capture(other.runner, capture).decode is capture.decode_runner


@pytest.mark.parametrize("count", [0, 2.5, None, True])
def test_new_tokens_are_a_positive_number(make, count):
    """Anything else is refused before anything runs."""
    engine, spy, _ = make()
    with pytest.raises(InputError, match="new tokens asked for") as caught:
        engine.generate(PROMPTS[:1], count)
    assert caught.value.field == "max_new_tokens"
    assert engine.prefill_timing.steps == spy.steps == 0


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (["hello"], "prompt 0 is no list of tokens: 'str' object"),
        ([1, 2, 3], "prompt 0 is no list of tokens: 'int' object"),
        ([[1], [2.0]], "prompt 1 is no list of tokens: 'float' object"),
        ([[1], [5, 96]], "prompt 1 has token 96, but the model knows 0 to 95"),
        ([[1, -1]], "prompt 0 has token -1, but"),
        (7, "is no list of tokens: 'int' object"),
    ],
)
def test_what_is_no_list_of_known_tokens_is_refused_before_anything_runs(make, alone, prompts, says):
    """An InputError names the prompt; nothing was run, and the next call is right."""
    engine, spy, _ = make()
    with pytest.raises(InputError, match=says) as caught:
        engine.generate(prompts, 2)
    assert caught.value.field == "prompts"
    assert engine.prefill_timing.steps == spy.steps == 0
    given = [torch.tensor(PROMPTS[0]), range(11, 20)]
    assert [one.tokens for one in engine.generate(given, 5)] == [alone(PROMPTS[n], 5) for n in (0, 2)]


def test_where_nothing_can_be_pinned_tokens_arrive_all_the_same(make, alone, monkeypatch):
    """Pinning that fails is warned of once, and tokens are read at once from then on."""
    engine, _, _ = make()
    platform = platform_for(engine.runner.device)
    capabilities = msgspec.structs.replace(platform.capabilities, pinned_memory=True)
    monkeypatch.setattr(platform, "capabilities", capabilities)

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with pytest.warns(GraphplatWarning, match="pinning memory failed: out of host memory") as caught:
        found = engine.generate(PROMPTS[:2], 5)
    assert [one.tokens for one in found] == [alone(prompt, 5) for prompt in PROMPTS[:2]]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("positions", "slots", "field"),
    [
        ([MAX_LEN, 0], None, "positions"),
        ([-1, 0], None, "positions"),
        ([0, 0], [0, 3], "slots"),
        ([0, 0], [-1, 0], "slots"),
        ([0, 0], [1, 1], "slots"),
    ],
)
def test_a_batch_never_reaches_into_another_requests_cache(make, positions, slots, field):
    """Positions and slots that the cache does not have, or that two requests share, are InputErrors."""
    engine, _, _ = make()
    with pytest.raises(InputError) as caught:
        engine.runner.decode_batch([5, 6], positions, slots)
    assert caught.value.field == field
    if slots is not None:
        with pytest.raises(InputError) as caught:
            engine.runner.prefill_batch([[5], [6]], slots)
        assert caught.value.field == "slots"


@pytest.mark.skipif(SIMULATED is not None, reason="this is such a process")
@pytest.mark.parametrize("name", ["npu", "acme"])
def test_all_of_this_holds_on_a_device_that_lags(name):
    """Tokens are read when they have arrived, whether they come by pinned memory or not."""
    environment = {**os.environ, "GRAPHPLAT_SIMULATED": f"{name}:1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not cuda", __file__]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
