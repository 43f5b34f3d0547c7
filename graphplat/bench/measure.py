"""Clocks: interleaved rounds, medians and spread, a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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


@attrs.define(eq=False)
class Way:
    """One way to run a step. ``step(i)`` runs the *i*-th inputs and returns its output."""

    name: str
    step: Callable[[int], Any]
    load: Callable[[int], None] | None = None
    """Puts the *i*-th inputs where the step reads them, untimed: for bare replays."""
    exact: bool = True
    """Runs the very kernels of the eager forward."""
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
    """How often a step is measured."""

    rounds: int
    steps: int
    block: int

    @classmethod
    def within(cls, seconds: float, budget: float) -> Effort:
        """For a step of so many *seconds*, spend about *budget* on one way."""
        affordable = budget / max(seconds, 1e-6)
        rounds = int(min(9, max(3, affordable // 4)))
        each = affordable / rounds
        return cls(rounds, int(min(10, max(1, each / 3))), int(min(20, max(2, each / 2))))


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

    def steps(self, ways: Sequence[Way], effort: Effort) -> dict[str, Timing]:
        """Time *ways* in turn, in rounds that begin with another one each time.

        Garbage is not collected meanwhile: a collection would fall on one way or another.
        """
        found: dict[str, tuple[list[float], list[float], list[float]]] = {w.name: ([], [], []) for w in ways}
        count = 0
        with guard.garbage_collection_held():
            for turn in range(effort.rounds):
                for offset in range(len(ways)):
                    way = ways[(turn + offset) % len(ways)]
                    step, host, block = found[way.name]
                    for _ in range(effort.steps):
                        count += 1
                        self._one(way, count % FRESH, step, host)
                    block.append(self._block(way, effort.block, count))
        return {name: Timing(*(Spread.of(values) for values in lists)) for name, lists in found.items()}

    def _one(self, way: Way, index: int, step: list[float], host: list[float]) -> None:
        if way.load is not None:
            way.load(index)
        self.sync()
        started = time.perf_counter()
        way.step(index)
        returned = time.perf_counter()
        self.sync()
        step.append((time.perf_counter() - started) * 1e6)
        host.append((returned - started) * 1e6)

    def _block(self, way: Way, size: int, first: int) -> float:
        self.sync()
        started = time.perf_counter()
        for index in range(first, first + size):
            way.step(index % FRESH)
        self.sync()
        return (time.perf_counter() - started) / size * 1e6

    def host(self, ways: Sequence[Way], *, blocks: int = 100, size: int = 20) -> dict[str, Spread]:
        """Host time of short steps: of *size* calls in a row, before the device is waited for."""
        found: dict[str, list[float]] = {way.name: [] for way in ways}
        with guard.garbage_collection_held():
            for _ in range(blocks):
                for way in ways:
                    self.sync()
                    started = time.perf_counter()
                    for index in range(size):
                        way.step(index % FRESH)
                    found[way.name].append((time.perf_counter() - started) / size * 1e6)
        self.sync()
        return {name: Spread.of(values) for name, values in found.items()}


def worst_difference(way: Way, expected: Sequence[torch.Tensor]) -> float:
    """How far *way*'s outputs are from *expected*, for each of the inputs."""
    worst = 0.0
    for index, wanted in enumerate(expected):
        if way.load is not None:
            way.load(index)
        worst = max(worst, relative_difference(wanted, way.step(index)))
    return worst
