"""The short way through a step: what one exact size needs, worked out once.

A step whose batch matches a plan costs one pass over its fields and at most one
grouped copy. Anything unusual falls back to the runner's full check, which also
words the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat.staging import Staging

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.buffers import BoundInputs
    from graphplat.report import Decision
    from graphplat.runners.graph import Entry

Found = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Targets, the same in the unit of a plan, and sources, field by field."""

_Tensor, _strided = torch.Tensor, torch.strided  # looked up for every field of every step

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE = (*_UNITS.values(), torch.int8)


@attrs.define(eq=False)
class StepPlan:
    """One graph, one exact number of requests and tokens."""

    entry: Entry
    launch: Callable[[Any], None]
    decision: Decision
    requests: int
    tokens: int
    size: int
    inputs: BoundInputs
    output: Any
    fields: tuple[tuple[str, torch.Tensor, torch.Size, torch.dtype, bool, torch.Tensor], ...]
    """Path, target, shape, type, whether such tensors may hold values that their bytes are not, and the
    target as a tensor of *unit*."""
    unit: torch.dtype | None
    """One integer type to read all targets as, so that mixed types share a launch."""
    device: torch.device
    on_host: bool
    staging: Staging | None
    from_host: bool = False
    """The last batch was in host memory."""

    @classmethod
    def make(
        cls,
        entry: Entry,
        launch: Callable[[Any], None],
        decision: Decision,
        batch: ForwardBatch,
        size: int,
    ) -> StepPlan | None:
        """The plan for *batch*'s size on *entry*, or ``None`` where its inputs need the full way."""
        bound, requests, tokens = entry.inputs, batch.num_requests, batch.num_tokens
        if any(f.fill == "last" or f.spec.varies or f.spec.optional for f in bound.fields):
            return None
        heads = bound.head(requests, tokens)
        views = list(heads.values())
        unit, units = _units(views)
        fields = tuple(
            (path, view, view.shape, view.dtype, view.is_floating_point() or view.is_complex(), grouped)
            for (path, view), grouped in zip(heads.items(), units or views, strict=True)
        )
        device = bound.arena.device
        return cls(
            entry,
            launch,
            decision,
            requests,
            tokens,
            size,
            bound,
            entry.output.head(requests, tokens),
            fields,
            unit,
            device,
            device.type == "cpu",
            Staging.of(bound),
        )

    def load(self, inputs: Mapping[str, Any]) -> bool:
        """Bring *inputs* in and reset padded rows; ``False``, with nothing changed, for the full way."""
        if type(inputs) is not dict:  # the full way says what is wrong, or reads it
            return False
        try:
            if self.from_host:
                sources = self._on_host(inputs)
                found = self._fresh(inputs) if sources is None else None
            else:
                found = self._fresh(inputs)
                sources = self._on_host(inputs) if found is None else None
        except RuntimeError:  # a tensor without dense memory: the full way names it
            return False
        self.from_host = sources is not None  # as the next batch will probably be
        if sources is not None and self.staging is not None:
            return self.staging.send(sources, self.requests, self.tokens)
        if found is None:
            return False
        self.inputs.reset_outside(self.requests, self.tokens)
        if found[0]:
            self._copy(*found)
        return True

    def _on_host(self, inputs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of a batch that lies in host memory as a whole; ``None``: not as planned."""
        if self.staging is None or len(inputs) != len(self.fields):
            return None
        sources: list[torch.Tensor] = []
        for path, _, shape, dtype, _, _ in self.fields:
            value = inputs.get(path)
            if (
                type(value) is not _Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or not value.is_cpu
                or value.requires_grad
                or value.layout is not _strided
            ):
                return None
            sources.append(value)
        return sources

    def _fresh(self, inputs: Mapping[str, Any]) -> Found | None:
        """What must be copied; ``None``: not as planned."""
        if len(inputs) != len(self.fields):
            return None
        targets: list[torch.Tensor] = []
        units: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        arena = self.inputs.arena
        for path, view, shape, dtype, tagged, grouped in self.fields:
            value = inputs.get(path)
            if value is view:
                continue
            if (
                type(value) is not _Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or value.device != self.device
                or value.requires_grad
                or (tagged and (value.is_neg() or value.is_conj()))
                or arena.start <= value.data_ptr() < arena.stop
            ):
                return None
            targets.append(view)
            units.append(grouped)
            sources.append(value)
        return targets, units, sources

    def _copy(
        self, targets: list[torch.Tensor], units: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> None:
        unit = self.unit
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif unit is None or self.on_host or not all(map(torch.Tensor.is_contiguous, sources)):
            torch._foreach_copy_(targets, sources)
        else:
            torch._foreach_copy_(
                units, [source if source.dtype is unit else source.view(unit) for source in sources]
            )


def _units(views: list[torch.Tensor]) -> tuple[torch.dtype | None, tuple[torch.Tensor, ...]]:
    """The widest whole-number type that every view can be read as, the commonest one of that width.

    Flags and real numbers are no such types: a kernel may change bytes that mean neither to them.
    """
    if not views or any(view.dim() == 0 or view.shape[-1] == 0 or not view.is_contiguous() for view in views):
        return None, ()
    width = min(view.element_size() for view in views)
    if width not in _UNITS:
        return None, ()
    narrow = [view.dtype for view in views if view.element_size() == width and view.dtype in _WHOLE]
    unit = max(narrow, key=narrow.count, default=_UNITS[width])
    with torch.inference_mode(False):
        return unit, tuple(view if view.dtype is unit else view.view(unit) for view in views)
