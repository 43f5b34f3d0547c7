"""Graphs whose memory the forward itself replaced while later ones were captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphplat.errors import CaptureError
from graphplat.report import Reason

if TYPE_CHECKING:
    from graphplat.keys import ShapeKey
    from graphplat.runners.graph import GraphRunner


def drop_stale(runner: GraphRunner, latest: ShapeKey) -> None:
    """Destroy all graphs but *latest* if capturing that one replaced a watched tensor.

    A forward may make a table anew for each size, say: what was recorded before reads memory that is
    gone. Raises :class:`CaptureError` under ``on_failure="raise"``; otherwise batches of the lost
    shapes run eagerly, or are captured again where that happens on use.
    """
    moved = None if runner.config.weights == "off" else runner.watch.settle()
    if moved is None:
        return
    runner.watch.remember()
    error = CaptureError(
        f"graphs captured earlier read a tensor that was replaced during the capture of {latest}",
        platform=runner.platform.name,
        phase=runner.phase,
        field=moved,
        hint="Keep it at one address for all sizes",
    )
    for key in [key for key in runner.entries if key != latest]:
        runner.drop(key)
        if runner.config.capture == "startup":
            runner.missing[key] = (Reason.CAPTURE_FAILED, str(error))
            runner.context.skip(runner.phase, Reason.CAPTURE_FAILED, str(error), key)
    if runner.config.capture == "startup" and runner.config.on_failure == "raise":
        raise error
