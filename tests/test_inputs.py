"""Input specs, the check of every batch, and what static buffers hold."""

from __future__ import annotations

import collections
import dataclasses
import traceback
from typing import Any

import pytest
import torch

from graphplat import (
    HostSpec,
    InputError,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    UpTo,
    capture_cuda_graphs,
)
from graphplat.buffers import BoundInputs
from graphplat.runners.base import BatchChecker

F32, I64 = torch.float32, torch.int64


# Specs


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TensorSpec(("rows",)), "unknown dimension 'rows'"),
        (lambda: TensorSpec((3, "requests")), "must come first"),
        (lambda: TensorSpec(("requests", -1)), "-1 is not a size"),
        (lambda: TensorSpec(("requests", True)), "True is not a size"),
        (lambda: TensorSpec(("requests", 1.5)), "1.5 is not a size"),
        (lambda: TensorSpec((4,), fill="last"), "needs a row dimension"),
        (
            lambda: TensorSpec(("requests",), dtype="int64"),
            "must be a torch.dtype, found 'int64'. Write torch.int64",
        ),
        (
            lambda: TensorSpec(("requests",), dtype="torch.bool", fill="last"),
            "found 'torch.bool'. Write torch.bool",
        ),
        (lambda: TensorSpec(("requests",), dtype=int), "found <class 'int'>. Write torch.int64"),
        (lambda: TensorSpec(("requests",), dtype=None), "found None. Write torch.int64, for instance"),
        (lambda: TensorSpec(("requests",), fill=0.5), "fill 0.5 is no torch.int64"),
        (lambda: TensorSpec(("requests",), dtype=torch.uint8, fill=-1), "fill -1 is no torch.uint8"),
        (lambda: TensorSpec(("requests",), dtype=torch.int32, fill=2**40), "is no torch.int32"),
        (lambda: TensorSpec("requests"), r"dims takes several dimensions, found 'requests'. Write \('req"),
        (lambda: TensorSpec(8), "dims takes several dimensions, found 8"),
        (lambda: HostSpec(update=True, per="token"), "per='token' counts nothing. Use one of"),
        (lambda: HostSpec(maximum="4"), "maximum must be a number, found '4'"),
        (lambda: HostSpec(maximum=True), "maximum must be a number, found True"),
        (lambda: HostSpec(update=True, fill="x"), "fill must be a whole number, found 'x'"),
        (lambda: HostSpec(values="ab"), r"values takes several values, found 'ab'. Write \('ab',\)"),
        (lambda: HostSpec(values=3), "values takes several values, found 3"),
        (HostSpec, "exactly one rule, found 0"),
        (lambda: HostSpec(values=(1,), maximum=3), "exactly one rule, found 2"),
        (lambda: HostSpec(values=([1], [2])), "must be hashable"),
        (lambda: HostSpec(values=(1, True)), "hold equal ones"),
        (lambda: InputSpec(x=3), "found int"),
        (
            lambda: InputSpec(**{"a.b": TensorSpec(), "a": {"b": TensorSpec()}}),
            "two inputs have the path 'a.b'",
        ),
        (lambda: InputSpec(x={0: TensorSpec(), "0": TensorSpec()}), "two inputs have the path 'x.0'"),
        (lambda: InputSpec(x=[TensorSpec(optional=True)]), "only top-level inputs can be optional"),
    ],
)
def test_a_wrong_spec_is_refused_where_it_is_written(make: Any, says: str) -> None:
    """A spec that cannot mean anything raises at once, saying what is wrong."""
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [(float("nan"), F32), (float("-inf"), F32), (0.1, torch.float16), (True, torch.bool), (-1, torch.int8)],
)
def test_any_value_of_the_dtype_can_be_a_fill(fill: Any, dtype: torch.dtype) -> None:
    """Not-a-number, infinities and rounded fractions are fine where the dtype has them."""
    assert TensorSpec(("requests",), dtype=dtype, fill=fill).fill is fill


def test_shapes_follow_the_counts() -> None:
    """Row dimensions take the counts, numbers stay, and varying dimensions take their largest size."""
    assert TensorSpec(("requests", 5)).shape(3, 9) == (3, 5)
    assert TensorSpec(("tokens", UpTo(7))).shape(3, 9) == (9, 7)
    assert TensorSpec(("requests+1",)).shape(3, 9) == (4,)
    assert TensorSpec((2, UpTo(4))).shape(3, 9) == (2, 4)
    assert TensorSpec(()).shape(3, 9) == ()


def test_each_set_of_optional_inputs_has_graphs_up_to_three_of_them() -> None:
    """Beyond three, only all and none are captured, so that the number of graphs stays small."""
    few = InputSpec(a=TensorSpec(optional=True), b=TensorSpec(optional=True))
    assert few.presence_sets() == [
        frozenset("ab"),
        frozenset("b"),
        frozenset("a"),
        frozenset(),
    ]
    many = InputSpec(**{name: TensorSpec(optional=True) for name in "abcd"})
    assert many.presence_sets() == [frozenset("abcd"), frozenset()]


# Checking


@dataclasses.dataclass(frozen=True)
class Meta:
    lengths: Any
    tables: Any


def nested_spec() -> InputSpec:
    return InputSpec(
        x=TensorSpec(("requests", 3), dtype=F32),
        meta={"inner": Meta(TensorSpec(("requests",)), [TensorSpec(("requests", UpTo(4)))])},
        flag=HostSpec(values=(1, 2)),
        bias=TensorSpec((3,), dtype=F32, optional=True),
    )


def nested_inputs(rows: Any, n: int, width: int = 4, **change: Any) -> dict[str, Any]:
    made = {
        "x": rows(n),
        "meta": {"inner": Meta(rows(n, width=1, dtype=I64)[:, 0], [rows(n, width=width, dtype=I64)])},
        "flag": 1,
    }
    return made | change


def nested_forward(batch: Any) -> Any:
    inner = batch.inputs["meta"]["inner"]
    y = batch.inputs["x"] * batch.inputs["flag"] + inner.lengths[:, None]
    y = y + inner.tables[0].sum(dim=1, keepdim=True)
    return y + batch.inputs["bias"] if "bias" in batch.inputs else y


def broken(rows: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Field named by the error, the inputs, and what the error says."""
    good = nested_inputs(rows, 3)
    inner = good["meta"]["inner"]
    without = {name: value for name, value in good.items() if name != "x"}
    return [
        ("x", without, "missing"),
        ("x", good | {"x": None}, "missing"),
        ("y", good | {"y": rows(3)}, "not declared"),
        ("x", good | {"x": [1.0] * 3}, "expected a tensor, found list"),
        ("x", good | {"x": good["x"].double()}, "expected torch.float32, found torch.float64"),
        ("x", good | {"x": good["x"].bfloat16()}, "found torch.bfloat16"),
        ("x", good | {"x": rows(4)}, "axis 0 differs"),
        ("x", good | {"x": rows(3, width=2)}, "axis 1 differs"),
        ("x", good | {"x": rows(3)[0]}, "expected shape"),
        ("x", good | {"x": rows(3).to("meta")}, "expected a tensor on"),
        ("x", good | {"x": rows(3).to_sparse()}, "expected a dense tensor"),
        ("meta", good | {"meta": [inner]}, "expected dict, found list"),
        ("meta.inner", good | {"meta": {"inner": {"lengths": 1}}}, "expected Meta, found dict"),
        ("meta.inner.lengths", good | {"meta": {"inner": Meta(None, inner.tables)}}, "missing"),
        ("meta.inner.tables[0]", good | {"meta": {"inner": Meta(inner.lengths, [])}}, "missing"),
        (
            "meta.inner.tables[1]",
            good | {"meta": {"inner": Meta(inner.lengths, inner.tables * 2)}},
            "not decl",
        ),
        ("flag", good | {"flag": torch.ones(())}, "expected a host value"),
        ("bias", good | {"bias": rows(1)}, "expected shape"),
        ("inputs", list(good.values()), "expected a dict of inputs, found list"),
    ]


@pytest.mark.parametrize("case", range(19))
def test_a_bad_field_is_named_and_changes_no_buffer(runtime: Any, decode: Any, rows: Any, case: int) -> None:
    """
    Any malformed batch raises InputError with the field's path, before a static buffer is
    written, and the next good batch is right.
    """
    field, inputs, says = broken(rows)[case]
    runner = capture_cuda_graphs(model_runner=runtime(nested_forward, nested_spec())).decode_runner
    batch = decode(3, **nested_inputs(rows, 3))
    runner.execute(batch)
    before = {path: tensor.clone() for path, tensor in runner.buffers(4).items()}
    bad = decode(3)
    bad.inputs = inputs
    for call in (runner.execute, runner.explain, runner.can_run_graph):
        with pytest.raises(InputError, match=says) as caught:
            call(bad)
        assert caught.value.field == field
        assert caught.value.phase == "decode"
    for path, tensor in runner.buffers(4).items():
        assert torch.equal(tensor, before[path]), path
    good = decode(3, **nested_inputs(rows, 3))
    assert torch.equal(runner.execute(good), nested_forward(good))
    assert sum(runner.stats.sizes.values()) == 2


def test_every_broken_case_is_tried(rows: Any) -> None:
    """The parameters of the test above cover its whole list."""
    assert len(broken(rows)) == 19


@pytest.mark.parametrize(
    ("rename", "says", "hint"),
    [
        (
            {"input_ids": "input_id"},
            "missing: 'input_ids'; not declared in the input spec: 'input_id'",
            "Did you mean 'input_ids' by 'input_id'?",
        ),
        (
            {"input_ids": "inputs_ids", "meta": "meat"},
            "missing: 'input_ids', 'meta'; not declared in the input spec: 'inputs_ids', 'meat'",
            "Did you mean 'input_ids' by 'inputs_ids', 'meta' by 'meat'?",
        ),
        (
            {"input_ids": "tokens"},
            "missing: 'input_ids'; not declared in the input spec: 'tokens'",
            "Every declared input that is not optional must be given",
        ),
        ({"biases": "bais"}, "not declared in the input spec", "Did you mean 'biases' by 'bais'?"),
        ({"biases": "other"}, "not declared in the input spec", "Declare it, or leave it out"),
    ],
)
def test_a_misspelt_input_is_told_beside_the_one_meant(
    runtime: Any, decode: Any, rows: Any, rename: dict[str, str], says: str, hint: str
) -> None:
    """Missing and unknown names are in one error, and a close pair of them is its next step."""
    rowed = TensorSpec(("requests", 3), dtype=F32)
    spec = InputSpec(
        input_ids=rowed, meta={"lengths": rowed}, biases=TensorSpec((3,), dtype=F32, optional=True)
    )
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda b: b.inputs["input_ids"] + 1, spec)
    ).decode_runner
    good = {"input_ids": rows(2), "meta": {"lengths": rows(2)}, "biases": rows(1)[0]}
    runner.execute(decode(2, **good))
    with pytest.raises(InputError) as caught:
        runner.execute(decode(2, **{rename.get(name, name): value for name, value in good.items()}))
    assert caught.value.what == says
    assert caught.value.hint == hint


def test_a_misspelt_input_within_another_is_told_by_its_path(runtime: Any, decode: Any, rows: Any) -> None:
    """Only the last names are compared: a path in common makes no two names alike."""
    leaf = TensorSpec(("requests", 3), dtype=F32)
    spec = InputSpec(attention={"metadata": {"tables": leaf, "kv": leaf}})
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda b: b.inputs["attention"]["metadata"]["kv"] + 1, spec)
    ).decode_runner
    for name, hint in (("table", "Did you mean 'tables' by 'table'?"), ("other", "Every declared input")):
        inputs = {"attention": {"metadata": {name: rows(2), "kv": rows(2)}}}
        with pytest.raises(
            InputError, match=r"missing: 'attention[.]metadata[.]tables'; not declared"
        ) as caught:
            runner.execute(decode(2, **inputs))
        assert caught.value.field == "attention.metadata.tables"
        assert str(caught.value.hint).startswith(hint)


def test_a_bad_field_is_told_once(runtime: Any, decode: Any, rows: Any) -> None:
    """The error that adds the phase takes the place of the one without; a foreign cause stays chained."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] + 1)).decode_runner
    with pytest.raises(InputError) as caught:
        runner.execute(decode(2, x=rows(3)))
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("axis 0 differs") == 1
    assert "[phase 'decode', field 'x']" in text

    class Unreadable(InputSpec):
        def read(self, inputs: dict[str, Any]) -> dict[str, Any]:
            raise InputError("unreadable", field="x") from KeyError("of the runtime")

    checker = BatchChecker(Phase.DECODE, Unreadable(x={"y": TensorSpec()}), torch.device("cpu"), 1)
    with pytest.raises(InputError, match=r"unreadable \[phase 'decode', field 'x'\]") as caught:
        checker.check(decode(2, x={"y": rows(2)}))
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_cause_that_python_chains_stays_with_an_error_of_the_runtimes_own(decode: Any, rows: Any) -> None:
    """A spec that raises while it handles another error, without ``from``: that one stays chained too."""

    class Looking(InputSpec):
        def read(self, inputs: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"x": inputs["y"]}
            except KeyError:
                raise InputError("no y", field="x")

    checker = BatchChecker(Phase.DECODE, Looking(x={"y": TensorSpec()}), torch.device("cpu"), 1)
    with pytest.raises(InputError, match=r"no y \[phase 'decode', field 'x'\]") as caught:
        checker.check(decode(2, x={"y": rows(2)}))
    assert isinstance(caught.value.__cause__, KeyError)
    text = "".join(traceback.format_exception(caught.value))
    assert "KeyError: 'y'" in text
    assert text.count("InputError: no y") == 1


def test_no_cause_is_made_up(decode: Any, rows: Any) -> None:
    """An error raised ``from None`` has no cause, nor has that of a batch given while another is handled."""

    class Silent(InputSpec):
        def read(self, inputs: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"x": inputs["y"]}
            except KeyError:
                raise InputError("no y", field="x") from None

    checker = BatchChecker(Phase.DECODE, Silent(x={"y": TensorSpec()}), torch.device("cpu"), 1)
    with pytest.raises(InputError) as caught:
        checker.check(decode(2, x={"y": rows(2)}))
    assert caught.value.__cause__ is None
    plain = BatchChecker(Phase.DECODE, InputSpec(x=TensorSpec()), torch.device("cpu"), 1)
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(InputError) as caught:
            plain.check(decode(2, x=rows(2)))
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("value", [{"x": 1}, None, torch.ones(2)], ids=lambda value: type(value).__name__)
def test_what_is_no_batch_is_told_how_to_make_one(runtime: Any, decode: Any, rows: Any, value: Any) -> None:
    """The inputs alone, nothing, or a tensor: an InputError that names what came, before anything runs."""
    capture = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] + 1))
    runner, eager = capture.decode_runner, capture.eager_runner
    runner.execute(decode(2, x=rows(2)))
    for call in (runner.execute, runner.explain, runner.can_run_graph, eager.execute, eager.explain):
        with pytest.raises(
            InputError, match=f"expected a ForwardBatch, found {type(value).__name__}"
        ) as caught:
            call(value)
        assert caught.value.phase == "decode"
        assert 'ForwardBatch(phase="decode", num_requests=' in str(caught.value.hint)
    assert sum(runner.stats.sizes.values()) == 1
    assert eager.stats.steps == 0


def test_a_batch_that_lacks_a_field_is_not_taken_for_another_type(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """An AttributeError that a ForwardBatch raises itself arrives as it is."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] + 1)).decode_runner
    batch = decode(2, x=rows(2))
    del batch.num_requests
    for call in (runner.execute, runner.explain):
        with pytest.raises(AttributeError, match="num_requests"):
            call(batch)


@pytest.mark.parametrize(
    ("requests", "tokens", "field"),
    [(-1, -1, "num_requests"), (2, 3, "num_tokens"), (True, 1, "num_requests")],
)
def test_counts_are_checked(
    runtime: Any, decode: Any, rows: Any, requests: Any, tokens: int, field: str
) -> None:
    """Counts that contradict the phase, or are no counts, are an InputError."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] + 1)).decode_runner
    batch = decode(2, x=rows(2))
    batch.num_requests, batch.num_tokens = requests, tokens
    with pytest.raises(InputError) as caught:
        runner.execute(batch)
    assert caught.value.field == field


def test_another_dtype_or_layout_is_never_cast_in_silence(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against ikawrakow/ik_llama.cpp#2158 and vllm-project/vllm#20426: another dtype is an
    error; a transposed, strided or expanded input gives the eager result.
    """
    spec = InputSpec(x=TensorSpec(("requests", 3)))

    def forward(batch: Any) -> Any:
        return batch.inputs["x"] * 2 + 1

    runner = capture_cuda_graphs(model_runner=runtime(forward, spec)).decode_runner
    wide = rows(3, width=6, dtype=I64)
    for x in (
        rows(3, dtype=I64).t(),
        wide[:, ::2],
        wide[:, :1].expand(3, 3),
        rows(1, dtype=I64).expand(3, 3),
    ):
        batch = decode(3, x=x)
        assert torch.equal(runner.execute(batch), forward(batch))
        assert torch.equal(runner.execute(batch), forward(batch))
    for dtype in (torch.int32, torch.bfloat16):
        with pytest.raises(InputError, match=r"expected torch\.int64"):
            runner.execute(decode(3, x=rows(3).to(dtype)))
    large = decode(3, x=rows(3, dtype=I64) + 2**40)
    assert torch.equal(runner.execute(large), forward(large))
    assert runner.stats.ran_eagerly == 0


# Nested inputs


def test_every_tensor_of_a_nested_input_is_read_anew(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against pytorch/torchtitan#4432 and NVIDIA/Megatron-LM#5931: tensors inside dicts,
    lists and frozen dataclasses are refreshed at each replay; the order of a dict does not matter;
    another host value is another graph, and an undeclared one runs eagerly.
    """
    runner = capture_cuda_graphs(model_runner=runtime(nested_forward, nested_spec())).decode_runner
    for n, flag in ((3, 1), (3, 2), (2, 1), (8, 2), (3, 1)):
        batch = decode(n, **nested_inputs(rows, n, flag=flag))
        assert torch.equal(runner.execute(batch), nested_forward(batch))
        batch.inputs = dict(reversed(batch.inputs.items()))
        assert torch.equal(runner.execute(batch), nested_forward(batch))
    assert runner.stats.ran_eagerly == 0
    other = decode(3, **nested_inputs(rows, 3, flag=3))
    assert runner.explain(other).reason is Reason.HOST_VALUE
    assert torch.equal(runner.execute(other), nested_forward(other))
    typed = decode(3, **nested_inputs(rows, 3, flag=True))  # equal to 1, but not the same value
    assert runner.explain(typed).reason is Reason.HOST_VALUE


def test_optional_inputs_have_graphs_of_their_own(runtime: Any, decode: Any, rows: Any) -> None:
    """Present, absent and present again: each replays a graph that reads, or lacks, the input."""
    runner = capture_cuda_graphs(model_runner=runtime(nested_forward, nested_spec())).decode_runner
    for bias in (True, False, True, None):
        inputs = nested_inputs(rows, 3)
        if bias:
            inputs["bias"] = rows(1)[0]
        elif bias is None:
            inputs["bias"] = None
        batch = decode(3, **inputs)
        key = runner.explain(batch).key
        assert key is not None
        assert key.present == (("bias",) if bias else ())
        got = runner.execute(batch)
        batch.inputs = {name: value for name, value in inputs.items() if value is not None}
        assert torch.equal(got, nested_forward(batch))


def test_a_set_of_optional_inputs_that_was_not_captured_runs_eagerly(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """With four optional inputs only all and none have graphs; others are counted."""
    names = ("a", "b", "c", "d")
    spec = InputSpec(
        **{n: TensorSpec(("requests", 3), dtype=F32, optional=True) for n in names}, x=TensorSpec()
    )

    def forward(batch: Any) -> Any:
        return sum((batch.inputs[n] for n in names if n in batch.inputs), batch.inputs["x"][:, None] * 1.0)

    spec = InputSpec(**spec.fields | {"x": TensorSpec(("requests",))})
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec)).decode_runner
    batch = decode(2, x=rows(2, width=1, dtype=I64)[:, 0], a=rows(2))
    assert runner.explain(batch).reason is Reason.OPTIONAL_INPUTS
    assert torch.equal(runner.execute(batch), forward(batch))


# Padding


class Spy:
    """A forward that copies its whole static inputs, padded rows included, to where a test can see them."""

    def __init__(self, device: torch.device, size: int = 8) -> None:
        self.seen = {
            "x": torch.zeros(size, 3, device=device),
            "slot": torch.zeros(size, dtype=I64, device=device),
        }

    def __call__(self, batch: Any) -> Any:
        for name, target in self.seen.items():
            if name in batch.inputs:
                target[: batch.num_requests].copy_(batch.inputs[name])
        return batch.inputs["x"] * 1


def spy_spec() -> InputSpec:
    return InputSpec(
        x=TensorSpec(("requests", 3), dtype=F32, fill=-5), slot=TensorSpec(("requests",), fill=77)
    )


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_padded_rows_hold_their_fill_before_every_replay(
    runtime: Any, decode: Any, rows: Any, device: torch.device, outputs: Any
) -> None:
    """
    Guards against sgl-project/sglang#10892: rows beyond the batch never keep an earlier
    batch's values, whatever ran before in this bucket or in another one that shares the memory.
    """
    spy = Spy(device)
    config = PhaseConfig(buckets=(2, 4, 8), outputs=outputs)
    runner = capture_cuda_graphs(model_runner=runtime(spy, spy_spec(), decode=config)).decode_runner
    for n in (8, 5, 3, 7, 6, 1, 2, 4, 8, 3, 5, 5, 6):
        bucket = min(b for b in (2, 4, 8) if b >= n)
        x, slot = rows(n), rows(n, width=1, dtype=I64)[:, 0] + 10**6
        runner.execute(decode(n, x=x, slot=slot))
        assert torch.equal(spy.seen["x"][:n], x)
        assert torch.equal(spy.seen["slot"][:n], slot)
        assert (spy.seen["x"][n:bucket] == -5).all(), n
        assert (spy.seen["slot"][n:bucket] == 77).all(), n


def test_padded_rows_are_reset_also_when_the_forward_writes_to_its_inputs(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """
    Guards against sgl-project/sglang#10892 in one more way: a forward that advances its positions in place
    leaves other values in the padded rows at each replay.
    """
    spy = Spy(device)

    def forward(batch: Any) -> Any:
        out = spy(batch)
        batch.inputs["x"].add_(1)
        return out

    runner = capture_cuda_graphs(model_runner=runtime(forward, spy_spec())).decode_runner
    for n in (3, 3, 3, 2, 3):
        x = rows(n)
        got = runner.execute(decode(n, x=x.clone(), slot=torch.zeros(n, dtype=I64, device=device)))
        assert torch.equal(got, x)
        bucket = 4 if n == 3 else 2
        assert (spy.seen["x"][n:bucket] == -5).all()


def test_an_interrupted_copy_leaves_no_stale_row(
    runtime: Any, decode: Any, rows: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops a step between its writes, the next step resets all padded rows."""
    spy = Spy(device)
    runner = capture_cuda_graphs(model_runner=runtime(spy, spy_spec())).decode_runner
    zeros = torch.zeros(8, dtype=I64, device=device)
    runner.execute(decode(8, x=rows(8), slot=zeros))
    runner.execute(decode(5, x=rows(5), slot=zeros[:5]))
    runner.execute(decode(8, x=rows(8), slot=zeros))
    foreach_copy = torch._foreach_copy_

    def interrupted(*args: Any) -> None:
        foreach_copy(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    for n in (8, 5):
        with pytest.raises(KeyboardInterrupt):
            runner.execute(decode(n, x=rows(n), slot=zeros[:n] + 9))
    monkeypatch.undo()
    x = rows(5)
    runner.execute(decode(5, x=x, slot=zeros[:5]))
    assert torch.equal(spy.seen["x"][:5], x)
    assert (spy.seen["x"][5:8] == -5).all()
    assert (spy.seen["slot"][5:8] == 77).all()


def test_an_interrupted_reset_leaves_no_stale_row(
    runtime: Any, decode: Any, rows: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another bucket left in the shared memory is still known to be there after an interrupted step."""
    spy = Spy(device)
    runner = capture_cuda_graphs(model_runner=runtime(spy, spy_spec())).decode_runner
    zeros = torch.zeros(8, dtype=I64, device=device)

    def interrupted(*args: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # the first step of a size and those after it take different ways
        runner.execute(decode(5, x=rows(5), slot=zeros[:5]))
        runner.execute(decode(3, x=rows(3), slot=zeros[:3] + 10**6))
        with monkeypatch.context() as patch:
            patch.setattr(BoundInputs, "_reset_outside", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner.execute(decode(5, x=rows(5), slot=zeros[:5]))
        runner.execute(decode(5, x=rows(5), slot=zeros[:5]))
        assert (spy.seen["x"][5:8] == -5).all()
        assert (spy.seen["slot"][5:8] == 77).all()


def test_padding_never_touches_a_real_slot(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """
    Guards against vllm-project/vllm#43810: with a slot reserved for padding as fill, writes and in-place
    additions of padded rows, two of them too, leave every slot alone that no real row names.
    """
    cache = torch.arange(30.0, device=device).view(10, 3)  # slot 9 is the reserved one
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32), slot=TensorSpec(("requests",), fill=9))

    def forward(batch: Any) -> Any:
        cache[batch.inputs["slot"]] = batch.inputs["x"]
        cache.index_add_(0, batch.inputs["slot"], batch.inputs["x"])
        return batch.inputs["x"] * 1

    config = PhaseConfig(buckets=(4,))
    start = cache[:9].clone()
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    assert torch.equal(cache[:9], start), "warm-up and capture must not touch a real slot either"
    for slots in ([8, 1], [3], [0, 2, 4, 8]):
        before, x = cache.clone(), rows(len(slots))
        runner.execute(decode(len(slots), x=x, slot=torch.tensor(slots, device=device)))
        others = [slot for slot in range(9) if slot not in slots]
        assert torch.equal(cache[others], before[others])
        assert torch.equal(cache[slots], x * 2)


def test_the_fill_is_set_for_each_field(runtime: Any, decode: Any, rows: Any, device: torch.device) -> None:
    """
    Guards against sgl-project/sglang#1094, #7233 and #1789: a length of 1 in padded rows keeps a
    division finite, and a total over the padded rows counts them.
    """
    totals = torch.zeros(1, dtype=I64, device=device)
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32), length=TensorSpec(("requests",), fill=1))

    def forward(batch: Any) -> Any:
        totals.copy_(batch.inputs["length"].sum())
        mean = batch.inputs["x"] / batch.inputs["length"][:, None]
        return mean + mean.mean() * 0  # any padded row that is not finite would spoil all

    config = PhaseConfig(buckets=(8,))
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    got = runner.execute(decode(3, x=rows(3), length=torch.tensor([2, 4, 5], device=device)))
    assert got.isfinite().all()
    assert totals.item() == 11 + 5


def test_the_last_real_row_is_repeated_where_asked(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """Cumulative lengths stay flat behind the last request, so that padded requests are empty."""
    seen = torch.zeros(9, dtype=I64, device=device)
    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=F32), starts=TensorSpec(("requests+1",), fill="last")
    )

    def forward(batch: Any) -> Any:
        seen[: batch.num_requests + 1].copy_(batch.inputs["starts"])
        return batch.inputs["x"] * 1

    config = PhaseConfig(buckets=(4, 8))
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    for n in (8, 5, 6, 3, 5, 1, 8, 7):
        starts = (rows(n + 1, width=1, dtype=I64)[:, 0]).cumsum(0)
        runner.execute(decode(n, x=rows(n), starts=starts))
        bucket = 4 if n <= 4 else 8
        assert torch.equal(seen[: n + 1], starts)
        assert (seen[n + 1 : bucket + 1] == starts[-1]).all()


def test_a_wide_batch_leaves_no_columns_to_a_narrow_one(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """
    Guards against GeeeekExplorer/nano-vllm#190, #258 and vllm-project/vllm#8068: a table wider than
    captured runs eagerly with a reason that names field and axis; a narrower one is widened with the fill.
    """
    spec = InputSpec(table=TensorSpec(("requests", UpTo(4)), fill=-1))

    def forward(batch: Any) -> Any:
        table = batch.inputs["table"]
        return torch.where(table >= 0, table + 1, 0).sum(dim=1)

    config = PhaseConfig(buckets=(2, 4))
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    for n, width in ((4, 4), (3, 2), (2, 4), (1, 1), (4, 3), (3, 4), (4, 0), (3, 1)):
        batch = decode(
            n, table=rows(n, width=width, dtype=I64) if width else torch.empty(n, 0, dtype=I64).to(device)
        )
        assert runner.can_run_graph(batch)
        assert torch.equal(runner.execute(batch), forward(batch)), (n, width)
    wide = decode(3, table=rows(3, width=5, dtype=I64))
    decision = runner.explain(wide)
    assert decision.reason is Reason.OVER_MAX_DIM
    assert "table: axis 1 has 5, graphs hold 4" in decision.detail
    assert torch.equal(runner.execute(wide), forward(wide))
    tall = decode(5, table=rows(5, width=4, dtype=I64))
    assert runner.explain(tall).reason is Reason.OVER_MAX_BUCKET
    assert torch.equal(runner.execute(tall), forward(tall))
    assert runner.stats.eager == collections.Counter({Reason.OVER_MAX_DIM: 1, Reason.OVER_MAX_BUCKET: 1})


def test_the_runtime_may_write_its_inputs_in_place(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """Inputs that are the runner's own buffers need no copy, and are padded like any other."""
    spy = Spy(device)
    runner = capture_cuda_graphs(model_runner=runtime(spy, spy_spec())).decode_runner
    for n in (8, 5, 3, 6):
        views = runner.buffers(n)
        values = rows(n)
        views["x"].copy_(values)
        views["slot"].fill_(n)
        assert torch.equal(runner.execute(decode(n, **views)), values)
        bucket = 4 if n <= 4 else 8
        assert (spy.seen["x"][n:bucket] == -5).all()


def test_inputs_may_lie_in_another_buckets_buffers(runtime: Any, decode: Any, rows: Any) -> None:
    """Overlapping source and target memory gives the same as memory of one's own."""
    spec = InputSpec(a=TensorSpec(("requests", 3), dtype=F32), b=TensorSpec(("requests", 3), dtype=F32))

    def forward(batch: Any) -> Any:
        return batch.inputs["a"] * 1000 + batch.inputs["b"]

    config = PhaseConfig(buckets=(8, 64))
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    views = runner.buffers(64)
    a, b = rows(64), rows(64)
    views["a"].copy_(a)
    views["b"].copy_(b)
    first = {name: view[:7] for name, view in views.items()}
    crossed = {"a": first["b"], "b": first["a"]}
    assert torch.equal(runner.execute(decode(7, **crossed)), b[:7] * 1000 + a[:7])


def test_host_tensors_are_accepted_on_any_device(runtime: Any, decode: Any, rows: Any) -> None:
    """A batch in host memory replays, and runs eagerly, as one on the device."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] * 2)).decode_runner
    for n in (3, 3, 9):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x.cpu())), x * 2)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_steps_run_in_any_grad_mode(runtime: Any, decode: Any, rows: Any, mode: Any) -> None:
    """Capture in one mode and steps in others, mixed: results are right and carry no gradient."""
    weight = torch.full((3,), 2.0, device=rows(1).device, requires_grad=True)
    with mode():
        config = PhaseConfig(buckets=(2, 4), capture="lazy")
        toy = runtime(lambda b: b.inputs["x"] * weight, decode=config)
        runner = capture_cuda_graphs(model_runner=toy).decode_runner
        runner.execute(decode(4, x=rows(4)))
    for other in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.enable_grad):
        for n in (2, 3, 4, 3, 7):
            x = rows(n)
            with other():
                given = x.clone().requires_grad_() if other is torch.enable_grad else x
                got = runner.execute(decode(n, x=given))
                assert torch.equal(got, x * 2)
                assert not got.requires_grad


def test_a_bad_field_is_found_also_after_good_steps_of_the_same_size(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """A size that has replayed before is still checked, field by field."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] * 2)).decode_runner
    good = rows(3)
    for bad in (
        good.double(), good.to_sparse(), rows(4), rows(3, width=4), good.to("meta"), None, [1], good[0]
    ):  # fmt: skip
        assert torch.equal(runner.execute(decode(3, x=good)), good * 2)
        with pytest.raises(InputError) as caught:
            runner.execute(decode(3, x=bad))
        assert caught.value.field == "x"
    for wrong in ({}, {"y": good}, {"x": good, "y": good}):
        with pytest.raises(InputError):
            runner.execute(decode(3, **wrong))
    assert torch.equal(runner.execute(decode(3, x=good)), good * 2)


class Three(int):
    """Equal to a count and hashed like one, as numbers of other libraries are."""


BROKEN_BATCHES = {
    "no inputs": ("inputs", lambda x: None, "expected a dict of inputs, found NoneType"),
    "a list": ("inputs", lambda x: [x], "expected a dict of inputs, found list"),
    "a tensor": ("inputs", lambda x: x, "expected a dict of inputs, found Tensor"),
    "a mapping": ("inputs", lambda x: collections.UserDict(x=x), "expected a dict of inputs, found UserDict"),
    "a list of requests": ("num_requests", lambda x: [3], "expected a count, found [3]"),
    "a dict of tokens": ("num_tokens", lambda x: {}, "expected a count, found {}"),
    "a real number of requests": ("num_requests", lambda x: 3.0, "expected a count, found 3.0"),
    "another kind of number": ("num_tokens", lambda x: Three(3), "expected a count, found 3"),
    "no requests": ("num_requests", lambda x: None, "expected a count, found None"),
}


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("name", BROKEN_BATCHES)
def test_a_batch_that_is_none_is_refused_alike_at_every_step(
    runtime: Any, decode: Any, rows: Any, name: str, host: bool
) -> None:
    """What is wrong with inputs or counts as a whole is the same InputError at the first step and later."""
    runner = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] * 2)).decode_runner
    attribute, make, text = BROKEN_BATCHES[name]
    x = rows(3).cpu() if host else rows(3)
    told = set()
    for _ in range(4):
        bad = decode(3, x=x)
        setattr(bad, attribute, make(x))
        with pytest.raises(InputError) as caught:
            runner.execute(bad)
        assert caught.value.what == text
        assert caught.value.field == attribute
        told.add(str(caught.value))
        for _ in range(2):
            assert torch.equal(runner.execute(decode(3, x=x)).cpu(), x.cpu() * 2)
    assert len(told) == 1
    assert runner.stats.replays == {4: 8}
