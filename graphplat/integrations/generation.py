"""Greedy generation with continuous batching, on the runners of graphplat.

Prompts join the batch when a slot is free and leave it as they finish. Decoding
requests always lie in slots 0, 1, 2 …, in the order of the batch's rows, so that a step
reads the cache in place: a newcomer takes the place of one that left, and only
when nobody waits is the last request's cache moved into the gap.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch

from graphplat.errors import ContractError, InputError
from graphplat.integrations.decoding import DecodeFeed, Executor, TokenCopy, TokenReader, greedy
from graphplat.integrations.requests import Call, Completion, OnToken, Request
from graphplat.integrations.transformers import CausalLMRunner
from graphplat.registry import platform_for

if TYPE_CHECKING:
    from graphplat.capture import CudaGraphsCapture

__all__ = ["Completion", "Engine", "Executor", "OnToken", "PhaseTiming", "stop_tokens"]


@attrs.define
class PhaseTiming:
    """Steps of one phase.

    Seconds are those that the host spent to launch steps and to wait for their tokens, not those in
    ``on_token``, though a step may run on the device meanwhile.
    """

    steps: int = 0
    """With lookahead, those also whose tokens were all dropped."""
    tokens: int = 0
    """Prefill: prompt tokens; decode: new tokens, without dropped ones."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Zero before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


@attrs.define(eq=False)
class Engine:
    """Runs prompts to their end through *prefill* and *decode*.

    *max_prefill_tokens* bounds one prefill batch; a longer prompt is cut into chunks
    of that size. *stop_tokens* defaults to the model's own generation settings.
    Times of all calls add up in ``prefill_timing`` and ``decode_timing``.

    With *lookahead* a decode step is launched before the tokens of the one before are read, so that
    the device need not wait for the host. No step is launched for a request beyond its last token. That a
    token was a stop token is seen when the next step is under way: what that step computes for the
    request is dropped, and the other requests of the batch get theirs before a newcomer joins. ``None``
    looks ahead where the device works beside the host, so not on one without streams, such as a CPU.
    """

    runner: CausalLMRunner
    prefill: Executor
    decode: Executor
    max_prefill_tokens: int = 2048
    stop_tokens: frozenset[int] | None = None
    lookahead: bool | None = None
    prefill_timing: PhaseTiming = attrs.field(factory=PhaseTiming, init=False)
    decode_timing: PhaseTiming = attrs.field(factory=PhaseTiming, init=False)
    _waiting: collections.deque[Request] = attrs.field(factory=collections.deque, init=False)
    _running: list[Request] = attrs.field(factory=list, init=False)

    @classmethod
    def from_capture(cls, runner: CausalLMRunner, capture: CudaGraphsCapture, **settings: Any) -> Self:
        """On the runners of a :class:`~graphplat.CudaGraphsCapture` of *runner*.

        Raises :class:`ContractError` for the capture of another one.
        """
        if capture.eager_runner.context.model_runner is not runner:
            raise ContractError(
                "the capture was made of another runner, whose model and cache it would run",
                hint="Pass what capture_cuda_graphs(model_runner=runner) returned",
            )
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
        anything runs, for an empty prompt, one that does not fit with its new tokens, or one that is no list
        of tokens that the model knows, and
        :class:`ContractError` while another call uses the same cache, as one within *on_token* would. What a
        step or *on_token* raises ends the call once nothing is in flight; the next call starts afresh.
        """
        requests = _read(prompts, self.runner.model)
        self._check(requests, max_new_tokens)
        call = self._call(max_new_tokens, on_token)
        if not self.runner.store.in_use.acquire(blocking=False):
            raise ContractError(
                "another call of generate() is using this cache",
                hint="Pass all prompts to one call, or give each engine a runner of its own",
            )
        try:
            self._waiting.extend(requests)
            with torch.inference_mode():
                while self._waiting or self._running:
                    if self._can_admit():
                        self._prefill_step(call)
                    else:
                        self._decode_until_one_ends(call)
                    self._running = [request for request in self._running if request.finish_reason is None]
        finally:
            self._waiting.clear()
            self._running.clear()
            self.runner.store.in_use.release()
        return [
            Completion(request.prompt, tuple(request.tokens), request.finish_reason or "length")
            for request in requests
        ]

    def _call(self, max_new_tokens: int, on_token: OnToken | None) -> Call:
        device = self.runner.device
        platform = platform_for(device)
        reader = TokenReader(platform, device, self.runner.max_requests)
        ahead = platform.current_stream(device) is not None if self.lookahead is None else self.lookahead
        stops = stop_tokens(self.runner.model) if self.stop_tokens is None else self.stop_tokens
        return Call(stops, max_new_tokens, on_token, reader, int(ahead))

    def _check(self, requests: Sequence[Request], max_new_tokens: int) -> None:
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InputError(f"{max_new_tokens!r} new tokens asked for", field="max_new_tokens")
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

    def _prefill_step(self, call: Call) -> None:
        """Prefill as many waiting prompts as slots and the token bound allow; they join the batch."""
        taken: list[Request] = []
        room = self.max_prefill_tokens
        free = [slot for slot in range(self.runner.max_requests) if slot not in self._slots()]
        while self._waiting and free and (not taken or len(self._waiting[0].prompt) <= room):
            request = self._waiting.popleft()
            request.slot = free.pop(0)
            room -= len(request.prompt)
            taken.append(request)
        with _timed(self.prefill_timing):
            # Only a prompt taken alone can be longer than a batch.
            while len(taken[0].prompt) - taken[0].done > self.max_prefill_tokens:
                self._prefill_chunk(taken, [self.max_prefill_tokens])
            tokens = self._prefill_chunk(taken, [len(request.prompt) - request.done for request in taken])
        self._running += taken
        for request, token in zip(taken, tokens, strict=True):
            call.settle(request, token)

    def _prefill_chunk(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[int]:
        """Run the next tokens of *requests*, one of *lengths* each; returns what would follow them."""
        used = requests[: len(lengths)]
        batch = self.runner.prefill_batch(
            [r.prompt[r.done : r.done + length] for r, length in zip(used, lengths, strict=True)],
            [r.slot for r in used],
            [r.done for r in used],
        )
        tokens: list[int] = greedy(self.prefill.execute(batch)).tolist()
        for request, length in zip(used, lengths, strict=True):
            request.done += length
        self.prefill_timing.steps += 1
        self.prefill_timing.tokens += sum(lengths)
        return tokens

    # Decode

    def _decode_until_one_ends(self, call: Call) -> None:
        """Decode the running requests until one or more of them end; nothing is in flight then."""
        self._compact()
        # As many steps as the first to reach its length needs. So a step launched too early for a
        # request that had stopped writes where that request might have gone on, within its slot.
        steps = min(call.left(request) for request in self._running)
        feed = self._feed(steps)
        flying: collections.deque[TokenCopy] = collections.deque()
        try:
            for _ in range(steps):
                with _timed(self.decode_timing):
                    flying.append(call.reader.send(feed.step()))
                self.decode_timing.steps += 1
                if len(flying) > call.ahead and self._land(flying, call):
                    break
            while flying:
                self._land(flying, call)
        except BaseException as error:
            for copy in flying:
                try:
                    copy.wait()
                except Exception as late:  # noqa: BLE001 - the first error is the one to report
                    error.add_note(f"a step in flight failed too: {type(late).__name__}: {late}")
            raise

    def _feed(self, steps: int) -> DecodeFeed:
        with _timed(self.decode_timing):
            return DecodeFeed.start(
                self.runner,
                self.decode,
                [request.tokens[-1] for request in self._running],
                [request.cached for request in self._running],
                steps,
            )

    def _land(self, flying: collections.deque[TokenCopy], call: Call) -> bool:
        """Wait for the oldest step in flight and hand its tokens out; returns whether a request has ended."""
        with _timed(self.decode_timing):
            tokens = flying.popleft().wait()
        for request, token in zip(self._running, tokens, strict=True):
            if request.finish_reason is None:
                self.decode_timing.tokens += 1
                call.settle(request, token)
        return any(request.finish_reason is not None for request in self._running)

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


def _read(prompts: Iterable[Sequence[int]], model: Any) -> list[Request]:
    """A request for each of *prompts*; :class:`InputError` unless they are lists of tokens *model* knows."""
    known = getattr(model.config, "vocab_size", 1 << 31)
    requests: list[Request] = []
    try:
        for prompt in prompts:
            requests.append(Request(len(requests), tuple(map(operator.index, prompt))))
            tokens = requests[-1].prompt
            if tokens and not 0 <= min(tokens) <= max(tokens) < known:
                wrong = min(tokens) if min(tokens) < 0 else max(tokens)
                what = f"prompt {len(requests) - 1} has token {wrong}, but the model knows 0 to {known - 1}"
                raise InputError(what, field="prompts")
    except TypeError as error:
        what = f"prompt {len(requests)} is no list of tokens: {error}"
        raise InputError(
            what, field="prompts", hint="Pass lists of token numbers, such as [[1, 2, 3]]"
        ) from error
    return requests


def stop_tokens(model: Any) -> frozenset[int]:
    """The end-of-sequence tokens of a model's generation settings; may be empty."""
    settings = getattr(model, "generation_config", None) or model.config
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


@contextlib.contextmanager
def _timed(timing: PhaseTiming) -> Iterator[None]:
    """Count the seconds of a body that ends well."""
    started = time.perf_counter()
    yield
    timing.seconds += time.perf_counter() - started
