"""For any spec, ladder and sequence of batches: a step gives what the forward gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphplat import (
    ForwardBatch,
    GraphConfig,
    HostSpec,
    InputError,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    TensorSpec,
    UpTo,
    capture_cuda_graphs,
    tree,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclasses.dataclass(frozen=True)
class Group:
    first: Any
    rest: Any


WRAPPERS = {
    "plain": lambda leaf: leaf,
    "dict": lambda leaf: {"k": leaf},
    "list": lambda leaf: [leaf],
    "deep": lambda leaf: {"g": Group(leaf, ({"z": leaf},))},
}


@attrs.frozen
class Field:
    """A tensor input, its place in the structure, and whether it is optional."""

    spec: TensorSpec
    wrap: str
    width: int


@st.composite
def fields(draw: Any, *, must: bool = False) -> Field:
    rows = draw(st.sampled_from(["requests", "tokens", "requests+1"] + ([] if must else [None])))
    inner = draw(st.sampled_from([(), (2,), (UpTo(3),), (2, UpTo(3))]))
    dims = ((rows,) if rows else ()) + inner
    optional = not must and draw(st.booleans())
    fill = draw(st.sampled_from([-1, 0, 77] + (["last"] if rows else [])))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.int32, torch.float64]))
    wrap = "plain" if optional else draw(st.sampled_from(list(WRAPPERS)))
    return Field(TensorSpec(dims, dtype=dtype, fill=fill, optional=optional), wrap, 3)


@attrs.frozen
class Case:
    """A runtime: what it takes, which graphs it gets, and how."""

    fields: dict[str, Field]
    host: bool
    variants: tuple[str, ...]
    per: int
    decode: PhaseConfig
    prefill: PhaseConfig


@st.composite
def cases(draw: Any) -> Case:
    found = {"f0": draw(fields(must=True))}
    for index in range(draw(st.integers(0, 2))):
        found[f"f{index + 1}"] = draw(fields())
    variants = draw(st.sampled_from([(), ("v",)]))
    outputs = draw(st.sampled_from(["copy", "view"]))
    lazy = draw(st.booleans())
    common = {
        "variants": variants,
        "outputs": outputs,
        "capture": "lazy" if lazy else "startup",
        "max_graphs": draw(st.sampled_from([None, 2])) if lazy else None,
        "warmup": draw(st.sampled_from(["auto", "each"])),
    }
    ladder = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    prefill = PhaseConfig(
        buckets=draw(ladder), max_requests=draw(st.integers(1, 4)), max_padding=9.0, **common
    )
    return Case(
        found,
        draw(st.booleans()),
        variants,
        draw(st.integers(1, 3)),
        PhaseConfig(buckets=draw(ladder), **common),
        prefill if draw(st.booleans()) else PhaseConfig(backend="disabled"),
    )


class Runtime(ModelRunner):
    """Adds up every row of every input, apart from fill values, and returns it in several shapes."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = torch.device(device)
        self.model = torch.nn.Module()
        self.graph_config = GraphConfig(decode=case.decode, prefill=case.prefill)
        self.tokens_per_request = case.per

    def input_spec(self, phase: Phase) -> InputSpec:
        spec = {name: WRAPPERS[field.wrap](field.spec) for name, field in self.case.fields.items()}
        if self.case.host:
            spec["factor"] = HostSpec(values=(2, 5))
            spec["bound"] = HostSpec(maximum=50)
        return InputSpec(**spec)

    def forward(self, batch: ForwardBatch) -> Any:
        requests = torch.zeros(batch.num_requests, dtype=torch.float64, device=self.device)
        tokens = torch.zeros(batch.num_tokens, dtype=torch.float64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, field in self.case.fields.items():
            for _, leaf in tree.walk(batch.inputs.get(name)):
                if leaf is None:
                    continue
                real = torch.where(leaf == padding(field.spec), 0, leaf).double()
                rows = real.flatten(1).sum(1) if real.dim() > 1 else real
                match field.spec.row_dim:
                    case "requests":
                        requests = requests + rows
                    case "tokens":
                        tokens = tokens + rows
                    case "requests+1":
                        requests = requests + rows[:-1]
                    case None:
                        total = total + real.sum()
        factor = batch.inputs.get("factor", 1) * (3 if batch.variant == "v" else 1)
        requests, tokens = (requests + total)[: batch.inputs.get("bound", 50)] * factor, tokens * factor
        stacked = torch.stack([requests, -requests])
        return {
            "r": requests,
            "t": [tokens, Group(tokens[:, None].float(), None)],
            "s": stacked,
            "c": total + 1,
            "n": 7,
        }


def padding(spec: TensorSpec) -> int:
    return 0 if spec.fill == "last" else int(spec.fill)


@attrs.frozen
class Step:
    """How one batch differs from others."""

    phase: Phase
    size: int
    requests: int
    seed: int
    width: int
    present: int
    factor: int
    variant: str | None


STEPS = st.builds(
    Step,
    phase=st.sampled_from(list(Phase)),
    size=st.integers(1, 11),
    requests=st.integers(1, 5),
    seed=st.integers(0, 999),
    width=st.integers(0, 4),
    present=st.integers(0, 7),
    factor=st.sampled_from([2, 5, 4]),
    variant=st.sampled_from([None, "v", "w"]),
)


def make_batch(case: Case, step: Step, device: str) -> ForwardBatch:
    """A good batch; what it holds is different for each seed."""
    if step.phase is Phase.DECODE:
        requests, tokens = step.size, step.size * case.per
    else:
        requests, tokens = min(step.requests, step.size), step.size
    generator = torch.Generator().manual_seed(step.seed)
    inputs: dict[str, Any] = {}
    for index, (name, field) in enumerate(case.fields.items()):
        if field.spec.optional and not step.present >> index & 1:
            continue
        shape = list(field.spec.shape(requests, tokens))
        if isinstance(field.spec.dims[-1:] and field.spec.dims[-1], UpTo):
            shape[-1] = step.width

        def leaf(shape: list[int] = shape, spec: TensorSpec = field.spec) -> torch.Tensor:
            return torch.randint(1, 70, shape, generator=generator).to(device, spec.dtype)

        inputs[name] = tree.map_leaves(lambda *_, make=leaf: make(), WRAPPERS[field.wrap](0))
    if case.host:
        inputs |= {"factor": step.factor, "bound": 50}
    return ForwardBatch(
        phase=step.phase, num_requests=requests, num_tokens=tokens, inputs=inputs, variant=step.variant
    )


def assert_same(got: Any, wanted: Any) -> None:
    mine, theirs = dict(tree.walk(got)), dict(tree.walk(wanted))
    assert mine.keys() == theirs.keys()
    for path, leaf in theirs.items():
        if isinstance(leaf, torch.Tensor):
            assert mine[path].dtype == leaf.dtype
            assert torch.equal(mine[path], leaf), path
        else:
            assert mine[path] == leaf


@pytest.mark.parametrize("device", DEVICES)
@QUICK
@given(case=cases(), steps=st.lists(STEPS, min_size=1, max_size=8))
def test_a_step_gives_what_the_forward_gives(device: str, case: Case, steps: list[Step]) -> None:
    """
    For random nested specs, optional inputs, host values, ladders, variants and phases, in any sequence:
    execute equals the eager forward; a copied result also equals it after all later steps.
    """
    toy = Runtime(case, device)
    capture = capture_cuda_graphs(model_runner=toy)
    runners = {Phase.DECODE: capture.decode_runner, Phase.PREFILL: capture.prefill_runner}
    kept = []
    for step in steps:
        batch = make_batch(case, step, device)
        wanted = toy.forward(batch)
        decision = runners[step.phase].explain(batch)
        got = runners[step.phase].execute(batch)
        assert_same(got, wanted)
        assert (decision.key is None) == (decision.reason is not None)
        if case.decode.outputs == "copy":
            kept.append((got, wanted))
    for got, wanted in kept:
        assert_same(got, wanted)
    assert sum(sum(r.stats.sizes.values()) for r in set(runners.values())) == len(steps)


def first_tensor(batch: ForwardBatch) -> tuple[str, torch.Tensor]:
    return next((path, leaf) for path, leaf in tree.walk(batch.inputs) if isinstance(leaf, torch.Tensor))


def replaced(batch: ForwardBatch, change: Any) -> Any:
    """The batch's inputs with its first tensor changed."""
    path, _ = first_tensor(batch)
    return tree.map_leaves(lambda at, leaf: change(leaf) if at == path else leaf, batch.inputs)


def spoil(batch: ForwardBatch, how: str) -> ForwardBatch:
    """The same batch with one thing wrong."""
    changes: dict[str, Any] = {}
    match how:
        case "missing":
            changes = {"inputs": {n: v for n, v in batch.inputs.items() if n != "f0"}}
        case "none":
            changes = {"inputs": batch.inputs | {"f0": None}}
        case "extra":
            changes = {"inputs": batch.inputs | {"unknown": 1}}
        case "dtype":
            changes = {"inputs": replaced(batch, lambda t: t.to(torch.float16))}
        case "rank":
            changes = {"inputs": replaced(batch, lambda t: t[None])}
        case "rows":
            changes = {"inputs": replaced(batch, lambda t: torch.cat([t, t[:1]]))}
        case "list":
            changes = {"inputs": replaced(batch, lambda t: t.tolist())}
        case "nothing":
            changes = {"inputs": replaced(batch, lambda t: None)}
        case "meta":
            changes = {"inputs": replaced(batch, lambda t: t.to("meta"))}
        case "structure":
            changes = {"inputs": batch.inputs | {"f0": {"other": batch.inputs["f0"]}}}
        case "phase":
            changes = {"phase": Phase.PREFILL if batch.phase is Phase.DECODE else Phase.DECODE}
        case "count":
            changes = {"num_requests": -1}
        case "tokens":
            changes = {"num_tokens": batch.num_requests - 1}
        case "inputs":
            changes = {"inputs": list(batch.inputs.values())}
    return attrs.evolve(batch, **changes)


WAYS = ["missing", "none", "extra", "dtype", "rank", "rows", "list", "nothing", "meta", "structure", "phase"]
WAYS += ["count", "tokens", "inputs"]


@pytest.mark.parametrize("device", DEVICES)
@QUICK
@given(
    case=cases(),
    steps=st.lists(STEPS, min_size=2, max_size=4),
    ways=st.lists(st.sampled_from(WAYS), min_size=4),
)
def test_a_malformed_batch_changes_nothing(
    device: str, case: Case, steps: list[Step], ways: list[str]
) -> None:
    """
    Whatever is wrong with a batch, InputError is raised, no static byte changes, nothing is counted, and
    the next good batch is right.
    """
    toy = Runtime(case, device)
    capture = capture_cuda_graphs(model_runner=toy)
    runners = {Phase.DECODE: capture.decode_runner, Phase.PREFILL: capture.prefill_runner}
    arena = capture.eager_runner.context.arena
    for step, way in zip(steps * len(ways), ways, strict=False):
        batch = make_batch(case, step, device)
        runner = runners[step.phase]
        assert_same(runner.execute(batch), toy.forward(batch))
        if way == "phase" and runner is capture.eager_runner:
            continue  # it runs both phases
        bad = spoil(batch, way)
        held = arena.carve(0, (arena.nbytes,), torch.uint8)
        before, counted = held.clone(), sum(runner.stats.sizes.values())
        for call in (runner.execute, runner.explain):
            with pytest.raises(InputError):
                call(bad)
        assert torch.equal(held, before)
        assert sum(runner.stats.sizes.values()) == counted
        assert_same(runner.execute(batch), toy.forward(batch))
