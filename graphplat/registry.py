"""Which platform serves a device, and which plugins are asked.

Plugins are entry points of the group ``graphplat``, named after the device type
they serve (``TYPE`` or ``TYPE-VARIANT``); only those of the type that is asked
for are imported. State belongs to one process: it is loaded on first use, again
after a fork, and guarded by a lock. Nothing here creates a device context.

Environment: ``GRAPHPLAT_PLATFORM`` (the choice by name), ``GRAPHPLAT_DISABLED_PLUGINS``
(names of plugins or distributions, comma-separated), ``GRAPHPLAT_STRICT_PLUGINS=1``
(a plugin that fails to load is an error), ``GRAPHPLAT_PROBE_TIMEOUT`` (seconds, 30).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from graphplat.discovery import LoadFailure
from graphplat.errors import InputError, PlatformError, PluginError
from graphplat.platform import Platform
from graphplat.plugin_hooks import GraphplatWarning, PlatformHooks, warn
from graphplat.plugin_records import FailureRecord, PlatformRecord, PluginRecord, records
from graphplat.plugin_state import PluginState
from graphplat.resolution import (
    DETAILS,
    PLATFORM_VARIABLE,
    Candidate,
    Outcome,
    Resolution,
    ambiguous,
    choose,
    choose_named,
    nothing_usable,
)

__all__ = [
    "Candidate",
    "FailureRecord",
    "GraphplatWarning",
    "LoadFailure",
    "Outcome",
    "PlatformHooks",
    "PlatformRecord",
    "PluginRecord",
    "Resolution",
    "current_platform",
    "hooks_for",
    "list_plugins",
    "platform_for",
    "register_plugin",
    "reset_registry",
    "resolve",
    "resolve_current",
    "unregister_plugin",
]

STRICT_VARIABLE = "GRAPHPLAT_STRICT_PLUGINS"
_FALLBACK = "cpu"
"""The platform of a process without an accelerator; the only type known by name here."""

_held = [PluginState()]


def _state() -> PluginState:
    state = _held[0]
    if state.pid != os.getpid():  # forked without Python's knowledge
        state = _held[0] = state.inherited()
    return state


def _after_fork() -> None:
    _held[0] = _held[0].inherited()


os.register_at_fork(after_in_child=_after_fork)


def platform_for(device: str | torch.device, *, name: str | None = None) -> Platform:
    """The platform that serves *device*; an index plays no part.

    *name*, or else the variable ``GRAPHPLAT_PLATFORM``, is an explicit choice:
    that platform or an error. Otherwise an available out-of-tree platform
    precedes the built-in one. Never falls back to another device type.

    Raises :class:`PlatformError` with every reason when none is available,
    :class:`AmbiguousPlatformError` when two out-of-tree ones are, and
    :class:`PluginError` when a plugin asks while it is being loaded. Warns once
    about each plugin of the type that failed to load. In code traced by
    ``torch.compile`` the answer is a constant.
    """
    if torch.compiler.is_compiling():
        key = f"{device}_{name}".replace(":", "_")
        _settle(key, device, name)
        return getattr(_Settled, key)  # type: ignore[no-any-return]
    return resolve(device, name=name).platform


def current_platform() -> Platform:
    """The platform of this machine.

    The one that ``GRAPHPLAT_PLATFORM`` names; else that of the only device type
    with an available accelerator; else cpu, with a warning about each plugin
    that failed to load. Loads the plugins of every type. Raises
    :class:`AmbiguousPlatformError` when several types are available.
    """
    if torch.compiler.is_compiling():
        _settle("current", None, None)
        return getattr(_Settled, "current")  # type: ignore[no-any-return]  # noqa: B009
    return resolve_current().platform


class _Settled:
    """Platforms that traced code has asked for: an attribute is what a tracer takes as constant."""


def _settle(key: str, device: str | torch.device | None, name: str | None) -> bool:
    result = resolve_current() if device is None else resolve(device, name=name)
    setattr(_Settled, key, result.platform)
    return True


# Run while tracing instead of being traced. This is the mark that torch.compiler's
# assume_constant_result sets; calling that imports the compiler, which takes seconds. A torch
# that does not know the mark breaks the graph here, and gives the right answer all the same.
setattr(_settle, "_dynamo_marked_constant", True)  # noqa: B010 - unknown to the type checker


def resolve(device_type: str | torch.device, *, name: str | None = None) -> Resolution:
    """As :func:`platform_for`, with the reason and what became of every candidate."""
    wanted, by = _choice(name)
    state, asked = _state(), _device_type(device_type)
    with state.entered():
        result = _resolve(state, asked, wanted, by)
    _report(state, result.broken, f"{asked!r} is served by platform {result.platform.name!r}")
    return result


def resolve_current() -> Resolution:
    """As :func:`current_platform`, with the reason and what became of every candidate."""
    wanted, by = _choice(None)
    state = _state()
    with state.entered():
        everything = {kind: state.candidates(kind, wanted) for kind in state.device_types()}
        _check_strict([one for found in everything.values() for one in found])
        kind = _type_named(everything, wanted, by) if wanted else _accelerator(everything)
        result = _resolve(state, kind or _FALLBACK, wanted, by)
    broken = {one for found in everything.values() for one in found if one.failed}
    _report(state, sorted(broken, key=lambda one: one.label), f"platform {result.platform.name!r} is used")
    return result


def list_plugins() -> list[PluginRecord]:
    """Every plugin, installed or registered: what it brings, whether it works here, and why not.

    Loads all and runs each probe once; creates no device context and raises for
    no plugin, so that it can explain all of them.
    """
    state = _state()
    with state.entered():
        return records(state)


def hooks_for(platform: Platform) -> PlatformHooks:
    """The hooks as *platform* sees them."""
    state = _state()
    with state.entered():
        owner = state.owner(platform)

    def others() -> Any:
        now = _state()
        with now.entered():
            return now.loaded(platform.device_type)

    return PlatformHooks(owner, others)


def register_plugin(plugin: Any, name: str) -> None:
    """Add *plugin*, a module or object with hooks, to this process and its forked children.

    What it brings counts as out of tree, for any device type. Raises
    :class:`PluginError`, with nothing registered, if it or its *name* is not right.
    """
    state = _state()
    with state.entered():
        state.register(plugin, name)


def unregister_plugin(name: str) -> Any:
    """Forget a plugin added with :func:`register_plugin`; returns it."""
    state = _state()
    with state.entered():
        return state.unregister(name)


def reset_registry() -> None:
    """Forget everything, as in a new process. For tests."""
    _held[0] = PluginState()


def _device_type(device: str | torch.device) -> str:
    if isinstance(device, torch.device):
        return device.type
    given: object = device
    kind, colon, index = given.partition(":") if isinstance(given, str) else ("", "", "")
    if not kind.isidentifier() or (colon and not index.isdecimal()):
        raise InputError(f"{device!r} is no device", hint='Give a torch.device or a string such as "cpu"')
    return kind


def _choice(name: str | None) -> tuple[str | None, str]:
    if name is not None:
        return name, "the argument name"
    return os.environ.get(PLATFORM_VARIABLE, "").strip() or None, PLATFORM_VARIABLE


def _resolve(state: PluginState, asked: str, wanted: str | None, by: str) -> Resolution:
    candidates = state.candidates(asked, wanted)
    _check_strict(candidates)
    try:
        if wanted is None:
            return choose(asked, candidates, have=state.available_names)
        if not any(one.platform == wanted for one in candidates):
            _check_other_types(state, asked, wanted, by)
        return choose_named(asked, wanted, by, candidates, have=state.available_names)
    except PlatformError as error:
        if not any(entry.in_tree for entry in state.discovery.entries):
            error.add_note("Distribution graphplat is not installed here, so its own platforms are unknown")
        raise


def _check_other_types(state: PluginState, asked: str, wanted: str, by: str) -> None:
    kinds = sorted(set(state.device_types()) - {asked}, key=lambda kind: (kind != wanted, kind))
    for kind in kinds:
        if any(one.platform == wanted for one in state.candidates(kind, wanted)):
            raise PlatformError(
                f"a platform for {asked!r} was asked for, but {by} names {wanted!r}, a platform for {kind!r}",
                hint=f"Unset {PLATFORM_VARIABLE}, or ask for {kind!r}",
            )


def _type_named(everything: dict[str, list[Candidate]], wanted: str, by: str) -> str:
    named = [(kind, one) for kind, found in everything.items() for one in found if one.platform == wanted]
    kinds = sorted({kind for kind, _ in named})
    if len(kinds) > 1:
        raise ambiguous(f"platforms named {wanted!r}", [one for _, one in named])
    if not kinds:
        failed = [one for found in everything.values() for one in found if one.failed]
        raise nothing_usable(f"no platform named {wanted!r}, as {by} demands", failed, _names(everything))
    return kinds[0]


def _names(everything: dict[str, list[Candidate]]) -> list[str]:
    return sorted({one.platform for found in everything.values() for one in found if one.platform})


def _accelerator(everything: dict[str, list[Candidate]]) -> str | None:
    usable = {
        kind: [one for one in found if one.instance is not None]
        for kind, found in everything.items()
        if kind != _FALLBACK
    }
    kinds = [kind for kind, found in usable.items() if found]
    if len(kinds) > 1:
        raise ambiguous("accelerators", [one for kind in kinds for one in usable[kind]])
    return kinds[0] if kinds else None


def _check_strict(candidates: list[Candidate]) -> None:
    if os.environ.get(STRICT_VARIABLE, "").strip().lower() in {"", "0", "false", "no", "off"}:
        return
    failed = [one for one in candidates if one.failed]
    if failed:
        reasons = ". ".join(one.reason for one in failed)
        raise PluginError(f"{STRICT_VARIABLE} is set. {reasons}", hint=DETAILS) from failed[0].error


def _report(state: PluginState, broken: list[Candidate], picked: str) -> None:
    for one in broken:
        if one.reason not in state.warned:
            state.warned.add(one.reason)
            warn(f"{one.reason}; {picked}. {DETAILS}")
