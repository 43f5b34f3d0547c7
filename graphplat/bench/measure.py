"""Clocks: interleaved rounds, medians and spread, a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import guard
from graphplat.backends.numerics import relative_difference
from graphplat.bench.records import Spread

if TYPE_CHECKING:
    from graphplat.platform import Platform

FRESH = 8
"""Different inputs that steps take in turn."""

Say = Callable[[str], None]
"""Takes a line of what is going on."""

Watch = Callable[[], AbstractContextManager[None]]
"""Entered while a compiler may take minutes, so that somebody can see what it does."""

_COLD = 5
"""Short steps at the start of a block that are not recorded: a wait has put the device's driver out of the
caches, and the way before everything else."""
_QUICK, _BLOCK = 5e-3, 20
"""Steps of less than so many seconds run in blocks of at least so many, if the budget allows."""


@attrs.define(eq=False)
class Way:
    """One way to run a step. ``step(i)`` runs the *i*-th inputs and returns its output."""

    name: str
    step: Callable[[int], Any]
    load: Callable[[int], None] | None = None
    """Puts the *i*-th inputs where the step reads them, untimed: for bare replays."""
    exact: bool = True
    """Runs the very kernels of the eager forward, so that its outputs have to be equal."""
    warmup_seconds: float | None = None
    capture_seconds: float | None = None
    capture_bytes: int | None = None
    note: str = ""


@attrs.frozen
class Timing:
    """What :meth:`Clock.steps` found of one way, in microseconds."""

    step: Spread
    host: Spread
    throughput: Spread


@attrs.frozen
class Effort:
    """How often one way runs in each round."""

    steps: int
    """One by one, each waited for."""
    block: int
    """In a row, the last one waited for."""

    @property
    def cold(self) -> int:
        """Steps at the start that are not recorded: the way before left its own data in the caches."""
        return int(self.steps >= 3)

    @classmethod
    def within(cls, seconds: float, share: float) -> Effort:
        """For a step of so many *seconds*, spend *share* seconds on a round.

        The launch of a block's first step is waited for in full, so quick steps get long blocks.
        """
        each = share / seconds
        alone = each - _BLOCK if seconds < _QUICK else each
        steps = int(min(10, max(1, min(alone, each / 3))))
        return cls(steps, int(min(50, max(2, each - steps))))


@attrs.frozen
class Schedule:
    """Rounds that all ways take part in, and what each of them does in one."""

    rounds: int
    efforts: dict[str, Effort]
    seconds: float
    """What all of it is expected to take."""

    @classmethod
    def within(cls, once: Mapping[str, float], budget: float) -> Schedule:
        """Spend up to *budget* seconds on each way, whose step takes *once* seconds.

        Three rounds of three steps are the least, whatever they take.
        """
        times = {name: max(seconds, 1e-6) for name, seconds in once.items()}
        allowed = (budget / (each * (_BLOCK + 4 if each < _QUICK else 10)) for each in times.values())
        rounds = int(min(9, max(3, min(allowed, default=3))))
        efforts = {name: Effort.within(each, budget / rounds) for name, each in times.items()}
        runs = {name: rounds * (effort.steps + effort.block) for name, effort in efforts.items()}
        return cls(rounds, efforts, sum(runs[name] * each for name, each in times.items()))


@attrs.define(eq=False)
class _Samples:
    """Microseconds measured of one way."""

    step: list[float] = attrs.field(factory=list)
    host: list[float] = attrs.field(factory=list)
    throughput: list[float] = attrs.field(factory=list)

    def timing(self) -> Timing:
        return Timing(Spread.of(self.step), Spread.of(self.host), Spread.of(self.throughput))


@attrs.define(eq=False)
class Clock:
    """Measures on one device until a deadline."""

    platform: Platform
    device: torch.device
    deadline: float = float("inf")

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def sync(self) -> None:
        """Wait for the device."""
        self.platform.synchronize(self.device)

    def seconds(self, function: Callable[[], Any]) -> float:
        """How long *function* takes, the device included."""
        self.sync()
        started = time.perf_counter()
        function()
        self.sync()
        return time.perf_counter() - started

    def steps(self, ways: Sequence[Way], schedule: Schedule) -> dict[str, Timing]:
        """Time *ways* in turn, in rounds that begin with another one each time.

        Garbage is not collected meanwhile: a collection would fall on one way or another.
        """
        found = {way.name: _Samples() for way in ways}
        count = 0
        with guard.garbage_collection_held():
            for turn in range(schedule.rounds):
                for way in _rotated(ways, turn):
                    effort = schedule.efforts[way.name]
                    self._turn(way, effort, count, found[way.name])
                    count += effort.steps + effort.block
        return {name: samples.timing() for name, samples in found.items()}

    def _turn(self, way: Way, effort: Effort, first: int, samples: _Samples) -> None:
        """One way's part of a round, with other inputs at each step."""
        for number in range(effort.steps):
            step, host = self._one(way, (first + number) % FRESH)
            if number >= effort.cold:
                samples.step.append(step)
                samples.host.append(host)
        samples.throughput.append(self._block(way, effort.block, first + effort.steps))

    def _one(self, way: Way, index: int) -> tuple[float, float]:
        if way.load is not None:
            way.load(index)
        self.sync()
        started = time.perf_counter()
        way.step(index)
        returned = time.perf_counter()
        self.sync()
        return (time.perf_counter() - started) * 1e6, (returned - started) * 1e6

    def _block(self, way: Way, size: int, first: int) -> float:
        self.sync()
        started = time.perf_counter()
        for index in range(first, first + size):
            way.step(index % FRESH)
        self.sync()
        return (time.perf_counter() - started) / size * 1e6

    def host(self, ways: Sequence[Way], *, blocks: int = 100, size: int = 20) -> dict[str, Spread]:
        """Host time of short steps: of *size* calls in a row, before the device is waited for.

        The first of them are not recorded, as in :meth:`steps`.
        """
        found: dict[str, list[float]] = {way.name: [] for way in ways}
        with guard.garbage_collection_held():
            for turn in range(blocks):
                for way in _rotated(ways, turn):
                    self.sync()
                    for index in range(_COLD):
                        way.step(index % FRESH)
                    started = time.perf_counter()
                    for index in range(_COLD, _COLD + size):
                        way.step(index % FRESH)
                    found[way.name].append((time.perf_counter() - started) / size * 1e6)
        self.sync()
        return {name: Spread.of(values) for name, values in found.items()}


def _rotated(ways: Sequence[Way], turn: int) -> list[Way]:
    """*ways*, beginning with another one each turn."""
    first = turn % max(1, len(ways))
    return [*ways[first:], *ways[:first]]


def brief(error: Exception) -> str:
    """One line on *error*, for what is skipped."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def worst_difference(way: Way, expected: Sequence[torch.Tensor]) -> float:
    """How far *way*'s outputs are from *expected*, for each of the inputs."""
    worst = 0.0
    for index, wanted in enumerate(expected):
        if way.load is not None:
            way.load(index)
        worst = max(worst, relative_difference(wanted, way.step(index)))
    return worst
