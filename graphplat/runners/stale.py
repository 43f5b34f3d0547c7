"""Graphs that a later capture made unsound: what they read was replaced, or what they overwrite is kept."""

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


def start_over(runner: GraphRunner) -> None:
    """Destroy every graph of a pool in which the forward keeps memory; later captures take another one.

    What the forward keeps stays where it is, and no graph writes there any more. Graphs of other phases are
    recorded again at once, or where that happens on use, then. From now on every shape is warmed up, so
    that what a forward keeps never lies in a pool.
    """
    context = runner.context
    context.pool_is_spoilt = False
    others = [other for other in context.runners if other is not runner and other.entries]
    for each in (runner, *others):
        for key in list(each.entries):
            each.drop(key)
        each.watch.forget()
    context.renew_unused_pool()
    for other in others:
        if other.config.capture == "startup":
            other.recapture()
