"""Capturing a runner's shapes: what to record, in which order, and what a failure does."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from graphplat import buckets as ladders
from graphplat import guard
from graphplat.errors import CaptureError, PlatformError, PluginError
from graphplat.hookspecs import CaptureProgress
from graphplat.report import Reason, ShapeReport
from graphplat.runners import deciding

if TYPE_CHECKING:
    import torch

    from graphplat.backends import CapturedShape
    from graphplat.batch import ForwardBatch, Phase
    from graphplat.buffers import BoundInputs
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


def _limit(runner: GraphRunner) -> int | None:
    """Shapes that platform and settings leave room for, if either sets a limit."""
    limits = []
    if runner.config.max_graphs is not None and runner.config.capture == "startup":
        limits.append(runner.config.max_graphs)
    device_limit = runner.platform.capabilities.max_graphs
    if device_limit is not None:
        limits.append((device_limit - runner.context.live_graphs) // runner.backend.graphs_per_shape())
    return max(min(limits), 0) if limits else None


def capture_shapes(runner: GraphRunner, keys: list[ShapeKey]) -> None:
    """Record *keys* in order, inside one session with the plugins' participants."""
    context = runner.context
    with contextlib.ExitStack() as stack:
        if context.hooks is not None:
            for participant in context.hooks.capture_participants(
                context.platform, context.model_runner, runner.phase
            ):
                stack.enter_context(Participant(participant, context.platform.name, runner.phase))
        stack.enter_context(context.forward_hooks.suspended())
        stack.enter_context(runner.backend.capture_session())
        _report(runner, "start", len(keys), 0)
        for done, key in enumerate(keys):
            _capture_key(runner, key, len(keys), done)
        _report(runner, "end", len(keys), len(keys))


@attrs.frozen
class Participant:
    """A plugin's context manager around a capture, which can neither hide nor replace its error."""

    manager: AbstractContextManager[Any]
    platform: str
    phase: Phase

    def __enter__(self) -> None:
        try:
            self.manager.__enter__()
        except Exception as error:
            raise self._error("entered", error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            hidden = self.manager.__exit__(kind, error, trace)
        except Exception as failed:
            if error is None:
                raise self._error("left", failed) from failed
            if failed is not error:
                error.add_note(str(self._error("left", failed)))
        else:
            if hidden and error is not None:
                error.add_note(f"capture participant {self.manager!r} tried to suppress this error")

    def _error(self, what: str, error: Exception) -> PluginError:
        return PluginError(
            f"capture participant {self.manager!r} could not be {what}: {type(error).__name__}: {error}",
            platform=self.platform,
            phase=self.phase,
        )


def _capture_key(runner: GraphRunner, key: ShapeKey, total: int, done: int) -> None:
    spent = sum(shape.bytes or 0 for shape in runner.backend.captured.values())
    budget = runner.config.memory_budget_gb
    if budget is not None and spent >= budget * 2**30:
        _miss(runner, key, Reason.MEMORY_BUDGET, f"{spent} bytes spent of {budget} GiB")
        return
    if runner.backend.prepares is not None:
        _report(runner, runner.backend.prepares, total, done, key=key)
    try:
        inputs, captured = _capture(runner, key)
    except CaptureError as error:
        _handle_failure(runner, key, error, total, done)
        return
    if budget is not None and spent + _known_bytes(runner, captured) > budget * 2**30:
        runner.backend.drop(key)
        over = f"{captured.bytes} bytes on top of {spent} exceed {budget} GiB"
        _miss(runner, key, Reason.MEMORY_BUDGET, over)
        _report(runner, "skipped", total, done + 1, key=key, detail=over)
        return
    _admit(runner, key, inputs, captured)
    _report(runner, "captured", total, done + 1, key=key, seconds=captured.seconds)


def _capture(runner: GraphRunner, key: ShapeKey) -> tuple[BoundInputs, CapturedShape]:
    try:
        runner.eager_runner.row_axes(key)  # small eager runs; not possible inside a recording
        inputs = runner.bind(key)
        batch = runner.context.dummy_batch(key, inputs.views())
        before = batch.tensors()
        runner.model_runner.prepare_capture_batch(batch)
    except Exception as error:
        raise runner.backend._error(CaptureError, "the capture could not be prepared", key, error) from error
    writes = runner.context.arena.writes
    captured = runner.backend.capture_one(
        key,
        runner.backend.bind(key, runner.eager_runner.forward, batch),
        capture_inputs=installed_tensors(before, batch) or None,
        post_warmup_hook=runner.model_runner.post_warmup,
    )
    inputs.volatile = runner.context.arena.writes != writes
    return inputs, captured


def _known_bytes(runner: GraphRunner, captured: CapturedShape) -> int:
    if captured.bytes is None:
        raise PlatformError(
            "memory_budget_gb is set, but this platform cannot say what a graph takes",
            platform=runner.platform.name,
            phase=runner.phase,
            hint="Leave memory_budget_gb out, or limit max_graphs",
        )
    return captured.bytes


def _admit(runner: GraphRunner, key: ShapeKey, inputs: BoundInputs, captured: CapturedShape) -> None:
    from graphplat.runners.graph import Entry

    runner.entries[key] = Entry(key, inputs, captured.output)
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
    if guard.is_out_of_memory(error):
        _miss(runner, key, Reason.OUT_OF_MEMORY, str(error))
    elif runner.config.on_failure == "raise":
        raise error
    else:
        _miss(runner, key, Reason.CAPTURE_FAILED, str(error))
    _report(runner, "skipped", total, done + 1, key=key, detail=str(error))


def _miss(runner: GraphRunner, key: ShapeKey, reason: Reason, detail: str) -> None:
    runner.missing[key] = (reason, detail)
    runner.context.skip(runner.phase, reason, detail, key)


def installed_tensors(before: dict[str, torch.Tensor], batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """The tensors that ``prepare_capture_batch`` put on *batch*, by path."""
    known = {id(tensor) for tensor in before.values()}
    return {path: tensor for path, tensor in batch.tensors().items() if id(tensor) not in known}


def _report(runner: GraphRunner, kind: str, total: int, done: int, **more: object) -> None:
    hooks = runner.context.hooks
    if hooks is not None:
        hooks.capture_progress(
            CaptureProgress(kind=kind, phase=runner.phase, total=total, done=done, **more)  # type: ignore[arg-type]
        )
