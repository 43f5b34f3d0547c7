"""``graphplat platforms``: what is installed, what works here, and why not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from graphplat.errors import PlatformError

if TYPE_CHECKING:
    from graphplat.platform import PlatformCapabilities
    from graphplat.registry import PluginRecord


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The platform that the environment demands."""

    variable: str
    name: str
    usable: bool
    reason: str = ""
    """Why it cannot be used."""


def command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show every plugin and platform, and why each can or cannot be used.

    Loads all plugins and probes each platform once; creates no device context.
    Where GRAPHPLAT_PLATFORM is set, says whether that platform can be used.
    """
    from rich.console import Console

    from graphplat.cli import render
    from graphplat.registry import list_plugins

    records, choice = list_plugins(), chosen()
    if json:
        render.print_json({"plugins": records, "choice": choice})
        return
    console = Console()
    columns = ("platform", "device", "plugin", "from", "in tree", "status")
    console.print(render.table("Platforms", columns, _rows(records)))
    for record in records:
        for line in _details(record):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if choice is not None:
        told = "can be used" if choice.usable else f"cannot be used: {choice.reason}"
        line = f"{choice.variable}={choice.name} {told}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def chosen() -> Choice | None:
    """What ``GRAPHPLAT_PLATFORM`` demands and whether it can be had; ``None`` where it is unset or empty."""
    from graphplat.registry import GraphplatWarning, resolve_current
    from graphplat.resolution import DETAILS, PLATFORM_VARIABLE

    name = os.environ.get(PLATFORM_VARIABLE, "").strip()
    if not name:
        return None
    reason = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphplatWarning)  # plugins that failed stand in the list
        try:
            resolve_current()
        except PlatformError as error:
            reason = str(error).removesuffix(f". {DETAILS}")  # which leads to this command
    return Choice(variable=PLATFORM_VARIABLE, name=name, usable=not reason, reason=reason)


def _rows(records: list[PluginRecord]) -> Iterator[tuple[object, ...]]:
    for record in records:
        source = f"{record.distribution} {record.version}" if record.distribution else "this process"
        if not record.platforms:
            yield "-", record.device_type or "any", record.name, source, record.in_tree, record.outcome
        for platform in record.platforms:
            yield (
                platform.name,
                platform.device_type,
                record.name,
                source,
                record.in_tree,
                platform.outcome,
            )


def describe(capabilities: PlatformCapabilities | None) -> str:
    """Everything that differs from the cautious default, in one line."""
    if capabilities is None:
        return "unknown without the device"
    fields = msgspec.structs.fields(capabilities)
    changed = {f.name: getattr(capabilities, f.name) for f in fields}
    changed = {f.name: changed[f.name] for f in fields if changed[f.name] != f.default}
    words = [name if value is True else f"{name}={value}" for name, value in changed.items()]
    return ", ".join(words) or "none"


def _details(record: PluginRecord) -> Iterator[str]:
    for platform in record.platforms:
        yield f"{platform.name} can: {describe(platform.capabilities)}"
        if platform.failure is not None:
            yield f"{platform.name} is not available: {platform.failure.error}"
    if record.failure is not None:
        yield f"{record.name} failed at {record.failure.phase}: {record.failure.error}"
    elif record.reason and not record.platforms:
        yield f"{record.name}: {record.reason}"
