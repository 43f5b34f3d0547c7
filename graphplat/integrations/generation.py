"""Greedy generation with continuous batching, on the runners of graphplat.

Prompts join the batch when a slot is free and leave it as they finish. Decoding
requests always lie in slots 0, 1, 2 …, in the order of the batch's rows, so that a step
reads the cache in place: a newcomer takes the place of one that left, and only
when nobody waits is the last request's cache moved into the gap.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import attrs
import torch

from graphplat.batch import ForwardBatch
from graphplat.errors import InputError
from graphplat.integrations.transformers import CausalLMRunner

if TYPE_CHECKING:
    from graphplat.capture import CudaGraphsCapture

OnToken = Callable[[int, int], None]
"""Called with the prompt's index and its new token, in the order of generation."""


class Executor(Protocol):
    """What runs batches: any runner of graphplat."""

    def execute(self, batch: ForwardBatch) -> Any:
        """The forward's output for *batch*."""


@attrs.frozen
class Completion:
    """What one prompt got."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """New tokens; the last is the stop token if it ended so."""
    finish_reason: Literal["stop", "length"]


@attrs.define
class PhaseTiming:
    """Steps of one phase; seconds include the read of their tokens by the host."""

    steps: int = 0
    tokens: int = 0
    """Prefill: prompt tokens; decode: new tokens."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Zero before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


@attrs.define(eq=False)
class _Request:
    index: int
    prompt: tuple[int, ...]
    slot: int = -1
    done: int = 0
    """Prompt tokens whose keys and values are in the cache."""
    tokens: list[int] = attrs.field(factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the newest."""
        return self.done + max(0, len(self.tokens) - 1)


@attrs.define(eq=False)
class Engine:
    """Runs prompts to their end through *prefill* and *decode*.

    *max_prefill_tokens* bounds one prefill batch; a longer prompt is cut into chunks
    of that size. *stop_tokens* defaults to the model's own generation settings.
    Times of all calls add up in ``prefill_timing`` and ``decode_timing``.
    """

    runner: CausalLMRunner
    prefill: Executor
    decode: Executor
    max_prefill_tokens: int = 2048
    stop_tokens: frozenset[int] | None = None
    prefill_timing: PhaseTiming = attrs.field(factory=PhaseTiming, init=False)
    decode_timing: PhaseTiming = attrs.field(factory=PhaseTiming, init=False)
    _waiting: collections.deque[_Request] = attrs.field(factory=collections.deque, init=False)
    _running: list[_Request] = attrs.field(factory=list, init=False)

    @classmethod
    def from_capture(cls, runner: CausalLMRunner, capture: CudaGraphsCapture, **settings: Any) -> Self:
        """On the runners of a :class:`~graphplat.CudaGraphsCapture` of *runner*."""
        return cls(runner, capture.prefill_runner, capture.decode_runner, **settings)

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_new_tokens: int = 32,
        *,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Greedy completions of token lists, in their order.

        More prompts than slots wait their turn. Raises :class:`InputError`, before
        anything runs, for an empty prompt or one that does not fit with its new tokens.
        """
        requests = [_Request(index, tuple(prompt)) for index, prompt in enumerate(prompts)]
        self._check(requests, max_new_tokens)
        stops = stop_tokens(self.runner.model) if self.stop_tokens is None else self.stop_tokens
        self._waiting.extend(requests)
        try:
            with torch.inference_mode():
                while self._waiting or self._running:
                    stepped = self._prefill_step() if self._can_admit() else self._decode_step()
                    for request in stepped:
                        _settle(request, stops, max_new_tokens, on_token)
                    self._running = [request for request in self._running if request.finish_reason is None]
        finally:
            self._waiting.clear()
            self._running.clear()
        return [
            Completion(request.prompt, tuple(request.tokens), request.finish_reason or "length")
            for request in requests
        ]

    def _check(self, requests: Sequence[_Request], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise InputError(f"{max_new_tokens} new tokens asked for", field="max_new_tokens")
        if self.max_prefill_tokens < 1:
            raise InputError("a prefill batch needs a token", field="max_prefill_tokens")
        for request in requests:
            # The newest token is never read back, so it needs no room.
            needed = len(request.prompt) + max_new_tokens - 1
            if not request.prompt or needed > self.runner.max_len:
                raise InputError(
                    f"prompt {request.index} has {len(request.prompt)} tokens and may grow to {needed}, "
                    f"but a request holds 1 to {self.runner.max_len}",
                    field="prompts",
                    hint="Raise max_len, or ask for fewer new tokens",
                )

    # Prefill

    def _can_admit(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.runner.max_requests

    def _prefill_step(self) -> list[_Request]:
        """Prefill as many waiting prompts as slots and the token bound allow; they join the batch."""
        taken: list[_Request] = []
        room = self.max_prefill_tokens
        free = [slot for slot in range(self.runner.max_requests) if slot not in self._slots()]
        while self._waiting and free and (not taken or len(self._waiting[0].prompt) <= room):
            request = self._waiting.popleft()
            request.slot = free.pop(0)
            room -= len(request.prompt)
            taken.append(request)
        started = time.perf_counter()
        # Only a prompt taken alone can be longer than a batch.
        while len(taken[0].prompt) - taken[0].done > self.max_prefill_tokens:
            self._prefill_chunk(taken, [self.max_prefill_tokens])
        tokens = self._prefill_chunk(taken, [len(request.prompt) - request.done for request in taken])
        self.prefill_timing.seconds += time.perf_counter() - started
        for request, token in zip(taken, tokens, strict=True):
            request.tokens.append(token)
        self._running += taken
        return taken

    def _prefill_chunk(self, requests: Sequence[_Request], lengths: Sequence[int]) -> list[int]:
        """Run the next tokens of *requests*, one of *lengths* each; returns what would follow them."""
        used = requests[: len(lengths)]
        batch = self.runner.prefill_batch(
            [r.prompt[r.done : r.done + length] for r, length in zip(used, lengths, strict=True)],
            [r.slot for r in used],
            [r.done for r in used],
        )
        tokens = _tokens(self.prefill.execute(batch))
        for request, length in zip(used, lengths, strict=True):
            request.done += length
        self.prefill_timing.steps += 1
        self.prefill_timing.tokens += sum(lengths)
        return tokens

    # Decode

    def _decode_step(self) -> list[_Request]:
        self._compact()
        running = self._running
        started = time.perf_counter()
        batch = self.runner.decode_batch(
            [request.tokens[-1] for request in running], [request.cached for request in running]
        )
        tokens = _tokens(self.decode.execute(batch))
        self.decode_timing.seconds += time.perf_counter() - started
        self.decode_timing.steps += 1
        self.decode_timing.tokens += len(tokens)
        for request, token in zip(running, tokens, strict=True):
            request.tokens.append(token)
        return running

    def _compact(self) -> None:
        """Bring the running requests into slots 0, 1, 2 … with as few moves as can be."""
        count = len(self._running)
        if [request.slot for request in self._running] == list(range(count)):
            return
        gaps = sorted(set(range(count)) - self._slots())
        for request in self._running:
            if request.slot >= count:
                target = gaps.pop()
                self.runner.store.move(request.slot, target, request.cached)
                request.slot = target
        self._running.sort(key=lambda request: request.slot)

    def _slots(self) -> set[int]:
        return {request.slot for request in self._running}


def stop_tokens(model: Any) -> frozenset[int]:
    """The end-of-sequence tokens of a model's generation settings; may be empty."""
    settings = getattr(model, "generation_config", None) or model.config
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _settle(request: _Request, stops: frozenset[int], limit: int, on_token: OnToken | None) -> None:
    """Hand the newest token out, and see whether it was the last."""
    token = request.tokens[-1]
    if on_token is not None:
        on_token(request.index, token)
    if token in stops:
        request.finish_reason = "stop"
    elif len(request.tokens) >= limit:
        request.finish_reason = "length"


def _tokens(output: torch.Tensor) -> list[int]:
    """Greedy choices, from logits if need be."""
    chosen = output.argmax(-1) if output.is_floating_point() else output
    tokens: list[int] = chosen.tolist()
    return tokens
