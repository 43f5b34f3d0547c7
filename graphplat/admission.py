"""Find the installed plugins, and admit each one whole or not at all."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Literal

import attrs
import pluggy

from graphplat import hookspecs
from graphplat.errors import PluginError
from graphplat.hookspecs import PROJECT
from graphplat.platform import IN_TREE_DEVICE_TYPES, Platform
from graphplat.probes import PlatformSlot
from graphplat.torch_guard import torch_unchanged

LoadPhase = Literal["discover", "import", "register", "validate", "probe"]


class HalfImportedError(PluginError):
    """The module that a plugin names is still being imported by the caller. Never recorded."""


@attrs.frozen
class Entry:
    """One installed plugin, known from metadata alone."""

    name: str
    distribution: str
    version: str
    value: str
    point: importlib.metadata.EntryPoint | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def device_type(self) -> str:
        """The device type it serves: its name up to the first hyphen."""
        return self.name.partition("-")[0]

    @property
    def in_tree(self) -> bool:
        """Whether it ships with graphplat."""
        return normalized(self.distribution) == PROJECT

    @property
    def label(self) -> str:
        """Plugin, distribution and version, for messages."""
        return f"{self.name} ({self.distribution} {self.version})"


@attrs.frozen(eq=False)
class LoadFailure:
    """Why a plugin is not there: the phase, the exception and its traceback as text.

    ``refused`` marks those turned down by a rule of graphplat, not by an error of their own.
    """

    plugin: str
    distribution: str
    version: str
    phase: LoadPhase
    error: BaseException
    traceback: str
    refused: bool = False

    @classmethod
    def of(
        cls, entry: Entry, phase: LoadPhase, error: BaseException, *, refused: bool = False
    ) -> LoadFailure:
        """Record *error*."""
        text = "".join(traceback.format_exception(error))
        return cls(entry.name, entry.distribution, entry.version, phase, error, text, refused)

    @property
    def summary(self) -> str:
        """One sentence."""
        where = "" if self.phase == "import" else f" ({self.phase})"
        verb = "was refused" if self.refused else f"failed to load{where}"
        return f"Plugin {self.plugin} ({self.distribution} {self.version}) {verb}: {cause(self.error)}"


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


def normalized(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def cause(error: BaseException | None) -> str:
    """Exception type and text, on one line."""
    if error is None:
        return "unknown"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@attrs.frozen(eq=False)
class Discovery:
    """What is installed, by entry-point name; nothing of it is imported yet."""

    entries: list[Entry]
    disabled: list[Entry]
    refused: list[tuple[Entry, LoadFailure]]
    """Unreadable metadata, one name in two distributions, a name reserved for graphplat's own."""


def discover(disabled: frozenset[str] = frozenset()) -> Discovery:
    """Read the metadata of every installed distribution; imports nothing.

    *disabled* holds names of plugins or distributions to leave out. The answer
    is sorted, so that it does not depend on the order of installation.
    """
    found: list[Entry] = []
    refused: list[tuple[Entry, LoadFailure]] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name, version = _identity(distribution)
        if normalized(name) in seen:
            continue  # the first one on sys.path is the one that imports
        seen.add(normalized(name))
        try:
            found += _entries(distribution, name, version)
        except Exception as error:  # noqa: BLE001 - one broken distribution must not hide the others
            entry = Entry("?", name, version, "")
            refused.append((entry, LoadFailure.of(entry, "discover", error)))
    found.sort(key=lambda entry: (entry.name, normalized(entry.distribution), entry.value))
    off = [entry for entry in found if disabled & {entry.name, entry.distribution}]
    entries = []
    enabled = [entry for entry in found if entry not in off]
    for entry in enabled:
        if clash := _clash(entry, enabled):
            refused.append((entry, LoadFailure.of(entry, "discover", clash, refused=True)))
        else:
            entries.append(entry)
    return Discovery(entries, off, refused)


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        return str(distribution.metadata["Name"]), str(distribution.version)
    except Exception:  # noqa: BLE001 - a distribution without metadata still has a folder
        return str(getattr(distribution, "_path", "unknown")), "?"


def _entries(distribution: importlib.metadata.Distribution, name: str, version: str) -> list[Entry]:
    text = distribution.read_text("entry_points.txt")
    if not text or PROJECT not in text:
        return []
    points = distribution.entry_points.select(group=PROJECT)
    return list(dict.fromkeys(Entry(point.name, name, version, point.value, point) for point in points))


def _clash(entry: Entry, found: list[Entry]) -> PluginError | None:
    if entry.in_tree:
        return None
    if entry.name in IN_TREE_DEVICE_TYPES:
        return PluginError(
            f"plugin name {entry.name!r} of distribution {entry.distribution} {entry.version} "
            f"is reserved for distribution {PROJECT}",
            hint=f"Name the entry point {entry.name}-VARIANT",
        )
    others = [other for other in found if other.name == entry.name and other is not entry]
    if not others:
        return None
    owners = sorted({f"{one.distribution} {one.version}" for one in (entry, *others)})
    return PluginError(
        f"plugin name {entry.name!r} is claimed more than once: {', '.join(owners)} ({entry.value})",
        hint="Uninstall one, or name it in GRAPHPLAT_DISABLED_PLUGINS by its distribution",
    )


def admit(entry: Entry) -> Plugin | LoadFailure:
    """Import, register and validate one plugin.

    Any exception becomes a :class:`LoadFailure`, but for ``KeyboardInterrupt``
    and :class:`HalfImportedError`, which leave no trace. Changes that the plugin
    made to torch are undone, and refused.
    """
    phase: LoadPhase = "import"
    try:
        with torch_unchanged() as changes:
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
            error.add_note(f"It also changed torch; undone: {', '.join(changes)}")
        return LoadFailure.of(entry, phase, error)
    if changes:
        refusal = PluginError(
            f"it changes torch for the whole process; undone: {', '.join(changes)}",
            hint="A plugin may add to torch, but not replace what is there",
        )
        return LoadFailure.of(entry, "validate", refusal, refused=True)
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
        raise PluginError(f"plugin {name!r} changes torch for the whole process: {', '.join(changes)}")
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
    return [PlatformSlot(cls) for cls in classes]


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
