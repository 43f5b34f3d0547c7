"""The ``graphplat`` command: one module for each subcommand, imported when it is asked for.

A subcommand ``NAME`` is a module ``graphplat.cli.NAME`` with a function ``command``, whose
parameters typer reads and whose docstring is the help text. Its summary stands
here, so that help imports none of them. This module imports no optional package, so that
:func:`main` can say which one is missing.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from graphplat.errors import GraphplatError

SUMMARIES = {
    "demo": "Answer a question with a real model through captured graphs.",
    "platforms": "Show every plugin and platform, and why each can or cannot be used.",
    "bench": "Measure steps, captures and memory against baselines.",
    "plan": "Plan which sizes to capture from observed batches.",
    "conformance": "Run the conformance suite against a platform.",
}
"""Every subcommand and its line in the overview, in order."""

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "transformers": "transformers",
    "matplotlib": "plot",
    "pytest": "dev",
}
"""The optional packages that commands import, and the extra that brings each."""


def __getattr__(name: str) -> Any:
    """``app``, made when it is asked for, since it needs an optional package."""
    if name == "app":
        from graphplat.cli.app import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command line.

    An error of graphplat ends it with status 1 and one message, a missing optional package
    with status 2. Where ``GRAPHPLAT_SIMULATED`` names a device, it is there for every command.
    """
    try:
        from graphplat.cli.app import app

        if os.environ.get("GRAPHPLAT_SIMULATED"):
            from graphplat.testing.simulated import install_from_environment

            install_from_environment()
        app()
    except GraphplatError as error:
        print(f"graphplat: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f'graphplat: {error.name} is not installed. Run: pip install "graphplat[{extra}]"',
            file=sys.stderr,
        )
        sys.exit(2)
