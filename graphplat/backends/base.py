"""What every backend shares while it captures: the session, warm-up, recording, clean-up."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from graphplat import guard
from graphplat.backends.replaying import CapturedShape, Place, ReplayBackend, discard, reset_all
from graphplat.errors import CaptureError
from graphplat.outputs import storages
from graphplat.plugin_hooks import warn

__all__ = ["CaptureBackend", "CapturedShape", "Place"]

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput
    from graphplat.platform import PlatformCapabilities


@attrs.define(eq=False)
class CaptureBackend(ReplayBackend):
    """Records shapes on one stream into one pool and replays them.

    Pool and stream come from the model runner's context, so that prefill and decode
    graphs share both.
    """

    warmup: str = "auto"
    generators: Sequence[torch.Generator] = ()
    _warmed: bool = False
    _returned: Mapping[int, object] | None = None
    """What the warm-up of the shape being recorded returned, by storage; ``None`` without one."""

    name: ClassVar[str] = "abstract"
    needs: ClassVar[tuple[str, ...]] = ("graph_capture",)
    """Capabilities without which this backend is refused."""
    prepares: ClassVar[str | None] = None
    """The progress event that announces a shape which may take long, such as ``compiling``."""

    @classmethod
    def lacking(cls, capabilities: PlatformCapabilities) -> str | None:
        """The first needed capability that is not declared."""
        return next((name for name in cls.needs if not getattr(capabilities, name)), None)

    @property
    def pool(self) -> Any:
        """The pool that all graphs share, or ``None``."""
        return self.context.pool

    @property
    def stream(self) -> Any:
        """The stream that everything is captured on."""
        return self.context.stream

    @contextlib.contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[None]:
        """Hold what captures need: the process's capture lock, collection off, the capture stream.

        Afterwards the caller's stream is current again and waits for the work done
        here, and random state and garbage collection are as before, also on failure.
        """
        stream = self.stream if stream is None else stream
        caller = self.platform.current_stream(self.device)
        kept = self.context.random_state_kept()
        with guard.CAPTURE_LOCK, guard.garbage_collection_held(), kept, torch.no_grad():
            if caller is not None:
                self.platform.wait_stream(stream, caller)
            try:
                with self.platform.use_stream(stream):
                    yield
            finally:
                if caller is not None:
                    self.platform.wait_stream(caller, stream)

    def bind(
        self, shape_key: ShapeKey, forward: Callable[[ForwardBatch], Any], batch: ForwardBatch
    ) -> Callable[[], Any]:
        """What :meth:`capture_one` records for *shape_key*: *forward* of the static *batch*."""
        del shape_key
        return lambda: forward(batch)

    def capture_one(
        self,
        shape_key: ShapeKey,
        forward_fn: Callable[[], Any],
        capture_inputs: Mapping[str, torch.Tensor] | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> CapturedShape:
        """Record *forward_fn* under *shape_key*, inside a :meth:`capture_session`.

        *capture_inputs* are the tensors that the recording goes on reading and nobody else
        owns; they live as long as the graph. ``None`` retains nothing. *post_warmup_hook*
        runs after each warm-up. Raises :class:`CaptureError`, chained, with the device
        state as before.
        """
        warmups, warm_seconds, self._returned = 0, 0.0, None
        # A try without one would part ranks that need it from ranks that do not.
        if self.warmup == "each" or not self._warmed or self.context.peers is not None:
            with self.context.stage(f"the warm-up of {shape_key}"):
                warm_seconds += self._warm_up(shape_key, forward_fn, post_warmup_hook)
            warmups += 1
        # Read after the warm-up, whose memory stays with the allocator and not with the graph.
        (started, before), grown = self._reading(shape_key), 0
        result, note = self._try_cold(shape_key, forward_fn) if not warmups else (None, "")
        if result is None:
            if not warmups:
                # What a recording that was thrown away took stays in the pool, for the next one to use.
                tried = (self.platform.reserved_bytes(self.device) or 0) - (before or 0)
                warm_seconds += self._warm_up(shape_key, forward_fn, post_warmup_hook)
                warmups += 1
                grown = tried if self.context.live_graphs else 0
                started, before = self._reading(shape_key)
            result = self._record_or_clean(shape_key, forward_fn)
        recording, output = result
        after = self.platform.reserved_bytes(self.device)
        captured = CapturedShape(
            recording,
            output,
            dict(capture_inputs) if capture_inputs else None,
            time.perf_counter() - started,
            warm_seconds,
            warmups,
            self._recording_bytes(recording) if after is None or before is None else after - before + grown,
            self._segments(recording),
            note,
        )
        self.captured[shape_key] = captured
        return captured

    def returned_before(self, leaf: torch.Tensor) -> bool | None:
        """Whether the warm-up of the shape being recorded returned this very memory.

        Then the runtime keeps it, and no graph may make it its own. ``None`` where the shape is
        recorded without a warm-up, which cannot tell.
        """
        return None if self._returned is None else leaf.untyped_storage()._cdata in self._returned

    def cleanup(self) -> None:
        """Destroy every graph, also where one cannot be; the backend can capture again.

        Raises the first error met, when all is done.
        """
        self._warmed = False
        self._fence = None
        shapes = self.captured.values()
        recordings = [shape.recording for shape in shapes if not shape.output.let_go()]
        self.captured.clear()
        reset_all(graph for recording in recordings for graph in self._graphs(recording))

    # What a backend defines

    @abc.abstractmethod
    def _record(self, shape_key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        """Record once; on failure leave no capture open and nothing held."""

    # Steps

    def _try_cold(self, key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, str]:
        """Record without a warm-up, and say ``None`` with a note where that is not safe.

        A first run at this size may initialise something: it fails, it compiles, or it
        leaves a tensor behind whose memory belongs to the graph. Each is seen from
        outside; then the recording is thrown away and the size is warmed up first. Forwards
        that kept something at other sizes are not tried, nor any once torch's compiler was
        used, since it would start inside the capture.
        """
        if self.context.kept or guard.compiled_frames():
            return None, self.context.kept and f"warmed up, since {self.context.kept}"
        self.platform.drop_workspaces()  # what libraries let go of must not hide what the forward keeps
        allocated = self._allocated()
        if allocated is None:
            return None, ""
        try:
            recording, output = self._record_or_clean(key, forward_fn)
        except CaptureError as error:
            guard.clear_locals(error)
            if (kept := self._judge_pool(key, allocated)) > 0:
                warn(
                    f"the first recording at {key} failed when the forward had kept {kept} bytes, and what "
                    'it wrote there never ran: set warmup="each" if it makes a tensor there for later steps'
                )
            if guard.is_out_of_memory(error):
                raise
            return None, f"warmed up, since a cold capture failed: {error.__cause__ or error}"
        left = (self._allocated() or 0) - allocated - output.own_bytes()
        self._run_once(key, recording)
        compiled = guard.compiled_frames() > 0
        if left <= 0 and not compiled:
            return (recording, output), ""
        del output
        self._reset(recording)
        self._judge_pool(key, allocated)
        reason = "the forward compiled something" if compiled else f"a cold capture left {left} bytes behind"
        return None, f"warmed up, since {reason}"

    def _allocated(self) -> int | None:
        """Bytes in live tensors, without the outputs that became the buffer of all graphs."""
        allocated = self.platform.allocated_bytes(self.device)
        return None if allocated is None else allocated - self.context.shared_output.adopted_bytes

    def _judge_pool(self, key: ShapeKey, before: int) -> int:
        """Bytes that a recording which is gone left behind: the forward keeps them, in the pool.

        Graphs recorded earlier may write there at every replay: whoever records shapes starts over
        in another pool, see :func:`~graphplat.runners.stale.start_over`.
        """
        self.platform.drop_workspaces()
        left = (self._allocated() or 0) - before
        if left > 0:
            self.context.kept = f"the forward kept {left} bytes of its first run at {key}"
            self.context.pool_is_spoilt = True
        return left

    def _run_once(self, key: ShapeKey, recording: Any) -> None:
        """Run a cold recording, as a warm-up would have: what the forward made and kept gets its values."""
        graphs = self._graphs(recording)
        if self.platform.capabilities.executes_in_capture or not graphs:
            return
        try:
            for graph in graphs:
                if self.updatable:
                    self.platform.update_graph(graph, self.context.host_fills(key))
                self.platform.replay(graph)
            if self.updatable:
                self.fence()
        except BaseException as error:
            discard(graphs, error)
            if not isinstance(error, Exception):
                raise
            raise self.error_for(CaptureError, "the captured forward could not be run", key, error) from error

    def _reading(self, key: ShapeKey) -> tuple[float, int | None]:
        """The time, and the bytes that the device holds without what a pool of no graph still had."""
        try:
            self.context.renew_unused_pool()
        except Exception as error:
            what = "the memory of earlier graphs could not be released"
            raise self.error_for(CaptureError, what, key, error) from error
        return time.perf_counter(), self.platform.reserved_bytes(self.device)

    def _warm_up(
        self, key: ShapeKey, forward_fn: Callable[[], Any], post_warmup_hook: Callable[[], None] | None
    ) -> float:
        started = time.perf_counter()
        try:
            self._returned = storages(forward_fn())
            if post_warmup_hook is not None:
                post_warmup_hook()
        except Exception as error:
            raise self.error_for(CaptureError, "the warm-up run failed", key, error) from error
        self._warmed = True
        return time.perf_counter() - started

    def _record_or_clean(self, key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        try:
            recording, output = self._record(key, forward_fn)
            if self.platform.capabilities.memory_aliases:
                output.lend(self.platform, recording)
        except Exception as error:
            raise self.error_for(CaptureError, "the forward could not be captured", key, error) from error
        return recording, output

    def _segments(self, recording: Any) -> int:
        return len(self._graphs(recording))

    def _recording_bytes(self, recording: Any) -> int | None:
        sizes = [getattr(graph, "memory_bytes", None) for graph in self._graphs(recording)]
        return None if None in sizes else sum(size for size in sizes if size is not None)
