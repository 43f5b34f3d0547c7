"""Notice what a plugin changes in torch while it loads, and put it back."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from graphplat.platform import IN_TREE_DEVICE_TYPES

_TORCH_HOME = os.path.dirname(torch.__file__) + os.sep
_COMPILER_HOME = os.path.join(_TORCH_HOME, "_dynamo") + os.sep
_MISSING = object()


def _watched() -> Iterator[tuple[str, Any]]:
    yield "torch", torch
    for kind in IN_TREE_DEVICE_TYPES:
        if inspect.ismodule(module := getattr(torch, kind, None)):
            yield f"torch.{kind}", module
    yield "torch.accelerator", torch.accelerator
    yield "torch.Tensor", torch.Tensor
    yield "torch.nn.Module", torch.nn.Module


@attrs.frozen(eq=False)
class TorchState:
    """Attributes and process-wide settings of torch at one moment.

    Attributes of torch, its device modules, ``torch.accelerator``, ``torch.Tensor`` and
    ``torch.nn.Module`` are compared by identity. New ones are nobody's loss,
    unless they hide an inherited one. Settings are those of the calling thread.
    """

    attributes: dict[str, dict[str, Any]]
    settings: dict[str, Any]

    @classmethod
    def take(cls) -> TorchState:
        """Record the state of now. Touches no device."""
        return cls({label: dict(vars(owner)) for label, owner in _watched()}, _settings())

    def put_back(self) -> list[str]:
        """Undo every change since :meth:`take`; returns their names, sorted."""
        changes: list[str] = []
        for label, owner in _watched():
            for name, old in _changed(self.attributes.get(label, {}), owner):
                if old is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
                changes.append(f"{label}.{name}")
        now = _settings()
        for name, before in self.settings.items():
            if now[name] is not before and now[name] != before:
                _restore(name, before)
                changes.append(name)
        return sorted(changes)


def _changed(before: dict[str, Any], owner: Any) -> list[tuple[str, Any]]:
    now = vars(owner)
    found = [
        (name, old)
        for name, old in before.items()
        if now.get(name, _MISSING) is not old and not _is_own_affair(name, old, now.get(name, _MISSING))
    ]
    if isinstance(owner, type):
        found += [(name, _MISSING) for name in now if name not in before and _hides(owner, name)]
    return found


def _is_own_affair(name: str, old: Any, new: Any) -> bool:
    """Whether torch itself may have made this change."""
    if name.startswith("_") and not name.endswith("__") and not callable(old):
        return True  # a cache or a flag: device counts, initialization state
    if name == "Storage":
        return True  # an alias that follows the default dtype
    if not inspect.isfunction(new):
        return False
    # the compiler wraps functions when it is imported, and replaces methods when first used
    origin = new.__code__.co_filename
    wrapped = origin.startswith(_TORCH_HOME) and inspect.unwrap(new) is inspect.unwrap(old)
    return wrapped or origin.startswith(_COMPILER_HOME)


def _hides(owner: type, name: str) -> bool:
    return name not in {"__doc__", "__annotations__"} and any(
        name in vars(base) for base in owner.__mro__[1:]
    )


def _settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": _default_device(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    }


def _default_device() -> torch.device | None:
    # torch.get_default_device() makes a tensor on the device to learn its index, and so a
    # device context; the private holder is only read, and unknown reads as "none set".
    holder = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    context = getattr(holder, "device_context", None)
    device = getattr(context, "device", None)
    return device if isinstance(device, torch.device) else None


def _restore(name: str, value: Any) -> None:
    if name == "default dtype":
        torch.set_default_dtype(value)
    elif name == "default device":
        torch.set_default_device(value)
    elif name == "grad mode":
        torch.set_grad_enabled(value)
    else:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])


@contextlib.contextmanager
def torch_unchanged() -> Iterator[list[str]]:
    """Give a list that names, after the body, every change it made; all are undone however it ends."""
    changes: list[str] = []
    state = TorchState.take()
    try:
        yield changes
    finally:
        changes.extend(state.put_back())
