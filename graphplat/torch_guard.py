"""Notice what a plugin changes in torch, and put it back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from operator import is_
from types import ModuleType
from typing import Any

import attrs
import torch
import torch.nn.modules.module as torch_modules

from graphplat.errors import PluginError

_TORCH_HOME = os.path.dirname(torch.__file__) + os.sep
_COMPILER_HOME = os.path.join(_TORCH_HOME, "_dynamo") + os.sep
_MISSING = object()

# Attributes


def _watched() -> list[tuple[str, Any]]:
    return _owners(len(vars(torch)))


@functools.lru_cache(maxsize=1)
def _owners(_size: int) -> list[tuple[str, Any]]:
    """Each module and class to watch, by its name. A device module that comes later makes torch larger."""
    modules = [("torch", torch), *_modules(torch, "torch")]
    modules += _modules(torch.nn, "torch.nn") + _modules(torch.distributed, "torch.distributed")
    found = {id(module): (label, module) for label, module in reversed(modules)}
    found[id(torch.Tensor)] = "torch.Tensor", torch.Tensor
    for label, module in modules:
        if module is not torch and (module is torch.nn or "Stream" in vars(module)):
            for name, value in list(vars(module).items()):
                if name[0] != "_" and _is(value, type) and _foreign(str(value.__module__)):
                    found.setdefault(id(value), (f"{label}.{name}", value))
    return list(found.values())


def _modules(package: Any, label: str) -> list[tuple[str, Any]]:
    return [
        (f"{label}.{name}", value)
        for name, value in list(vars(package).items())
        if _is(value, ModuleType) and name[0] != "_" and _foreign(value.__name__)
    ]


def _foreign(module: str) -> bool:
    return module.partition(".")[0] not in sys.stdlib_module_names


def _is(value: Any, kind: type) -> bool:
    # isinstance() asks the value for its class, and torch has values that then warn of being deprecated
    return issubclass(type(value), kind)


def _changed(before: dict[str, Any], owner: Any) -> list[tuple[str, Any]]:
    now = vars(owner)
    if (
        len(now) == len(before)
        and all(map(is_, before.values(), now.values()))
        and all(map(is_, before, now))
    ):
        return []
    found = [
        (name, old)
        for name, old in before.items()
        if now.get(name, _MISSING) is not old
        and not _is_own_affair(owner, name, old, now.get(name, _MISSING))
    ]
    if isinstance(owner, type):
        found += [(name, _MISSING) for name in list(now) if name not in before and _hides(owner, name)]
    return found


def _is_own_affair(owner: Any, name: str, old: Any, new: Any) -> bool:
    """Whether torch itself may have made this change."""
    private = name.startswith("_") and not name.endswith("__")
    inner = owner not in (torch, torch.Tensor)
    if (private or inner) and _is_data(old):
        return True  # a cache or a flag: device counts, initialization state, a context's stream
    if name == "Storage":
        return True  # an alias that follows the default dtype
    if not inspect.isfunction(new):
        return False
    # the compiler wraps functions when it is imported, and replaces methods when first used
    origin = new.__code__.co_filename
    wrapped = origin.startswith(_TORCH_HOME) and inspect.unwrap(new) is inspect.unwrap(old)
    return wrapped or origin.startswith(_COMPILER_HOME)


def _hides(owner: type, name: str) -> bool:
    # Python itself writes these into a class, the last when an instance is copied
    if name in {"__doc__", "__annotations__", "__annotations_cache__", "__annotate_func__", "__slotnames__"}:
        return False
    return any(name in vars(base) and not _is_data(vars(base)[name]) for base in owner.__mro__[1:])


def _is_data(value: Any) -> bool:
    return not (callable(value) or _is(value, ModuleType) or hasattr(type(value), "__get__"))


# Settings


@attrs.frozen
class _Setting:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    of_thread: bool = False
    """Whether each thread has its own, which a new one begins with the default of."""


@functools.cache
def _settings() -> list[_Setting]:
    return list(_every_setting())


def _every_setting() -> Iterator[_Setting]:
    yield _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting("default device", _default_device, torch.set_default_device, of_thread=True)
    yield _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, of_thread=True)
    yield _Setting("deterministic algorithms", _determinism, _set_determinism)
    yield _Setting("number of threads", torch.get_num_threads, torch.set_num_threads, of_thread=True)
    yield _Setting("autocast", _autocast, _set_autocast, of_thread=True)
    yield _Setting("global module hooks", _module_hooks, _set_module_hooks)
    yield _Setting(
        "float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    )
    # after the matmul precision, which torch keeps in some of these too
    for label, owner in [("torch.backends", torch.backends), *_modules(torch.backends, "torch.backends")]:
        for part in ("", "matmul", "conv", "rnn"):
            holder = getattr(owner, part, None) if part else owner
            for flag in ("fp32_precision", "deterministic", "benchmark", "enabled"):
                if holder is not None and hasattr(holder, flag):
                    yield _flag(holder, flag, ".".join(filter(None, (label, part, flag))))


def _flag(holder: Any, flag: str, label: str) -> _Setting:
    return _Setting(label, lambda: getattr(holder, flag), lambda value: setattr(holder, flag, value))


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except RuntimeError:
        # torch refuses to give a precision in the old terms once it was set in the new ones
        return _MISSING


def _default_device() -> torch.device | None:
    # torch.get_default_device() makes a tensor on the device to learn its index, and so a
    # device context; the private holder is only read, and unknown reads as "none set".
    holder = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    context = getattr(holder, "device_context", None)
    device = getattr(context, "device", None)
    return device if isinstance(device, torch.device) else None


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _autocast_kinds() -> set[str]:
    accelerator = torch.accelerator.current_accelerator()
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}


def _autocast() -> set[str]:
    return {kind for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)}


def _set_autocast(value: set[str]) -> None:
    for kind in _autocast_kinds():
        torch.set_autocast_enabled(kind, kind in value)


def _module_hooks() -> dict[str, dict[Any, Any]]:
    # torch gives handles to add and remove such hooks, and no list; private names that a
    # release lacks are left alone.
    return {
        name: dict(value)
        for name, value in vars(torch_modules).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }


def _set_module_hooks(value: dict[str, dict[Any, Any]]) -> None:
    for name, hooks in value.items():
        holder: dict[Any, Any] = getattr(torch_modules, name)
        holder.clear()
        holder.update(hooks)


# Both


@attrs.frozen(eq=False)
class TorchState:
    """Attributes and settings of torch at one moment.

    Compared by identity are the attributes of torch, of the public modules in torch (the device
    modules of all vendors among them), in ``torch.nn`` and in ``torch.distributed``, of
    ``torch.Tensor``, and of the public classes of ``torch.nn`` and the device modules. New ones are
    nobody's loss, unless they hide an inherited one. Settings are those of the process and of the
    calling thread.

    Out of sight: kernels registered with the dispatcher, and private modules. What another thread
    changes meanwhile cannot be told apart.
    """

    attributes: list[tuple[str, Any, dict[str, Any]]]
    settings: list[tuple[_Setting, Any]]

    @classmethod
    def take(cls) -> TorchState:
        """Record the state of now. Touches no device. Takes some 0.6 ms, as :meth:`put_back` does."""
        attributes = [(label, owner, dict(vars(owner))) for label, owner in _watched()]
        return cls(attributes, [(setting, _read(setting)) for setting in _settings()])

    def put_back(self, *, of_thread: bool = True) -> list[str]:
        """Undo every change since :meth:`take`; returns their names, sorted.

        ``of_thread=False`` leaves out settings that each thread has its own of.
        """
        changes: list[str] = []
        for label, owner, before in self.attributes:
            for name, old in _changed(before, owner):
                if old is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
                changes.append(f"{label}.{name}")
        settings = [one for one in self.settings if of_thread or not one[0].of_thread]
        changes += [setting.name for setting, before in settings if _read(setting) != before]
        for setting, before in settings:  # read again: one precision follows from another
            if before is not _MISSING and _read(setting) != before:
                setting.write(before)
        return sorted(changes)


@contextlib.contextmanager
def torch_unchanged() -> Iterator[list[str]]:
    """Give a list that names, after the body, every change it made; all are undone however it ends."""
    changes: list[str] = []
    state = TorchState.take()
    try:
        yield changes
    finally:
        changes.extend(state.put_back())


def refusal(what: str, changes: list[str], *, platform: str | None = None, phase: Any = None) -> PluginError:
    """The error of *what*, a plugin or a hook of it, that made *changes*."""
    return PluginError(
        f"{what} changes torch for the whole process; undone: {', '.join(changes)}",
        platform=platform,
        phase=phase,
        hint="A plugin may add to torch, but not replace what is there. If it imports the device's own "
        "package, import that one before graphplat looks for platforms",
    )


def also_changed(changes: list[str]) -> str:
    """A note for the error of a plugin that failed, and made *changes* before."""
    return f"It also changed torch; undone: {', '.join(changes)}"
