"""Capturing a runner's shapes: what to record, in which order, and what a failure does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from graphplat import guard
from graphplat.budget import Budget
from graphplat.errors import CaptureError
from graphplat.hookspecs import CaptureProgress
from graphplat.output_layout import UnlikeLayoutError
from graphplat.outputs import GraphOutput
from graphplat.peers import Cost, Outcome
from graphplat.report import Reason, ShapeReport
from graphplat.runners import fitting
from graphplat.runners.entry import Entry, installed_on
from graphplat.runners.participants import Participant
from graphplat.runners.planning import split_remaining
from graphplat.runners.prepared import Prepared
from graphplat.runners.stale import drop_stale, start_over

if TYPE_CHECKING:
    import torch

    from graphplat.backends import CapturedShape
    from graphplat.buffers import BoundInputs
    from graphplat.keys import ShapeKey
    from graphplat.runners.graph import GraphRunner
    from graphplat.runners.planning import CapturePlan


def capture_planned(runner: GraphRunner, plan: CapturePlan) -> None:
    """Record the shapes of *plan*, or leave them to the first batch that needs them.

    What a failure leaves without a graph is noted as missing.
    """
    if runner not in runner.context.runners:
        runner.context.runners.append(runner)
    try:
        if runner.context.peers is not None:
            runner.context.peers.same_plan(runner.phase, runner.config, plan.keys)
        if runner.config.capture == "startup":
            _capture_startup(runner, plan.keys)
    except BaseException as error:
        why = (Reason.CAPTURE_FAILED, f"the capture was cut short: {type(error).__name__}: {error}")
        runner.missing |= {key: why for key in plan.keys if key not in runner.entries | runner.missing}
        raise


def capture_on_use(runner: GraphRunner, key: ShapeKey) -> Entry | None:
    """Record *key* for a batch that needs it now; where there are too many graphs, the oldest goes."""
    limit = runner.config.max_graphs
    while limit is not None and len(runner.entries) >= limit:
        runner.drop(next(iter(runner.entries)))
    if not _make_room(runner, key):
        fitting.warn_if_short(runner, [key])
        return None
    runner.context.release_memory()
    with runner.context.together(f"the capture of {key}"):
        if capture_shapes(runner, [key]):
            start_over(runner)
            capture_shapes(runner, [key])
    fitting.warn_if_short(runner, [key])
    return runner.entries.get(key)


def _make_room(runner: GraphRunner, key: ShapeKey) -> bool:
    """Drop the oldest graphs until the device can hold those of *key*; whether it ever can."""
    limit = runner.platform.capabilities.max_graphs
    if limit is None:
        return True
    needed = runner.backend.graphs_per_shape()
    others = runner.context.live_graphs - runner.backend.live_graphs
    if others + needed > limit:
        _miss(runner, key, Reason.GRAPH_LIMIT, f"{needed} beside {others} of another phase, at most {limit}")
        return False
    while runner.entries and runner.context.live_graphs + needed > limit:
        runner.drop(next(iter(runner.entries)))
    return True


def _capture_startup(runner: GraphRunner, keys: list[ShapeKey]) -> None:
    """Record *keys*, largest first; where they exceed the budget, again without what saves least.

    A pool gives memory back only with its last graph, so that leaving a graph out means
    recording the others anew. Where graphs of another phase live in the pool, that would return nothing:
    there, a graph that exceeds the budget is dropped, and what it added to the pool stays.
    """
    kept = keys
    while kept and capture_shapes(runner, kept, retry=True):
        if runner.context.pool_is_spoilt:
            kept = [key for key in kept if key not in runner.missing]
            start_over(runner)
            continue
        measured = {shape.key: shape.bytes or 0 for shape in runner.context.shapes_of(runner.phase)}
        limit = fitting.budget_of(runner) or 0
        choice = Budget(
            [k for k in kept if k not in runner.missing], measured, limit, runner.context.counts_pool
        ).keep()
        for key in measured:
            runner.drop(key)
        runner.watch.forget()
        runner.context.renew_unused_pool()
        detail = f"within {limit} bytes for this phase, other buckets save more"
        detail = detail if choice else f"no bucket takes {limit} bytes or less"
        for key in kept:
            if key not in choice and key not in runner.missing:
                _miss(runner, key, Reason.MEMORY_BUDGET, detail)
        kept = choice


def capture_shapes(runner: GraphRunner, keys: list[ShapeKey], *, retry: bool = False) -> bool:
    """Record *keys* in order, inside one session with the plugins' participants.

    Returns whether to record again: the pool is spoilt, or, only with *retry*, the budget was exceeded
    and another choice of shapes can be recorded.
    """
    context = runner.context
    with contextlib.ExitStack() as stack:
        stack.enter_context(_watching(runner))
        with context.together(f"the start of {runner.phase} captures"):
            if context.hooks is not None:
                for participant in context.hooks.capture_participants(
                    context.platform, context.model_runner, runner.phase
                ):
                    stack.enter_context(Participant(participant, context.platform.name, runner.phase))
            stack.enter_context(context.forward_hooks.suspended())
            stack.enter_context(runner.backend.capture_session())
            _report(runner, "start", len(keys), 0)
        pending = list(keys)
        while pending:
            done = len(keys) - len(pending)
            exceeded = _capture_key(runner, pending.pop(0), len(keys), done)
            if context.pool_is_spoilt or (exceeded and retry and fitting.can_retry(runner)):
                return True
            if retry:
                fitting.note_estimate(runner, keys)
                pending = _within_limit(runner, pending)
        _report(runner, "end", len(keys), len(keys))
    return False


@contextlib.contextmanager
def _watching(runner: GraphRunner) -> Iterator[None]:
    """Know the weights while outputs are placed, and hold them on only for graphs that are watched."""
    watched = runner.config.weights != "off"
    if not (watched and runner.entries):
        runner.watch.remember()
    try:
        yield
    finally:
        if not (watched and runner.entries):
            runner.watch.forget()


def _within_limit(runner: GraphRunner, pending: list[ShapeKey]) -> list[ShapeKey]:
    """*pending* without the shapes for which the device has too few graphs left."""
    kept, dropped, limit = split_remaining(runner, pending)
    for key in dropped:
        _miss(runner, key, Reason.GRAPH_LIMIT, f"{limit} more shapes fit, each of several graphs")
    return kept


def _capture_key(runner: GraphRunner, key: ShapeKey, total: int, done: int) -> bool:
    """Record one shape, or note why not; returns whether it exceeds the budget."""
    if runner.backend.prepares is not None:
        _report(runner, runner.backend.prepares, total, done, key=key)
    try:
        inputs, captured, installed = _capture(runner, key)
    except CaptureError as error:
        runner.backend.drop(key)  # where only another rank failed
        family = key.phase, key.family
        if family in runner.context.old_layouts and isinstance(error.__cause__, UnlikeLayoutError):
            runner.eager_runner.forget_outputs(key)
            return _capture_key(runner, key, total, done)
        _handle_failure(runner, key, error, total, done)
        return False
    over = fitting.over_budget(runner, captured)
    if over and (runner.config.capture == "lazy" or not fitting.can_retry(runner)):
        runner.backend.drop(key)
        runner.context.renew_unused_pool()
        _miss(runner, key, Reason.MEMORY_BUDGET, over)
        _report(runner, "skipped", total, done + 1, key=key, detail=over)
        return False
    _admit(runner, Entry(key, inputs, captured.output, installed), captured)
    drop_stale(runner, key)
    if not over:
        _report(runner, "captured", total, done + 1, key=key, seconds=captured.seconds)
    return bool(over)


def _capture(runner: GraphRunner, key: ShapeKey) -> tuple[BoundInputs, CapturedShape, dict[str, Any]]:
    with runner.context.stage(f"the preparation of {key}"):
        prepared = Prepared.make(runner, key)
    cost = Cost()
    with runner.context.stage(f"the capture of {key}", cost):
        captured = runner.backend.capture_one(
            key,
            runner.backend.bind(key, runner.eager_runner.forward, prepared.batch),
            capture_inputs=prepared.installed or None,
            post_warmup_hook=runner.model_runner.post_warmup,
        )
        cost.bytes = captured.bytes
        inputs = prepared.inputs
        inputs.volatile = runner.backend.exposes_inputs(key) or prepared.were_written()
    if runner.context.peers is not None:
        captured = attrs.evolve(captured, bytes=cost.bytes)
        runner.backend.captured[key] = captured
    return inputs, captured, installed_on(prepared.batch)


def place_output(runner: GraphRunner, key: ShapeKey, output: Any) -> GraphOutput:
    """Put a captured output's rows where all graphs of the pool put theirs.

    Raises :class:`CaptureError` where it is another output than that of the small eager runs.
    """
    layout, addresses = runner.eager_runner.output_layout(key), runner.watch.pointers()
    layout.check(output, key.requests, key.tokens)
    runner.context.old_layouts.discard((key.phase, key.family))
    aliases = runner.platform.capabilities.memory_aliases

    def persistent(path: str, leaf: torch.Tensor) -> bool:
        if path in layout.shared or leaf.data_ptr() in addresses or runner.context.arena.contains(leaf):
            return True
        returned = runner.backend.returned_before(leaf)
        # What was left in place is never written by another graph, so a doubt costs no copy there.
        return not aliases if returned is None else returned

    stores = runner.context.shared_output
    place = stores.leave if aliases else stores.place
    return GraphOutput(place(output, layout.axes, persistent), layout.axes, key)


def _admit(runner: GraphRunner, entry: Entry, captured: CapturedShape) -> None:
    key = entry.key
    runner.entries[key] = entry
    runner.missing.pop(key, None)
    report = ShapeReport(
        key=key,
        backend=runner.backend.name,
        seconds=captured.seconds,
        warmup_seconds=captured.warmup_seconds,
        bytes=captured.bytes,
        retained_bytes=captured.retained_bytes,
        warmups=captured.warmups,
        segments=captured.segments,
        note=captured.note,
    )
    runner.context.shapes.append(report)


def _handle_failure(runner: GraphRunner, key: ShapeKey, error: CaptureError, total: int, done: int) -> None:
    peers = runner.context.peers
    short = guard.is_out_of_memory(error) if peers is None else peers.failure is Outcome.OUT_OF_MEMORY
    stopped = peers is not None and peers.failure is Outcome.DONE
    if stopped or (not short and runner.config.on_failure == "raise"):
        raise error
    if peers is not None or isinstance(error.__cause__, UnlikeLayoutError):
        runner.eager_runner.forget_outputs(key)  # what one rank knows and another does not would part them
    if peers is not None:
        peers.handled()
    _miss(runner, key, Reason.OUT_OF_MEMORY if short else Reason.CAPTURE_FAILED, str(error))
    _report(runner, "skipped", total, done + 1, key=key, detail=str(error))


def _miss(runner: GraphRunner, key: ShapeKey, reason: Reason, detail: str) -> None:
    runner.missing[key] = (reason, detail)
    runner.context.skip(runner.phase, reason, detail, key)


def _report(runner: GraphRunner, kind: str, total: int, done: int, **more: object) -> None:
    hooks = runner.context.hooks
    if hooks is not None:
        hooks.capture_progress(
            CaptureProgress(kind=kind, phase=runner.phase, total=total, done=done, **more)  # type: ignore[arg-type]
        )
