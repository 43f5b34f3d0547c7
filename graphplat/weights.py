"""Notice when a tensor whose address a graph has baked in was moved."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

_pointer: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


@attrs.define(eq=False)
class WeightWatch:
    """Remembers parameters, buffers and extra tensors: which objects, at which addresses.

    In-place updates keep both and need nothing. A rebound parameter, a swapped
    ``.data`` or a replaced extra changes one of them. Comparing runs in C over live
    views of the modules' dictionaries, so that a step can afford it.
    """

    model: torch.nn.Module
    extras: Callable[[], Mapping[str, torch.Tensor]]
    _views: list[Any] = attrs.field(factory=list)
    _tensors: list[torch.Tensor | None] = attrs.field(factory=list)
    _pointers: list[int] = attrs.field(factory=list)
    _live: list[torch.Tensor] = attrs.field(factory=list)
    _described: dict[str, tuple[int, torch.Size, torch.dtype]] = attrs.field(factory=dict)
    _has_extras: bool = False

    def remember(self) -> None:
        """Take the present state as what the graphs have baked in."""
        self._views = [
            holder.values()
            for module in self.model.modules()
            for holder in (module._parameters, module._buffers)
            if holder
        ]
        self._tensors = list(itertools.chain.from_iterable(self._views))
        self._live = [tensor for tensor in self._tensors if tensor is not None]
        self._pointers = list(map(_pointer, self._live))
        self._described = self._describe_extras()
        self._has_extras = bool(self._described)

    def moved(self) -> str | None:
        """What moved since :meth:`remember`, by name, or ``None``."""
        now = itertools.chain.from_iterable(self._views)
        if (
            all(map(operator.is_, now, self._tensors))
            and list(map(_pointer, self._live)) == self._pointers
            and not (self._has_extras and self._describe_extras() != self._described)
        ):
            return None
        return self._name_moved()

    def pointers(self) -> set[int]:
        """The addresses of all watched tensors."""
        return set(self._pointers) | {pointer for pointer, _, _ in self._described.values()}

    def _describe_extras(self) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        return {name: (t.data_ptr(), t.shape, t.dtype) for name, t in self.extras().items()}

    def _name_moved(self) -> str:
        known = {id(tensor): pointer for tensor, pointer in zip(self._live, self._pointers, strict=True)}
        named = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        for name, tensor in named:
            if known.get(id(tensor)) != tensor.data_ptr():
                return name
        for name, described in self._describe_extras().items():
            if self._described.get(name) != described:
                return name
        return "a parameter, buffer or extra tensor that is gone"
