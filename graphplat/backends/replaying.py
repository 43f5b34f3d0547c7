"""What every backend shares once shapes are captured: launching them, rewriting them, letting them go."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import guard
from graphplat.errors import CaptureError, GraphplatError, ReplayError

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput
    from graphplat.platform import Platform
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
class ReplayBackend(abc.ABC):
    """Holds captured shapes and replays them."""

    platform: Platform
    device: torch.device
    context: RunnerContext
    place: Place
    updatable: bool = False
    """Whether host values of the graphs are rewritten at replay."""
    captured: dict[ShapeKey, CapturedShape] = attrs.field(factory=dict)
    _fence: Any = None

    def graphs_per_shape(self) -> int:
        """Device graphs that one shape is expected to take."""
        return max((shape.segments for shape in self.captured.values()), default=1)

    def can_run(self, shape_key: ShapeKey) -> bool:
        """Whether *shape_key* has a graph."""
        return shape_key in self.captured

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        """Hold what replays need around them; nothing by default.

        For those who drive a backend themselves, and for vendors to wrap. Runners launch without it: what
        every launch needs belongs into :meth:`launcher`.
        """
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
        except GraphplatError:
            raise
        except Exception as error:
            raise self.replay_error(shape_key, error) from error
        return self.captured[shape_key].output

    def exposes_inputs(self, shape_key: ShapeKey) -> bool:
        """Whether code of the runtime that runs at each replay of *shape_key* is given static inputs."""
        del shape_key
        return False

    def error_for(
        self, kind: type[GraphplatError], what: str, key: ShapeKey, error: BaseException
    ) -> GraphplatError:
        """An error of *kind* to raise from *error*: what went wrong with *key*, and where in the runtime."""
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

    def replay_error(self, shape_key: ShapeKey, error: Exception) -> GraphplatError:
        """What to raise for a foreign *error* met while launching *shape_key*."""
        return self.error_for(ReplayError, "the graph could not be replayed", shape_key, error)

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
            raise self.error_for(ReplayError, what, shape_key, error) from error

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
            failed = self.error_for(
                ReplayError, f"host values {sorted(values)} could not be updated", key, error
            )
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
        """Destroy one graph and what it kept alive; with its last view where a caller still holds one."""
        captured = self.captured.pop(shape_key, None)
        if captured is not None and not captured.output.let_go():
            self._reset(captured.recording)

    @property
    def live_graphs(self) -> int:
        """Device graphs now held."""
        return sum(shape.segments for shape in self.captured.values())

    # What a backend defines

    @abc.abstractmethod
    def _launcher(self, captured: CapturedShape) -> Callable[[ForwardBatch | None], None]:
        """What replays a recording on the current stream."""

    @abc.abstractmethod
    def _graphs(self, recording: Any) -> Sequence[Any]:
        """The device graphs of a recording, in capture order."""

    # Steps

    def _reset(self, recording: Any) -> None:
        reset_all(self._graphs(recording))


def reset_all(graphs: Iterable[Any]) -> None:
    """Destroy *graphs*, each of them also where another cannot be; raises the first error met at the end."""
    first: Exception | None = None
    for graph in graphs:
        try:
            graph.reset()
        except Exception as error:  # noqa: BLE001 - raised below
            if first is None:
                first = error
            else:
                first.add_note(f"another graph could not be destroyed: {type(error).__name__}: {error}")
    if first is not None:
        raise first


def discard(graphs: Iterable[Any], error: BaseException) -> None:
    """Destroy *graphs* because of *error*; what fails here is attached to it."""
    try:
        reset_all(graphs)
    except Exception as cleanup:  # noqa: BLE001 - the first error is the one to report
        error.add_note(f"destroying graphs failed too: {type(cleanup).__name__}: {cleanup}")
