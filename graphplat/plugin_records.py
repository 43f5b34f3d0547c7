"""What ``graphplat platforms`` shows: plain records that encode to JSON."""

from __future__ import annotations

import traceback

import msgspec

from graphplat.admission import Plugin
from graphplat.discovery import Entry, LoadFailure, cause
from graphplat.platform import PlatformCapabilities
from graphplat.plugin_state import PluginState
from graphplat.probes import PlatformSlot
from graphplat.resolution import DISABLED_VARIABLE, Outcome


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a plugin or a platform is not there."""

    phase: str
    """``discover``, ``import``, ``register``, ``validate`` or ``probe``."""
    error: str
    """Exception type and text."""
    traceback: str


class PlatformRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One platform of a plugin."""

    name: str
    device_type: str
    outcome: Outcome
    capabilities: PlatformCapabilities | None = None
    """``None`` when they depend on a device that is not there."""
    failure: FailureRecord | None = None


class PluginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin, installed or registered in this process."""

    name: str
    device_type: str | None
    """``None``: registered in this process, for any type."""
    distribution: str | None
    version: str | None
    in_tree: bool
    outcome: Outcome
    """``available`` if it is loaded and any platform of it works, or it brings none."""
    reason: str = ""
    hooks: list[str] = []
    platforms: list[PlatformRecord] = []
    failure: FailureRecord | None = None


def records(state: PluginState) -> list[PluginRecord]:
    """Load and probe everything; one record per plugin, by name."""
    found = [
        _absent(entry, Outcome.DISABLED, f"disabled by {DISABLED_VARIABLE}")
        for entry in state.discovery.disabled
    ]
    found += [_failed(entry, why) for entry, why in state.discovery.refused]
    for entry in state.discovery.entries:
        result = state.load(entry)
        found.append(_failed(entry, result) if isinstance(result, LoadFailure) else _present(result))
    found += [_present(plugin) for plugin in state.by_hand.values()]
    return sorted(found, key=lambda one: (one.name, one.distribution or ""))


def _absent(
    entry: Entry, outcome: Outcome, reason: str, failure: FailureRecord | None = None
) -> PluginRecord:
    return PluginRecord(
        name=entry.name,
        device_type=entry.device_type,
        distribution=entry.distribution,
        version=entry.version,
        in_tree=entry.in_tree,
        outcome=outcome,
        reason=reason,
        failure=failure,
    )


def _failed(entry: Entry, why: LoadFailure) -> PluginRecord:
    outcome = Outcome.REJECTED if why.refused else Outcome.LOAD_FAILED
    failure = FailureRecord(phase=why.phase, error=cause(why.error), traceback=why.traceback)
    return _absent(entry, outcome, why.summary, failure)


def _present(plugin: Plugin) -> PluginRecord:
    entry = plugin.entry
    platforms = [] if plugin.disabled else [_platform(slot) for slot in plugin.platforms]
    outcome = Outcome.AVAILABLE
    if plugin.disabled:
        outcome = Outcome.DISABLED
    elif platforms and all(one.outcome is Outcome.UNAVAILABLE for one in platforms):
        outcome = Outcome.UNAVAILABLE
    return PluginRecord(
        name=plugin.name,
        device_type=entry.device_type if entry else None,
        distribution=entry.distribution if entry else None,
        version=entry.version if entry else None,
        in_tree=plugin.in_tree,
        outcome=outcome,
        reason="; ".join(one.failure.error for one in platforms if one.failure),
        hooks=plugin.hooks,
        platforms=platforms,
    )


def _platform(slot: PlatformSlot) -> PlatformRecord:
    slot.probe()
    failure = None
    if slot.error is not None:
        text = "".join(traceback.format_exception(slot.error))
        failure = FailureRecord(phase="probe", error=cause(slot.error), traceback=text)
    # on an instance a property gives its value; on a class it may only give itself
    claimed: object = (slot.instance or slot.cls).capabilities
    return PlatformRecord(
        name=slot.cls.name,
        device_type=slot.cls.device_type,
        outcome=Outcome.UNAVAILABLE if failure else Outcome.AVAILABLE,
        capabilities=claimed if isinstance(claimed, PlatformCapabilities) else None,
        failure=failure,
    )
