"""What every backend shares: the capture session, warm-up, clean-up, and who owns what."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from graphplat import guard
from graphplat.errors import CaptureError, GraphplatError, ReplayError

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput
    from graphplat.platform import Platform, PlatformCapabilities
    from graphplat.runners.context import RunnerContext

Place = Callable[["ShapeKey", Any], "GraphOutput"]
"""Moves a captured output into the shared buffers; called at the end of a recording."""


@attrs.frozen(eq=False)
class CapturedShape:
    """One recorded shape and all that it must keep alive."""

    recording: Any
    output: GraphOutput
    capture_inputs: Mapping[str, torch.Tensor] | None
    """The capture-only tensors whose addresses the recording reads."""
    seconds: float
    warmup_seconds: float
    warmups: int
    bytes: int | None
    segments: int = 1
    note: str = ""

    @property
    def retained_bytes(self) -> int:
        """Bytes of capture-only tensors kept for this shape, shared storage counted once."""
        storages = {t.untyped_storage() for t in (self.capture_inputs or {}).values()}
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@attrs.define(eq=False)
class CaptureBackend(abc.ABC):
    """Records shapes on one stream into one pool and replays them.

    Pool and stream come from the model runner's context, so that prefill and decode
    graphs share both.
    """

    platform: Platform
    device: torch.device
    context: RunnerContext
    place: Place
    warmup: str = "auto"
    updatable: bool = False
    """Whether host values of the graphs are rewritten at replay."""
    generators: Sequence[torch.Generator] = ()
    captured: dict[ShapeKey, CapturedShape] = attrs.field(factory=dict)
    _warmed: bool = False
    _fence: Any = None

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

    def graphs_per_shape(self) -> int:
        """Device graphs that one shape is expected to take."""
        return max((shape.segments for shape in self.captured.values()), default=1)

    @contextlib.contextmanager
    def capture_session(self, stream: Any = None) -> Iterator[None]:
        """Hold what captures need: the process's capture lock, collection off, the capture stream.

        Afterwards the caller's stream is current again and waits for the work done
        here, and random state and garbage collection are as before, also on failure.
        """
        stream = self.stream if stream is None else stream
        caller = self.platform.current_stream(self.device)
        with guard.CAPTURE_LOCK, guard.garbage_collection_held(), self._random_state_kept(), torch.no_grad():
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
        before = self.platform.reserved_bytes(self.device)
        warmups, warm_seconds = 0, 0.0
        if self.warmup == "each" or not self._warmed:
            warm_seconds += self._warm_up(shape_key, forward_fn, post_warmup_hook)
            warmups += 1
        started = time.perf_counter()
        result, note = self._try_cold(shape_key, forward_fn) if not warmups else (None, "")
        if result is None:
            if not warmups:
                warm_seconds += self._warm_up(shape_key, forward_fn, post_warmup_hook)
                warmups += 1
                started = time.perf_counter()
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
            after - before if after is not None and before is not None else self._recording_bytes(recording),
            self._segments(recording),
            note,
        )
        self.captured[shape_key] = captured
        return captured

    def can_run(self, shape_key: ShapeKey) -> bool:
        """Whether *shape_key* has a graph."""
        return shape_key in self.captured

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        """Hold what a replay needs around :meth:`replay`; nothing by default."""
        yield

    def launcher(self, shape_key: ShapeKey) -> Callable[[ForwardBatch | None], None]:
        """What launches the graph of *shape_key* for a live batch; looked up once, called every step."""
        return self._launcher(self.captured[shape_key])

    def replay(self, shape_key: ShapeKey, batch: ForwardBatch | None = None) -> GraphOutput:
        """Launch the graph of *shape_key* on the current stream; its output, padded rows included.

        *batch* is the live batch, which eager parts of a recording may read. Raises
        :class:`ReplayError`, chained.
        """
        try:
            self.launcher(shape_key)(batch)
        except Exception as error:
            raise self.replay_error(shape_key, error) from error
        return self.captured[shape_key].output

    def replay_error(self, shape_key: ShapeKey, error: Exception) -> GraphplatError:
        """*error*, met while launching *shape_key*, as an error of this library."""
        if isinstance(error, GraphplatError):
            return error
        return self._error(ReplayError, "the graph could not be replayed", shape_key, error)

    def update(self, shape_key: ShapeKey, values: Mapping[str, Sequence[int]]) -> None:
        """Rewrite host values of *shape_key* for its next replay, behind a fence.

        The host waits until the device has read the values of the last replay.
        Raises :class:`ReplayError` when the platform refuses, so that no replay is stale.
        """
        try:
            if self._fence is not None:
                self.platform.synchronize_event(self._fence)
            for graph in self._graphs(self.captured[shape_key].recording):
                self.platform.update_graph(graph, values)
        except Exception as error:
            what = f"host values {sorted(values)} could not be updated"
            raise self._error(ReplayError, what, shape_key, error) from error

    def replay_updated(
        self, shape_key: ShapeKey, values: Mapping[str, Sequence[int]], batch: ForwardBatch | None = None
    ) -> GraphOutput:
        """:meth:`update` and :meth:`replay`, in the order that the platform declares, then a fence.

        Where an update may come with its replay, the launch comes first and the device waits for the
        values. Several graphs with eager parts between them are always updated first.
        """
        overlaps = self.platform.capabilities.update_after_capture == "with_replay"
        if not overlaps or self.captured[shape_key].segments > 1:
            self.update(shape_key, values)
            output = self.replay(shape_key, batch)
        else:
            if self._fence is not None:
                self.platform.synchronize_event(self._fence)
            output = self.replay(shape_key, batch)
            self._update_launched(shape_key, values)
        self.fence()
        return output

    def _update_launched(self, key: ShapeKey, values: Mapping[str, Sequence[int]]) -> None:
        try:
            for graph in self.device_graphs(key):
                self.platform.update_graph(graph, values)
        except Exception as error:
            failed = self._error(ReplayError, f"host values {sorted(values)} could not be updated", key, error)
            try:  # the replay under way waits for values: those of the capture let it end
                for graph in self.device_graphs(key):
                    self.platform.update_graph(graph, self.context.host_fills(key))
            except Exception as stuck:  # noqa: BLE001 - told with the first error
                failed.add_note(f"The replay under way will never end: {type(stuck).__name__}: {stuck}")
            raise failed from error

    def fence(self) -> None:
        """Note that the device may still read the host values of the replay just launched."""
        self._fence = self.platform.record_event(self.platform.current_stream(self.device))

    def device_graphs(self, shape_key: ShapeKey) -> Sequence[Any]:
        """The platform's graph objects of *shape_key*, in capture order."""
        return self._graphs(self.captured[shape_key].recording)

    def drop(self, shape_key: ShapeKey) -> None:
        """Destroy one graph and what it kept alive."""
        captured = self.captured.pop(shape_key, None)
        if captured is not None:
            self._reset(captured.recording)

    def cleanup(self) -> None:
        """Destroy every graph; the backend can capture again."""
        for key in list(self.captured):
            self.drop(key)
        self._warmed = False
        self._fence = None

    @property
    def live_graphs(self) -> int:
        """Device graphs now held."""
        return sum(shape.segments for shape in self.captured.values())

    # What a backend defines

    @abc.abstractmethod
    def _record(self, shape_key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        """Record once; on failure leave no capture open and nothing held."""

    @abc.abstractmethod
    def _launcher(self, captured: CapturedShape) -> Callable[[ForwardBatch | None], None]:
        """What replays a recording on the current stream."""

    @abc.abstractmethod
    def _graphs(self, recording: Any) -> Sequence[Any]:
        """The device graphs of a recording, in capture order."""

    # Steps

    def _try_cold(self, key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, str]:
        """Record without a warm-up, and say ``None`` with a note where that is not safe.

        A first run at this size may initialise something: it fails, it compiles, or it
        leaves a tensor behind whose memory belongs to the graph. Each is seen from
        outside; then the recording is thrown away and the size is warmed up first.
        """
        allocated = self.platform.allocated_bytes(self.device)
        if allocated is None:
            return None, ""
        frames = guard.compiled_frames()
        try:
            recording, output = self._record_or_clean(key, forward_fn)
        except CaptureError as error:
            if guard.is_out_of_memory(error):
                raise
            return None, f"warmed up, since a cold capture failed: {error.__cause__ or error}"
        left = (self.platform.allocated_bytes(self.device) or 0) - allocated
        left -= self._kept_bytes(recording, output)
        if guard.compiled_frames() != frames:
            reason = "the forward compiled something"
        elif left > 0:
            reason = f"a cold capture left {left} bytes behind"
        else:
            return (recording, output), ""
        self._reset(recording)
        return None, f"warmed up, since {reason}"

    def _warm_up(
        self, key: ShapeKey, forward_fn: Callable[[], Any], post_warmup_hook: Callable[[], None] | None
    ) -> float:
        started = time.perf_counter()
        try:
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        except Exception as error:
            raise self._error(CaptureError, "the warm-up run failed", key, error) from error
        self._warmed = True
        return time.perf_counter() - started

    def _record_or_clean(self, key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        self.context.renew_unused_pool()
        try:
            return self._record(key, forward_fn)
        except Exception as error:
            raise self._error(CaptureError, "the forward could not be captured", key, error) from error

    def _error(
        self, kind: type[GraphplatError], what: str, key: ShapeKey, error: BaseException
    ) -> GraphplatError:
        where = guard.user_frame(error)
        return kind(
            f"{what}: {type(error).__name__}: {error}" + (f" (at {where})" if where else ""),
            platform=self.platform.name,
            phase=key.phase,
            bucket=key.size,
            hint='Set on_failure="eager" to run such batches without a graph'
            if kind is CaptureError
            else None,
        )

    def _reset(self, recording: Any) -> None:
        for graph in self._graphs(recording):
            graph.reset()

    def _segments(self, recording: Any) -> int:
        return len(self._graphs(recording))

    def _recording_bytes(self, recording: Any) -> int | None:
        sizes = [getattr(graph, "memory_bytes", None) for graph in self._graphs(recording)]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _kept_bytes(self, recording: Any, output: GraphOutput) -> int:
        """Bytes that a sound recording may leave allocated: its non-row outputs."""
        del recording
        return output.own_bytes()

    @contextlib.contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        state = self.platform.rng_state(self.device)
        private = [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            if state is not None:
                self.platform.set_rng_state(self.device, state)
            for generator, kept in zip(self.generators, private, strict=True):
                generator.set_state(kept)
