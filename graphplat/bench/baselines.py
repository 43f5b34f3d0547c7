"""Ways to run a step without graphplat: graphs captured by hand, torch's own, and the compiler's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from graphplat.backends.kernels import own_code
from graphplat.batch import ForwardBatch
from graphplat.bench.hand import Hand
from graphplat.bench.measure import Clock, Way
from graphplat.bench.subject import function_of


def static_copy(batch: ForwardBatch) -> ForwardBatch:
    """A batch of memory of its own, padded nowhere."""
    return ForwardBatch(
        phase=batch.phase,
        num_requests=batch.num_requests,
        num_tokens=batch.num_tokens,
        inputs={name: tensor.clone() for name, tensor in batch.inputs.items()},
    )


def bare_graph(
    clock: Clock,
    held: ExitStack,
    function: Callable[[ForwardBatch], torch.Tensor],
    static: ForwardBatch,
    batches: Sequence[ForwardBatch],
    *,
    name: str,
    exact: bool,
) -> Way:
    """*function* of *static* captured by hand; a step is a replay and nothing else.

    *exact* says whether it runs the kernels of the eager forward. The graph is destroyed when *held* closes.
    """
    hand = Hand(clock)
    held.callback(hand.release)
    with hand.session():
        made = hand.capture(lambda: function(static), warmups=2)
    targets = list(static.inputs.values())

    def load(index: int) -> None:
        for target, source in zip(targets, batches[index].inputs.values(), strict=True):
            target.copy_(source)

    def replay(index: int) -> torch.Tensor:
        del index
        made.graph.replay()
        found: torch.Tensor = made.output
        return found

    return Way(
        name,
        replay,
        load=load,
        exact=exact,
        warmup_seconds=made.warmup_seconds,
        capture_seconds=made.capture_seconds,
        capture_bytes=made.bytes,
    )


def graphed_callables(clock: Clock, runtime: Any, batches: Sequence[ForwardBatch]) -> Way:
    """The function of that name of the device's torch module. Raises :class:`NotImplementedError`."""
    module = torch.get_device_module(clock.device)
    make = getattr(module, "make_graphed_callables", None)
    if make is None:
        raise NotImplementedError(f"torch.{clock.device.type} has no such function")
    sample = tuple(tensor.clone() for tensor in batches[0].inputs.values())
    started = time.perf_counter()
    graphed = make(function_of(runtime, batches[0]), sample)
    clock.sync()
    seconds = time.perf_counter() - started
    return Way(
        "make_graphed_callables",
        lambda index: graphed(*batches[index].inputs.values()),
        capture_seconds=seconds,
        note="warm-up within its capture",
    )


def compiled_forward(runtime: Any, mode: str | None = None) -> Callable[[ForwardBatch], torch.Tensor]:
    """The forward of *runtime* under ``torch.compile``."""

    def forward(batch: ForwardBatch) -> torch.Tensor:
        found: torch.Tensor = runtime.forward(batch)
        return found

    compiled: Callable[[ForwardBatch], torch.Tensor] = torch.compile(
        own_code(forward), fullgraph=True, dynamic=False, mode=mode
    )
    return compiled


def compiler(
    clock: Clock,
    forward: Callable[[ForwardBatch], torch.Tensor],
    batches: Sequence[ForwardBatch],
    mode: str | None = None,
) -> Way:
    """Steps of a :func:`compiled_forward`, which compiles here."""
    mark: Callable[[], None] | None = torch.compiler.cudagraph_mark_step_begin if mode else None

    def step(index: int) -> torch.Tensor:
        if mark is not None:
            mark()
        return forward(batches[index])

    started = time.perf_counter()
    for index in range(3):  # reduce-overhead records at the second run and replays from the third
        step(index)
    clock.sync()
    seconds = time.perf_counter() - started
    name = f"torch.compile {mode}" if mode else "torch.compile"
    return Way(name, step, exact=False, warmup_seconds=seconds)
