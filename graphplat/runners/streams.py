"""Capture streams, handed on from one model runner to the next.

Math libraries keep a workspace of some 30 MB for every stream that ever used them. A
stream for each runner, dropped with it, would leave one workspace behind each time, where
a platform cannot drop them. Two runners alive at once never share a stream, since the graphs
of such a platform have its workspace baked in and may replay at the same time.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from graphplat.platform import Platform

_Key = tuple[str, str]
_idle: dict[_Key, list[Any]] = {}
_lock = threading.Lock()


@attrs.define(eq=False)
class StreamLease:
    """One stream on loan, until it is given back or this object dies."""

    stream: Any
    _finalizer: Any = None

    @classmethod
    def take(cls, platform: Platform, device: torch.device) -> StreamLease:
        """An idle stream of *device*, or a new one."""
        key = (platform.name, str(device))
        with _lock:
            idle = _idle.setdefault(key, [])
            stream = idle.pop() if idle else None
        if stream is None:
            stream = platform.new_stream(device)
        lease = cls(stream)
        lease._finalizer = weakref.finalize(lease, _give_back, key, stream)
        lease._finalizer.atexit = False
        return lease

    def give_back(self) -> None:
        """End the loan; what was captured on the stream must be gone."""
        self._finalizer()


def _give_back(key: _Key, stream: Any) -> None:
    if stream is not None:
        with _lock:
            _idle.setdefault(key, []).append(stream)
