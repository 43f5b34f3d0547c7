"""Which sizes to capture: the ladder of least expected time under a limit, found exactly.

A batch runs in the smallest bucket that holds it, so a ladder cuts the observed sizes into runs of
neighbours, and each run costs its largest member's step time. The best cut is found by
dynamic programming over the candidate sizes, from the smallest up.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import attrs
import msgspec

from graphplat.errors import ConfigError


class BucketLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What a ladder may cost; ``None`` sets no bound."""

    graphs: int | None = None
    """Buckets."""
    bytes: int | None = None
    """Memory of all buckets together: the sum of what each takes."""


class BucketPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A ladder and what to expect of it."""

    buckets: tuple[int, ...]
    """Ascending; empty if nothing was observed that a candidate holds."""
    expected_time: float
    """Mean time of an observed step that the ladder holds, in the unit of the step times."""
    padding_waste: float
    """The part of all rows computed that is padding."""
    bytes: int
    """Memory of its buckets, zero where none was given."""
    steps: int
    """Observed steps that the ladder holds."""
    uncovered: int
    """Observed steps that it does not: larger than every bucket. They run eagerly."""


class _Path(NamedTuple):
    """A choice among the first candidates, by its last one."""

    time: float
    graphs: int
    bytes: int
    bucket: int
    before: _Path | None

    def buckets(self) -> tuple[int, ...]:
        """The whole choice, ascending."""
        found: list[int] = []
        path: _Path | None = self
        while path is not None:
            found.append(path.bucket)
            path = path.before
        return tuple(reversed(found))


def plan_buckets(
    histogram: Mapping[int, int],
    step_times: Mapping[int, float],
    memory: Mapping[int, int] | None,
    limit: int | BucketLimit,
) -> BucketPlan:
    """The set of buckets with the least expected time within *limit*.

    *histogram* counts steps by size, as ``runner.stats.sizes`` does. *step_times* gives the time
    of a replay by bucket, in any unit: its sizes are the candidates. *memory* gives the bytes of
    each candidate's graph, or ``None`` where they do not matter. They are added up, so give what each graph
    takes whatever else is captured: what one adds to a pool that others filled is less than that. *limit* is
    a number of graphs, or a :class:`BucketLimit`.

    Every observed size up to the largest candidate has a bucket that holds it. Among plans of equal
    time the one with fewer graphs wins, then the one with fewer bytes. Exact for any times, also
    where a larger bucket is faster. Needs about candidates squared times graphs steps; with a limit of
    bytes more, as many as there are trade-offs of time against bytes.

    Raises :class:`ConfigError` for counts, times or bytes that cannot be, and for a limit that no
    ladder meets.
    """
    limit = BucketLimit(graphs=limit) if isinstance(limit, int) else limit
    _check(histogram, step_times, memory, limit)
    candidates = sorted(step_times)
    held = {size: count for size, count in histogram.items() if count and size <= candidates[-1]}
    if not held:
        return describe((), histogram, step_times, memory)
    search = _Search.make(candidates, held, step_times, memory or {}, limit)
    best = search.run()
    if best is None:
        raise ConfigError(
            f"no ladder within {limit} holds sizes up to {max(held)}",
            hint="Raise the limit, or leave the largest candidates out so that such steps run eagerly",
        )
    return describe(best.buckets(), histogram, step_times, memory)


def describe(
    buckets: Iterable[int],
    histogram: Mapping[int, int],
    step_times: Mapping[int, float],
    memory: Mapping[int, int] | None = None,
) -> BucketPlan:
    """What to expect of any ladder; times between known sizes are interpolated.

    Raises :class:`ConfigError` if *step_times* is empty and a time is needed.
    """
    ladder = tuple(sorted(buckets))
    time, steps, uncovered, real, computed = 0.0, 0, 0, 0, 0
    for size, count in sorted(histogram.items()):
        place = bisect.bisect_left(ladder, size)
        if place == len(ladder):
            uncovered += count
            continue
        bucket = ladder[place]
        time += count * interpolated(step_times, bucket)
        steps += count
        real += count * size
        computed += count * bucket
    return BucketPlan(
        buckets=ladder,
        expected_time=time / steps if steps else 0.0,
        padding_waste=1 - real / computed if computed else 0.0,
        bytes=sum((memory or {}).get(bucket, 0) for bucket in ladder),
        steps=steps,
        uncovered=uncovered,
    )


def interpolated(step_times: Mapping[int, float], size: int) -> float:
    """The time of *size*: known, or on the line between its neighbours; beyond the ends the nearest."""
    if size in step_times:
        return step_times[size]
    known = sorted(step_times)
    if not known:
        raise ConfigError("no step times are known", field="step_times")
    place = bisect.bisect_left(known, size)
    if place in (0, len(known)):
        return step_times[known[min(place, len(known) - 1)]]
    low, high = known[place - 1], known[place]
    part = (size - low) / (high - low)
    return step_times[low] * (1 - part) + step_times[high] * part


@attrs.define
class _Search:
    """The dynamic program over ascending candidates."""

    candidates: Sequence[int]
    times: Sequence[float]
    sizes: Sequence[int]
    """Bytes by candidate."""
    weights: Sequence[int]
    """Steps of all sizes up to each candidate, cumulative; one more entry than candidates."""
    limit: BucketLimit

    @classmethod
    def make(
        cls,
        candidates: Sequence[int],
        held: Mapping[int, int],
        step_times: Mapping[int, float],
        memory: Mapping[int, int],
        limit: BucketLimit,
    ) -> _Search:
        counts = [0] * len(candidates)
        for size, count in held.items():
            counts[bisect.bisect_left(candidates, size)] += count
        return cls(
            candidates,
            [step_times[size] for size in candidates],
            [memory.get(size, 0) if limit.bytes is not None else 0 for size in candidates],
            [0, *itertools.accumulate(counts)],
            limit,
        )

    def run(self) -> _Path | None:
        """The best path that holds every step, or ``None``."""
        ending: list[list[_Path]] = []
        finished: list[_Path] = []
        for index in range(len(self.candidates)):
            best: dict[tuple[int, int], _Path] = {}
            if self.weights[index + 1]:
                self._extend(best, None, self.weights[index + 1] * self.times[index], index)
            for before in range(index):
                # A bucket that serves no step only costs.
                if served := self.weights[index + 1] - self.weights[before + 1]:
                    for path in ending[before]:
                        self._extend(best, path, path.time + served * self.times[index], index)
            ending.append(_undominated(best.values()))
            if self.weights[index + 1] == self.weights[-1]:
                finished += ending[-1]
        return min(finished, key=lambda path: path[:3], default=None)

    def _extend(
        self, best: dict[tuple[int, int], _Path], path: _Path | None, time: float, index: int
    ) -> None:
        """Note *path* with the bucket at *index* behind it, within the limit, if it is the best."""
        graphs = 1 + (path.graphs if path else 0)
        size = self.sizes[index] + (path.bytes if path else 0)
        if self.limit.graphs is not None and graphs > self.limit.graphs:
            return
        if self.limit.bytes is not None and size > self.limit.bytes:
            return
        known = best.get((graphs, size))
        if known is None or time < known.time:
            best[graphs, size] = _Path(time, graphs, size, self.candidates[index], path)


def _undominated(paths: Iterable[_Path]) -> list[_Path]:
    """Paths that no other beats or equals in time, graphs and bytes alike."""
    kept: list[_Path] = []
    for path in sorted(paths, key=lambda path: path[:3]):
        if not any(other.graphs <= path.graphs and other.bytes <= path.bytes for other in kept):
            kept.append(path)
    return kept


def _check(
    histogram: Mapping[int, int],
    step_times: Mapping[int, float],
    memory: Mapping[int, int] | None,
    limit: BucketLimit,
) -> None:
    if not step_times:
        raise ConfigError("no candidate sizes", field="step_times")
    for field, table in (("histogram", histogram), ("step_times", step_times), ("memory", memory or {})):
        for size, value in table.items():
            if type(size) is not int or size < 1:
                raise ConfigError(f"size {size!r} is not a positive integer", field=field)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{value!r} for size {size} is not a finite amount", field=field)
    for field, bound in (("graphs", limit.graphs), ("bytes", limit.bytes)):
        if bound is not None and (type(bound) is not int or bound < (field == "graphs")):
            raise ConfigError(f"a limit of {bound!r} cannot be met", field=field)
    if limit.bytes is not None and memory is None:
        raise ConfigError("a limit of bytes needs the bytes of each bucket", field="memory")
    if limit.bytes is not None and (lacking := sorted(step_times.keys() - (memory or {}).keys())):
        raise ConfigError(f"no bytes are known for sizes {lacking}", field="memory")
