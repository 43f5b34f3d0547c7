"""Decode steps that feed each other on the device, and their tokens on the way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import attrs
import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.integrations.transformers import CausalLMRunner
from graphplat.platform import Platform
from graphplat.staging import pinned_zeros


class Executor(Protocol):
    """What runs batches: any runner of graphplat."""

    def execute(self, batch: ForwardBatch) -> Any:
        """The forward's output for *batch*."""


def greedy(output: torch.Tensor) -> torch.Tensor:
    """Greedy choices ``(requests,)`` on the device, from logits if need be; may be *output* itself."""
    return output.argmax(-1) if output.is_floating_point() else output


@attrs.define(eq=False)
class DecodeFeed:
    """Decode steps of an unchanging batch whose request *i* is in slot *i*.

    A step takes the tokens of the one before, and its row of a table of positions. All of it
    lies on the device, so that no step waits for the host.
    """

    decode: Executor
    tokens: torch.Tensor
    """The newest of each request, ``(requests,)``."""
    positions: torch.Tensor
    """Where they go, ``(steps, requests)``."""
    slots: torch.Tensor
    _next: int = 0

    @classmethod
    def start(
        cls,
        runner: CausalLMRunner,
        decode: Executor,
        tokens: Sequence[int],
        positions: Sequence[int],
        steps: int,
    ) -> Self:
        """For at most *steps* steps from *tokens* at *positions*; the only upload of all of them."""
        inputs = runner.decode_batch(tokens, positions).inputs
        table = inputs["positions"] + runner.store.columns[:steps, None]
        return cls(decode, inputs["input_ids"], table, inputs["slots"])

    def step(self) -> torch.Tensor:
        """Launch the next step; returns its tokens, ``(requests,)``, which no later step overwrites."""
        count = self.tokens.shape[0]
        inputs = {"input_ids": self.tokens, "positions": self.positions[self._next], "slots": self.slots}
        batch = ForwardBatch(phase=Phase.DECODE, num_requests=count, num_tokens=count, inputs=inputs)
        output = self.decode.execute(batch)
        tokens = greedy(output)
        # A view holds until anybody's next step, and who is handed a token may run one.
        self.tokens = tokens.clone() if tokens is output else tokens
        self._next += 1
        return self.tokens


@attrs.define(eq=False)
class TokenCopy:
    """The tokens of one step on their way to the host."""

    _tokens: torch.Tensor | list[int]
    _platform: Platform
    _event: Any = None

    def wait(self) -> list[int]:
        """The tokens, once they have arrived."""
        if isinstance(self._tokens, list):
            return self._tokens
        self._platform.synchronize_event(self._event)
        tokens: list[int] = self._tokens.tolist()
        return tokens


@attrs.define(eq=False)
class TokenReader:
    """Brings tokens to the host in the order of the stream, without holding up what is launched next.

    Where no pinned memory is to be had, tokens are read at once; where pinning failed, after a warning.
    """

    platform: Platform
    device: torch.device
    most: int
    """Requests of the largest batch."""
    _ring: torch.Tensor | None = None
    _next: int = 0
    _pins: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pins = self.platform.capabilities.pinned_memory

    def send(self, tokens: torch.Tensor) -> TokenCopy:
        """Start to copy *tokens*. Those of the step before may still be on their way, but no earlier ones."""
        if self._ring is None and self._pins:
            without = "tokens are read before the next step is launched"
            self._ring = pinned_zeros(2, self.most, dtype=torch.int64, without=without)
            self._pins = self._ring is not None
        if self._ring is None:
            return TokenCopy(tokens.tolist(), self.platform)
        place = self._ring[self._next, : tokens.shape[0]]
        self._next = 1 - self._next
        place.copy_(tokens, non_blocking=True)
        event = self.platform.record_event(self.platform.current_stream(self.device))
        return TokenCopy(place, self.platform, event)
