"""Choose one platform among candidates, and say why."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import attrs

from graphplat.errors import AmbiguousPlatformError, PlatformError
from graphplat.platform import Platform

PLATFORM_VARIABLE = "GRAPHPLAT_PLATFORM"
DISABLED_VARIABLE = "GRAPHPLAT_DISABLED_PLUGINS"
Names = Callable[[], Sequence[str]]
DETAILS = 'Run "graphplat platforms" for details'


class Outcome(enum.StrEnum):
    """What became of a candidate."""

    CHOSEN = "chosen"
    AVAILABLE = "available"
    """It works here, but another one was chosen."""
    UNAVAILABLE = "unavailable"
    """Its probe said why it cannot be used here."""
    LOAD_FAILED = "load_failed"
    REJECTED = "rejected"
    """It broke a rule: a name clash, or a change to torch."""
    DISABLED = "disabled"
    NOT_PROBED = "not_probed"
    """Another one was chosen by name."""

    def __str__(self) -> str:
        return self.value


@attrs.frozen
class Candidate:
    """One plugin's offer for a device type."""

    plugin: str
    distribution: str | None
    """``None``: registered in this process."""
    version: str | None
    in_tree: bool
    platform: str | None
    """The platform's name; ``None`` when the plugin never came to name one."""
    outcome: Outcome
    reason: str = ""
    error: BaseException | None = attrs.field(default=None, eq=False, repr=False)
    instance: Platform | None = attrs.field(default=None, eq=False, repr=False)
    failed: bool = False
    """Something is broken, as opposed to made for other hardware."""

    @property
    def label(self) -> str:
        """Platform, plugin, distribution and version, for messages."""
        source = f"{self.distribution} {self.version}" if self.distribution else "registered in this process"
        named = f"platform {self.platform!r} of " if self.platform else ""
        return f"{named}plugin {self.plugin} ({source})"


@attrs.frozen
class Resolution:
    """Which platform serves a device type, and why."""

    platform: Platform
    plugin: str
    because: str
    candidates: tuple[Candidate, ...]

    @property
    def broken(self) -> list[Candidate]:
        """Candidates that failed, and were passed over."""
        return [one for one in self.candidates if one.failed]


def choose(device_type: str, candidates: Sequence[Candidate], *, have: Names) -> Resolution:
    """An available out-of-tree platform, else the built-in of the type.

    Raises :class:`AmbiguousPlatformError` when two out-of-tree ones are available,
    and :class:`PlatformError` naming every reason when none is; *have* lists what else is available.
    """
    usable = [one for one in candidates if one.instance is not None]
    foreign = [one for one in usable if not one.in_tree]
    if len(foreign) > 1:
        raise ambiguous(f"platforms for {device_type!r}", foreign)
    if foreign:
        return _chosen(foreign[0], "it is available and out of tree", candidates)
    if len(usable) > 1:
        raise ambiguous(f"platforms for {device_type!r}", usable)
    if usable:
        return _chosen(usable[0], "it is the built-in one, and no out-of-tree one is available", candidates)
    raise nothing_usable(f"no platform for {device_type!r}", candidates, have())


def choose_named(
    device_type: str,
    name: str,
    by: str,
    candidates: Sequence[Candidate],
    *,
    have: Names,
) -> Resolution:
    """The candidate called *name*, which *by* asked for; it, or an error."""
    named = [one for one in candidates if one.platform == name]
    usable = [one for one in named if one.instance is not None]
    usable = [one for one in usable if not one.in_tree] or usable
    if len(usable) > 1:
        raise ambiguous(f"platforms named {name!r}", usable)
    if usable:
        return _chosen(usable[0], f"{by} names it", candidates)
    what = f"platform {name!r}, named by {by}, cannot be used for {device_type!r}"
    if not named:
        what = f"no platform named {name!r} for {device_type!r}, as {by} demands"
    raise nothing_usable(what, named or candidates, have())


def _chosen(winner: Candidate, because: str, candidates: Sequence[Candidate]) -> Resolution:
    assert winner.instance is not None  # noqa: S101 - only usable ones win
    marked = tuple(
        attrs.evolve(one, outcome=Outcome.CHOSEN, reason=because) if one is winner else one
        for one in candidates
    )
    return Resolution(winner.instance, winner.plugin, because, marked)


def ambiguous(what: str, candidates: Sequence[Candidate]) -> AmbiguousPlatformError:
    """The error of a tie, naming the candidates and the settings that break it."""
    names = sorted({one.platform for one in candidates if one.platform})
    hint = (
        f"Set {PLATFORM_VARIABLE} to one of {', '.join(names)}"
        if len(names) == len(candidates)
        else f"Name one of the plugins or distributions in {DISABLED_VARIABLE}"
    )
    if len(names) == len(candidates):
        hint += f", or disable a plugin with {DISABLED_VARIABLE}"
    listed = "; ".join(one.label for one in candidates)
    return AmbiguousPlatformError(f"several {what} are available: {listed}", hint=hint)


def nothing_usable(what: str, candidates: Sequence[Candidate], have: Sequence[str]) -> PlatformError:
    """The error of no platform, with each candidate's reason, chained to the first failure."""
    reasons = [one.reason for one in candidates if one.instance is None and one.reason]
    available = f"; have {', '.join(have)}" if have else ""
    error = PlatformError(". ".join([what + available, *reasons]), hint=DETAILS)
    causes = [one for one in candidates if one.error is not None]
    causes.sort(key=lambda one: (not one.failed, one.in_tree))
    if causes:
        error.__cause__ = causes[0].error
    return error
