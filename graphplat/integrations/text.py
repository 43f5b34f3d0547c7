"""Text in, text out: tokenizers, and text that streams while tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a user's question, chat template included."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of *tokens*, without special ones."""


@attrs.frozen
class ChatTokenizer:
    """A tokenizer of transformers, with its chat template where it has one."""

    tokenizer: Any

    def encode(self, prompt: str) -> list[int]:
        """The tokens of *prompt* as a user's turn; plain tokens without a template."""
        if not self.tokenizer.chat_template:
            tokens: list[int] = self.tokenizer.encode(prompt)
            return tokens
        turns = [{"role": "user", "content": prompt}]
        found = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of *tokens*, without special ones."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


@attrs.frozen
class ByteTokenizer:
    """Bytes as tokens, for random weights that come without a vocabulary."""

    def encode(self, prompt: str) -> list[int]:
        """The UTF-8 bytes of *prompt*."""
        return list(prompt.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Token numbers, since no text was ever meant."""
        return "".join(f"<{token}>" for token in tokens)


@attrs.define(eq=False)
class TextStream:
    """Turns one request's tokens into text, piece by piece.

    A character may span several tokens, so a piece is held back while the
    text ends in an unfinished one. ``decode`` is a tokenizer's own; the pieces of a
    finished stream add up to its text of all tokens.
    """

    decode: Callable[[Sequence[int]], str]
    _tokens: list[int] = attrs.field(factory=list, init=False)
    _window: int = attrs.field(default=0, init=False)
    """First token of the text that is decoded again with each new one."""
    _read: int = attrs.field(default=0, init=False)
    """Tokens whose text was handed out."""

    def push(self, token: int) -> str:
        """Take *token*; returns the new text, perhaps none."""
        self._tokens.append(token)
        known, text = self._texts()
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            return ""
        # Decode from the former piece on: how a token reads depends on the one before it.
        self._window, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def finish(self) -> str:
        """What was held back."""
        known, text = self._texts()
        self._window = self._read = len(self._tokens)
        return text[len(known) :]

    def _texts(self) -> tuple[str, str]:
        return (
            self.decode(self._tokens[self._window : self._read]),
            self.decode(self._tokens[self._window :]),
        )
