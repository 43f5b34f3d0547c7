"""What an engine is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs

from graphplat.integrations.decoding import TokenReader

OnToken = Callable[[int, int], None]
"""Called with the prompt's index and its new token, in the order of generation."""


@attrs.frozen
class Completion:
    """What one prompt got."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """New tokens; the last is the stop token if it ended so."""
    finish_reason: Literal["stop", "length"]


@attrs.define(eq=False)
class Request:
    """One prompt on its way through the engine."""

    index: int
    prompt: tuple[int, ...]
    slot: int = -1
    """Where its cache lies; -1 while it waits."""
    done: int = 0
    """Prompt tokens whose keys and values are in the cache."""
    tokens: list[int] = attrs.field(factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the newest."""
        return self.done + max(0, len(self.tokens) - 1)


@attrs.frozen
class Call:
    """What one call of ``generate`` asks for, and how its tokens are read."""

    stops: frozenset[int]
    limit: int
    on_token: OnToken | None
    reader: TokenReader
    ahead: int
    """Steps launched before the tokens of a step are read."""

    def left(self, request: Request) -> int:
        """Tokens that *request* may still get."""
        return self.limit - len(request.tokens)

    def settle(self, request: Request, token: int) -> None:
        """Give *request* its next *token*, hand it out, and see whether it was the last."""
        request.tokens.append(token)
        if self.on_token is not None:
            self.on_token(request.index, token)
        if token in self.stops:
            request.finish_reason = "stop"
        elif self.left(request) <= 0:
            request.finish_reason = "length"
