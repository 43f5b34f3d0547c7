"""The command line as typer sees it: it finds each subcommand by its module."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphplat import __version__
from graphplat.cli.main import SUMMARIES


class _Commands(TyperGroup):
    """Finds subcommands by module, and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The subcommands that are there."""
        del ctx
        return [name for name in SUMMARIES if importlib.util.find_spec(f"graphplat.cli.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand, or ``None`` for an unknown name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"graphplat.cli.{cmd_name}")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, short_help=SUMMARIES[cmd_name])(module.command)
        return typer.main.get_command(single)


app = typer.Typer(cls=_Commands, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphplat {__version__}")
        raise typer.Exit


@app.callback()
def overview(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Capture and replay device graphs for any inference runtime on any accelerator."""
    del version  # its callback has shown it
