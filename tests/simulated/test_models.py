"""Unmodified models of transformers on the simulated device."""

import copy

import pytest
import torch

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def models(request, sim):
    """A tiny random Llama on the CPU, and its copy on device 1."""
    if sim.name not in ("npu", "acme"):
        pytest.skip("the same operators for every name; two names are enough")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        pad_token_id=0,
        attn_implementation=request.param,
    )
    model = LlamaForCausalLM(config).eval()
    return model, copy.deepcopy(model).to(f"{sim.name}:1")


@pytest.fixture
def inputs():
    """Token ids, a 4-D mask and positions: what makes a forward free of host reads."""
    ids = torch.randint(1, 128, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None].expand(2, 1, 7, 7).contiguous()
    positions = torch.arange(7)[None].expand(2, 7).contiguous()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def move(inputs, where):
    """*inputs* on a device."""
    return {name: value.to(where) for name, value in inputs.items()}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_logits_equal_the_cpu(models, inputs, sim, mode):
    """
    Logits are bit-equal to the CPU's, with and without masks, in every gradient mode.
    """
    here, there = models
    padded = torch.ones(2, 7, dtype=torch.int64)
    padded[0, :3] = 0
    with mode():
        for given in (inputs, {"input_ids": inputs["input_ids"]}, {**inputs, "attention_mask": padded}):
            want = here(**given).logits
            got = there(**move(given, f"{sim.name}:1")).logits
            assert got.device.index == 1
            assert torch.equal(got.cpu(), want)


def test_generation_equals_the_cpu(models, inputs, sim):
    """
    Greedy generation gives the CPU's tokens.
    """
    here, there = models
    given = {"input_ids": inputs["input_ids"], "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    want = here.generate(**given, max_new_tokens=5, do_sample=False)
    got = there.generate(**move(given, f"{sim.name}:1"), max_new_tokens=5, do_sample=False)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_captured_model_replays_bit_equal(models, inputs, sim, dev, graph_type, mode, deferred):
    """
    Nothing executes at capture; each replay on fresh tokens gives the CPU's logits, without the model's
    Python, immediate or deferred.
    """
    here, there = models
    static = move(inputs, f"{sim.name}:1")
    graph = graph_type()
    sim.set_deferred(deferred)
    try:
        with mode(), dev.device(1):
            there(**static, use_cache=False)
            with dev.graph(graph, stream=dev.Stream()):
                logits = there(**static, use_cache=False).logits
            assert logits.isnan().all().item()
            for seed in (2, 3):
                ids = torch.randint(1, 128, (2, 7), generator=torch.Generator().manual_seed(seed))
                static["input_ids"].copy_(ids)
                graph.replay()
                assert torch.equal(logits.cpu(), here(**{**inputs, "input_ids": ids}).logits)
            graph.reset()
    finally:
        sim.set_deferred(False)
