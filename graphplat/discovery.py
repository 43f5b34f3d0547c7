"""What is installed: plugins known from metadata alone, and why some are turned down."""

from __future__ import annotations

import importlib.metadata
import re
import traceback
from typing import Literal

import attrs

from graphplat.errors import PluginError
from graphplat.hookspecs import PROJECT
from graphplat.platform import IN_TREE_DEVICE_TYPES

LoadPhase = Literal["discover", "import", "register", "validate"]
"""How far a plugin came before it failed."""


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
