"""What devices whose graphs record a stream call their things, as data of a plugin."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamGraphApi(msgspec.Struct, frozen=True, kw_only=True):
    """Names and keywords of a device's graph API."""

    module: str
    """``torch.<module>`` holds streams, events and graphs."""
    graph_class: str
    begin_keywords: dict[str, Any] = {}
    """Passed to ``capture_begin`` beside ``pool``."""
    context: str | None = None
    """Record inside this context manager of the module instead of by ``capture_begin``."""
    context_keywords: dict[str, Any] = {}
    """Passed to the context manager beside ``pool`` and ``stream``."""
    package: str | None = None
    """What makes the module appear, where torch does not load it by itself."""
    raw_stream: str | None = None
    """A function of ``torch._C`` that gives a device's current stream as a number, where there is one.
    Making a stream object costs some 6 µs on every step, the number 0.1."""
    clear_workspaces: str | None = None
    """The full name of a function that frees the workspaces which torch keeps for a math library."""
