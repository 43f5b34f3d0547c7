"""What one rank of test_distributed.py does; a process of its own that takes scenarios by name."""

import datetime
import json
import sys
import traceback
from collections import Counter

import torch
import torch.distributed as dist

from graphplat import (
    CaptureError,
    ForwardBatch,
    GraphConfig,
    HostSpec,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    TensorSpec,
    capture_cuda_graphs,
    platform_for,
)

RANK = int(sys.argv[1])
DECODE = PhaseConfig(buckets=(2, 4, 8))


class Ranked(ModelRunner):
    """Sums over all rows of all ranks, so that a rank on another path is seen, or waits for ever."""

    def __init__(self, decode=DECODE, prefill=None, fault=None, optional=False, host=None, members=()):
        self.device = torch.device("cpu")
        self.model = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.eye_(self.model.weight)
        self.graph_config = GraphConfig(
            decode=decode, prefill=prefill or PhaseConfig(backend="disabled", max_requests=4)
        )
        self.process_group = dist.group.WORLD
        self.fault = fault
        self.optional = optional
        self.host = host
        self.forwards = Counter()
        self.prepared = None
        for name, value in dict(members).items():
            setattr(self, name, value)

    def input_spec(self, phase):
        unit = "requests" if phase is Phase.DECODE else "tokens"
        fields = {"x": TensorSpec((unit, 3), dtype=torch.float32)}
        if self.optional:
            fields["bias"] = TensorSpec((unit, 3), dtype=torch.float32, optional=True)
        if self.host:
            fields["mode"] = self.host
        return InputSpec(**fields)

    def prepare_capture_batch(self, batch):
        if self.prepared:
            self.prepared(batch)

    def forward(self, batch):
        x = batch.inputs["x"]
        capturing = platform_for("cpu").is_capturing()
        where = "capture" if capturing else "eager"
        self.forwards[where, x.shape[0]] += 1
        if self.fault:
            self.fault(where, x.shape[0], "before")
        hidden = self.model(x)
        if batch.inputs.get("bias") is not None:
            hidden = hidden + batch.inputs["bias"]
        if batch.variant == "b":
            hidden = hidden * 2
        if batch.global_dp_buffer_len is not None:
            hidden = hidden * batch.global_dp_buffer_len
        total = hidden.sum(0)
        dist.all_reduce(total)
        if self.fault:
            self.fault(where, x.shape[0], "after")
        return hidden + total


def rows(count, rank, start=1):
    return torch.arange(count * 3, dtype=torch.float32).view(count, 3) + 100 * rank + start


def batch(count, variant=None, phase=Phase.DECODE, tokens=None, **inputs):
    tokens = count if tokens is None else tokens
    inputs.setdefault("x", rows(tokens, RANK))
    return ForwardBatch(phase=phase, num_requests=count, num_tokens=tokens, inputs=inputs, variant=variant)


def expected(*counts, scale=1):
    """The eager result of this rank where all ranks have so many rows."""
    total = sum((rows(count, rank) * scale).sum(0) for rank, count in enumerate(counts))
    return rows(counts[RANK], RANK) * scale + total


def captured(**settings):
    runtime = Ranked(**settings)
    return runtime, capture_cuda_graphs(model_runner=runtime).decode_runner


def told(runner):
    last = runner.stats.last
    if last is None:
        return None
    return {"bucket": last.key.size if last.key else None, "reason": str(last.reason or "")}


def stepped(runner, *counts, **inputs):
    """One step of so many rows on each rank: how it ran, and whether it was right."""
    found = runner.execute(batch(counts[RANK], **inputs))
    scale = 2 if inputs.get("variant") == "b" else 1
    return told(runner) | {"right": torch.equal(found, expected(*counts, scale=scale))}


def raised(call, *args, **settings):
    """The error of *call*: its type, text and causes."""
    try:
        call(*args, **settings)
    except BaseException as error:
        chain, cause = [], error.__cause__
        while cause is not None:
            chain.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__
        notes = getattr(error, "__notes__", [])
        return {"type": type(error).__name__, "text": str(error), "chain": chain, "notes": notes}
    return {"type": None}


# Steps


def sizes():
    runtime, runner = captured()
    runtime.forwards.clear()
    steps = [stepped(runner, *counts) for counts in ((3, 8), (3, 1), (0, 8), (0, 0), (2, 2), (8, 9), (9, 0))]
    return {"steps": steps, "forwards": runtime.forwards.total(), "replayed": runner.stats.replayed}


def prefill():
    config = PhaseConfig(buckets=(8, 64), max_requests=4, max_padding=2.0)
    runtime = Ranked(decode=PhaseConfig(backend="disabled"), prefill=config)
    runner = capture_cuda_graphs(model_runner=runtime).prefill_runner
    steps = []
    for counts in ((40, 2), (2, 40), (0, 6), (2, 3)):
        tokens = counts[RANK]
        found = runner.execute(batch(min(tokens, 2), tokens=tokens, phase=Phase.PREFILL))
        steps.append(told(runner) | {"right": torch.equal(found, expected(*counts))})
    return {"steps": steps}


def variants():
    _, runner = captured(decode=PhaseConfig(buckets=(2, 4), variants=("a", "b")))
    steps = []
    for mine in (("a", "a"), ("b", "b"), ("a", None), ("a", "b")):
        steps.append(told_after(runner, batch(2, variant=mine[RANK])))
    idle = [stepped(runner, 0, 3, variant=("a", "b")[RANK] if RANK else None)]
    return {"steps": steps, "idle": told(runner), "rows": len(idle)}


def told_after(runner, work):
    runner.execute(work)
    return told(runner)


def host_values():
    spec = HostSpec(values=(1, 2))
    _, runner = captured(host=spec)
    return {
        "steps": [told_after(runner, batch(2, mode=mode[RANK])) for mode in ((1, 1), (1, 2), (2, 2), (1, 3))]
    }


def optional_inputs():
    _, runner = captured(optional=True)
    steps = [told_after(runner, batch(2, bias=torch.ones(2, 3)))]
    one = {} if RANK == 0 else {"bias": torch.ones(2, 3)}
    steps.append(told_after(runner, batch(2, **one)))
    one = {} if RANK == 0 else {"bias": torch.ones(3, 3)}
    work = batch(0 if RANK == 0 else 3, **one)
    found = runner.execute(work)
    total = (rows(3, 1) + 1).sum(0)
    right = found.shape == (0, 3) if RANK == 0 else torch.equal(found, rows(3, 1) + 1 + total)
    return {"steps": steps, "idle": told(runner) | {"right": bool(right)}}


def malformed():
    _, runner = captured()
    bad = {"x": torch.zeros(2, 4)} if RANK == 0 else {}
    first = raised(runner.execute, batch(2, **bad))
    return {"error": first, "next": stepped(runner, 3, 2)}


def refused(spoil):
    """One rank passes what *spoil* makes of its batch; steps before and after are common."""
    _, runner = captured()
    before = stepped(runner, 3, 2)
    work = batch(2)
    error = raised(runner.execute, spoil(work) if RANK == 1 else work)
    return {"error": error, "steps": [before, stepped(runner, 3, 2)], "replayed": runner.stats.replayed}


def no_batch():
    return refused(lambda work: work.inputs)


def no_inputs():
    def spoil(work):
        work.inputs = None
        return work

    return refused(spoil)


def unhashable_counts():
    def spoil(work):
        work.num_requests = [2]
        return work

    return refused(spoil)


def released_on_one():
    _, runner = captured()
    if RANK == 0:
        runner.release()
    return {"step": stepped(runner, 2, 3)}


def different_methods():
    """One rank captures again while the other takes a step."""
    _, runner = captured()
    error = raised(runner.recapture) if RANK == 0 else raised(runner.execute, batch(2))
    after = raised(runner.recapture)
    return {"error": error, "after": after, "step": stepped(runner, 2, 3)}


# Fields for capture


def numbered(left, **settings):
    """A runtime whose prepare_capture_batch leaves ``left["number"]``, and its runner."""
    runtime = Ranked(decode=PhaseConfig(buckets=(4, 8), **settings))

    def prepared(batch):
        number = left["number"]
        batch.global_dp_buffer_len = number(batch) if callable(number) else number
        batch.global_num_tokens_gpu = left.get("tensor")

    runtime.prepared = prepared
    return runtime, capture_cuda_graphs(model_runner=runtime).decode_runner


def numbered_step(runner, counts, numbers, used=None):
    """One step with a number of each rank's own, of which *used* are computed with."""
    work = batch(counts[RANK])
    work.global_dp_buffer_len = numbers[RANK]
    found = runner.execute(work)
    scaled = [rows(counts[rank], rank) * (used or numbers)[rank] for rank in range(2)]
    right = torch.equal(found, scaled[RANK] + sum(one.sum(0) for one in scaled))
    return told(runner) | {"right": right}


def live_numbers(capture="startup"):
    _, runner = numbered({"number": 8}, capture=capture)
    steps = [numbered_step(runner, (3, 2), (16, 8)), numbered_step(runner, (3, 2), (8, 8))]
    steps.append(numbered_step(runner, (3, 2), (None, 8), used=(8, 8)))
    steps += [numbered_step(runner, counts, (16, 8)) for counts in ((3, 2), (0, 2), (2, 0))]
    return {"steps": steps, "buckets": list(runner.buckets)}


def live_numbers_lazy():
    return live_numbers("lazy")


def live_numbers_by_bucket():
    _, runner = numbered({"number": lambda batch: 2 * batch.num_requests})
    steps = [numbered_step(runner, counts, (n, n)) for counts, n in (((8, 8), 16), ((3, 3), 8), ((3, 8), 16))]
    steps.append(numbered_step(runner, (3, 3), (None, None), used=(8, 8)))
    return {"steps": steps}


def live_numbers_captured_anew():
    left = {"number": 8}
    runtime, runner = numbered(left)
    left["number"] = 32
    if RANK == 1:
        runtime.model.weight.data = runtime.model.weight.data.clone()
    steps = [numbered_step(runner, (3, 2), (8, 32)), numbered_step(runner, (3, 2), (32, 32))]
    return {"steps": steps, "recaptures": runner.stats.recaptures}


def live_tensors(capture="startup"):
    tensor = torch.tensor([1, 2])
    _, runner = numbered({"number": 8, "tensor": tensor}, capture=capture)
    bad, good = batch(2), batch(2)
    bad.global_num_tokens_gpu = tensor if RANK == 0 else tensor.clone()
    good.global_num_tokens_gpu = tensor
    error = raised(runner.execute, bad)
    runner.execute(good)
    return {"error": error, "last": told(runner), "step": numbered_step(runner, (3, 2), (8, 8))}


def live_tensors_lazy():
    return live_tensors("lazy")


# Weights


def moved_weight(policy):
    runtime, runner = captured(decode=PhaseConfig(buckets=(2, 4), weights=policy))
    if RANK == 1:
        runtime.model.weight.data = runtime.model.weight.data.clone()
    error = raised(runner.execute, batch(2))
    after = None
    if policy == "recapture":
        after = stepped(runner, 2, 3)
    return {"error": error, "last": told(runner), "recaptures": runner.stats.recaptures, "after": after}


def moved_recapture():
    return moved_weight("recapture")


def moved_eager():
    return moved_weight("eager")


def moved_raise():
    return moved_weight("raise")


# Captures


def different_buckets():
    decode = DECODE if RANK else PhaseConfig(buckets=(2, 4))
    return {"error": raised(captured, decode=decode)}


def different_policies():
    decode = DECODE if RANK else PhaseConfig(buckets=(2, 4, 8), on_failure="eager")
    return {"error": raised(captured, decode=decode)}


def one_disabled():
    decode = DECODE if RANK else PhaseConfig(backend="disabled")
    return {"error": raised(captured, decode=decode)}


def failing(kind, at, moment, policy, error=ZeroDivisionError, capture="startup"):
    def fault(where, size, when):
        if RANK == 1 and (where, size, when) == (kind, at, moment) and fault.active:
            raise error("this rank's own")

    fault.active = False
    decode = PhaseConfig(buckets=(2, 4, 8), on_failure=policy, capture=capture)
    return Ranked(decode=decode, fault=fault), fault


def capture_failing(kind, moment, policy, error=ZeroDivisionError):
    runtime, fault = failing(kind, 4, moment, policy, error)
    fault.active = True
    result = {}
    found = raised(lambda: result.update(runner=capture_cuda_graphs(model_runner=runtime)))
    if "runner" not in result:
        return {"error": found}
    runner = result["runner"].decode_runner
    skipped = [(str(s.reason), s.key.size, s.detail) for s in result["runner"].report.skipped if s.key]
    steps = [stepped(runner, 3, 4), stepped(runner, 8, 1), stepped(runner, 2, 1)]
    fault.active = False
    runner.recapture()
    return {"error": found, "skipped": skipped, "steps": steps, "again": stepped(runner, 3, 4)}


def fails_after_collective_eager():
    return capture_failing("capture", "after", "eager")


def fails_after_collective_raise():
    return capture_failing("capture", "after", "raise")


def out_of_memory_on_one():
    return capture_failing("capture", "after", "raise", torch.OutOfMemoryError)


def interrupted():
    return capture_failing("capture", "after", "eager", KeyboardInterrupt)


def prepare_fails():
    runtime = Ranked(decode=PhaseConfig(buckets=(2, 4, 8), on_failure="eager"))

    def prepared(batch):
        if RANK == 0 and batch.num_requests == 8 and runtime.forwards["eager", 8]:
            raise OSError("no buffer")

    runtime.prepared = prepared
    capture = capture_cuda_graphs(model_runner=runtime)
    runner = capture.decode_runner
    skipped = [(str(s.reason), s.key.size) for s in capture.report.skipped if s.key]
    return {"skipped": skipped, "steps": [stepped(runner, 3, 4), stepped(runner, 8, 1)]}


def hangs_before_collective():
    """The rank fails inside the forward, where the other already waits in the collective."""
    runtime, fault = failing("capture", 4, "before", "raise")
    fault.active = True
    error = raised(capture_cuda_graphs, model_runner=runtime)
    dead = raised(dist.all_reduce, torch.zeros(1))
    return {"error": error, "group": dead["type"]}


def hangs_in_first_run():
    runtime, fault = failing("eager", 8, "before", "raise")
    fault.active = True
    return {"error": raised(capture_cuda_graphs, model_runner=runtime)}


def lazy():
    runtime, fault = failing("capture", 4, "after", "eager", capture="lazy")
    runner = capture_cuda_graphs(model_runner=runtime).decode_runner
    steps = [stepped(runner, 1, 8), stepped(runner, 0, 2)]
    fault.active = True
    steps += [stepped(runner, 3, 1), stepped(runner, 1, 4), stepped(runner, 7, 7)]
    return {"steps": steps, "buckets": list(runner.buckets), "replayed": runner.stats.replayed}


def lazy_raises():
    runtime, fault = failing("capture", 4, "after", "raise", capture="lazy")
    runner = capture_cuda_graphs(model_runner=runtime).decode_runner
    fault.active = True
    error = raised(runner.execute, batch(3))
    fault.active = False
    return {"error": error, "step": stepped(runner, 3, 4)}


def budget():
    """The ranks measure differently, and keep the same buckets."""

    def fault(where, size, when):
        if RANK and when == "after":
            torch.ones(size, 64).sum()

    whole = capture_cuda_graphs(model_runner=Ranked(fault=fault)).report.shapes
    sizes = {shape.key.size: shape.bytes for shape in whole}
    limit = (sizes[8] + sizes[4] - 1) / 2**30

    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = Ranked(decode=PhaseConfig(buckets=(2, 4, 8), memory_budget_gb=limit), fault=fault)
        capture = capture_cuda_graphs(model_runner=runtime)
    runner = capture.decode_runner
    return {
        "buckets": list(runner.buckets),
        "bytes": [shape.bytes for shape in capture.report.shapes],
        "warned": [type(w.message).__name__ for w in caught],
        "step": stepped(runner, 1, 2),
    }


def broken_plan():
    """A peer that never comes is an error within the group's time, and not a hang."""
    if RANK == 0:
        return {}
    return {"error": raised(captured)}


def main():
    for line in sys.stdin:
        order = json.loads(line)
        store = dist.FileStore(order["store"], 2)
        dist.init_process_group(
            "gloo", store=store, rank=RANK, world_size=2, timeout=datetime.timedelta(seconds=order["timeout"])
        )
        try:
            answer = globals()[order["scenario"]]()
        except BaseException:
            answer = {"crash": traceback.format_exc()}
        finally:
            dist.destroy_process_group()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert CaptureError
    main()
