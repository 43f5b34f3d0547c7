"""A device graph for plain CPU tensors: it records operators and replays them into the same memory.

The verbs and rules are those of a stream graph. A capture runs the forward once; every operator that does
work is recorded with the memory it read and wrote. A replay runs these operators again on that memory and
none of the model's Python. So inputs are read anew at their old addresses, results appear at their old
addresses, a host decision stays as it was at capture, and reading a tensor on the host during capture is an
error.

Limits that a recorder of operators cannot lift:

- a kernel that takes raw pointers (``data_ptr``, DLPack, ``ctypes``) is invisible and is not replayed;
- with grad mode on, ``tolist`` and ``numpy`` are invisible;
- a function under ``torch.compile`` runs eagerly while it is captured, since dynamo skips frames under a
  dispatch mode; with ``fullgraph=True`` it raises. Dynamo remembers a skip: a function that first runs inside
  a capture stays eager afterwards, so warm it up before.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack

import torch

from graphplat.errors import CaptureError, ReplayError
from graphplat.recorded_calls import Recording
from graphplat.recorded_memory import RecordedPool
from graphplat.recorded_trace import Recorder

__all__ = ["RecordedGraph", "RecordedPool", "is_recording"]


class _Capturing(threading.local):
    graph: RecordedGraph | None = None


_capturing = _Capturing()


def is_recording() -> bool:
    """Whether a capture is active in this thread."""
    return _capturing.graph is not None


class RecordedGraph:
    """A graph of CPU operators.

    Capture it once, then replay it as often as needed; ``reset()`` frees it for another capture. From
    capture to reset the graph holds every storage it reads or writes: inputs, weights, caches and outputs.
    Replay works inside and outside ``torch.inference_mode()``, whatever mode the capture ran in. Random
    operators draw fresh numbers at each replay. A collective is started and waited for at its place. One
    graph must not be replayed by two threads at once, nor two graphs of one pool.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._modes = ExitStack()
        self._pool: RecordedPool | None = None
        self._recording: Recording | None = None

    def capture_begin(self, pool: RecordedPool | None = None) -> None:
        """Record the operators that this thread runs from now on, with intermediates placed in *pool*.

        Raises CaptureError if this graph is captured already, or if this thread is capturing.
        """
        if self._recording is not None:
            raise CaptureError("this graph is captured already", hint="Call reset() before another capture")
        if is_recording() or self._recorder is not None:
            raise CaptureError("a capture is active", hint="End it with capture_end() or abort() first")
        self._pool = pool if pool is not None else RecordedPool()
        self._recorder = Recorder()
        if not torch.is_grad_enabled():
            self._modes.enter_context(_composites_arrive_whole())
        self._modes.enter_context(self._recorder)
        _capturing.graph = self

    def capture_end(self) -> None:
        """End the capture and make the graph ready to replay.

        A tensor made during the capture and still held by anyone now is an output: it keeps its memory, and
        each replay writes it. No capture is active afterwards, also if this raises. Raises CaptureError if
        this thread has not begun a capture of this graph, and again what the forward swallowed, chained.
        """
        recorder, pool = self._recorder, self._pool
        if _capturing.graph is not self or recorder is None or pool is None:
            raise CaptureError("this thread is not capturing this graph", hint="Call capture_begin() first")
        self.abort()
        self._recording = recorder.finish(pool)

    def abort(self) -> None:
        """End a capture and forget what it recorded; no effect unless this thread is capturing this graph."""
        if _capturing.graph is not self:
            return
        _capturing.graph = None
        self._recorder = None
        self._pool = None
        self._modes.close()

    def replay(self) -> None:
        """Run the recorded operators again.

        Raises ReplayError if nothing is captured, if this thread is capturing, or if an operator fails: it
        names the operator and is chained to its error, and the outputs then mix old and new values.
        """
        recording = self._captured(ReplayError)
        if is_recording():
            raise ReplayError("a graph cannot be replayed inside a capture")
        position = 0
        with torch.inference_mode(), _without_autocast():
            try:
                for position, call in enumerate(recording.calls):  # noqa: B007
                    call()
            except Exception as error:
                name, count = recording.names[position], len(recording.calls)
                raise ReplayError(f"operator {name} ({position + 1} of {count}) failed: {error}") from error

    def reset(self) -> None:
        """Free the graph's memory, so that it may be captured again."""
        self.abort()
        self._recording = None

    def pool(self) -> RecordedPool:
        """Return the pool of this graph's intermediates, to capture other graphs with.

        Raises CaptureError before a successful capture.
        """
        return self._captured(CaptureError).pool

    @property
    def num_ops(self) -> int:
        """Operators that a replay runs; 0 before capture."""
        return len(self._recording.calls) if self._recording else 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of intermediates at their peak, outputs and constants; inputs and weights do not count."""
        return self._recording.nbytes if self._recording else 0

    def _captured(self, error: type[CaptureError | ReplayError]) -> Recording:
        if self._recording is None:
            raise error(
                "this graph is not captured", hint="Call capture_begin(), run the forward, capture_end()"
            )
        return self._recording


def _composites_arrive_whole() -> contextlib.AbstractContextManager[object]:
    """Skip autograd's layer in this thread, as inference mode does, so that composite operators arrive whole.

    ``tolist`` and ``numpy`` show only as composites. Torch has no public name for this; without it they go
    unseen under ``no_grad``, as they do in grad mode.
    """
    guard = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
    return guard() if guard is not None else contextlib.nullcontext()


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """Run as recorded, where autocast has cast already."""
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return contextlib.nullcontext()
