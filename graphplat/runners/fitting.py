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


def known_bytes(runner: GraphRunner, captured: CapturedShape) -> int:
    """What *captured* takes; raises :class:`PlatformError` where nobody can say."""
    if captured.bytes is None:
        raise PlatformError(
            "memory_budget_gb is set, but this platform cannot say what a graph takes",
            platform=runner.platform.name,
            phase=runner.phase,
            hint="Leave memory_budget_gb out, or limit max_graphs",
        )
    return captured.bytes


def warn_if_short(runner: GraphRunner, keys: list[ShapeKey]) -> None:
    """Say which of *keys* have no graph for want of memory; batches run in larger buckets, or eagerly."""
    short = (Reason.OUT_OF_MEMORY, Reason.MEMORY_BUDGET)
    lost = [key for key in keys if runner.missing.get(key, (None,))[0] in short]
    if lost:
        names = ", ".join(map(str, lost))
        warn(f"too little memory for {len(lost)} of {len(keys)} graphs: {names}. The report says why")
