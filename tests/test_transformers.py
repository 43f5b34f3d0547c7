"""Causal models of transformers on a slot cache: the same tokens as ``model.generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from graphplat import (
    CaptureReport,
    ConfigError,
    ForwardBatch,
    GraphConfig,
    InputError,
    PhaseConfig,
    Reason,
    capture_cuda_graphs,
)
from graphplat.integrations.generation import Engine, stop_tokens
from graphplat.integrations.slot_cache import SlotStore
from graphplat.integrations.text import ByteTokenizer, TextStream
from graphplat.integrations.transformers import CONTINUED, SCATTERED, CausalLMRunner

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Wide weights keep the best two logits apart, so that ties cannot flip a token.
    "initializer_range": 0.5,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}
PROMPTS = [[5, 9, 33], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19], [90, 2, 41, 8, 8]]


def make_model(family: str = "llama", **changes: Any) -> Any:
    """A small model with the same random weights each time."""
    config_class, extra = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(config_class(**(SMALL | extra | changes))).eval()


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    """The new tokens of a prompt alone, by transformers itself."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        do_sample=False,
        max_new_tokens=count,
    )
    return found[0, len(prompt) :].tolist()


def pad(runner: CausalLMRunner, batch: ForwardBatch, requests: int, tokens: int) -> ForwardBatch:
    """What a graph of this size sees: every row beyond the real ones holds the declared fill."""
    inputs = {}
    for name, spec in runner.input_spec(batch.phase).tensors.items():
        if name not in batch.inputs:
            continue
        inputs[name] = torch.full(spec.shape(requests, tokens), spec.fill, dtype=spec.dtype)
        real = batch.inputs[name]
        inputs[name][: len(real)] = real
    return ForwardBatch(
        phase=batch.phase, num_requests=requests, num_tokens=tokens, inputs=inputs, variant=batch.variant
    )


@pytest.mark.parametrize(
    ("backend", "chosen"), [("full", "sdpa"), ("breakable", "sdpa"), ("compiled", "matmul")]
)
def test_attention_follows_the_backend_unless_a_kernel_is_given(backend, chosen):
    """Decode attends by the fused kernel, and by two products where the compiler can fuse what is around."""
    config = GraphConfig(decode=PhaseConfig(backend=backend, max_size=2))
    settings = {"max_requests": 2, "max_len": 16, "graph_config": config}
    assert CausalLMRunner(make_model("llama"), **settings).kernel == chosen
    for kernel in ("sdpa", "matmul"):
        assert CausalLMRunner(make_model("llama"), **settings, kernel=kernel).kernel == kernel


@pytest.mark.parametrize(
    "settings", [{"returns": "token"}, {"kernel": "flash"}, {"max_requests": 0}, {"max_len": 0}], ids=str
)
def test_settings_that_say_nothing_are_refused_and_change_nothing(settings):
    """A misspelt choice or a cache of nothing is a ConfigError, and the model keeps its own attention."""
    model = make_model("llama")
    before = model.config._attn_implementation
    config = GraphConfig(decode=PhaseConfig(backend="disabled"), prefill=PhaseConfig(backend="disabled"))
    with pytest.raises(ConfigError):
        CausalLMRunner(model, graph_config=config, **settings)
    assert model.config._attn_implementation == before


def test_an_empty_batch_holds_whole_numbers():
    """Batches of no request have the types of any other."""
    batch = CausalLMRunner(make_model("llama"), max_len=16).decode_batch([], [])
    assert {tensor.dtype for tensor in batch.inputs.values()} == {torch.int64}


def test_a_norm_that_takes_more_is_refused_for_fusing():
    """A norm that cannot be called with hidden states alone is a ConfigError that names it."""

    class GatedRMSNorm(torch.nn.Module):
        variance_epsilon = 1e-6

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(32))

        def forward(self, x, gate):
            return x * gate

    model = make_model("llama")
    model.model.norm = GatedRMSNorm()
    with pytest.raises(ConfigError, match=r"model\.norm, a GatedRMSNorm, takes more than hidden states"):
        CausalLMRunner(model, max_len=16, fused_norms=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_steps_choose_the_tokens_that_generate_chooses(family, padded, kernel):
    """
    Packed prefill and batched decode of unequal lengths give each request the
    tokens that it gets alone, padded to a larger size or not.
    """
    model = make_model(family)
    expected = [reference(model, prompt, 6) for prompt in PROMPTS]
    runner = CausalLMRunner(model, max_requests=6, max_len=64, kernel=kernel)
    batch: ForwardBatch = runner.prefill_batch(PROMPTS, range(4))
    if padded:
        batch = pad(runner, batch, 6, 32)
    tokens = [runner.forward(batch)[:4].argmax(-1).tolist()]
    for step in range(5):
        batch = runner.decode_batch(tokens[-1], [len(prompt) + step for prompt in PROMPTS])
        if padded:
            batch = pad(runner, batch, 6, 6)
        tokens.append(runner.forward(batch)[:4].argmax(-1).tolist())
    assert [list(column) for column in zip(*tokens, strict=True)] == expected


@pytest.fixture
def runner() -> CausalLMRunner:
    """Eager, six slots, prompts 0 to 3 prefilled into slots 0 to 3."""
    made = CausalLMRunner(make_model(), max_requests=6, max_len=32)
    made.forward(made.prefill_batch(PROMPTS, range(4)))
    return made


def decode_next(runner: CausalLMRunner) -> ForwardBatch:
    return runner.decode_batch([3, 4, 5, 6], [len(prompt) for prompt in PROMPTS])


class TestSlotCache:
    def test_padded_rows_write_only_to_the_reserved_slot(self, runner):
        """A padded step leaves every slot but its requests' and the reserved one as they were."""
        runner.store.data[:, :, 4:6] = 7.0
        dummy = runner.store.data[:, :, runner.store.dummy].clone()
        runner.forward(pad(runner, decode_next(runner), 6, 6))
        assert (runner.store.data[:, :, 4:6] == 7.0).all()
        assert not torch.equal(runner.store.data[:, :, runner.store.dummy], dummy)

    def test_what_lies_in_free_slots_does_not_matter(self, runner):
        """Rows read from free slots belong to padding, and reach no request."""
        batch = pad(runner, decode_next(runner), 6, 6)
        clean = runner.forward(batch)[:4]
        runner.store.data[:, :, 4:] = 1e4
        assert torch.equal(runner.forward(batch)[:4], clean)

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_running_a_step_twice_is_running_it_once(self, runner, phase):
        """No step advances anything: a warm-up, a capture and a replay may follow each other."""
        batch = decode_next(runner) if phase == "decode" else runner.prefill_batch(PROMPTS, range(4))
        first = runner.forward(batch)
        held = runner.store.data.clone()
        assert torch.equal(runner.forward(batch), first)
        assert torch.equal(runner.store.data, held)

    def test_scattered_requests_decode_as_those_in_place(self, runner):
        """A batch whose rows are not its slots says so, and gives the same logits."""
        expected = runner.forward(decode_next(runner))
        for source, target in ((0, 5), (1, 0)):
            runner.store.move(source, target, 8)
        runner.store.data[:, :, 1] = 0.0
        batch = runner.decode_batch([3, 4, 5, 6], [len(prompt) for prompt in PROMPTS], [5, 0, 2, 3])
        assert batch.variant == SCATTERED
        torch.testing.assert_close(runner.forward(batch), expected)

    def test_the_greedy_choice_can_be_part_of_the_forward(self):
        """``returns="tokens"`` gives one token a request instead of its logits."""
        model = make_model()
        expected = CausalLMRunner(model, max_len=32)
        chosen = CausalLMRunner(model, max_len=32, returns="tokens")
        batch = expected.prefill_batch(PROMPTS, range(4))
        assert torch.equal(chosen.forward(batch), expected.forward(batch).argmax(-1))

    def test_rows_are_rounded_up_for_aligned_masks(self):
        """A row of 33 tokens holds 40."""
        assert CausalLMRunner(make_model(), max_len=33).max_len == 40

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    @pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
    def test_a_step_compiles_whole(self, runner, phase, kernel):
        """One graph for the compiler: no break, and the same logits."""
        runner.kernel = kernel
        batch = decode_next(runner) if phase == "decode" else runner.prefill_batch(PROMPTS, range(4))
        batch = pad(runner, batch, 4, 4 if phase == "decode" else 24)
        expected = runner.forward(batch)
        compiled = torch.compile(runner.forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch), expected)

    @pytest.mark.parametrize("slot", [-1, 6])
    def test_only_a_requests_slot_can_be_moved(self, runner, slot):
        """The reserved slot and what lies beyond are refused."""
        with pytest.raises(InputError, match="slots"):
            runner.store.move(slot, 0, 1)

    @pytest.mark.parametrize("field", ["slots", "max_len"])
    def test_an_empty_cache_is_refused(self, field):
        """No slots or no tokens is a setting gone wrong."""
        sizes = {"slots": 1, "max_len": 8} | {field: 0}
        with pytest.raises(ConfigError, match=field):
            SlotStore(
                layers=1, kv_heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu"), **sizes
            )


class TestPrefill:
    PROMPT = PROMPTS[2]

    @pytest.mark.parametrize("way", ["live lengths", "mask", "padded mask"])
    def test_a_prompt_in_chunks_is_the_prompt_at_once(self, way):
        """Later chunks see the earlier ones in the cache, beside another request's tokens."""
        config = GraphConfig(prefill=PhaseConfig(backend="full"), decode=PhaseConfig(backend="disabled"))
        runner = CausalLMRunner(make_model(), max_requests=3, max_len=32, max_history=8, graph_config=config)
        expected = runner.forward(runner.prefill_batch([self.PROMPT], [0]))
        runner.store.data.zero_()
        runner.forward(runner.prefill_batch([self.PROMPT[:4]], [1]))
        batch: ForwardBatch = runner.prefill_batch([PROMPTS[3], self.PROMPT[4:]], [0, 1], [0, 4])
        if way != "live lengths":
            padded = way == "padded mask"
            batch = pad(runner, batch, 3 if padded else 2, 16 if padded else batch.num_tokens)
        torch.testing.assert_close(runner.forward(batch)[1:2], expected)

    def test_without_graphs_for_it_a_later_chunk_is_marked(self):
        """It then runs eagerly; captured graphs would not see the earlier tokens."""
        config = GraphConfig(prefill=PhaseConfig(backend="full"), decode=PhaseConfig(backend="disabled"))
        runner = CausalLMRunner(make_model(), max_len=32, graph_config=config)
        batch = runner.prefill_batch([[1, 2]], [0], [4])
        assert batch.variant == CONTINUED
        with pytest.raises(InputError, match="max_history"):
            runner.forward(pad(runner, batch, 1, 2))

    @pytest.mark.parametrize(("prompts", "starts"), [([[]], None), ([[1] * 33], None), ([[1, 2]], [31])])
    def test_a_prompt_that_does_not_fit_is_refused(self, runner, prompts, starts):
        """Empty, longer than a slot, or longer than what is left of it."""
        with pytest.raises(InputError):
            runner.prefill_batch(prompts, [0], starts)


class TestModels:
    def test_the_model_still_works_for_others(self):
        """Its own ``generate`` gives the same tokens after a runner took it, padded batches included."""
        model = make_model()
        expected = [reference(model, prompt, 4) for prompt in PROMPTS[:2]]
        CausalLMRunner(model, max_len=32)
        assert [reference(model, prompt, 4) for prompt in PROMPTS[:2]] == expected
        ids = torch.tensor([PROMPTS[0], [0, 0, *PROMPTS[1]]])
        mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
        found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
        assert found[:, 3:].tolist() == expected

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            (transformers.MistralConfig(**SMALL, sliding_window=8), "sliding_window"),
            (
                transformers.Qwen2Config(
                    **SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1
                ),
                "layer_types",
            ),
            (
                transformers.LlamaConfig(
                    **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
                ),
                "rope_type",
            ),
        ],
        ids=["sliding window", "mixed layers", "rotary frequencies from the host"],
    )
    def test_a_model_that_slots_cannot_serve_is_refused(self, config, field):
        """The error names what it is about the model, and the model is left alone."""
        model = transformers.AutoModelForCausalLM.from_config(config)
        before = model.config._attn_implementation
        with pytest.raises(ConfigError, match=field):
            CausalLMRunner(model)
        assert model.config._attn_implementation == before

    def test_something_else_is_refused(self):
        """A module that is no model of transformers."""
        with pytest.raises(ConfigError, match="Linear"):
            CausalLMRunner(torch.nn.Linear(2, 2))

    def test_buckets_beyond_the_slots_are_refused(self):
        """A decode graph reads one slot a row."""
        config = GraphConfig(decode=PhaseConfig(buckets=(1, 9)))
        with pytest.raises(ConfigError, match="max_requests"):
            CausalLMRunner(make_model(), max_requests=8, graph_config=config)


def gemma() -> Any:
    """Its attention can be served; its norms scale by ``1 + weight``."""
    config = transformers.GemmaConfig(**SMALL, head_dim=8)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class TestFusedNorms:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["float32", "bfloat16"]
    )
    def test_logits_differ_by_rounding(self, family, dtype, tolerance):
        """
        Prefill and decode give the model's own logits within 0.0001 of the largest in single precision and
        0.1 of it in bfloat16, with no norm of the model's own left.
        """
        logits = []
        for fused in (False, True):
            model = make_model(family).to(dtype)
            for name, weight in model.named_parameters():
                if "norm" in name:  # all one in a fresh model
                    weight.data = torch.linspace(0.5, 1.5, len(weight), dtype=dtype)
            runner = CausalLMRunner(model, max_requests=6, max_len=32, fused_norms=fused)
            prefilled = runner.forward(runner.prefill_batch(PROMPTS, range(4)))
            logits.append(torch.cat((prefilled, runner.forward(decode_next(runner)))).float())
            names = {type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__}
            assert (names == {"RMSNorm"}) == fused
        assert (logits[1] - logits[0]).abs().max() <= tolerance * logits[0].abs().max()

    def test_weights_are_shared_under_their_names(self):
        """Every parameter is the very object that it was; a second runner finds nothing left to do."""
        model = make_model("qwen3")
        before = dict(model.named_parameters())
        keys = list(model.state_dict())
        for _ in range(2):
            CausalLMRunner(model, max_len=32, fused_norms=True)
            after = dict(model.named_parameters())
            assert list(after) == list(before)
            assert all(after[name] is before[name] for name in before)
            assert list(model.state_dict()) == keys
        norm = model.model.norm
        assert isinstance(norm, torch.nn.RMSNorm)
        assert norm.eps == model.config.rms_norm_eps
        assert not norm.training

    @pytest.mark.parametrize("case", ["other scale", "other epsilon", "bias", "none"])
    def test_other_norms_are_refused_and_the_model_is_left_alone(self, case):
        """The error names the module and the way out; no module and no setting of the model has changed."""
        model = gemma() if case == "other scale" else make_model()
        last = model.model.norm
        if case == "other epsilon":  # the one that is compared last
            last.forward = lambda x: torch.nn.functional.rms_norm(
                x, (32,), last.weight, 4 * last.variance_epsilon
            )
        elif case == "bias":
            last.bias = torch.nn.Parameter(torch.zeros(32))
        elif case == "none":
            for module in model.modules():
                if type(module).__name__ == "LlamaRMSNorm":
                    del module.variance_epsilon
        before, attention = dict(model.named_modules()), model.config._attn_implementation
        named = {"other scale": r"model\.layers\.0\.input_layernorm", "none": "has no RMSNorm"}
        with pytest.raises(ConfigError, match=named.get(case, r"model\.norm, a LlamaRMSNorm")) as caught:
            CausalLMRunner(model, max_len=32, fused_norms=True)
        assert "Leave fused_norms off" in str(caught.value)
        assert dict(model.named_modules()) == before
        assert model.config._attn_implementation == attention

    def test_the_default_random_generator_is_left_alone(self):
        """The inputs that norms are compared on are drawn from another one."""
        before = torch.get_rng_state()
        CausalLMRunner(make_model(), max_len=32, fused_norms=True)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_graphs_give_what_eager_gives(self, device, dtype):
        """Bit for bit, in both phases, where graph and eager have the same size."""
        config = GraphConfig(
            decode=PhaseConfig(buckets=(4,)),
            prefill=PhaseConfig(backend="full", buckets=(18,), max_requests=4),
        )
        model = make_model().to(device, dtype)
        runner = CausalLMRunner(model, max_requests=4, max_len=32, graph_config=config, fused_norms=True)
        capture = capture_cuda_graphs(model_runner=runner)
        packed = runner.prefill_batch(PROMPTS, range(4))
        batch = ForwardBatch(phase="prefill", num_requests=4, num_tokens=18, inputs=packed.inputs)
        for graphs, step in ((capture.prefill_runner, batch), (capture.decode_runner, decode_next(runner))):
            found = graphs.execute(step)
            assert torch.equal(found, runner.forward(step))
            assert graphs.stats.replayed == 1


def make_engine(
    model: Any, prefill: str = "full", decode: str = "full", **settings: Any
) -> tuple[Engine, CaptureReport]:
    buckets = {"buckets": (4, 8, 16)} if prefill != "disabled" else {}
    config = GraphConfig(
        decode=PhaseConfig(backend=decode, max_size=3),
        prefill=PhaseConfig(backend=prefill, max_requests=3, max_padding=4.0, **buckets),
    )
    runner = CausalLMRunner(model, max_requests=3, max_len=32, graph_config=config, **settings)
    capture = capture_cuda_graphs(model_runner=runner)
    return Engine.from_capture(runner, capture, max_prefill_tokens=8), capture.report


MANY = [*PROMPTS, [60, 61], [4] * 10, [33, 5, 60]]


class TestEngine:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("prefill", ["full", "breakable", "disabled"])
    def test_joining_and_leaving_changes_no_tokens(self, family, prefill):
        """
        Seven prompts share three slots, end at different times, the long ones in chunks,
        and each gets what it gets alone.
        """
        model = make_model(family)
        stops = [reference(model, MANY[1], 3)[-1]]
        model.generation_config.eos_token_id = stops
        expected = [tuple(reference(model, prompt, 7)) for prompt in MANY]
        assert len({len(tokens) for tokens in expected}) > 1
        engine, _ = make_engine(model, prefill, max_history=8)
        found = engine.generate(MANY, 7)
        assert [one.tokens for one in found] == expected
        assert [one.finish_reason == "stop" for one in found] == [one[-1] in stops for one in expected]
        assert engine.decode.stats.ran_eagerly == 0
        if prefill != "disabled":
            assert engine.prefill.stats.replayed == engine.prefill_timing.steps
        again = engine.generate(MANY[::-1], 7)
        assert [one.tokens for one in again] == expected[::-1]

    def test_a_later_chunk_without_a_graph_runs_eagerly_and_is_right(self):
        """The reason says that its variant was not captured."""
        model = make_model()
        expected = tuple(reference(model, [4] * 10, 3))
        engine, _ = make_engine(model)
        assert engine.generate([[4] * 10], 3)[0].tokens == expected
        assert engine.prefill.stats.eager == {Reason.UNKNOWN_VARIANT: 1}

    def test_graphs_captured_again_amid_a_generation_harm_nothing(self):
        """Warm-up and capture write to the reserved slot alone."""
        model = make_model()
        expected = [tuple(reference(model, prompt, 5)) for prompt in PROMPTS]
        engine, _ = make_engine(model, max_history=8)

        def disturb(index: int, token: int) -> None:
            del index, token
            engine.decode.recapture()

        assert [one.tokens for one in engine.generate(PROMPTS, 5, on_token=disturb)] == expected

    def test_tokens_are_handed_out_as_they_come(self):
        """The callback sees every token once, in order, and those of a batch side by side."""
        engine, _ = make_engine(make_model())
        seen: list[tuple[int, int]] = []
        found = engine.generate(PROMPTS[:2], 4, on_token=lambda *step: seen.append(step))
        assert [index for index, _ in seen] == [0, 1] * 4
        for index, completion in enumerate(found):
            assert tuple(token for owner, token in seen if owner == index) == completion.tokens

    def test_stop_tokens_can_be_given(self):
        """They replace the model's own."""
        model = make_model()
        second = reference(model, PROMPTS[0], 2)[1]
        engine, _ = make_engine(model)
        engine.stop_tokens = frozenset([second])
        found = engine.generate(PROMPTS[:1], 5)[0]
        assert found.tokens[-1] == second
        assert found.finish_reason == "stop"

    @pytest.mark.parametrize(("setting", "expected"), [(None, set()), (3, {3}), ([3, 4], {3, 4})])
    def test_stop_tokens_come_from_the_generation_settings(self, setting, expected):
        """None, one or several."""
        model = make_model()
        model.generation_config.eos_token_id = setting
        assert stop_tokens(model) == expected

    @pytest.mark.parametrize(("prompts", "count"), [([[1], []], 2), ([[1] * 30], 4), ([[1]], 0)])
    def test_what_cannot_end_well_is_refused_before_anything_runs(self, prompts, count):
        """An empty prompt, one whose answer does not fit, or no tokens at all."""
        engine, _ = make_engine(make_model())
        with pytest.raises(InputError):
            engine.generate(prompts, count)
        assert engine.prefill_timing.steps == 0
        assert engine.generate([[1]], 1)[0].finish_reason == "length"

    def test_a_failure_amid_a_generation_leaves_the_engine_usable(self):
        """What was running is dropped, and the next call starts afresh."""
        model = make_model()
        engine, _ = make_engine(model)

        def fail(index: int, token: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:2], 4, on_token=fail)
        before = engine.prefill_timing.tokens
        assert list(engine.generate(PROMPTS[:1], 4)[0].tokens) == reference(model, PROMPTS[0], 4)
        assert engine.prefill_timing.tokens - before == len(PROMPTS[0])

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
    @pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
    @pytest.mark.parametrize("prefill", ["full", "breakable"])
    def test_the_same_on_a_gpu(self, prefill, kernel):
        """Tokens through device graphs are those of ``generate``."""
        model = make_model().to("cuda")
        expected = [tuple(reference(model, prompt, 7)) for prompt in MANY]
        engine, _ = make_engine(model, prefill, max_history=8, kernel=kernel)
        assert [one.tokens for one in engine.generate(MANY, 7)] == expected
        assert engine.decode.stats.ran_eagerly == 0


class TestText:
    @staticmethod
    def decode(tokens: Any) -> str:
        """One byte a token, as a byte-level vocabulary reads them."""
        return bytes(tokens).decode(errors="replace")

    def test_a_character_of_several_tokens_appears_whole(self):
        """No piece holds half a character, and all pieces are the text."""
        text = "né à 東京 👋🏽!"
        stream = TextStream(self.decode)
        pieces = [stream.push(token) for token in text.encode()]
        assert "".join(pieces) + stream.finish() == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)

    def test_what_never_becomes_a_character_is_shown_at_the_end(self):
        """A text that stops amid a character keeps what came before it."""
        stream = TextStream(self.decode)
        pieces = [stream.push(token) for token in b"ab\xe6\x9d"]
        assert "".join(pieces) == "ab"
        assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
        assert stream.finish() == ""

    def test_bytes_stand_in_for_a_vocabulary(self):
        """Random weights need tokens, not words."""
        assert ByteTokenizer().encode("é") == [0xC3, 0xA9]
        assert ByteTokenizer().decode([7, 300]) == "<7><300>"
