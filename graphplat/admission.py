"""Admit each plugin whole, or not at all."""

from __future__ import annotations

import difflib
import importlib.metadata
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import pluggy

from graphplat import hookspecs
from graphplat.discovery import Entry, LoadFailure, LoadPhase, cause
from graphplat.errors import PluginError
from graphplat.hookspecs import PROJECT
from graphplat.platform import IN_TREE_DEVICE_TYPES, Platform
from graphplat.probes import PlatformSlot
from graphplat.torch_guard import also_changed, refusal, torch_unchanged


class HalfImportedError(PluginError):
    """The module that a plugin names is still being imported by the caller. Never recorded."""


@attrs.define(eq=False)
class Plugin:
    """An admitted plugin with a hook manager of its own, so that no other plugin answers for it."""

    name: str
    source: Any
    manager: pluggy.PluginManager
    entry: Entry | None
    platforms: list[PlatformSlot]
    disabled: bool = False

    @property
    def label(self) -> str:
        """Plugin, distribution and version, for messages."""
        return self.entry.label if self.entry else f"{self.name} (registered in this process)"

    @property
    def in_tree(self) -> bool:
        """Whether it ships with graphplat."""
        return self.entry is not None and self.entry.in_tree

    @property
    def hooks(self) -> list[str]:
        """The hooks it implements."""
        return sorted(caller.name for caller in self.manager.get_hookcallers(self.source) or ())


def admit(entry: Entry) -> Plugin | LoadFailure:
    """Import, register and validate one plugin.

    Any exception becomes a :class:`LoadFailure`, but for ``KeyboardInterrupt``
    and :class:`HalfImportedError`, which leave no trace. Changes that the plugin
    made to torch are undone, and refused; graphplat's own plugins, which make none,
    are not watched.
    """
    phase: LoadPhase = "import"
    guard: AbstractContextManager[list[str]] = nullcontext([]) if entry.in_tree else torch_unchanged()
    try:
        with guard as changes:
            assert entry.point is not None  # noqa: S101 - discovered entries have one
            source = _load(entry, entry.point)
            phase = "register"
            manager = register(source, entry.name)
            phase = "validate"
            slots = platforms_of(manager, entry)
    except (KeyboardInterrupt, HalfImportedError):
        raise
    except BaseException as error:  # noqa: BLE001 - recorded with its traceback, shown when asked for
        if changes:
            error.add_note(also_changed(changes))
        return LoadFailure.of(entry, phase, error)
    if changes:
        return LoadFailure.of(entry, "validate", refusal("it", changes), refused=True)
    return Plugin(entry.name, source, manager, entry, slots)


def _load(entry: Entry, point: importlib.metadata.EntryPoint) -> Any:
    try:
        return point.load()
    finally:
        # A module that this thread is still importing comes back half done; what it lacks
        # now says nothing about the plugin. Other threads' imports were waited for.
        parts = entry.value.partition(":")[0].strip().split(".")
        for depth in range(1, len(parts) + 1):
            spec = getattr(sys.modules.get(".".join(parts[:depth])), "__spec__", None)
            if getattr(spec, "_initializing", False):
                raise HalfImportedError(
                    f"plugin {entry.label} asks for a platform while it is being imported",
                    hint="Ask from a hook, or from a function called later",
                )


def admit_by_hand(source: Any, name: str, *, disabled: bool) -> Plugin:
    """Register and validate *source*; :class:`PluginError`, chained to the cause, if that fails."""
    try:
        with torch_unchanged() as changes:
            manager = register(source, name)
            slots = platforms_of(manager, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"plugin {name!r} cannot be registered: {cause(error)}") from error
    if changes:
        raise refusal(f"plugin {name!r}", changes)
    return Plugin(name, source, manager, None, slots, disabled)


def register(source: Any, name: str) -> pluggy.PluginManager:
    """A hook manager that holds *source* alone. Raises :class:`PluginError` if a hook is not right."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    specified = [hook for hook in vars(manager.hook) if not hook.startswith("_")]
    if source is None:
        raise PluginError("it loads to None", hint="Name a module, or an object with hooks")
    try:
        manager.register(source, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error), hint=_advice(manager, specified)) from error
    implemented = {caller.name for caller in manager.get_hookcallers(source) or ()}
    if forgotten := [
        hook for hook in specified if hook not in implemented and callable(getattr(source, hook, None))
    ]:
        raise PluginError(
            f"{', '.join(forgotten)} is not marked", hint="Decorate it with @graphplat.hookimpl"
        )
    if not implemented:
        raise PluginError("it implements no hook", hint="Decorate its hooks with @graphplat.hookimpl")
    return manager


def _advice(manager: pluggy.PluginManager, specified: list[str]) -> str:
    strays = [hook for hook in vars(manager.hook) if not hook.startswith("_") and hook not in specified]
    close = [match for hook in strays for match in difflib.get_close_matches(hook, specified, n=1)]
    return f"Did you mean {', '.join(close)}?" if close else f"The hooks are {', '.join(specified)}"


def platforms_of(manager: pluggy.PluginManager, entry: Entry | None) -> list[PlatformSlot]:
    """Ask the plugin for its platform classes and check each. No device is touched."""
    hook = manager.hook.provide_platforms
    answers = hook()
    if len(answers) != len(hook.get_hookimpls()):
        raise PluginError("provide_platforms() returned None", hint="Return a list of Platform classes")
    classes = [cls for answer in answers for cls in _classes(answer)]
    names = [cls.name for cls in classes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PluginError(f"provide_platforms() gives two platforms named {', '.join(twice)}")
    if entry is not None:
        for cls in classes:
            _check_claims(cls, entry)
    return [PlatformSlot(cls, guarded=entry is None or not entry.in_tree) for cls in classes]


def _classes(answer: Any) -> list[type[Platform]]:
    if isinstance(answer, (str, type)) or not isinstance(answer, Iterable):
        raise PluginError(
            f"provide_platforms() returned {answer!r}", hint="Return a list of Platform classes"
        )
    classes = list(answer)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, Platform)):
            raise PluginError(f"provide_platforms() gives {cls!r}, which is no subclass of Platform")
        if not all(isinstance(getattr(cls, field, None), str) for field in ("name", "device_type")):
            raise PluginError(
                f"provide_platforms() gives {cls.__qualname__}, an abstract class",
                hint="Give it a name and a device_type",
            )
    return classes


def _check_claims(cls: type[Platform], entry: Entry) -> None:
    if cls.device_type != entry.device_type:
        raise PluginError(
            f"platform {cls.name!r} is of device type {cls.device_type!r}, "
            f"but the entry point {entry.name!r} serves {entry.device_type!r}",
            hint=f"Name the entry point {cls.device_type}-VARIANT",
        )
    if entry.in_tree:
        return
    if cls.name in IN_TREE_DEVICE_TYPES:
        raise PluginError(f"platform name {cls.name!r} is reserved for graphplat", hint="Choose another")
    # Not constructed: the answer depends on the class, and construction belongs to the probe.
    if cls.is_out_of_tree(cls.__new__(cls)) is not True:
        raise PluginError(
            f"platform {cls.name!r} says that it ships with graphplat, but distribution "
            f"{entry.distribution} brings it",
            hint="is_out_of_tree() must return True",
        )
