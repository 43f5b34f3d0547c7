"""What commands print: tables, JSON, and a progress bar where somebody watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from graphplat import hookimpl
from graphplat.hookspecs import CaptureProgress
from graphplat.registry import register_plugin, unregister_plugin

_PLUGIN = "capture-progress-bar"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; columns that hold only numbers in every row are set to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    built = Table(title=title, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        numeric = all(row[index].strip("0123456789.,- ") == "" for row in cells)
        built.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        built.add_row(*row)
    return built


def print_json(document: Any) -> None:
    """Print *document* as one JSON document and nothing else."""
    encoded = msgspec.json.encode(document, enc_hook=str)
    print(msgspec.json.format(encoded, indent=2).decode())


def size(count: int | None) -> str:
    """Bytes for people; ``unknown`` for ``None``."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@attrs.define(eq=False)
class CaptureBar:
    """Shows each captured shape of a phase on *progress*. A plugin that only observes."""

    progress: Progress
    _task: TaskID | None = attrs.field(default=None, init=False)

    @hookimpl
    def capture_progress(self, event: CaptureProgress) -> None:
        """Move the bar."""
        if event.kind == "start" or self._task is None:
            self._task = self.progress.add_task(f"capturing {event.phase}", total=event.total)
        label = f"{'compiling' if event.kind == 'compiling' else 'capturing'} {event.phase}"
        if event.key is not None:
            label += f" {event.key.size}"
        if event.kind == "end":
            label = f"captured {event.phase}"
        self.progress.update(self._task, completed=event.done, description=label)


@contextmanager
def capture_bar(console: Console, *, transient: bool = False) -> Iterator[None]:
    """Show a progress bar while graphs are captured, if *console* is a terminal.

    A *transient* one is gone afterwards.
    """
    if not console.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=transient) as progress:
        register_plugin(CaptureBar(progress), _PLUGIN)
        try:
            yield
        finally:
            unregister_plugin(_PLUGIN)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
