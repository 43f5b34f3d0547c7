"""Notice when a tensor whose address a graph has baked in was moved."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner

Address = int | tuple[Any, ...]
Described = tuple[Address, torch.Size, tuple[int, ...], torch.dtype]
_plain: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_size: Callable[[torch.Tensor], Any] = torch.Tensor.size
_stride: Callable[[torch.Tensor], Any] = torch.Tensor.stride
_TURNS = 8
_FEW = 64
_END = object()
_MARK = (_END,)


def _address(tensor: torch.Tensor) -> Address:
    """Where *tensor* lies; of one that wraps others, as quantized weights do, where each of those lies."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return tuple(_address(getattr(tensor, name)) for name in names)
    return tensor.data_ptr()


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.size(), tensor.stride()


def _numbers(address: Address) -> Iterator[int]:
    if isinstance(address, int):
        yield address
    else:
        yield from itertools.chain.from_iterable(map(_numbers, address))


@attrs.define(eq=False)
class WeightWatch:
    """Remembers submodules, parameters, buffers and extra tensors: which objects, at which addresses.

    In-place updates keep both and need nothing. A replaced submodule, a rebound parameter, a
    swapped ``.data`` or a replaced extra changes one of them. Comparing runs in C over live
    views of the modules' dictionaries, so that a step can afford it.

    Where there are more than 64 tensors, one that got other sizes or strides at its old address
    (``w.data = w.data.t()``) is found within eight steps: comparing those of every tensor at
    every step would cost three times as much.
    """

    model_runner: ModelRunner
    _model: torch.nn.Module | None = None
    _views: list[Any] = attrs.field(factory=list)
    _held: list[Any] = attrs.field(factory=list)
    _pointers: list[Address] = attrs.field(factory=list)
    _locate: Callable[[torch.Tensor], Address] = _plain
    _live: list[torch.Tensor] = attrs.field(factory=list)
    _described: dict[str, Described] = attrs.field(factory=dict)
    _has_extras: bool = False
    _empty: list[dict[str, Any]] = attrs.field(factory=list)
    """Dictionaries that held nothing, so that what is added to one is seen."""
    _layouts: list[tuple[list[torch.Tensor], list[Any], list[Any]]] = attrs.field(factory=list)
    """Tensors that are looked at together, their sizes and strides."""
    _turn: int = 0
    _turns: int = 1
    _reshaped: bool = False
    """A layout was found changed; kept until :meth:`remember`, since only some are looked at each time."""

    def remember(self) -> None:
        """Take the present state as what the graphs have baked in."""
        self._model = self.model_runner.model
        holders = [
            holder
            for module in self._model.modules()
            for holder in (module._parameters, module._buffers, module._modules)
        ]
        self._views = [holder.values() for holder in holders if holder]
        self._empty = [holder for holder in holders if not holder]
        # The end mark shows an entry that was added or taken away behind all others.
        self._held = [*itertools.chain.from_iterable(self._views), _END]
        self._live = [held for held in self._held if isinstance(held, torch.Tensor)]
        usual = all(type(held).data_ptr is torch.Tensor.data_ptr for held in self._live)
        wrapped = any(hasattr(type(held), "__tensor_flatten__") for held in self._live)
        self._locate = _plain if usual and not wrapped else _address
        self._pointers = list(map(self._locate, self._live))
        self._turns = _TURNS if len(self._live) > _FEW else 1
        shares = [] if wrapped else [self._live[turn :: self._turns] for turn in range(self._turns)]
        self._layouts = [(share, list(map(_size, share)), list(map(_stride, share))) for share in shares]
        self._reshaped = False
        self._described = self._describe_extras()
        self._has_extras = bool(self._described)

    def moved(self) -> str | None:
        """What moved since :meth:`remember`, by name, or ``None``."""
        now = itertools.chain(itertools.chain.from_iterable(self._views), _MARK)
        if (
            self.model_runner.model is self._model
            and all(map(operator.is_, now, self._held))
            and list(map(self._locate, self._live)) == self._pointers
            and not any(self._empty)
            and self._same_layouts()
            and (not self._has_extras or self._describe_extras() == self._described)
        ):
            return None
        return self._name_moved()

    def _same_layouts(self) -> bool:
        """Compare sizes and strides: of all tensors, or of every eighth and of others at each call."""
        if self._reshaped or not self._layouts:
            return not self._reshaped
        self._turn = turn = (self._turn + 1) % self._turns
        looked_at, sizes, strides = self._layouts[turn]
        self._reshaped = list(map(_size, looked_at)) != sizes or list(map(_stride, looked_at)) != strides
        return not self._reshaped

    def settle(self) -> str | None:
        """As :meth:`moved`, but tensors that only came in addition are taken as known."""
        moved = self.moved()
        if moved is None or self._any_lost():
            return moved
        self.remember()
        return None

    def _any_lost(self) -> bool:
        """Whether a remembered tensor is no longer there, or lies elsewhere."""
        model, extras = self.model_runner.model, self._describe_extras()
        there = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}
        known = zip(self._live, self._pointers, strict=True)
        return any(id(tensor) not in there or _address(tensor) != where for tensor, where in known) or any(
            extras.get(name) != described for name, described in self._described.items()
        )

    def pointers(self) -> set[int]:
        """The addresses of all watched tensors."""
        found = [*self._pointers, *(address for address, *_ in self._described.values())]
        return set(itertools.chain.from_iterable(map(_numbers, found)))

    def _describe_extras(self) -> dict[str, Described]:
        extras = self.model_runner.extra_tensors()
        return {name: (_address(t), t.shape, t.stride(), t.dtype) for name, t in extras.items()}

    def _name_moved(self) -> str:
        known = {id(tensor): pointer for tensor, pointer in zip(self._live, self._pointers, strict=True)}
        model = self.model_runner.model
        if model is not self._model:
            return "the model"
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        for name, tensor in named:
            if known.get(id(tensor)) != _address(tensor):
                return name
        layouts = {
            id(t): (size, stride) for share in self._layouts for t, size, stride in zip(*share, strict=True)
        }
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if layouts.get(id(tensor), _layout(tensor)) != _layout(tensor):
                return name
        for name, described in self._describe_extras().items():
            if self._described.get(name) != described:
                return name
        return "a submodule, parameter, buffer or extra tensor that was added or is gone"
