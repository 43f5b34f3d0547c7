"""``graphplat conformance``: does a platform keep the contract?"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from graphplat.cli.files import check_file


def command(
    *,
    device: Annotated[str, typer.Option(help="The device to test: TYPE or TYPE:INDEX.")],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; what the tests print goes to stderr.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON document here too.")] = None,
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
    status is 0 if every other test passed. Where pytest cannot run, because of -k or
    --known-failure say, there is no document.
    """
    from graphplat.registry import resolve
    from graphplat.testing import conformance, simulated

    if output is not None:
        check_file(output, "output")
    simulated.install_from_environment()
    resolve(device, name=platform)  # its error is better than a suite of failing tests
    with tempfile.TemporaryDirectory() as folder:
        report = output or Path(folder) / "report.json"
        with contextlib.redirect_stdout(sys.stderr if json else sys.stdout):
            status = conformance.run(
                device,
                platform=platform,
                json=report if json or output else None,
                known_failures=tuple(known_failure or ()),
                arguments=("-k", select) if select else (),
            )
        from graphplat.testing.plugin import NO_REPORT  # late, or a pytest around this warns

        if json and status not in NO_REPORT:  # where a file of an earlier run may lie
            print(report.read_text(encoding="utf-8"))
    raise typer.Exit(status)
