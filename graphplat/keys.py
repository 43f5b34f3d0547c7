"""The shape key: one key for a graph, its buffers, its outputs and vendor metadata."""

from __future__ import annotations

from typing import Any

import msgspec

from graphplat.batch import Phase

Family = tuple[str | None, frozenset[str], tuple[tuple[str, Any], ...]]
"""Variant, optional inputs that are present, host constants: what graphs of one size differ in."""


class ShapeKey(msgspec.Struct, frozen=True, kw_only=True):
    """What one captured graph can serve. Hashable; equal keys mean one graph."""

    phase: Phase
    size: int
    """The bucket: requests for decode, tokens for prefill."""
    requests: int
    """Request rows of the graph."""
    tokens: int
    """Token rows of the graph."""
    tokens_per_request: int = 1
    variant: str | None = None
    present: tuple[str, ...] = ()
    """Optional inputs that are there, sorted."""
    host: tuple[tuple[str, Any], ...] = ()
    """Host constants by which graphs are told apart."""
    dtypes: tuple[tuple[str, str], ...] = ()
    """The dtype of every tensor input."""

    @property
    def family(self) -> Family:
        """What this key shares with those of the same kind of batch at other sizes."""
        return self.variant, frozenset(self.present), self.host

    def __str__(self) -> str:
        parts = [f"{self.phase} {self.size}"]
        if self.variant is not None:
            parts.append(f"variant {self.variant!r}")
        if self.tokens_per_request != 1:
            parts.append(f"{self.tokens_per_request} tokens a request")
        if self.present:
            parts.append(f"with {', '.join(self.present)}")
        parts += [f"{name}={value!r}" for name, value in self.host]
        return ", ".join(parts)
