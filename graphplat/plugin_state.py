"""The plugins of one process: loaded on demand, each once, under a lock."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import attrs

from graphplat.admission import Plugin, admit, admit_by_hand
from graphplat.discovery import Discovery, Entry, LoadFailure, cause, discover
from graphplat.errors import InputError, PluginError
from graphplat.platform import IN_TREE_DEVICE_TYPES, Platform
from graphplat.probes import PlatformSlot, probed_here
from graphplat.resolution import DISABLED_VARIABLE, Candidate, Outcome

_PATIENCE = 900.0
"""Seconds to wait for another thread that loads plugins. Longer than imports and probes take:
only a plugin whose import waits for a thread that waits for the registry gets here."""


def disabled_names() -> frozenset[str]:
    """Plugins and distributions that the operator has switched off."""
    names = os.environ.get(DISABLED_VARIABLE, "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


@attrs.define(eq=False)
class PluginState:
    """What one process knows about its plugins."""

    pid: int = attrs.field(factory=os.getpid)
    by_hand: dict[str, Plugin] = attrs.field(factory=dict)
    warned: set[str] = attrs.field(factory=set)
    _lock: Any = attrs.field(factory=threading.RLock)
    _loading: str | None = None
    _discovery: Discovery | None = None
    _results: dict[Entry, Plugin | LoadFailure] = attrs.field(factory=dict)

    def inherited(self) -> PluginState:
        """The state of a forked child: plugins registered by hand stay, nothing is loaded or probed."""
        kept = {
            name: attrs.evolve(plugin, platforms=[PlatformSlot(slot.cls) for slot in plugin.platforms])
            for name, plugin in self.by_hand.items()
        }
        return PluginState(by_hand=kept)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the lock. Raises :class:`PluginError` if a plugin is asking while it is being loaded."""
        hint = "Ask from a hook, or from a function called later"
        if name := probed_here():
            raise PluginError(f"probe() of platform {name!r} asks for a platform", hint=hint)
        if not self._lock.acquire(timeout=_PATIENCE):
            raise PluginError(f"waited {_PATIENCE:g} s for another thread that loads plugin {self._loading}")
        try:
            if self._loading is not None:
                raise PluginError(
                    f"plugin {self._loading} asks for a platform while it is being loaded", hint=hint
                )
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _load_of(self, label: str) -> Iterator[None]:
        self._loading = label
        try:
            yield
        finally:
            self._loading = None

    @property
    def discovery(self) -> Discovery:
        """What is installed."""
        if self._discovery is None:
            self._discovery = discover(disabled_names())
        return self._discovery

    def load(self, entry: Entry) -> Plugin | LoadFailure:
        """Admit *entry*, once. An interrupted load leaves no trace."""
        if entry not in self._results:
            with self._load_of(entry.label):
                self._results[entry] = admit(entry)
        return self._results[entry]

    def register(self, source: Any, name: str) -> None:
        """Admit *source* by hand; :class:`PluginError` if it is not right or the name is taken."""
        if not name:
            raise InputError("a plugin needs a name")
        installed = self.discovery.entries + self.discovery.disabled
        taken = [entry.label for entry in installed if entry.name == name]
        taken += [plugin.label for plugin in self.by_hand.values() if plugin.name == name]
        if taken:
            raise PluginError(f"plugin name {name!r} is taken by {taken[0]}", hint="Choose another name")
        if again := [plugin.name for plugin in self.by_hand.values() if plugin.source is source]:
            raise PluginError(f"plugin {name!r} is already registered, as {again[0]!r}")
        with self._load_of(name):
            plugin = admit_by_hand(source, name, disabled=name in disabled_names())
        self.by_hand[name] = plugin

    def unregister(self, name: str) -> Any:
        """Forget a plugin registered by hand; returns it."""
        if name not in self.by_hand:
            have = ", ".join(sorted(self.by_hand)) or "none"
            raise PluginError(f"no plugin {name!r} was registered in this process; have {have}")
        return self.by_hand.pop(name).source

    def device_types(self) -> list[str]:
        """Every device type that an installed or registered plugin serves, sorted."""
        found = {entry.device_type for entry in self.discovery.entries}
        found |= {slot.cls.device_type for plugin in self.by_hand.values() for slot in plugin.platforms}
        return sorted(found)

    def loaded(self, device_type: str) -> list[Plugin]:
        """Load the plugins of *device_type*; those that are there, and all registered by hand."""
        results = [self.load(entry) for entry in self.discovery.entries if entry.device_type == device_type]
        found = [one for one in results if isinstance(one, Plugin)]
        found += [plugin for plugin in self.by_hand.values() if not plugin.disabled]
        return found

    def owner(self, platform: Platform) -> Plugin | None:
        """The plugin that brought *platform*, if one did."""
        cls = type(platform)
        plugins = self.loaded(platform.device_type)
        offers = [(plugin, slot) for plugin in plugins for slot in plugin.platforms]
        exact = [plugin for plugin, slot in offers if slot.instance is platform]
        same = [plugin for plugin, slot in offers if slot.cls is cls]
        # an instance from before a fork, of a class that the plugin makes anew each time
        alike = [plugin for plugin, slot in offers if _identity(slot.cls) == _identity(cls)]
        return next(iter(exact or same or alike), None)

    def candidates(self, device_type: str, only: str | None = None) -> list[Candidate]:
        """Load and probe what serves *device_type*; with *only*, probe platforms of that name alone."""
        found = [
            _without_platform(entry, Outcome.DISABLED, _off(entry.label))
            for entry in self.discovery.disabled
            if entry.device_type == device_type
        ]
        found += [_failed(entry, why) for entry, why in self.refused(device_type)]
        for entry in self.discovery.entries:
            if entry.device_type != device_type:
                continue
            result = self.load(entry)
            if isinstance(result, LoadFailure):
                found.append(_failed(entry, result))
            else:
                found += _offers(result, device_type, only)
        for plugin in self.by_hand.values():
            found += _offers(plugin, device_type, only)
        return sorted(found, key=lambda one: (one.plugin, one.distribution or "", one.platform or ""))

    def refused(self, device_type: str) -> list[tuple[Entry, LoadFailure]]:
        """What discovery turned down; unreadable metadata may be of any type."""
        return [
            (entry, why)
            for entry, why in self.discovery.refused
            if entry.device_type == device_type or not entry.value
        ]

    def available_names(self) -> list[str]:
        """Platforms that work here, among the built-in ones and those already loaded."""
        for entry in self.discovery.entries:
            if entry.in_tree and entry.name in IN_TREE_DEVICE_TYPES:
                self.load(entry)
        loaded = [one for one in self._results.values() if isinstance(one, Plugin)]
        slots = [slot for plugin in (*loaded, *self.by_hand.values()) for slot in plugin.platforms]
        for slot in slots:
            slot.probe()
        return sorted({slot.cls.name for slot in slots if slot.instance is not None})


def _off(label: str) -> str:
    return f"Plugin {label} is disabled by {DISABLED_VARIABLE}"


def _identity(cls: type[Platform]) -> tuple[str, str, str]:
    return cls.__module__, cls.__qualname__, cls.name


def _without_platform(
    entry: Entry, outcome: Outcome, reason: str, error: BaseException | None = None
) -> Candidate:
    return Candidate(
        plugin=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        in_tree=entry.in_tree,
        platform=None,
        outcome=outcome,
        reason=reason,
        error=error,
        failed=error is not None,
    )


def _failed(entry: Entry, why: LoadFailure) -> Candidate:
    outcome = Outcome.REJECTED if why.refused else Outcome.LOAD_FAILED
    return _without_platform(entry, outcome, why.summary, why.error)


def _offers(plugin: Plugin, device_type: str, only: str | None) -> list[Candidate]:
    slots = [slot for slot in plugin.platforms if slot.cls.device_type == device_type]
    return [_offer(plugin, slot, only) for slot in slots]


def _offer(plugin: Plugin, slot: PlatformSlot, only: str | None) -> Candidate:
    name = slot.cls.name
    if plugin.disabled:
        outcome, reason = Outcome.DISABLED, _off(plugin.label)
    elif only not in (None, name):
        outcome, reason = Outcome.NOT_PROBED, ""
    else:
        slot.probe()
        outcome, reason = Outcome.AVAILABLE, ""
        if slot.error is not None:
            outcome = Outcome.UNAVAILABLE
            reason = f"Platform {name!r} of plugin {plugin.label} is unavailable: {cause(slot.error)}"
    return Candidate(
        plugin=plugin.name,
        distribution=plugin.entry.distribution if plugin.entry else None,
        version=plugin.entry.version if plugin.entry else None,
        in_tree=plugin.in_tree,
        platform=name,
        outcome=outcome,
        reason=reason,
        error=slot.error,
        instance=slot.instance if outcome is Outcome.AVAILABLE else None,
        failed=slot.broken,
    )
