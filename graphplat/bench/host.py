"""Sections ``host`` and ``scaling``, and the breaks of section ``prefill``: what the host pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.bench.fields import FiveFields, column_batch
from graphplat.bench.floor import Floor
from graphplat.bench.measure import FRESH, Clock, Way
from graphplat.bench.records import BenchReport, BreakRow, HostRow, ScalingRow, Skip
from graphplat.bench.subject import hold
from graphplat.capture import capture_cuda_graphs
from graphplat.config import GraphConfig, PhaseConfig
from graphplat.errors import ReplayError
from graphplat.report import total_bytes

_ROWS, _BUCKET = 13, 16
_BREAKS = 60
_WEIGHTS = 256
"""As many as a model of thirty layers has."""


def host_times(clock: Clock, report: BenchReport) -> None:
    """Host time of ``execute`` over the bare replay of the same graph, by where a batch comes from.

    Beside it steps written by hand, which show how little the device's own verbs can take here.
    """
    with ExitStack() as held:
        found = clock.host(_host_ways(clock, held))
    bare = found["bare replay"].median
    report.host += [
        HostRow(way=name, host_us=spread, over_replay_us=spread.median - bare)
        for name, spread in found.items()
    ]


def _host_ways(clock: Clock, held: ExitStack) -> list[Way]:
    """Compared with the forward, but for the bare replay, which computes on what the buffers hold."""
    runner, runtime = _captured(clock, held, (_BUCKET,), outputs="view")
    copying, _ = _captured(clock, held, (_BUCKET,), outputs="copy")
    watching, _ = _captured(clock, held, (_BUCKET,), outputs="view", weights=_WEIGHTS)
    ((graph,),) = runner.device_graphs().values()
    lent, others = runner.buffers(_ROWS), watching.buffers(_ROWS)
    own = ForwardBatch(phase=Phase.DECODE, num_requests=_ROWS, num_tokens=_ROWS, inputs=lent)
    watched = ForwardBatch(phase=Phase.DECODE, num_requests=_ROWS, num_tokens=_ROWS, inputs=others)
    host = [column_batch(_ROWS, "cpu", seed) for seed in range(FRESH)]
    device = [column_batch(_ROWS, clock.device, seed) for seed in range(FRESH)]
    floor = Floor.capture(clock, runtime, _ROWS, _BUCKET)
    held.callback(floor.release)

    def write(index: int) -> None:
        for name, source in device[index].inputs.items():
            lent[name].copy_(source)
            others[name].copy_(source)

    replay = graph.replay
    ways = [
        Way("bare replay", lambda index: replay()),
        Way("runner's own buffers", lambda index: runner.execute(own), load=write),
        Way(f"the same, {_WEIGHTS} weights watched", lambda index: watching.execute(watched), load=write),
        Way("host tensors", lambda index: runner.execute(host[index])),
        Way("device tensors of mixed types", lambda index: runner.execute(device[index])),
        Way("device tensors, outputs copied", lambda index: copying.execute(device[index])),
        *floor.ways(device, host),
    ]
    for way in ways[1:]:
        _check(way, runtime, device)
    return ways


def scaling(clock: Clock, report: BenchReport, counts: Sequence[int] = (1, 8, 64, 512)) -> None:
    """Cost of a step and of a capture by the number of captured buckets."""
    ways: list[Way] = []
    made: list[tuple[int, float, int | None]] = []
    with ExitStack() as held:
        for count in counts:
            if clock.left() <= 0:
                report.skipped.append(Skip(section="scaling", what=f"{count} buckets", why="no time left"))
                break
            runner, runtime = _captured(clock, held, tuple(range(1, count + 1)), outputs="view")
            # A second capture: the first also loads what the device needs once.
            seconds = clock.seconds(runner.recapture)
            made.append((count, seconds, total_bytes(runner.context.shapes)))
            size = count // 2 + 1 if count > 1 else 1
            batches = [column_batch(size, clock.device, seed) for seed in range(FRESH)]
            way = Way(str(count), _executor(runner, batches))
            _check(way, runtime, batches)
            ways.append(way)
        found = clock.host(ways)
    report.scaling += [
        ScalingRow(
            buckets=count,
            capture_seconds=seconds,
            capture_us_per_bucket=seconds / count * 1e6,
            host_us=found[str(count)],
            bytes=size,
        )
        for count, seconds, size in made
    ]


def breaks(clock: Clock, report: BenchReport) -> None:
    """Host time of each break, its segment's launch included, around functions that do nothing."""
    if not clock.platform.capabilities.breakable:
        why = f"{clock.platform.name} does not declare them"
        report.skipped.append(Skip(section="prefill", what="breaks", why=why))
        return
    batches = [column_batch(_ROWS, clock.device, seed) for seed in range(FRESH)]
    ways = []
    settings: dict[str, Any] = {"outputs": "view", "backend": "breakable"}
    with ExitStack() as held:
        for count in (0, _BREAKS):
            runner, runtime = _captured(clock, held, (_BUCKET,), breaks=count, **settings)
            way = Way(str(count), _executor(runner, batches))
            _check(way, runtime, batches)
            ways.append(way)
        found = clock.host(ways, blocks=50, size=5)
    none, many = found["0"], found[str(_BREAKS)]
    per_break = (many.median - none.median) / _BREAKS
    report.breaks += [
        BreakRow(breaks=0, host_us=none),
        BreakRow(breaks=_BREAKS, host_us=many, per_break_us=per_break),
    ]


def _captured(
    clock: Clock,
    held: ExitStack,
    buckets: tuple[int, ...],
    *,
    breaks: int = 0,
    weights: int = 1,
    **settings: Any,
) -> tuple[Any, FiveFields]:
    """A runner with graphs, which are destroyed when *held* closes."""
    config = GraphConfig(decode=PhaseConfig(buckets=buckets, **settings))
    runtime = FiveFields(clock.device, config, breaks=breaks, weights=weights)
    return hold(held, capture_cuda_graphs(model_runner=runtime)).decode_runner, runtime


def _executor(runner: Any, batches: Sequence[ForwardBatch]) -> Callable[[int], torch.Tensor]:
    def step(index: int) -> torch.Tensor:
        found: torch.Tensor = runner.execute(batches[index])
        return found

    return step


def _check(way: Way, runtime: FiveFields, batches: Sequence[ForwardBatch]) -> None:
    """Raise :class:`ReplayError` unless *way* gives what the forward gives."""
    for index, batch in enumerate(batches):
        if way.load is not None:
            way.load(index)
        if not torch.equal(runtime.forward(batch), way.step(index)):
            raise ReplayError(f"{way.name}: results differ from eager ones")
