"""The ``breakable`` backend: captured segments with eager parts between them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from graphplat import breaks, tree
from graphplat.backends.base import CaptureBackend, CapturedShape
from graphplat.backends.bridge import Bridges, EagerPart
from graphplat.backends.full import abandon, replayer
from graphplat.backends.replaying import discard
from graphplat.errors import CaptureError

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.breaks import BreakOptions
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput
    from graphplat.platform import Platform


@attrs.define(eq=False)
class Segments:
    """One recording: device graphs and eager parts, in order.

    It owns every tensor that crosses a break: the arguments of eager parts
    and the memory their results are copied to.
    """

    graphs: list[Any] = attrs.field(factory=list)
    parts: list[EagerPart] = attrs.field(factory=list)
    steps: list[Callable[[], None]] = attrs.field(factory=list)
    inference: bool = attrs.field(factory=torch.is_inference_mode_enabled)
    """Whether it was recorded in inference mode."""


@attrs.define(eq=False)
class BreakableBackend(CaptureBackend):
    """Records a forward as segments that :func:`~graphplat.eager_on_graph` functions separate."""

    name: ClassVar[str] = "breakable"
    needs: ClassVar[tuple[str, ...]] = ("graph_capture", "breakable")
    bridges: Bridges = attrs.field(factory=Bridges)

    def _record(self, shape_key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        recorder = Recorder(self, shape_key)
        try:
            recorder.begin()
            with breaks.recording_with(recorder):
                output = forward_fn()
            placed = self.place(shape_key, output)
            recorder.end(last=True)
        except BaseException as error:
            recorder.abandon(error)
            raise
        finally:
            self.bridges.next_break()
        return recorder.segments, placed

    def exposes_inputs(self, shape_key: ShapeKey) -> bool:
        """Eager parts may write to what they are given, at some replays and not at others."""
        parts = self.captured[shape_key].recording.parts
        given = (leaf for part in parts for _, leaf in tree.walk((part.args, part.kwargs)))
        return any(map(self.context.arena.holds, given))

    def _launcher(self, captured: CapturedShape) -> Callable[[ForwardBatch | None], None]:
        steps = captured.recording.steps
        # Eager parts write into static memory; what a capture in inference mode made wants that mode for it.
        mode = torch.inference_mode if captured.recording.inference else torch.no_grad

        def launch(batch: ForwardBatch | None) -> None:
            with mode(), breaks.running(batch):
                for step in steps:
                    step()

        return launch

    def _graphs(self, recording: Any) -> Sequence[Any]:
        graphs: list[Any] = recording.graphs
        return graphs

    def _try_cold(self, key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, str]:
        # What crosses a break stays allocated by design, and cannot be told from what was left behind.
        del key, forward_fn
        return None, ""

    def cleanup(self) -> None:
        """Destroy every graph and the memory shared between breaks."""
        try:
            super().cleanup()
        finally:
            self.bridges.release()


@attrs.define(eq=False)
class Recorder:
    """One breakable capture under way."""

    backend: BreakableBackend
    key: ShapeKey
    segments: Segments = attrs.field(factory=Segments)
    _open: Any = None
    _forked: list[Any] = attrs.field(factory=list)
    _failure: BaseException | None = None

    def begin(self) -> None:
        """Open a segment."""
        backend = self.backend
        graph = backend.platform.create_graph(updatable=backend.updatable)
        self._open = graph
        for generator in backend.generators:
            backend.platform.register_generator(graph, generator)
        backend.platform.capture_begin(graph, pool=backend.pool, stream=backend.stream)

    def end(self, *, last: bool = False) -> None:
        """Close the segment, its side streams joined, and run it once.

        Running it gives the eager part that follows real values to work on,
        as in the warm-up, where the device only recorded.
        """
        platform = self.backend.platform
        self._join()
        if self._open is None:
            raise CaptureError(
                "the forward went on after an eager part had failed",
                hint="Let the error pass, so that it can be reported",
            ) from self._failure
        empty = _ends_empty(platform, self._open)
        graph, self._open = self._open, None
        if empty:  # two breaks in a row, say: a launch would do nothing
            graph.reset()
            if not self.segments.graphs:
                self.backend.context.renew_unused_pool()
            return
        self.segments.graphs.append(graph)
        self.segments.steps.append(replayer(platform, graph))
        if not last and not platform.capabilities.executes_in_capture:
            backend = self.backend
            if backend.updatable:  # a replay without an update would wait for ever
                platform.update_graph(graph, backend.context.host_fills(self.key))
            platform.replay(graph)
            if backend.updatable:
                backend.fence()

    def split(self) -> None:
        """End a segment and begin the next."""
        self.end()
        self.begin()

    def fork(self, stream: Any) -> None:
        """Order *stream* after the segment so far, and note that it must be joined."""
        self.backend.platform.wait_stream(stream, self.backend.stream)
        self._forked.append(stream)

    def _join(self) -> None:
        while self._forked:
            self.backend.platform.wait_stream(self.backend.stream, self._forked.pop())

    def call_eagerly(self, function: Any, args: Any, kwargs: Any, options: BreakOptions) -> Any:
        """Run *function* between two segments, now and at every replay."""
        bridges = self.backend.bridges
        if options.copy_inputs:
            bound = inspect.signature(function).bind(*args, **kwargs)
            for name in options.copy_inputs:
                if name in bound.arguments:
                    bound.arguments[name] = bridges.copy_in(bound.arguments[name])
            args, kwargs = bound.args, bound.kwargs
        self.end()
        part = EagerPart.make(function, args, kwargs, options, self.key)
        try:
            with breaks.recording_with(None):
                result = part.call_for_capture(bridges)
        except BaseException as error:
            self._failure = error
            raise
        bridges.next_break()
        self.segments.parts.append(part)
        self.segments.steps.append(part.run)
        self.begin()
        return result

    def abandon(self, error: BaseException) -> None:
        """Leave no capture open and hold nothing, whichever step failed."""
        backend = self.backend
        if self._open is not None:
            try:
                self._join()  # an unjoined stream would spoil the end of the capture, and the pool with it
            except Exception as cleanup:  # noqa: BLE001 - the first error is the one to report
                error.add_note(f"joining side streams failed too: {type(cleanup).__name__}: {cleanup}")
            abandon(backend.context, self._open, error)
            self._open = None
        discard(self.segments.graphs, error)
        self.segments = Segments()
        self._failure = None  # its traceback would keep the forward's tensors


def _ends_empty(platform: Platform, graph: Any) -> bool:
    """End the capture; says whether nothing was recorded, where that can be told.

    torch warns about an empty graph, and offers no other sign of one.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        platform.capture_end(graph)
    told = [warning for warning in caught if "graph is empty" in str(warning.message).lower()]
    for warning in caught:
        if warning not in told:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return bool(told) or getattr(graph, "num_ops", None) == 0
