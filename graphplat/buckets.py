"""Bucket ladders: which sizes get a graph."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from graphplat.batch import Phase
from graphplat.errors import ConfigError

DEFAULT_MAX = {Phase.DECODE: 128, Phase.PREFILL: 2048}
"""Largest default bucket: requests for decode, tokens for prefill."""


def default_ladder(phase: Phase, maximum: int) -> tuple[int, ...]:
    """The ladder used when none is given, ascending, always ending in *maximum*.

    Decode: 1, 2, 4, then steps of 8. Prefill: powers of two, which keeps the
    padding below 2 and the number of graphs logarithmic.
    """
    if phase is Phase.DECODE:
        steps: Iterable[int] = (1, 2, 4, *range(8, maximum + 1, 8))
    else:
        steps = (1 << power for power in range(maximum.bit_length()))
    return tuple(sorted({size for size in steps if size <= maximum} | {maximum}))


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Sorted, unique positive sizes; raises :class:`ConfigError` for anything else."""
    if len(buckets) == 0:
        raise ConfigError("the bucket list is empty", hint='Leave it out for the default, or use "disabled"')
    for size in buckets:
        if type(size) is not int or size < 1:
            raise ConfigError(f"bucket {size!r} is not a positive integer")
    return tuple(sorted(set(buckets)))


def resolve_ladder(phase: Phase, buckets: Sequence[int] | None, maximum: int | None) -> tuple[int, ...]:
    """The effective ladder, ascending.

    A given list is clipped to *maximum* and always contains it; without a
    *maximum* its largest entry is the maximum.
    """
    if maximum is not None and (type(maximum) is not int or maximum < 1):
        raise ConfigError(f"maximum size {maximum!r} is not a positive integer")
    if buckets is None:
        return default_ladder(phase, maximum if maximum is not None else DEFAULT_MAX[phase])
    sizes = check_buckets(buckets)
    if maximum is None:
        return sizes
    return tuple(sorted({size for size in sizes if size <= maximum} | {maximum}))


def fit(ladder: Sequence[int], size: int) -> int | None:
    """The smallest bucket of ascending *ladder* that holds *size*, or ``None``."""
    place = index(ladder, size)
    return ladder[place] if place < len(ladder) else None


def index(ladder: Sequence[int], size: int) -> int:
    """Where the buckets that hold *size* begin in ascending *ladder*."""
    return bisect.bisect_left(ladder, size)


def thin(ladder: Sequence[int], limit: int) -> tuple[int, ...]:
    """At most *limit* sizes of ascending *ladder*, evenly spread, both ends kept.

    With a limit of one the largest stays: it can hold every batch.
    """
    count = len(ladder)
    if limit <= 0:
        return ()
    if limit >= count:
        return tuple(ladder)
    if limit == 1:
        return (ladder[-1],)
    return tuple(ladder[round(step * (count - 1) / (limit - 1))] for step in range(limit))
