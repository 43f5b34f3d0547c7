"""Notice when a tensor whose address a graph has baked in was moved."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner

_pointer: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_END = object()
_MARK = (_END,)


@attrs.define(eq=False)
class WeightWatch:
    """Remembers submodules, parameters, buffers and extra tensors: which objects, at which addresses.

    In-place updates keep both and need nothing. A replaced submodule, a rebound parameter, a
    swapped ``.data`` or a replaced extra changes one of them. Comparing runs in C over live
    views of the modules' dictionaries, so that a step can afford it.
    """

    model_runner: ModelRunner
    _model: torch.nn.Module | None = None
    _views: list[Any] = attrs.field(factory=list)
    _held: list[Any] = attrs.field(factory=list)
    _pointers: list[int] = attrs.field(factory=list)
    _live: list[torch.Tensor] = attrs.field(factory=list)
    _described: dict[str, tuple[int, torch.Size, torch.dtype]] = attrs.field(factory=dict)
    _has_extras: bool = False

    def remember(self) -> None:
        """Take the present state as what the graphs have baked in."""
        self._model = self.model_runner.model
        self._views = [
            holder.values()
            for module in self._model.modules()
            for holder in (module._parameters, module._buffers, module._modules)
            if holder
        ]
        # The end mark shows an entry that was added or taken away behind all others.
        self._held = [*itertools.chain.from_iterable(self._views), _END]
        self._live = [held for held in self._held if isinstance(held, torch.Tensor)]
        self._pointers = list(map(_pointer, self._live))
        self._described = self._describe_extras()
        self._has_extras = bool(self._described)

    def moved(self) -> str | None:
        """What moved since :meth:`remember`, by name, or ``None``."""
        now = itertools.chain(itertools.chain.from_iterable(self._views), _MARK)
        if (
            self.model_runner.model is self._model
            and all(map(operator.is_, now, self._held))
            and list(map(_pointer, self._live)) == self._pointers
            and (not self._has_extras or self._describe_extras() == self._described)
        ):
            return None
        return self._name_moved()

    def pointers(self) -> set[int]:
        """The addresses of all watched tensors."""
        return set(self._pointers) | {pointer for pointer, _, _ in self._described.values()}

    def _describe_extras(self) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        extras = self.model_runner.extra_tensors()
        return {name: (t.data_ptr(), t.shape, t.dtype) for name, t in extras.items()}

    def _name_moved(self) -> str:
        known = {id(tensor): pointer for tensor, pointer in zip(self._live, self._pointers, strict=True)}
        model = self.model_runner.model
        if model is not self._model:
            return "the model"
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        for name, tensor in named:
            if known.get(id(tensor)) != tensor.data_ptr():
                return name
        for name, described in self._describe_extras().items():
            if self._described.get(name) != described:
                return name
        return "a submodule, parameter, buffer or extra tensor that was added or is gone"
