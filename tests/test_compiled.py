"""The compiled backend: the compiler's kernels in graphs of our own, checked against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import (
    CaptureError,
    ConfigError,
    ForwardBatch,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    hookimpl,
)
from graphplat import guard as guards
from graphplat.backends.numerics import Difference, relative_difference, tolerance
from graphplat.registry import register_plugin, unregister_plugin

# Loading torch's compiler warns about its own use of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def config(**settings: Any) -> PhaseConfig:
    return PhaseConfig(**{"backend": "compiled", "buckets": (1, 2, 4)} | settings)


def notes(capture: Any) -> dict[int, str]:
    return {shape.key.size: shape.note for shape in capture.report.shapes}


def test_results_are_those_of_eager(runtime, decode, rows) -> None:
    """Every size, full or padded, gives what the forward gives, within rounding; state is written too."""
    seen: dict[str, torch.Tensor] = {}

    def forward(batch: ForwardBatch) -> dict[str, torch.Tensor]:
        x, slots = batch.inputs["x"], batch.inputs["slots"]
        hidden = torch.nn.functional.gelu(x * 0.01) * 3
        seen["state"].index_copy_(0, slots, hidden)
        return {"hidden": hidden, "best": hidden.argmax(-1)}

    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=torch.float32), slots=TensorSpec(("requests",), fill=4)
    )
    made = runtime(forward, spec, decode=config())
    seen["state"] = torch.zeros(5, 3, device=made.device)
    runner = capture_cuda_graphs(model_runner=made).decode_runner
    for count in (1, 2, 3, 4, 2):
        x, slots = rows(count), torch.arange(count, device=made.device)
        found = runner.execute(decode(count, x=x, slots=slots))
        state = seen["state"].clone()
        expected = forward(decode(count, x=x, slots=slots))
        torch.testing.assert_close(found["hidden"], expected["hidden"])
        assert torch.equal(found["best"], expected["best"])
        torch.testing.assert_close(state[:count], expected["hidden"])
    assert runner.stats.ran_eagerly == 0


def test_one_compilation_serves_all_sizes(runtime, decode) -> None:
    """The compiler runs for the largest size, and once more for size one, always a constant to it."""
    made = runtime(lambda batch: batch.inputs["x"].sin() + 1, decode=config(buckets=(1, 2, 3, 4, 6)))
    found = notes(capture_cuda_graphs(model_runner=made))
    assert [size for size, note in found.items() if "compiled in" in note] == [6, 1]
    assert all("differs from eager by" in note for note in found.values())


def test_each_size_may_have_kernels_of_its_own(runtime, decode, rows) -> None:
    """With compile="each" nothing is shared."""
    made = runtime(lambda batch: batch.inputs["x"].cos(), decode=config(buckets=(2, 4), compile="each"))
    capture = capture_cuda_graphs(model_runner=made)
    assert all("compiled in" in note for note in notes(capture).values())
    x = rows(3)
    torch.testing.assert_close(capture.decode_runner.execute(decode(3, x=x)), x.cos())


def test_the_compiler_gets_the_options_of_its_phase(runtime, decode, rows, monkeypatch) -> None:
    """What compile_options holds reaches the compiler at every size, and graph trees stay off."""
    given: list[dict[str, Any]] = []
    compiler = torch.compile

    def compile_as_told(function: Any, **settings: Any) -> Any:
        given.append(settings["options"])
        return compiler(function, **settings)

    monkeypatch.setattr(torch, "compile", compile_as_told)
    options = {"coordinate_descent_tuning": True}
    made = runtime(lambda batch: batch.inputs["x"] * 2, decode=config(compile_options=options))
    options.clear()
    runner = capture_cuda_graphs(model_runner=made).decode_runner
    assert len(given) == 3  # checked, all sizes, size one
    assert all(each["coordinate_descent_tuning"] is True for each in given)
    assert [each["triton.cudagraphs"] for each in given[1:]] == [False, False]
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), x * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_such_option": 1}, "refuses: Unexpected optimization option no_such_option "),
        ({"max_autotune": "yes"}, "refuses: .*max_autotune.*str"),
        ({"triton.cudagraphs": True}, "'triton.cudagraphs' asks for the compiler's own graphs"),
    ],
)
def test_options_that_the_compiler_refuses_are_named_before_anything_runs(
    runtime, options: dict[str, Any], message: str
) -> None:
    """A misspelt option is an error of the settings also where failed captures run eagerly."""
    made = runtime(
        lambda batch: batch.inputs["x"] * 2, decode=config(compile_options=options, on_failure="eager")
    )
    with pytest.raises(ConfigError, match=message) as caught:
        capture_cuda_graphs(model_runner=made)
    assert caught.value.field == "compile_options"


def test_a_forward_that_depends_on_its_size_is_compiled_for_each(runtime, decode, rows) -> None:
    """Where one compilation cannot serve all sizes each gets its own, and the report says so."""

    def forward(batch: ForwardBatch) -> torch.Tensor:
        x = batch.inputs["x"]
        return x * 2 if x.shape[0] > 2 else x * 3

    capture = capture_cuda_graphs(model_runner=runtime(forward, decode=config(buckets=(2, 4))))
    assert "compiled for each size" in notes(capture)[2]
    for count, factor in ((4, 2), (2, 3)):
        x = rows(count)
        assert torch.equal(capture.decode_runner.execute(decode(count, x=x)), x * factor)


def test_a_forward_that_cannot_be_compiled_whole_is_compiled_in_pieces(runtime, decode, rows) -> None:
    """Python between two pieces runs eagerly, and the report says so."""

    def forward(batch: ForwardBatch) -> torch.Tensor:
        first = batch.inputs["x"] + 1
        torch._dynamo.graph_break()
        return first * 2

    capture = capture_cuda_graphs(model_runner=runtime(forward, decode=config(buckets=(2,))))
    assert "compiled in pieces" in notes(capture)[2]
    x = rows(2)
    assert torch.equal(capture.decode_runner.execute(decode(2, x=x)), (x + 1) * 2)


def test_pieces_are_compiled_for_more_sizes_than_the_compiler_counts_to(runtime, decode, rows) -> None:
    """
    The pieces of all sizes share the compiler's count, at whose limit of eight it would run the forward as it
    is: each size is compiled all the same, and no size is without a note of it.
    """
    compiled: list[int] = []

    def forward(batch: ForwardBatch) -> torch.Tensor:
        first = batch.inputs["x"] + 1
        torch._dynamo.graph_break()
        if torch.compiler.is_compiling():
            return first * 3
        compiled.append(0)
        return first * 3

    settings = config(buckets=tuple(range(1, 13)), compile="each")
    capture = capture_cuda_graphs(model_runner=runtime(forward, decode=settings))
    assert all("compiled in pieces" in note for note in notes(capture).values())
    compiled.clear()
    for count in (1, 12):
        x = rows(count)
        assert torch.equal(capture.decode_runner.execute(decode(count, x=x)), (x + 1) * 3)
    assert not compiled


def wrong_when_compiled(batch: ForwardBatch) -> torch.Tensor:
    x = batch.inputs["x"] * 1.0
    return x * 1.01 if torch.compiler.is_compiling() else x


def test_wrong_kernels_are_refused(runtime) -> None:
    """A difference beyond the tolerance names itself, what is allowed, the bucket, and what to do."""
    made = runtime(wrong_when_compiled, decode=config(buckets=(2,)))
    with pytest.raises(CaptureError, match=r"differ from eager ones by 0\.01.*0\.0001 is allowed") as caught:
        capture_cuda_graphs(model_runner=made)
    assert (caught.value.phase, caught.value.bucket) == (Phase.DECODE, 2)


def test_wrong_kernels_leave_the_bucket_to_eager(runtime, decode, rows) -> None:
    """With on_failure="eager" such a size runs eagerly, and the reason is counted."""
    made = runtime(wrong_when_compiled, decode=config(buckets=(2,), on_failure="eager"))
    runner = capture_cuda_graphs(model_runner=made).decode_runner
    x = rows(2)
    assert torch.equal(runner.execute(decode(2, x=x)), x)
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 1}


def test_the_tolerance_is_a_setting(runtime) -> None:
    """A larger tolerance accepts the same kernels, and the report holds the difference."""
    made = runtime(wrong_when_compiled, decode=config(buckets=(2,), tolerance=0.02))
    assert "differs from eager by 0.01 " in notes(capture_cuda_graphs(model_runner=made))[2]


def test_random_results_are_not_compared(runtime) -> None:
    """A forward that differs from itself cannot be held against its kernels; the report says so."""
    made = runtime(
        lambda batch: batch.inputs["x"] + torch.rand_like(batch.inputs["x"]), decode=config(buckets=(2,))
    )
    assert "not compared with eager" in notes(capture_cuda_graphs(model_runner=made))[2]


def test_errors_of_the_forward_stay_errors(runtime) -> None:
    """What the model itself raises is the cause of the CaptureError."""

    def forward(batch: ForwardBatch) -> torch.Tensor:
        if batch.num_requests == 4:
            raise LookupError("no such table")
        return batch.inputs["x"] + 1

    made = runtime(forward, decode=config(buckets=(4,)))
    with pytest.raises((CaptureError, LookupError), match="no such table"):
        capture_cuda_graphs(model_runner=made)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_caller_may_be_in_any_mode(runtime, decode, rows, mode: Callable[[], Any]) -> None:
    """A replay runs in the modes of its capture: nothing is compiled again."""
    weight = torch.eye(3).to(rows(1).device)
    made = runtime(lambda batch: batch.inputs["x"] @ weight, decode=config(buckets=(2,)))
    runner = capture_cuda_graphs(model_runner=made).decode_runner
    x = rows(2) + 0.001
    before = guards.compiled_frames()
    with mode():
        found = runner.execute(decode(2, x=x))
    assert runner.stats.replayed == 1
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, x)
    assert guards.compiled_frames() == before


def test_results_survive_the_next_step(runtime, decode, rows) -> None:
    """Each step's results are its own."""
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda batch: batch.inputs["x"] * 2, decode=config(buckets=(2,)))
    ).decode_runner
    first, second = rows(2), rows(2)
    found = runner.execute(decode(2, x=first))
    runner.execute(decode(2, x=second))
    assert torch.equal(found, first * 2)


def test_a_second_capture_compiles_nothing(runtime, decode, rows) -> None:
    """Kernels outlive their graphs."""
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda batch: batch.inputs["x"].tanh(), decode=config(buckets=(1, 2, 4)))
    ).decode_runner
    before = guards.compiled_frames()
    runner.recapture()
    assert guards.compiled_frames() == before
    x = rows(3)
    torch.testing.assert_close(runner.execute(decode(3, x=x)), x.tanh())


class Watcher:
    def __init__(self) -> None:
        self.events: list[Any] = []

    @hookimpl
    def capture_progress(self, event: Any) -> None:
        self.events.append(event)


def test_compilation_is_announced(runtime) -> None:
    """Observers hear of each size before it is compiled, and again when it is captured."""
    watcher = Watcher()
    register_plugin(watcher, "watcher")
    try:
        capture_cuda_graphs(
            model_runner=runtime(lambda batch: batch.inputs["x"] - 1, decode=config(buckets=(2, 4)))
        )
    finally:
        unregister_plugin("watcher")
    told = [(event.kind, event.key.size if event.key else None) for event in watcher.events]
    assert told == [
        ("start", None),
        ("compiling", 4),
        ("captured", 4),
        ("compiling", 2),
        ("captured", 2),
        ("end", None),
    ]


def test_the_compiler_inside_a_capture_is_an_error(runtime, decode, monkeypatch) -> None:
    """Should the compiler run while a stream is captured, the capture fails and says so."""
    made = runtime(lambda batch: batch.inputs["x"] + 2, decode=config(buckets=(2,)))
    if made.device.type == "cpu":
        pytest.skip("nothing is captured where the compiled function is the recording")
    count = iter(range(1000))
    monkeypatch.setattr(guards, "compiled_frames", lambda: next(count))
    with pytest.raises(CaptureError, match="compiler ran inside the capture"):
        capture_cuda_graphs(model_runner=made)


def test_differences_count_what_matters() -> None:
    """A part of the largest value; infinite for a misplaced NaN, another shape, or another structure."""
    expected = {"a": torch.tensor([1.0, -4.0]), "n": torch.tensor([3, 4])}
    near = Difference.between(expected, {"a": torch.tensor([1.5, -4.0]), "n": torch.tensor([3, 5])})
    assert (near.relative, near.path, near.flipped, near.integers) == (0.125, "a", 1, 2)
    nan, inf = float("nan"), float("inf")
    assert relative_difference(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0])) == 0
    assert relative_difference(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0])) == inf
    assert relative_difference(torch.tensor([nan, 1.0]), torch.tensor([2.0, 1.0])) == inf
    assert Difference.between(expected, {"a": expected["a"]}).relative == inf
    assert Difference.between(expected, expected | {"a": torch.zeros(3)}).relative == inf


def test_the_least_precise_type_sets_the_tolerance() -> None:
    """Weights in bfloat16 under float32 results, or autocast, widen it."""
    single, half = {"y": torch.zeros(1)}, {"w": torch.zeros(1, dtype=torch.bfloat16)}
    cpu = torch.device("cpu")
    assert tolerance([single], cpu) == 1e-4
    assert tolerance([single, half], cpu) == 0.15
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tolerance([single], cpu) == 0.15
