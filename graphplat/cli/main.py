"""The ``graphplat`` command: one module for each subcommand, imported when it is asked for.

A subcommand ``NAME`` is a module ``graphplat.cli.NAME`` with a function ``command``, whose
parameters typer reads and whose docstring is the help text. Its summary stands
here, so that help imports none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from graphplat.errors import GraphplatError

SUMMARIES = {
    "demo": "Answer a question with a real model through captured graphs.",
    "platforms": "Show every plugin and platform, and why each can or cannot be used.",
    "bench": "Measure steps, captures and memory against baselines.",
    "plan": "Plan which sizes to capture from observed batches.",
    "conformance": "Run the conformance suite against a platform.",
}
"""Every subcommand and its line in the overview, in order."""


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


@app.callback()
def overview() -> None:
    """Capture and replay device graphs for any inference runtime on any accelerator."""


def main() -> None:
    """Run the command line; an error of graphplat ends it with status 1 and one message.

    Where ``GRAPHPLAT_SIMULATED`` names a device, it is there for every command.
    """
    try:
        if os.environ.get("GRAPHPLAT_SIMULATED"):
            from graphplat.testing.simulated import install_from_environment

            install_from_environment()
        app()
    except GraphplatError as error:
        print(f"graphplat: {error}", file=sys.stderr)
        sys.exit(1)
