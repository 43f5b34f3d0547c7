"""What must hold while a graph is recorded: one capture at a time, no garbage collection."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from graphplat.errors import GraphplatError

CAPTURE_LOCK = threading.RLock()
"""Held during a capture: device runtimes allow one capture at a time in a process."""


@contextlib.contextmanager
def garbage_collection_held() -> Iterator[None]:
    """Collect once, then keep automatic collection off; the former state is restored exactly.

    Cyclic garbage may own an old graph, whose finalizer calls the driver in the
    middle of a recording and so invalidates it. The collection only gives memory back
    early, so it leaves the oldest generation alone: in a process full of
    modules that one takes as long as capturing a dozen graphs.
    """
    enabled = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compiled_frames() -> int:
    """How often torch's compiler has translated something so far; 0 if it was never loaded."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters  # no public counter of compilations exists

    # Frames count what may break into pieces, graphs what was compiled whole too.
    return int(counters["frames"]["total"]) + int(counters["stats"]["unique_graphs"])


def user_frame(error: BaseException) -> str | None:
    """``file:line in function`` of the innermost frame outside torch and graphplat, if any."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(skipped):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None


def clear_locals(error: BaseException) -> None:
    """Let go of what the frames that *error* and its causes passed through still hold, such as tensors."""
    seen: BaseException | None = error
    met: list[BaseException] = []
    while seen is not None and seen not in met:
        met.append(seen)
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether *error* or anything it was raised from is a device's out-of-memory error.

    A foreign error that was only raised while such a one was handled is a fault of its own.
    """
    seen: BaseException | None = error
    met: list[BaseException] = []
    while seen is not None and seen not in met:
        met.append(seen)
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)):
            return True
        seen = seen.__cause__ or (seen.__context__ if isinstance(seen, GraphplatError) else None)
    return False
