"""``graphplat conformance``: does a platform keep the contract?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    device: Annotated[str, typer.Option(help="The device to test: TYPE or TYPE:INDEX.")],
    json: Annotated[Path | None, typer.Option("--json", help="Write a JSON report to this file.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="The platform by name, where several serve TYPE.")
    ] = None,
    known_failure: Annotated[
        list[str] | None, typer.Option(help='A test known to fail, as "NAME: REASON"; may be repeated.')
    ] = None,
    select: Annotated[str | None, typer.Option("-k", help="Run only tests whose names match.")] = None,
) -> None:
    """Run the conformance suite against a platform.

    Tests of what the platform does not declare are skipped with a reason. The
    status is 0 if every other test passed.
    """
    from graphplat.registry import resolve
    from graphplat.testing import conformance, simulated

    simulated.install_from_environment()
    resolve(device, name=platform)  # its error is better than a suite of failing tests
    status = conformance.run(
        device,
        platform=platform,
        json=json,
        known_failures=tuple(known_failure or ()),
        arguments=("-k", select) if select else (),
    )
    raise typer.Exit(status)
