"""Graph breaks: run a function eagerly between the captured segments of a forward.

Outside a breakable capture the decorators do nothing at all. What is being recorded
lives in context variables that a backend sets for the duration of one recording
or replay; there is no process-wide state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import attrs

from graphplat.batch import ForwardBatch
from graphplat.errors import ContractError, GraphplatError

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)


@attrs.frozen
class BreakOptions:
    """How one eager function crosses a break."""

    capture_stub: Callable[..., Any] | None = None
    rows: Literal["tokens", "requests"] | None = None
    copy_inputs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


class SegmentRecorder(Protocol):
    """What a breakable capture offers to the functions below."""

    def call_eagerly(self, function: Any, args: Any, kwargs: Any, options: BreakOptions) -> Any:
        """End the segment, run *function*, note it for every replay, begin the next segment."""

    def split(self) -> None:
        """End the segment and begin the next one."""

    def fork(self, stream: Any) -> None:
        """Make *stream* part of the segment, to be joined before the segment ends."""


_RECORDER: ContextVar[SegmentRecorder | None] = ContextVar("graphplat_recorder", default=None)
_LIVE_BATCH: ContextVar[ForwardBatch | None] = ContextVar("graphplat_live_batch", default=None)


class EagerOnGraph(Generic[P, R_co]):
    """A function, or a method bound to its object, that runs eagerly between segments."""

    def __init__(self, body: Callable[P, R_co], options: BreakOptions) -> None:
        self.body = body
        self.options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Break the graph being captured around the body; outside a capture just run it."""
        recorder = _RECORDER.get()
        if recorder is None:
            return self.body(*args, **kwargs)
        return cast(R_co, recorder.call_eagerly(self.body, args, kwargs, self.options))

    def run_eager(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the body itself: never breaks a graph."""
        return self.body(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> EagerOnGraph[P, R_co]: ...

    @overload
    def __get__(
        self: EagerOnGraph[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> EagerOnGraph[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method to *instance*."""
        if instance is None:
            return self
        return EagerOnGraph(types.MethodType(self.body, instance), self.options)


@overload
def eager_on_graph(function: Callable[P, R], /) -> EagerOnGraph[P, R]: ...


@overload
def eager_on_graph(
    *,
    capture_stub: Callable[..., Any] | None = None,
    rows: Literal["tokens", "requests"] | None = None,
    copy_inputs: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], EagerOnGraph[P, R]]: ...


def eager_on_graph(
    function: Any = None,
    /,
    *,
    capture_stub: Callable[..., Any] | None = None,
    rows: Literal["tokens", "requests"] | None = None,
    copy_inputs: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
) -> Any:
    """Mark a function or method that a breakable graph must not contain.

    At every replay it is called again with the same arguments, whose memory the graph
    owns; live state is read with :func:`live_batch`, not from arguments. Each tensor that it
    returns is copied to where the next segment reads, unless it is one of the arguments
    itself, written in place; a view of one is copied, so that what the forward later writes
    there does not reach the argument. A result with fewer rows than captured leaves zeros behind; other
    shapes or types raise :class:`ReplayError`. Host values in a result stay as captured.

    *capture_stub* stands in for the body during capture. *rows* says that axis 0 of every
    result, also of one written in place, counts tokens or requests: only real rows are kept
    and the rest is zero. *writes* names the arguments of which the same is true though they
    are not returned, such as the ``out`` of an attention. *copy_inputs* names arguments that
    the body only reads: the segment copies them into memory that all breaks share, instead
    of each owning its own.

    The result has ``run_eager``, the body itself. Raises :class:`ContractError` for other *rows*, and if
    *copy_inputs* or *writes* name no argument of the body, or both the same; and at capture
    :class:`CaptureError` where *rows* has nothing to act on: no tensor returned, no *writes*.
    """
    if rows not in (None, "tokens", "requests"):
        raise ContractError(f"rows={rows!r} counts nothing", hint='Give "tokens", "requests" or None')
    several: dict[str, object] = {"copy_inputs": copy_inputs, "writes": writes}
    for option, names in several.items():
        if isinstance(names, str):
            raise ContractError(f"{option} takes several names, found {names!r}", hint=f"Write ({names!r},)")
    options = BreakOptions(capture_stub, rows, tuple(copy_inputs), tuple(writes))

    def decorate(body: Callable[P, R]) -> EagerOnGraph[P, R]:
        _check_names(body, options)
        marked = EagerOnGraph(body, options)
        functools.update_wrapper(marked, body)
        return marked

    return decorate if function is None else decorate(function)


def _check_names(body: Callable[..., Any], options: BreakOptions) -> None:
    for option in ("copy_inputs", "writes"):
        names = getattr(options, option)
        unknown = sorted(set(names) - set(inspect.signature(body).parameters)) if names else []
        if unknown:
            raise ContractError(
                f"{option} names {', '.join(unknown)}, no argument of {body.__qualname__}",
                hint="Name parameters of the function",
            )
    if both := sorted(set(options.copy_inputs) & set(options.writes)):
        raise ContractError(
            f"copy_inputs and writes of {body.__qualname__} both name {', '.join(both)}",
            hint="What is written into a copy reaches nobody; take it out of copy_inputs",
        )


def break_graph() -> None:
    """End the segment being captured and begin another; nothing outside a breakable capture."""
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.split()


def fork_stream(stream: Any) -> None:
    """Let *stream* take part in the segment being captured, after the work queued so far.

    It is joined before the segment ends, also at a break. Outside a breakable
    capture this does nothing: order the streams yourself there.
    """
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.fork(stream)


def live_batch() -> ForwardBatch:
    """The batch being run: at replay the caller's own, during capture the dummy one.

    For eager parts that need per-request state: live lengths, tables on the host.
    Raises :class:`GraphplatError` outside a forward run by a runner.
    """
    batch = _LIVE_BATCH.get()
    if batch is None:
        raise GraphplatError("no batch is being run", hint="Call this from a forward that a runner executes")
    return batch


@contextlib.contextmanager
def recording_with(recorder: SegmentRecorder | None) -> Iterator[None]:
    """Send breaks to *recorder* inside the body; ``None`` turns them off."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@contextlib.contextmanager
def running(batch: ForwardBatch | None) -> Iterator[None]:
    """Make *batch* the live one inside the body."""
    token = _LIVE_BATCH.set(batch)
    try:
        yield
    finally:
        _LIVE_BATCH.reset(token)
