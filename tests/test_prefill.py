"""Prefill: packed prompts through ``full`` and ``breakable`` graphs, compared with a plain dense forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from graphplat import (
    ForwardBatch,
    GraphConfig,
    GraphplatWarning,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    eager_on_graph,
    live_batch,
)
from graphplat.errors import ConfigError, InputError
from graphplat.testing.reference import CONTINUED, SCATTERED, SHAPES, ReferenceRunner, ReferenceShape

BACKENDS = ("full", "breakable")
BUCKETS = (4, 8, 16, 32)
SLOTS = 6


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """How both phases are captured."""
    return str(request.param)


def settings(backend: str, **prefill: Any) -> GraphConfig:
    return GraphConfig(
        decode=PhaseConfig(backend=backend, buckets=(1, 2, 4), variants=(SCATTERED,)),
        prefill=PhaseConfig(**({"backend": backend, "buckets": BUCKETS, "max_requests": 4} | prefill)),
    )


@pytest.fixture
def reference(device: torch.device, backend: str) -> Callable[..., Any]:
    """Make a tiny reference runtime and capture it; keywords are prefill settings."""

    def make(*, kind: type[ReferenceRunner] = ReferenceRunner, history: int = 16, **prefill: Any) -> Any:
        runner = kind(
            "tiny",
            device=device,
            slots=SLOTS,
            max_len=40,
            max_history=history,
            graph_config=settings(backend, **prefill),
        )
        return runner, capture_cuda_graphs(model_runner=runner)

    return make


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(96) for _ in range(length)] for length in lengths]


def dense(runner: ReferenceRunner, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([runner.dense(prompt)[-1] for prompt in prompts])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Right results


@pytest.mark.parametrize(
    "lengths",
    [(3,), (4,), (2, 1), (3, 5), (1, 1, 1, 1), (7, 2, 4, 3), (16,), (9, 12, 1, 10), (17, 14)],
    ids=str,
)
def test_packed_prompts_agree_with_a_dense_forward(reference, lengths):
    """Whatever is packed, each request's logits are those of its prompt alone, and a graph gave them."""
    runner, capture = reference()
    prompts = prompts_of(*lengths)
    batch = runner.prefill_batch(prompts)
    decision = capture.prefill_runner.explain(batch)
    assert decision.key is not None
    assert decision.key.size == min(size for size in BUCKETS if size >= sum(lengths))
    found = capture.prefill_runner.execute(batch)
    assert found.shape == (len(lengths), 96)
    close(found, dense(runner, prompts))
    assert capture.prefill_runner.stats.replayed == 1


def test_steps_of_any_size_in_any_order_never_mix(reference):
    """Forty steps of prefill, chunks and decode over all buckets, each as if it were the first."""
    runner, capture = reference()
    numbers = random.Random(5)
    texts: dict[int, list[int]] = {}
    for _ in range(40):
        ready = [slot for slot in texts if len(texts[slot]) < 36]
        if ready and numbers.random() < 0.5:
            slots = ready[: numbers.choice((1, 2, 3))]
            new = [numbers.randrange(96) for _ in slots]
            positions = [len(texts[slot]) for slot in slots]
            for slot, token in zip(slots, new, strict=True):
                texts[slot].append(token)
            found = capture.decode_runner.execute(runner.decode_batch(new, positions, slots))
        else:
            slots = numbers.sample(range(SLOTS), numbers.choice((1, 2, 3)))
            prompts = prompts_of(*(numbers.choice((1, 3, 6)) for _ in slots), seed=numbers.randrange(1000))
            keep = [numbers.random() < 0.3 and 0 < len(texts.get(slot, [])) < 12 for slot in slots]
            starts = [len(texts[slot]) if kept else 0 for slot, kept in zip(slots, keep, strict=True)]
            for slot, prompt, start in zip(slots, prompts, starts, strict=True):
                texts[slot] = texts.get(slot, [])[:start] + prompt
            found = capture.prefill_runner.execute(runner.prefill_batch(prompts, slots, starts))
        close(found, dense(runner, [texts[slot] for slot in slots]))
    assert capture.prefill_runner.stats.replayed
    assert capture.decode_runner.stats.ran_eagerly == 0


def test_greedy_generation_agrees_with_a_dense_forward(reference):
    """Prefill, then decode through graphs, gives the tokens that recomputing the whole text gives."""
    runner, capture = reference()
    texts = prompts_of(5, 2, 8)
    found = capture.prefill_runner.execute(runner.prefill_batch(texts))
    for _ in range(6):
        close(found, dense(runner, texts))
        new = found.argmax(-1).tolist()
        positions = [len(text) for text in texts]
        texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
        found = capture.decode_runner.execute(runner.decode_batch(new, positions))
    assert capture.decode_runner.stats.replayed == 6


@pytest.mark.parametrize("history", [16, 0], ids=["history captured", "no history captured"])
def test_chunked_prefill_sees_earlier_tokens(reference, backend, history):
    """
    A prompt in three chunks, packed with others, ends as the whole prompt would. Where
    no captured attention can see earlier tokens the batch runs eagerly and says why.
    """
    runner, capture = reference(history=history)
    long, other = prompts_of(14, 9)
    prefill = capture.prefill_runner
    prefill.execute(runner.prefill_batch([long[:5]], slots=[3]))
    prefill.execute(runner.prefill_batch([other[:4], long[5:11]], slots=[1, 3], starts=[0, 5]))
    found = prefill.execute(runner.prefill_batch([long[11:], other[4:]], slots=[3, 1], starts=[11, 4]))
    close(found, dense(runner, [long, other]))
    if backend == "breakable" or history:
        assert prefill.stats.replayed == 3
    else:
        assert prefill.stats.eager == {Reason.UNKNOWN_VARIANT: 2}
        assert CONTINUED in prefill.stats.last.detail


def test_more_history_than_captured_runs_eagerly(reference, backend):
    """Earlier tokens beyond what the captured attention holds: eager, with a reason, and right."""
    runner, capture = reference(history=8)
    (text,) = prompts_of(18)
    capture.prefill_runner.execute(runner.prefill_batch([text[:12]]))
    found = capture.prefill_runner.execute(runner.prefill_batch([text[12:]], starts=[12]))
    close(found, dense(runner, [text]))
    expected = {} if backend == "breakable" else {Reason.OVER_MAX_DIM: 1}
    assert capture.prefill_runner.stats.eager == expected


def test_a_batch_without_host_lengths_is_right_too(reference):
    """The eager attention reads lengths from the batch's tensors when nobody gives them on the host."""
    runner, capture = reference()
    prompts = prompts_of(5, 2, 4)
    packed = runner.prefill_batch(prompts)
    plain = ForwardBatch(phase=Phase.PREFILL, num_requests=3, num_tokens=11, inputs=packed.inputs)
    close(capture.prefill_runner.execute(plain), dense(runner, prompts))
    close(capture.eager_runner.execute(plain), dense(runner, prompts))


# Padding


def test_unused_rows_are_empty_requests_of_the_dummy_slot(reference):
    """
    After a larger batch, a smaller one finds cumulative lengths that stay at its end, lengths of
    zero, and tokens that belong to the dummy slot.
    """
    runner, capture = reference()
    prefill = capture.prefill_runner
    prefill.execute(runner.prefill_batch(prompts_of(4, 4, 4, 4)))
    prefill.execute(runner.prefill_batch(prompts_of(6, 5)))
    key = prefill.stats.last.key
    static = prefill.entries[key].inputs.views()
    assert (key.requests, key.tokens) == (4, 16)
    assert static["cu_seqlens"].tolist() == [0, 6, 11, 11, 11]
    assert static["seq_lens"].tolist() == [6, 5, 0, 0]
    assert static["slots"].tolist() == [0] * 6 + [1] * 5 + [runner.cache.dummy] * 5
    assert static["positions"].tolist() == [*range(6), *range(5)] + [0] * 5


def test_padded_tokens_leave_every_real_slot_alone(reference):
    """Only the rows of the batch's own tokens change; the reserved slot takes the rest."""
    runner, capture = reference()
    cache = runner.cache
    cache.data.fill_(7.0)
    capture.prefill_runner.execute(runner.prefill_batch(prompts_of(3, 2), slots=[SLOTS - 1, 0]))
    capture.decode_runner.execute(runner.decode_batch([1, 2, 3], [9, 9, 9]))
    for slot, written in {5: {0, 1, 2}, 0: {0, 1, 9}, 1: {9}, 2: {9}, 3: set(), 4: set()}.items():
        touched = (cache.data[:, :, slot] != 7.0).any(-1).any(0).any(0).any(0)
        assert set(touched.nonzero().flatten().tolist()) == written, slot


def test_padded_rows_of_shared_memory_are_defined(reference, backend):
    """What an eager attention leaves behind the real rows never reaches a result."""
    runner, capture = reference()
    if backend == "breakable":
        for tensor in runner.extra_tensors().values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.fill_(float("nan"))
    prompts = prompts_of(6, 5)
    found = capture.prefill_runner.execute(runner.prefill_batch(prompts))
    close(found, dense(runner, prompts))
    assert runner.cache.data.isfinite().all(), "padded tokens carry no NaN into the dummy slot"


def test_an_eager_attention_does_no_work_for_padding(device):
    """It sees the live lengths of the batch, not those of the bucket."""
    seen: list[int] = []

    class Counting(ReferenceRunner):
        def attend_live(self, batch: Any, *args: Any) -> torch.Tensor:
            seen.append(sum(span.length for span in batch.spans) if hasattr(batch, "spans") else 0)
            return super().attend_live(batch, *args)

    runner = Counting("tiny", device=device, slots=SLOTS, graph_config=settings("breakable"))
    capture = capture_cuda_graphs(model_runner=runner)
    seen.clear()
    capture.prefill_runner.execute(runner.prefill_batch(prompts_of(6, 5)))
    assert seen == [11] * runner.shape.layers


# Choosing


def test_too_many_requests_run_eagerly(reference):
    """More requests than a graph has rows: eager, with a reason, and right."""
    runner, capture = reference()
    prompts = prompts_of(1, 2, 1, 3, 1)
    found = capture.prefill_runner.execute(runner.prefill_batch(prompts))
    close(found, dense(runner, prompts))
    assert capture.prefill_runner.stats.eager == {Reason.OVER_MAX_REQUESTS: 1}
    assert "5 requests" in capture.prefill_runner.stats.last.detail


def test_wasteful_padding_runs_eagerly(reference):
    """A bucket of more than ``max_padding`` times the tokens is not used."""
    runner, capture = reference(buckets=(4, 32))
    prefill = capture.prefill_runner
    for lengths in ((5, 4), (10, 5), (10, 6), (20, 12), (4,)):
        prompts = prompts_of(*lengths)
        batch = runner.prefill_batch(prompts)
        assert prefill.can_run_graph(batch) is (sum(lengths) in (16, 32, 4)), lengths
        close(prefill.execute(batch), dense(runner, prompts))
    assert prefill.stats.eager == {Reason.PADDING_WASTE: 2}
    assert "max_padding=2.0" in prefill.explain(runner.prefill_batch(prompts_of(9))).detail


def test_the_limit_on_padding_can_be_set(reference):
    """A higher ``max_padding`` takes a larger bucket."""
    runner, capture = reference(buckets=(4, 32), max_padding=8.0)
    assert capture.prefill_runner.can_run_graph(runner.prefill_batch(prompts_of(5)))


def test_more_tokens_than_any_bucket_run_eagerly(reference):
    """Eager, with a reason, and right."""
    runner, capture = reference()
    prompts = prompts_of(30, 3)
    close(capture.prefill_runner.execute(runner.prefill_batch(prompts)), dense(runner, prompts))
    assert capture.prefill_runner.stats.eager == {Reason.OVER_MAX_BUCKET: 1}


class Unlucky(ReferenceRunner):
    """A runtime whose prefill of eight tokens fails while ``error`` is set."""

    error: Exception | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self.error and batch.phase is Phase.PREFILL and batch.inputs["input_ids"].shape[0] == 8:
            raise self.error
        return super().forward(batch)


def unlucky(device: torch.device, backend: str, error: Exception) -> tuple[Any, Any]:
    runner = Unlucky("tiny", device=device, slots=SLOTS, graph_config=settings(backend, on_failure="eager"))
    runner.error = error
    short = isinstance(error, torch.OutOfMemoryError)
    with pytest.warns(GraphplatWarning, match="too little memory") if short else nullcontext():
        capture = capture_cuda_graphs(model_runner=runner)
    runner.error = None
    assert capture.prefill_runner.buckets == (4, 16, 32)
    return runner, capture


def test_a_larger_bucket_steps_in_within_the_limit_on_padding(device, backend):
    """Where no memory was left for a bucket the next one serves, unless that pads too much."""
    runner, capture = unlucky(device, backend, torch.OutOfMemoryError("no memory for this one"))
    prefill = capture.prefill_runner
    assert [skip.reason for skip in capture.report.skipped] == [Reason.OUT_OF_MEMORY] * len(
        capture.report.skipped
    )
    assert prefill.explain(runner.prefill_batch(prompts_of(8))).key.size == 16
    assert prefill.explain(runner.prefill_batch(prompts_of(7))).reason is Reason.PADDING_WASTE
    for lengths in ((8,), (3, 4)):
        prompts = prompts_of(*lengths)
        close(prefill.execute(runner.prefill_batch(prompts)), dense(runner, prompts))


def test_a_bucket_that_failed_to_capture_runs_eagerly(device, backend):
    """Its batches are right, the reason is counted, and other buckets keep their graphs."""
    runner, capture = unlucky(device, backend, ValueError("not this one"))
    for lengths in ((3, 5), (4,), (9,)):
        prompts = prompts_of(*lengths)
        close(capture.prefill_runner.execute(runner.prefill_batch(prompts)), dense(runner, prompts))
    assert capture.prefill_runner.stats.eager == {Reason.CAPTURE_FAILED: 1}
    assert capture.prefill_runner.stats.replays == {4: 1, 16: 1}


# Capturing


def test_capture_goes_from_the_largest_bucket_to_the_smallest(reference, backend):
    """In the report's order, one backend, and segments where attention breaks."""
    runner, capture = reference()
    shapes = [shape for shape in capture.report.shapes if shape.key.phase is Phase.PREFILL]
    sizes = [shape.key.size for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == set(BUCKETS)
    assert {shape.backend for shape in shapes} == {backend}
    expected = runner.shape.layers + 1 if backend == "breakable" else 1
    assert {shape.segments for shape in shapes} == {expected}
    assert {(shape.key.tokens, shape.key.requests) for shape in shapes} == {(s, min(4, s)) for s in BUCKETS}


def test_a_draft_runner_prefills_through_graphs_and_decodes_eagerly(device, backend):
    """A speculative draft worker captures its own decode graphs later; its prefill is as any other's."""
    runner = ReferenceRunner("tiny", device=device, slots=SLOTS, graph_config=settings(backend))
    runner.is_draft_worker = True
    capture = capture_cuda_graphs(model_runner=runner, capture_decode_cuda_graph=False)
    assert capture.decode.runner is capture.eager_runner
    assert capture.decode.graph_mem_usage == 0
    assert [(skip.phase, skip.reason) for skip in capture.report.skipped] == [
        (Phase.DECODE, Reason.DRAFT_RUNNER)
    ]
    prompts = prompts_of(3, 4)
    close(capture.prefill_runner.execute(runner.prefill_batch(prompts)), dense(runner, prompts))
    assert capture.prefill_runner.stats.replayed == 1
    found = capture.decode_runner.execute(runner.decode_batch([5, 6], [3, 4]))
    close(found, dense(runner, [[*prompts[0], 5], [*prompts[1], 6]]))


def test_without_prefill_graphs_the_eager_runner_prefills(device):
    """The default settings leave prefill to the eager runner, and say so."""
    runner = ReferenceRunner(
        "tiny", device=device, slots=SLOTS, graph_config=GraphConfig(decode=PhaseConfig(buckets=(1, 2)))
    )
    capture = capture_cuda_graphs(model_runner=runner)
    assert capture.prefill_runner is capture.eager_runner
    assert [(skip.phase, skip.reason) for skip in capture.report.skipped] == [
        (Phase.PREFILL, Reason.PHASE_DISABLED)
    ]
    prompts = prompts_of(30, 12, 3)
    close(capture.prefill_runner.execute(runner.prefill_batch(prompts)), dense(runner, prompts))


def test_released_prefill_graphs_are_captured_again(reference):
    """Eager in between, with a reason."""
    runner, capture = reference()
    prefill, prompts = capture.prefill_runner, prompts_of(5, 6)
    prefill.release()
    close(prefill.execute(runner.prefill_batch(prompts)), dense(runner, prompts))
    prefill.recapture()
    close(prefill.execute(runner.prefill_batch(prompts)), dense(runner, prompts))
    assert prefill.stats.eager == {Reason.RELEASED: 1}
    assert prefill.stats.replayed == 1


# The reference itself


@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_both_decode_kernels_agree_with_a_dense_forward(device, kernel):
    """Compact slots are read in place, others are gathered; all four ways give the dense logits."""
    config = GraphConfig(decode=PhaseConfig(buckets=(4,), variants=(SCATTERED,)))
    runner = ReferenceRunner("tiny", device=device, slots=SLOTS, kernel=kernel, graph_config=config)
    capture = capture_cuda_graphs(model_runner=runner)
    prompts = prompts_of(5, 2, 8)
    for slots, variant in (([0, 1, 2], None), ([4, 0, 2], SCATTERED)):
        capture.prefill_runner.execute(runner.prefill_batch(prompts, slots))
        batch = runner.decode_batch([7, 8, 9], [5, 2, 8], slots)
        assert batch.variant == variant
        found = capture.decode_runner.execute(batch)
        texts = [[*prompt, token] for prompt, token in zip(prompts, (7, 8, 9), strict=True)]
        close(found, dense(runner, texts))
    assert capture.decode_runner.stats.replayed == 2


def test_an_untied_head_is_a_weight_of_its_own(device):
    """A shape with ``tied=False`` draws its head apart; with True the embedding serves."""
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 24, "vocab": 32}
    for tied in (True, False):
        runner = ReferenceRunner(ReferenceShape(**sizes, tied=tied), device=device, slots=2)
        decoder = runner.decoder
        assert (decoder.head is decoder.embedding) is tied
        assert sum(p.numel() for p in decoder.parameters()) == runner.shape.parameters


def test_the_same_seed_gives_the_same_weights():
    """On each device and, rounded, in each dtype; another seed gives others."""
    first, second, other = (ReferenceRunner("tiny", slots=1, seed=seed).decoder.head for seed in (3, 3, 4))
    rounded = ReferenceRunner("tiny", slots=1, seed=3, dtype=torch.bfloat16).decoder.head
    assert torch.equal(first, second)
    assert torch.equal(first.bfloat16(), rounded)
    assert not torch.equal(first, other)


def test_the_named_shapes_are_those_of_the_models_they_stand_for():
    """Parameters of SmolLM2-135M and Llama-3-8B."""
    assert SHAPES["135M"].parameters == 134_515_008
    assert SHAPES["8B"].parameters == 8_030_261_248


def test_what_the_reference_cannot_hold_is_refused():
    """Unknown shapes, uneven heads, empty caches, empty and overlong prompts."""
    with pytest.raises(ConfigError, match="no shape 'huge'"):
        ReferenceRunner("huge")
    with pytest.raises(ConfigError, match="do not divide"):
        ReferenceShape(layers=1, hidden=16, heads=3, kv_heads=1, intermediate=8, vocab=8)
    with pytest.raises(ConfigError, match="at least one"):
        ReferenceRunner("tiny", slots=0)
    runner = ReferenceRunner("tiny", slots=1, max_len=8)
    for prompt, start in (([], 0), ([1] * 9, 0), ([1, 2], 7)):
        with pytest.raises(InputError, match="tokens fit"):
            runner.prefill_batch([prompt], starts=[start])


def test_any_forward_can_prefill_with_breaks(runtime, device):
    """Not only the reference: one sum a request, taken eagerly at the live lengths on the host."""

    @eager_on_graph(rows="requests")
    def sums(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        offset = 0
        for row, length in enumerate(live_batch().inputs["cu_seqlens"].diff().tolist()):
            out[row] = x[offset : offset + length].sum(0)
            offset += length
        return out

    def forward(batch: Any) -> torch.Tensor:
        x = batch.inputs["x"] * 2
        return sums(x, x.new_empty(batch.inputs["cu_seqlens"].shape[0] - 1, 3)) + 1

    spec = InputSpec(
        x=TensorSpec(("tokens", 3), dtype=torch.float32), cu_seqlens=TensorSpec(("requests+1",), fill="last")
    )
    runner = capture_cuda_graphs(
        model_runner=runtime(
            forward,
            {Phase.PREFILL: spec},
            decode=PhaseConfig(backend="disabled"),
            prefill=PhaseConfig(backend="breakable", buckets=(8, 16), max_requests=3),
        )
    ).prefill_runner
    for lengths in ((5, 6, 3), (9,), (4, 4), (1, 6)):
        total = sum(lengths)
        x = torch.randint(0, 9, (total, 3)).to(device, torch.float32)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
        batch = ForwardBatch(
            phase=Phase.PREFILL,
            num_requests=len(lengths),
            num_tokens=total,
            inputs={"x": x, "cu_seqlens": ends},
        )
        expected = torch.stack([part.sum(0) * 2 + 1 for part in x.split(lengths)])
        assert torch.equal(runner.execute(batch), expected)
    assert runner.stats.replayed == 4
