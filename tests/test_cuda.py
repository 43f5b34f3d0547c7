"""What only real hardware can show: streams, pools, pinned memory, random state, other threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import (
    CaptureError,
    ForwardBatch,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    WeightsMovedError,
    capture_cuda_graphs,
    platform_for,
)

pytestmark = pytest.mark.cuda

Decode = Callable[..., ForwardBatch]
Make = Callable[..., Any]
MIB = 1 << 20


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, with nothing left over from other tests."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.device(request.param)


def settled() -> int:
    """Bytes that torch's allocator holds once nothing unused is cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_an_invalidated_capture_leaves_stream_pool_and_random_state_usable(
    runtime: Make, decode: Decode, rows: Make
) -> None:
    """
    pytorch#190308: after a host read ended a capture, the stream captures no more, other
    buckets replay, random numbers can be drawn, and later captures work, also by hand.
    """

    def forward(batch: ForwardBatch) -> torch.Tensor:
        x = batch.inputs["x"]
        if batch.num_requests == 4 and torch.cuda.is_current_stream_capturing():
            torch.rand(3, device=x.device).sum().item()
        return x * 2

    model = runtime(forward, decode=PhaseConfig(buckets=(2, 4, 8), on_failure="eager"))
    stream = torch.cuda.current_stream()
    capture = capture_cuda_graphs(model_runner=model)
    runner = capture.decode_runner
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert runner.buckets == (2, 8)
    for count in (1, 4, 7):
        x = rows(count)
        assert torch.equal(runner.execute(decode(count, x=x)), x * 2)
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 1}
    first, second = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    assert not torch.equal(first, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(4, device="cuda")
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)


def test_failed_captures_give_their_memory_back(runtime: Make) -> None:
    """pytorch#190308: fifty failed captures hold no more memory than one."""

    def forward(batch: ForwardBatch) -> torch.Tensor:
        big = torch.ones(4 << 20, device="cuda")
        if torch.cuda.is_current_stream_capturing():
            big.sum().item()
        return batch.inputs["x"]

    def fail() -> None:
        with pytest.raises(CaptureError, match="bucket 1"):
            capture_cuda_graphs(model_runner=runtime(forward, decode=PhaseConfig(buckets=(1,))))

    fail()
    before = settled()
    for _ in range(50):
        fail()
    assert settled() - before < 2 << 20


def test_capture_and_release_leave_memory_where_it_began(runtime: Make, decode: Decode, rows: Make) -> None:
    """Fifty cycles of capture and release, by release() and by dropping the runner, add nothing."""
    model = runtime(lambda batch: (batch.inputs["x"] @ torch.ones(3, 3, device="cuda")).tanh())

    def cycle() -> None:
        runner = capture_cuda_graphs(model_runner=model).decode_runner
        runner.execute(decode(3, x=rows(3)))
        runner.release()

    cycle()
    before = settled()
    for _ in range(50):
        cycle()
    assert settled() <= before


def test_garbage_owning_a_graph_cannot_end_a_capture(runtime: Make, decode: Decode, rows: Make) -> None:
    """
    pytorch#161037: dead cycles that own graphs are not finalized inside a recording, even
    with a collection threshold of one; the collector's state is restored exactly.
    """

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = torch.ones(4, device="cuda") * 2

    def forward(batch: ForwardBatch) -> torch.Tensor:
        [[] for _ in range(2000)]
        return batch.inputs["x"] + 1

    threshold = gc.get_threshold()
    for enabled in (True, False):
        Cycle()
        gc.enable() if enabled else gc.disable()
        gc.set_threshold(1)
        try:
            runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
            assert gc.isenabled() is enabled
        finally:
            gc.set_threshold(*threshold)
            gc.enable()
        x = rows(3)
        assert torch.equal(runner.execute(decode(3, x=x)), x + 1)


@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
def test_random_draws_differ_and_repeat_after_reseeding(runtime: Make, decode: Decode, private: bool) -> None:
    """ACE-Step-1.5#613: replays draw fresh numbers, from generators of the runtime's own too."""
    generator = torch.Generator(device="cuda") if private else torch.cuda.default_generators[0]

    def forward(batch: ForwardBatch) -> torch.Tensor:
        noise = torch.empty_like(batch.inputs["x"]).normal_(generator=generator if private else None)
        return batch.inputs["x"] + noise

    model = runtime(forward, generators=(generator,) if private else ())
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    batch = decode(2, x=torch.zeros(2, 3, device="cuda"))
    generator.manual_seed(5)
    first, second = runner.execute(batch), runner.execute(batch)
    assert not torch.equal(first, second)
    generator.manual_seed(5)
    assert torch.equal(runner.execute(batch), first)
    assert torch.equal(runner.execute(batch), second)
    assert runner.stats.replayed == 4


def test_another_threads_device_work_is_unharmed_and_harmless(
    runtime: Make, decode: Decode, rows: Make
) -> None:
    """
    vllm#48053, libreyolo#681: a thread that pins memory, copies and allocates all the time
    survives captures at start-up and on first use, and they survive it.
    """
    stop, errors, turns = threading.Event(), [], 0

    def work() -> None:
        nonlocal turns
        side = torch.cuda.Stream()
        try:
            while not stop.is_set():
                pinned = torch.full((1 << 12,), turns % 7, dtype=torch.float32).pin_memory()
                with torch.cuda.stream(side):
                    copied = pinned.to("cuda", non_blocking=True) + 1
                side.synchronize()
                assert copied[0].item() == turns % 7 + 1
                turns += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not turns and thread.is_alive():
            time.sleep(0.01)
        for mode in ("startup", "lazy"):
            model = runtime(
                lambda batch: batch.inputs["x"] * 3, decode=PhaseConfig(max_size=64, capture=mode)
            )
            runner = capture_cuda_graphs(model_runner=model).decode_runner
            for count in (1, 5, 33, 64):
                x = rows(count)
                assert torch.equal(runner.execute(decode(count, x=x)), x * 3)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert turns > 0


def test_two_streams_may_share_a_runner(runtime: Make, decode: Decode) -> None:
    """sglang-omni#1369: alternating threads with streams of their own each see their own values."""

    def forward(batch: ForwardBatch) -> torch.Tensor:
        x = batch.inputs["x"]
        for _ in range(20):
            x = x @ torch.eye(3, device="cuda")
        return x + 1

    runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
    wrong: list[tuple[int, int]] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(300):
                value = float(number * 1000 + turn)
                out = runner.execute(decode(4, x=torch.full((4, 3), value, device="cuda")))
                if not torch.equal(out.cpu(), torch.full((4, 3), value + 1)):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_host_batches_may_be_overwritten_at_once(runtime: Make, decode: Decode) -> None:
    """A caller may reuse its host tensors as soon as execute() returns, however far the device lags."""
    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=torch.float32),
        i=TensorSpec(("requests",), dtype=torch.int32, fill=1),
    )

    def forward(batch: ForwardBatch) -> torch.Tensor:
        torch.cuda._sleep(200_000)
        return batch.inputs["x"] * batch.inputs["i"][:, None]

    runner = capture_cuda_graphs(model_runner=runtime(forward, spec)).decode_runner
    x, i = torch.zeros(3, 3), torch.zeros(3, dtype=torch.int32)
    kept = []
    for turn in range(40):
        x.fill_(turn)
        i.fill_(2)
        kept.append(runner.execute(decode(3, x=x, i=i)))
    x.fill_(-1)
    for turn, out in enumerate(kept):
        assert torch.equal(out.cpu(), torch.full((3, 3), turn * 2.0)), turn


def test_steps_allocate_nothing_in_view_mode(runtime: Make, decode: Decode, rows: Make) -> None:
    """The replay path asks the allocator for nothing, whichever way the inputs come."""
    model = runtime(lambda batch: batch.inputs["x"] * 2, decode=PhaseConfig(buckets=(4,), outputs="view"))
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    batches = [decode(3, x=rows(3)), decode(3, x=rows(3).cpu()), decode(4, **runner.buffers(4))]
    for batch in batches * 10:
        runner.execute(batch)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for batch in batches * 10:
        runner.execute(batch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_ladder_takes_little_more_memory_than_its_largest_bucket(runtime: Make) -> None:
    """
    TensorRT-LLM#3116, vllm#9724: graphs of one pool leave wide outputs in one place, so nineteen
    of them reserve at most a quarter more than the largest alone.
    """
    wide = torch.randn(3, 65_536, device="cuda")

    def reserved(buckets: tuple[int, ...] | None) -> int:
        model = runtime(lambda batch: batch.inputs["x"] @ wide, decode=PhaseConfig(buckets=buckets))
        return capture_cuda_graphs(model_runner=model).report.graph_bytes

    one, many = reserved((128,)), reserved(None)
    assert 128 * 65_536 * 4 <= one <= many <= 1.25 * one


def test_both_phases_take_little_more_memory_than_the_largest_bucket(runtime: Make) -> None:
    """vllm#9724: prefill and decode graphs share one pool, so together they take what the largest takes."""
    wide = torch.randn(3, 65_536, device="cuda")
    spec = {
        phase: InputSpec(x=TensorSpec((rows, 3), dtype=torch.float32))
        for phase, rows in ((Phase.DECODE, "requests"), (Phase.PREFILL, "tokens"))
    }
    prefill = PhaseConfig(backend="full", buckets=(16, 64, 256), max_requests=4)

    def reserved(**phases: PhaseConfig) -> int:
        model = runtime(lambda batch: (batch.inputs["x"] @ wide).relu(), spec, **phases)
        return capture_cuda_graphs(model_runner=model).report.graph_bytes

    one = PhaseConfig(backend="full", buckets=(256,), max_requests=4)
    alone = reserved(prefill=one, decode=PhaseConfig(backend="disabled"))
    both = reserved(prefill=prefill, decode=PhaseConfig())
    assert 256 * 65_536 * 4 <= alone <= both <= 1.25 * alone


@pytest.mark.parametrize("by", ["anyone", "a graph that is destroyed"])
def test_dropped_workspaces_leave_graphs_and_other_memory_alone(
    runtime: Make, decode: Decode, by: str
) -> None:
    """
    pytorch#193402, #192061: once the math library's workspaces were dropped and unused memory given back, by
    anyone or because one graph was destroyed, replays of the others are right and write to nobody's memory.
    """
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    spec = InputSpec(x=TensorSpec(("requests", 2048), dtype=torch.bfloat16))
    model = runtime(
        lambda batch: batch.inputs["x"] @ weight @ weight, spec, decode=PhaseConfig(buckets=(1, 8, 64))
    )
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    if by == "anyone":
        torch._C._cuda_clearCublasWorkspaces()
    else:
        runner.drop(next(key for key in runner.entries if key.size == 8))
    settled()
    # As large as a workspace on this kind of GPU, so that one would be given the place of another.
    others = [torch.full((32 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for count in (1, 64, 5, 64, 1):  # the third one captures what was dropped, if it was
        x = torch.randn(count, 2048, device="cuda", dtype=torch.bfloat16)
        result = runner.execute(decode(count, x=x))
        key = runner.stats.last.key
        padded = torch.zeros(key.size, 2048, device="cuda", dtype=torch.bfloat16)
        padded[:count] = x
        torch.testing.assert_close(result, (padded @ weight @ weight)[:count])
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)
    assert runner.stats.replayed == 5


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_reported_bytes_are_what_the_device_counts(runtime: Make, backend: str) -> None:
    """
    For every bucket and in sum, the report's bytes are within 1 MiB what torch's allocator counts
    in the graphs' pool; releasing gives all of them back.
    """
    wide = torch.randn(3, 65_536, device="cuda")

    def forward(batch: ForwardBatch) -> torch.Tensor:
        return (batch.inputs["x"] @ wide).relu() + 1

    settings = PhaseConfig(buckets=(2, 32, 128), backend=backend)
    capture_cuda_graphs(model_runner=runtime(forward, decode=settings)).decode_runner.release()
    before = settled()
    capture = capture_cuda_graphs(model_runner=runtime(forward, decode=settings))
    report, runner = capture.report, capture.decode_runner
    grown = settled() - before
    pools = {graph.pool() for graphs in runner.device_graphs().values() for graph in graphs}
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pooled = sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) in pools)
    outputs = 128 * 65_536 * 4
    assert len(pools) == 1
    assert outputs <= pooled
    assert abs(report.graph_bytes - pooled) <= MIB
    assert abs(report.graph_bytes + report.static_buffer_bytes - grown) <= 2 * MIB  # its own segment's rest
    runner.release()
    assert abs(settled() - before) <= 2 * MIB


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes allocate on the device")
def test_reported_bytes_are_what_the_driver_gives_away(runtime: Make) -> None:
    """The driver's free memory falls by the report's bytes, within 1 MiB, and rises by them at release."""
    wide = torch.randn(3, 65_536, device="cuda")
    model = runtime(lambda batch: batch.inputs["x"] @ wide, decode=PhaseConfig(buckets=(32, 128)))
    capture = capture_cuda_graphs(model_runner=model)
    runner = capture.decode_runner
    for _ in range(2):
        runner.release()
        settled()
        free, _total = torch.cuda.mem_get_info()
        runner.recapture()
        settled()
        taken = free - torch.cuda.mem_get_info()[0]
        reported = sum(shape.bytes or 0 for shape in runner.context.shapes)
        assert reported >= 128 * 65_536 * 4
        assert abs(taken - reported) <= MIB
    runner.release()
    settled()
    assert abs(torch.cuda.mem_get_info()[0] - free) <= MIB


def test_outputs_of_buckets_that_share_memory_do_not_mix(runtime: Make, decode: Decode, rows: Make) -> None:
    """sglang#23037: results kept from one bucket are intact after replays of others in the same memory."""
    wide = torch.randn(3, 4096, device="cuda")
    model = runtime(
        lambda batch: {"y": batch.inputs["x"] @ wide, "twice": batch.inputs["x"] * 2},
        decode=PhaseConfig(buckets=(1, 8, 64)),
    )
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    kept = []
    for count in (64, 1, 7, 33, 8, 1, 64):
        x = rows(count)
        kept.append((x, runner.execute(decode(count, x=x))))
    for x, out in kept:
        torch.testing.assert_close(out["y"], x @ wide)
        assert torch.equal(out["twice"], x * 2)


def test_a_view_stays_readable_after_release(runtime: Make, decode: Decode, rows: Make) -> None:
    """What a caller still holds in view mode keeps its graph's memory until it is dropped."""
    model = runtime(
        lambda batch: (batch.inputs["x"] * 2).repeat(1, 1 << 16),
        decode=PhaseConfig(buckets=(8,), outputs="view"),
    )
    platform_for(model.device).drop_workspaces()
    before = settled()
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    x = rows(8)
    out = runner.execute(decode(8, x=x))
    runner.release()
    settled()
    junk = [torch.full((8, 3 << 16), float("nan"), device="cuda") for _ in range(8)]
    assert torch.equal(out, (x * 2).repeat(1, 1 << 16))
    del out, junk
    assert settled() - before < 4 << 20


def test_moved_weights_are_found_before_replay(runtime: Make, decode: Decode, rows: Make) -> None:
    """vllm-ascend#7473: a swapped .data is noticed, and a replay from the old address never happens."""
    linear = torch.nn.Linear(3, 3, device="cuda")
    for policy in ("recapture", "eager", "raise"):
        model = runtime(
            lambda batch: linear(batch.inputs["x"]), decode=PhaseConfig(buckets=(4,), weights=policy)
        )
        model.model = linear
        runner = capture_cuda_graphs(model_runner=model).decode_runner
        x = rows(4)
        runner.execute(decode(4, x=x))
        linear.weight.data = torch.randn(3, 3, device="cuda")
        if policy == "raise":
            with pytest.raises(WeightsMovedError, match="weight"):
                runner.execute(decode(4, x=x))
            continue
        with torch.no_grad():
            torch.testing.assert_close(runner.execute(decode(4, x=x)), linear(x))


def test_importing_and_listing_creates_no_context_and_leaves_children_able_to_use_the_gpu() -> None:
    """vllm#32611: after import, listing and resolving, a forked child can still start the driver."""
    script = """
        import os, torch
        import graphplat
        from graphplat.registry import list_plugins
        list_plugins()
        assert graphplat.platform_for("cuda").name == "cuda"
        assert not torch.cuda.is_initialized()
        pid = os.fork()
        if pid == 0:
            ok = torch.ones(2, device="cuda").sum().item() == 2
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_symmetric_memory_is_preallocated_when_asked_for(runtime: Make) -> None:
    """With a group, enable_symm_mem sets the memory up after capture; without one it says what is missing."""
    script = """
        import torch, torch.distributed as dist
        from graphplat import *
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
        class R(ModelRunner):
            device = torch.device("cuda", 0)
            graph_config = GraphConfig(decode=PhaseConfig(buckets=(1,)))
            enable_symm_mem = True
            symm_mem_bytes = 1 << 20
            def __init__(self): self.model = torch.nn.Module()
            def input_spec(self, phase): return InputSpec(x=TensorSpec(("requests",)))
            def forward(self, batch): return batch.inputs["x"] + 1
        try:
            capture_cuda_graphs(model_runner=R())
        except PlatformError as error:
            assert "process group" in str(error)
        else:
            raise AssertionError
        runner = R()
        runner.symm_group = dist.group.WORLD
        platform = platform_for("cuda")
        buffer, handle = platform.preallocate_symmetric_memory(
            device=R.device, stream=None, group=dist.group.WORLD, nbytes=1 << 20)
        assert buffer.numel() == 1 << 20 and handle.world_size == 1
        dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
