"""Which shapes a runner is to capture, within the number of graphs that device and settings allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from graphplat import buckets as ladders
from graphplat.report import Reason

if TYPE_CHECKING:
    from graphplat.keys import ShapeKey
    from graphplat.runners.graph import GraphRunner


@attrs.frozen
class CapturePlan:
    """The shapes of one runner, largest first."""

    keys: list[ShapeKey]
    dropped: list[ShapeKey]
    """Shapes for which there are too few graphs."""
    why: str = ""

    @classmethod
    def make(cls, runner: GraphRunner) -> CapturePlan:
        """Plan every bucket and family, thinned where the number of graphs is limited."""
        keys = [
            runner.eager_runner.make_key(runner.phase, size, variant, present, host)
            for size in reversed(runner.ladder)
            for variant, present, host in runner.families
        ]
        kept, dropped, limit = split_remaining(runner, keys)
        if limit is None or not dropped:
            return cls(kept, [])
        families = len(runner.families)
        why = f"at most {limit} graphs for {families} families: "
        if limit < families:
            why += f"kept {'; '.join(map(str, kept)) or 'none'}"
        else:
            why += f"buckets {sorted({key.size for key in dropped})} were dropped"
        runner.context.skip(runner.phase, Reason.GRAPH_LIMIT, why)
        return cls(kept, dropped, why)


def split_remaining(
    runner: GraphRunner, keys: list[ShapeKey]
) -> tuple[list[ShapeKey], list[ShapeKey], int | None]:
    """*keys* still to record, those that must be left out after all, and the limit that says so.

    How many device graphs a shape takes is known only once the largest was recorded in
    segments. Both ends of the remaining sizes are kept.
    """
    limit = _limit(runner)
    if limit is None or len(keys) <= limit:
        return keys, [], limit
    kept = _thin(keys, limit)
    return kept, [key for key in keys if key not in kept], limit


def _thin(keys: list[ShapeKey], limit: int) -> list[ShapeKey]:
    """At most *limit* of *keys*: whole buckets, evenly spread.

    Where there are more families than that, only the largest bucket, the unnamed variant first.
    """
    sizes = sorted({key.size for key in keys})
    families = -(-len(keys) // len(sizes))
    if limit < families:
        return sorted((k for k in keys if k.size == sizes[-1]), key=lambda k: k.variant is not None)[:limit]
    kept = ladders.thin(sizes, limit // families)
    return [key for key in keys if key.size in kept]


def _limit(runner: GraphRunner) -> int | None:
    """Shapes that platform and settings leave room for, if either sets a limit."""
    limits = []
    if runner.config.max_graphs is not None and runner.config.capture == "startup":
        limits.append(runner.config.max_graphs)
    device_limit = runner.platform.capabilities.max_graphs
    if device_limit is not None:
        limits.append((device_limit - runner.context.live_graphs) // runner.backend.graphs_per_shape())
    return max(min(limits), 0) if limits else None
