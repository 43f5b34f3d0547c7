"""Section ``capture``: seconds and bytes of whole ladders, by hand and through graphplat."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs

from graphplat.batch import ForwardBatch, Phase
from graphplat.bench.hand import Hand, timed_graph_module
from graphplat.bench.records import BenchReport, CaptureRow, Skip, Spread
from graphplat.bench.subject import Subject, hold
from graphplat.config import PhaseConfig
from graphplat.report import total_bytes
from graphplat.runners import BaseRunner

_REPEATS = 5


@attrs.define(eq=False)
class Ladder:
    """Captures decode graphs of one ladder again and again, and prefill graphs beside them."""

    subject: Subject
    report: BenchReport
    sizes: Sequence[int]
    prefill_sizes: Sequence[int] = ()
    batches: dict[int, ForwardBatch] = attrs.field(factory=dict)

    def run(self) -> None:
        """Add a row for every way. No graph is left, whatever goes wrong."""
        with ExitStack() as held:
            self._measure(held)

    def _measure(self, held: ExitStack) -> None:
        subject = self.subject
        self.batches = {size: subject.decode_batches(size, 1)[0] for size in self.sizes}
        ways: dict[str, Callable[[], tuple[float, int | None]]] = {
            "by hand, own pools, two warm-ups each": lambda: self._by_hand(self.sizes, 2, own_pools=True),
            "by hand, one pool, one warm-up each": lambda: self._by_hand(self.sizes, 1),
            "by hand, one pool, largest warmed up": self._lean,
            "by hand, the largest alone": lambda: self._by_hand(self.sizes[-1:], 1),
        }
        if timed_graph_module(subject.clock.device) is not None:
            ways |= {"torch graph(), own pools, two warm-ups each": self._context_managers}
        else:
            self._skip("torch graph()", f"torch.{subject.clock.device.type} has no such context manager")
        runners: list[BaseRunner] = []
        counts = dict.fromkeys(ways, len(self.sizes)) | {"by hand, the largest alone": 1}
        for name, settings in self._ladders().items():
            capture = hold(held, subject.capture(**settings))
            active = [runner for runner in (capture.prefill_runner, capture.decode_runner) if runner.buckets]
            runners += active
            counts[name] = sum(len(runner.buckets) for runner in active)
            ways[name] = functools.partial(self._through_graphplat, active)
        found = self._repeat(ways, runners)
        self.report.capture += [
            CaptureRow(
                way=name,
                buckets=counts[name],
                seconds=Spread.of([seconds for seconds, _ in results]),
                bytes=results[-1][1],
            )
            for name, results in found.items()
        ]

    def _ladders(self) -> dict[str, dict[str, Any]]:
        """What graphplat captures, as settings of both phases."""
        decode, none = {"buckets": list(self.sizes)}, {"backend": "disabled"}
        ladders: dict[str, dict[str, Any]] = {"graphplat full": {"decode": decode}}
        if self.prefill_sizes and self.subject.is_reference:
            prefill: dict[str, Any] = {"backend": "full", "max_requests": self.subject.slots}
            largest = prefill | {"buckets": [max(self.prefill_sizes)]}
            both = prefill | {"buckets": list(self.prefill_sizes)}
            ladders["graphplat full, prefill too"] = {"decode": decode, "prefill": both}
            ladders["graphplat full, the largest prefill alone"] = {"decode": none, "prefill": largest}
        return ladders

    def _through_graphplat(self, runners: Sequence[BaseRunner]) -> tuple[float, int | None]:
        def capture() -> None:
            for runner in runners:
                runner.recapture()

        seconds = self.subject.clock.seconds(capture)
        return seconds, total_bytes(runners[0].context.shapes)

    def _repeat(
        self, ways: dict[str, Callable[[], tuple[float, int | None]]], runners: Sequence[BaseRunner]
    ) -> dict[str, list[tuple[float, int | None]]]:
        """In turn; before each the graphs of graphplat are gone and the cache is empty."""
        found: dict[str, list[tuple[float, int | None]]] = {name: [] for name in ways}

        def release() -> None:
            for runner in runners:
                runner.release()

        for turn in range(_REPEATS):
            for name, way in ways.items():
                if turn and self.subject.clock.left() <= 0:
                    continue
                release()
                self.subject.clock.platform.empty_cache()
                found[name].append(way())
        return found

    def _by_hand(
        self, sizes: Sequence[int], warmups: int, *, own_pools: bool = False
    ) -> tuple[float, int | None]:
        hand = Hand(self.subject.clock)

        def capture() -> None:
            with hand.session():
                for size in reversed(sizes):
                    hand.capture(self._forward(size), warmups=warmups, own_pool=own_pools)

        return self._timed(hand, capture)

    def _lean(self) -> tuple[float, int | None]:
        hand = Hand(self.subject.clock)

        def capture() -> None:
            with hand.session():
                for size in reversed(self.sizes):
                    hand.capture(self._forward(size), warmups=int(size == self.sizes[-1]))

        return self._timed(hand, capture)

    def _timed(self, hand: Hand, capture: Callable[[], None]) -> tuple[float, int | None]:
        try:
            seconds = self.subject.clock.seconds(capture)
            held = total_bytes(hand.graphs)
        finally:
            hand.release()
        return seconds, held

    def _context_managers(self) -> tuple[float, int | None]:
        module = timed_graph_module(self.subject.clock.device)
        platform, device = self.subject.clock.platform, self.subject.clock.device
        before = platform.reserved_bytes(device)
        kept = []
        self.subject.clock.sync()
        started = time.perf_counter()
        with ExitStack() as held:
            for size in reversed(self.sizes):
                forward = self._forward(size)
                for _ in range(2):
                    forward()
                graph = platform.create_graph()
                with module.graph(graph):
                    kept.append(forward())
                held.callback(graph.reset)
            self.subject.clock.sync()
            seconds = time.perf_counter() - started
            after = platform.reserved_bytes(device)
        return seconds, after - before if after is not None and before is not None else None

    def _forward(self, size: int) -> Callable[[], object]:
        return lambda: self.subject.runtime.forward(self.batches[size])

    def _skip(self, what: str, why: str) -> None:
        self.report.skipped.append(Skip(section="capture", what=what, why=why))


def default_sizes(slots: int) -> tuple[int, ...]:
    """The default decode ladder, as far as the cache has slots."""
    return PhaseConfig(max_size=min(slots, 128)).ladder(Phase.DECODE)
