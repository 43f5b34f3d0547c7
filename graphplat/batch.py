"""What a runtime hands to a runner: a phase and a batch."""

from __future__ import annotations

import enum
from typing import Any

import attrs
import torch

from graphplat import tree
from graphplat.errors import InputError


class Phase(enum.StrEnum):
    """Which kind of step a batch is."""

    DECODE = "decode"
    """A fixed number of new tokens per request; buckets count requests."""
    PREFILL = "prefill"
    """Packed prompts of unequal lengths; buckets count tokens."""

    def __str__(self) -> str:
        return self.value


def _to_phase(value: Phase | str) -> Phase:
    if type(value) is Phase:
        return value
    try:
        return Phase(value)
    except ValueError as error:
        known = ", ".join(repr(str(phase)) for phase in Phase)
        raise InputError(f"expected one of {known}, found {value!r}", field="phase") from error


@attrs.define(eq=False)
class ForwardBatch:
    """One step's work: sizes, inputs, and what exists only for capture.

    ``num_requests`` and ``num_tokens`` are the real counts, without padding.
    ``inputs`` is a nested structure of tensors and host constants shaped as the
    runtime's :class:`~graphplat.InputSpec` says. ``variant`` selects among
    graphs of one size (an adapter set, a speculative mode). Raises :class:`InputError` for an unknown phase.

    ``global_num_tokens_gpu``, ``global_dp_buffer_len`` and ``capture_only`` hold
    what :meth:`~graphplat.ModelRunner.prepare_capture_batch` installs for
    capture: a number that a graph freezes, and tensors whose address it goes on reading. On a
    live batch ``None`` means as captured; another number runs eagerly, another tensor is an
    :class:`InputError`. Weak references to a batch work.
    """

    phase: Phase = attrs.field(converter=_to_phase)
    num_requests: int
    num_tokens: int
    inputs: dict[str, Any] = attrs.field(factory=dict)
    variant: str | None = None
    global_num_tokens_gpu: torch.Tensor | None = None
    global_dp_buffer_len: int | None = None
    capture_only: dict[str, torch.Tensor] = attrs.field(factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor reachable from this batch, by path."""
        return {
            path: leaf
            for name in ("inputs", "global_num_tokens_gpu", "capture_only")
            for path, leaf in tree.walk(getattr(self, name), name)
            if isinstance(leaf, torch.Tensor)
        }
