"""The ``full`` backend: one graph holds the whole forward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from graphplat.backends.base import CaptureBackend, CapturedShape
from graphplat.platform import Platform

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput
    from graphplat.runners.context import RunnerContext


@attrs.define(eq=False)
class FullBackend(CaptureBackend):
    """Records a forward as a single graph."""

    name = "full"

    def _record(self, shape_key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        graph = self.platform.create_graph(updatable=self.updatable)
        for generator in self.generators:
            self.platform.register_generator(graph, generator)
        try:
            self.platform.capture_begin(graph, pool=self.pool, stream=self.stream)
            output = self.place(shape_key, forward_fn())
            self.platform.capture_end(graph)
        except BaseException as error:
            abandon(self.context, graph, error)
            raise
        return graph, output

    def _launcher(self, captured: CapturedShape) -> Callable[[ForwardBatch | None], None]:
        launch = replayer(self.platform, captured.recording)
        return lambda _batch: launch()  # the graph reads the static buffers, not the batch

    def _graphs(self, recording: Any) -> Sequence[Any]:
        return (recording,)


def replayer(platform: Platform, graph: Any) -> Callable[[], None]:
    """Replays *graph*: by its own method where the platform adds nothing, sparing a call on each step."""
    if type(platform).replay is Platform.replay:
        replay: Callable[[], None] = graph.replay
        return replay
    return functools.partial(platform.replay, graph)


def abandon(context: RunnerContext, graph: Any, error: BaseException) -> None:
    """Clean up after a failed capture, and take another pool unless this one is sound."""
    if not abort(context.platform, graph, error, pool=context.pool, stream=context.stream):
        context.renew_pool()


def abort(platform: Platform, graph: Any, error: BaseException, *, pool: Any, stream: Any) -> bool:
    """End the capture that *error* stopped; whether its pool is sound. What fails here is noted on it."""
    try:
        with warnings.catch_warnings():
            # True of a capture that failed before its first operator, and no news beside the failure.
            warnings.filterwarnings("ignore", message="(?i).*graph is empty")
            return platform.abort_capture(graph, pool=pool, stream=stream)
    except Exception as cleanup:  # noqa: BLE001 - whatever fails here must not hide the first error
        what = f"{type(cleanup).__name__}: {cleanup}"
        error.add_note(f"cleaning up after the failed capture failed too: {what}")
        return False
