"""Which shapes a runner is to capture, within the number of graphs that device and settings allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from graphplat import buckets as ladders
from graphplat.report import Reason
from graphplat.runners import deciding

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
        families = list(deciding.families(runner))
        if not families:
            runner.context.skip(runner.phase, Reason.HOST_VALUE, deciding.cannot_update(runner) or "")
            return cls([], [])
        keys = {
            size: [
                runner.eager_runner.make_key(runner.phase, size, variant, present, host)
                for variant, present, host in families
            ]
            for size in reversed(runner.ladder)
        }
        limit = _limit(runner)
        kept = runner.ladder if limit is None else ladders.thin(runner.ladder, limit // len(families))
        dropped = [size for size in runner.ladder if size not in kept]
        why = f"at most {limit} graphs for {len(families)} families: buckets {dropped} were dropped"
        if dropped:
            runner.context.skip(runner.phase, Reason.GRAPH_LIMIT, why)
        return cls(
            [key for size in keys if size in kept for key in keys[size]],
            [key for size in dropped for key in keys[size]],
            why,
        )


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
    sizes = sorted({key.size for key in keys})
    families = -(-len(keys) // len(sizes))
    kept = set(ladders.thin(sizes, limit // families))
    return [key for key in keys if key.size in kept], [key for key in keys if key.size not in kept], limit


def _limit(runner: GraphRunner) -> int | None:
    """Shapes that platform and settings leave room for, if either sets a limit."""
    limits = []
    if runner.config.max_graphs is not None and runner.config.capture == "startup":
        limits.append(runner.config.max_graphs)
    device_limit = runner.platform.capabilities.max_graphs
    if device_limit is not None:
        limits.append((device_limit - runner.context.live_graphs) // runner.backend.graphs_per_shape())
    return max(min(limits), 0) if limits else None
