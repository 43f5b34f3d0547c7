"""What a graph keeps alive: the tensors that were installed for its capture, and nothing else.

These tests run on each real device, and once more in a process where a simulated device stands
in: there, dead memory is handed to the next tensor at once.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import (
    CaptureError,
    ForwardBatch,
    GraphConfig,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    TensorSpec,
    capture_cuda_graphs,
    eager_on_graph,
    platform_for,
)
from graphplat.backends import CaptureBackend
from graphplat.runners import prepared
from graphplat.testing.reference import ReferenceRunner
from graphplat.testing.simulated import install_from_environment

SIMULATED = install_from_environment()
REAL = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# A recorded graph of the cpu holds every storage that it reads, so nothing can die under it.
ADDRESSES_ONLY = [pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=[SIMULATED.name] if SIMULATED else REAL)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device on which graphs really run, or the simulated one."""
    return torch.device(request.param)


@pytest.fixture(params=["full", "breakable"])
def backend(request: pytest.FixtureRequest) -> str:
    """How both phases are captured."""
    return str(request.param)


@eager_on_graph
def _aside(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Toy(ModelRunner):
    """Doubles its input, with a break inside; *install* completes the dummy batch."""

    def __init__(self, device: torch.device, backend: str, install: Callable[[ForwardBatch], None]) -> None:
        self.device = device
        self.model = torch.nn.Module()
        self.graph_config = GraphConfig(
            decode=PhaseConfig(backend=backend, buckets=(2, 4)),
            prefill=PhaseConfig(backend=backend, buckets=(4, 8), max_requests=4),
        )
        self.install = install
        self.batches: list[weakref.ref[ForwardBatch]] = []

    def input_spec(self, phase: Phase) -> InputSpec:
        rows = "requests" if phase is Phase.DECODE else "tokens"
        return InputSpec(x=TensorSpec((rows, 3), dtype=torch.float32))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        found = _aside(batch.inputs["x"] * 2)
        for tensor in (batch.global_num_tokens_gpu, *batch.capture_only.values()):
            if tensor is not None:
                found = found * tensor.float().mean()
        return found

    def prepare_capture_batch(self, batch: ForwardBatch) -> None:
        self.batches.append(weakref.ref(batch))
        self.install(batch)


def tensor(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values).to(device)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the runners pass to ``capture_one``, names only, in order."""
    seen: list[Any] = []
    inner = CaptureBackend.capture_one

    def spy(self: Any, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, **more: Any) -> Any:
        seen.append(None if capture_inputs is None else sorted(capture_inputs))
        return inner(self, shape_key, forward_fn, capture_inputs=capture_inputs, **more)

    monkeypatch.setattr(CaptureBackend, "capture_one", spy)
    return seen


def retained(capture: Any) -> list[int]:
    return [shape.retained_bytes for shape in capture.report.shapes]


def runners(capture: Any) -> tuple[Any, Any]:
    return capture.prefill_runner, capture.decode_runner


def test_a_plain_model_passes_and_retains_nothing(device, backend, passed):
    """``capture_inputs`` is ``None``, the dummy batches die, the report says 0 bytes."""
    runner = Toy(device, backend, lambda batch: None)
    capture = capture_cuda_graphs(model_runner=runner)
    assert passed == [None] * 4
    assert retained(capture) == [0] * 4
    gc.collect()
    assert runner.batches
    assert [ref() for ref in runner.batches] == [None] * len(runner.batches)
    for each in runners(capture):
        assert {captured.capture_inputs for captured in each.backend.captured.values()} == {None}


def test_a_host_number_installed_for_capture_is_no_tensor(device, backend, passed):
    """``global_dp_buffer_len`` alone opens no gate."""

    def install(batch: ForwardBatch) -> None:
        batch.global_dp_buffer_len = 12

    capture = capture_cuda_graphs(model_runner=Toy(device, backend, install))
    assert passed == [None] * 4
    assert retained(capture) == [0] * 4


def test_exactly_the_installed_tensors_are_passed_and_kept(device, backend, passed):
    """
    The graph owns the data-parallel counts themselves, not the batch that carried them, as long
    as it lives; the report counts their bytes.
    """
    made: list[weakref.ref[torch.Tensor]] = []

    def install(batch: ForwardBatch) -> None:
        batch.global_num_tokens_gpu = tensor(device, 1, 1, 1)
        made.append(weakref.ref(batch.global_num_tokens_gpu))

    runner = Toy(device, backend, install)
    capture = capture_cuda_graphs(model_runner=runner)
    gc.collect()
    assert passed == [["global_num_tokens_gpu"]] * 4
    assert retained(capture) == [24] * 4
    assert [ref() for ref in runner.batches] == [None] * len(runner.batches)
    alive = {id(ref()) for ref in made if ref() is not None}
    kept = {
        id(captured.capture_inputs["global_num_tokens_gpu"])
        for each in runners(capture)
        for captured in each.backend.captured.values()
    }
    assert len(kept) == 4
    assert kept == alive
    for each in runners(capture):
        each.release()
    gc.collect()
    assert [ref() for ref in made if ref() is not None] == []


def test_the_gate_rests_on_no_single_field(device, backend, passed):
    """Any tensor that the runtime installs passes, also without ``global_num_tokens_gpu``."""

    def install(batch: ForwardBatch) -> None:
        batch.capture_only["scale"] = tensor(device, 1, 1)
        batch.capture_only["mask"] = tensor(device, 1)

    capture = capture_cuda_graphs(model_runner=Toy(device, backend, install))
    assert passed == [["capture_only.mask", "capture_only.scale"]] * 4
    assert retained(capture) == [24] * 4


def test_an_input_put_in_place_of_a_static_one_is_refused(device, backend):
    """A graph that read a runtime's own tensor would never see the inputs of a step."""

    def install(batch: ForwardBatch) -> None:
        batch.inputs["x"] = batch.inputs["x"] + 1

    with pytest.raises(CaptureError, match="in the place of an input"):
        capture_cuda_graphs(model_runner=Toy(device, backend, install))


def test_an_input_put_beside_the_declared_ones_counts_as_installed(device, backend, passed):
    """A tensor that only the capture has among its inputs is kept, as long as the graph that reads it."""

    def install(batch: ForwardBatch) -> None:
        batch.inputs["extra"] = batch.inputs["x"] + 1

    capture = capture_cuda_graphs(model_runner=Toy(device, backend, install))
    assert passed == [["inputs.extra"]] * 4
    assert retained(capture) == [12 * size for size in (8, 4, 4, 2)]


def test_what_the_batch_held_already_is_not_installed(device, backend, passed):
    """A static input under a second name is the library's own; nothing more is kept."""

    def install(batch: ForwardBatch) -> None:
        batch.capture_only["again"] = batch.inputs["x"]

    capture = capture_cuda_graphs(model_runner=Toy(device, backend, install))
    assert passed == [None] * 4
    assert retained(capture) == [0] * 4


def test_shared_memory_is_counted_once(device, backend):
    """Two views of one storage retain that storage."""

    def install(batch: ForwardBatch) -> None:
        both = torch.ones(6).to(device)
        batch.capture_only.update(left=both[:3], right=both[3:])

    capture = capture_cuda_graphs(model_runner=Toy(device, backend, install))
    assert retained(capture) == [24] * 4


def test_a_dropped_graph_lets_its_tensors_go(device, backend):
    """Eviction frees what that graph kept, and only that."""
    made: dict[int, weakref.ref[torch.Tensor]] = {}

    def install(batch: ForwardBatch) -> None:
        batch.global_num_tokens_gpu = tensor(device, 1, 1)
        if batch.phase is Phase.DECODE:
            made[batch.num_requests] = weakref.ref(batch.global_num_tokens_gpu)

    runner = Toy(device, backend, install)
    decode = PhaseConfig(backend=backend, buckets=(2, 4, 8), capture="lazy", max_graphs=2)
    runner.graph_config = GraphConfig(decode=decode)
    capture = capture_cuda_graphs(model_runner=runner)
    for count in (8, 4, 2):
        x = torch.ones(count, 3).to(device)
        batch = ForwardBatch(phase=Phase.DECODE, num_requests=count, num_tokens=count, inputs={"x": x})
        assert torch.equal(capture.decode_runner.execute(batch).cpu(), torch.full((count, 3), 3.0))
    gc.collect()
    assert {size for size, ref in made.items() if ref() is not None} == {2, 4}


# A model that reads its capture-only tensors at every replay


def _churn(device: torch.device) -> None:
    """Let whatever died be handed out and written over."""
    gc.collect()
    junk = [torch.full((size,), 7).to(device) for size in (1, 2, 3, 4, 8) for _ in range(100)]
    del junk


def _steps(device: torch.device, backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results of a data-parallel reference model after its batches died, beside the dense ones."""
    runner = ReferenceRunner(
        "tiny",
        device=device,
        slots=4,
        max_len=16,
        ranks=3,
        graph_config=GraphConfig(
            decode=PhaseConfig(backend=backend, buckets=(2, 4)),
            prefill=PhaseConfig(backend=backend, buckets=(4, 8), max_requests=2),
        ),
    )
    capture = capture_cuda_graphs(model_runner=runner)
    found = []
    texts = [[5, 9, 33], [7, 1]]
    for keep in (2, 1):
        _churn(device)
        prompts = texts[:keep]
        logits = capture.prefill_runner.execute(runner.prefill_batch(prompts))
        found.append((logits, torch.stack([runner.dense(prompt)[-1] for prompt in prompts])))
        _churn(device)
        logits = capture.decode_runner.execute(
            runner.decode_batch([2] * keep, [len(prompt) for prompt in prompts])
        )
        found.append((logits, torch.stack([runner.dense([*prompt, 2])[-1] for prompt in prompts])))
    assert capture.prefill_runner.stats.replayed == capture.decode_runner.stats.replayed == 2
    return found


def _right(steps: list[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    return [torch.allclose(found.cpu(), dense.cpu(), rtol=1e-4, atol=1e-4) for found, dense in steps]


def test_a_data_parallel_model_stays_right_when_its_batches_are_gone(device, backend):
    """Its graphs read the token counts at every replay, long after the batch that carried them died."""
    assert _right(_steps(device, backend)) == [True] * 4


@pytest.mark.parametrize("device", [SIMULATED.name] if SIMULATED else ADDRESSES_ONLY, indirect=True)
def test_the_same_model_goes_wrong_with_the_gate_shut(device, backend, monkeypatch):
    """
    With nothing retained, the counts' memory goes to other tensors and results are wrong: the test
    above can fail. Not on the cpu, whose recorded graphs hold what they read.
    """
    monkeypatch.setattr(prepared, "installed_tensors", lambda before, batch: {})
    assert not all(_right(_steps(device, backend)))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_the_device_holds_what_the_report_says(device, backend):
    """Allocated bytes grow by the capture-only tensors of every bucket, and by none without them."""
    size = 4 << 20

    def allocated(install: Callable[[ForwardBatch], None]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        # An eager step's workspace would otherwise be counted here and dropped by the first capture.
        platform_for(torch.device(device)).drop_workspaces()
        before = torch.cuda.memory_allocated()
        capture = capture_cuda_graphs(model_runner=Toy(device, backend, install))
        gc.collect()
        grown = torch.cuda.memory_allocated() - before
        for each in runners(capture):
            each.release()
        return grown

    def install(batch: ForwardBatch) -> None:
        batch.capture_only["big"] = torch.ones(size // 4, device=device)

    plain, with_tensors = allocated(lambda batch: None), allocated(install)
    assert plain < size // 4
    assert abs(with_tensors - plain - 4 * size) < size // 4


@pytest.mark.skipif(SIMULATED is not None, reason="this is that process")
def test_all_of_this_holds_on_a_simulated_device():
    """Where graphs know addresses only and nothing executes during capture."""
    environment = {**os.environ, "GRAPHPLAT_SIMULATED": "npu:1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not cuda", __file__]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
