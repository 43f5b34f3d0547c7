"""Whether graphs fit into the memory they may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphplat.budget import estimate
from graphplat.errors import PlatformError
from graphplat.plugin_hooks import warn
from graphplat.report import Reason

if TYPE_CHECKING:
    from graphplat.backends import CapturedShape
    from graphplat.keys import ShapeKey
    from graphplat.runners.graph import GraphRunner


def budget_of(runner: GraphRunner) -> int | None:
    """Bytes that the graphs of this phase may take, if the settings say."""
    gib = runner.config.memory_budget_gb
    return None if gib is None else int(gib * 2**30)


def can_retry(runner: GraphRunner) -> bool:
    """Whether dropping graphs of this phase gives memory back."""
    return runner.context.live_graphs == runner.backend.live_graphs or not runner.context.counts_pool


def note_estimate(runner: GraphRunner, keys: list[ShapeKey]) -> None:
    """Note what all of *keys* are expected to take, as soon as that can be told."""
    measured = [shape.bytes for shape in runner.context.shapes_of(runner.phase)[:2]]
    known = [taken for taken in measured if taken is not None]
    if runner.phase not in runner.context.estimates and len(known) == len(measured):
        expected = estimate(keys, known, pooled=runner.context.counts_pool)
        if expected is not None:
            runner.context.estimates[runner.phase] = expected


def over_budget(runner: GraphRunner, captured: CapturedShape) -> str:
    """By what *captured* exceeds the budget of its phase; empty if it does not.

    Raises :class:`PlatformError` where there is a budget and nobody can say what a graph takes.
    """
    budget = budget_of(runner)
    if budget is None:
        return ""
    if captured.bytes is None:
        raise PlatformError(
            "memory_budget_gb is set, but this platform cannot say what a graph takes",
            platform=runner.platform.name,
            phase=runner.phase,
            hint="Leave memory_budget_gb out, or limit max_graphs",
        )
    spent = sum(shape.bytes or 0 for shape in runner.context.shapes_of(runner.phase))
    within = spent + captured.bytes <= budget
    return "" if within else f"{captured.bytes} bytes on top of {spent} exceed {budget}"


def warn_if_short(runner: GraphRunner, keys: list[ShapeKey]) -> None:
    """Say which of *keys* have no graph for want of memory, or of graphs on the device.

    Their batches run in larger buckets, or eagerly. Who sets ``max_graphs`` to less than there are shapes
    knows that some have none.
    """
    own = runner.config.max_graphs if runner.config.capture == "startup" else None
    _warn_of(runner, keys, "too little memory", Reason.OUT_OF_MEMORY, Reason.MEMORY_BUDGET)
    if own is None or own >= len(runner.keys):
        _warn_of(runner, keys, "the device allows too few graphs", Reason.GRAPH_LIMIT)


def _warn_of(runner: GraphRunner, keys: list[ShapeKey], short_of: str, *reasons: Reason) -> None:
    lost = [key for key in keys if runner.missing.get(key, (None,))[0] in reasons]
    if lost:
        names = ", ".join(map(str, lost))
        warn(f"{short_of} for {len(lost)} of {len(keys)} shapes: {names}. The report says why")
