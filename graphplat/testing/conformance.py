"""The suite as a module that pytest can collect, and the function that runs it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from graphplat.testing.suite import *  # noqa: F403

__test__ = True


def run(
    device: str,
    *,
    platform: str | None = None,
    json: Path | None = None,
    known_failures: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> int:
    """Run the suite against *device* in this process; pytest's exit status, 0 if all is well.

    *known_failures* are lines ``NAME: REASON``; *arguments* go to pytest.
    """
    import pytest

    from graphplat.testing import plugin

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"  # so that no project's own settings apply
        lines = "".join(f"\n    {line}" for line in known_failures)
        settings.write_text(f"[pytest]\nxfail_strict = true\ngraphplat_known_failures ={lines}\n")
        options = [
            f"--config-file={settings}",
            f"--rootdir={os.path.dirname(__file__)}",
            f"--graphplat-device={device}",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            "-ra",
        ]
        if platform is not None:
            options.append(f"--graphplat-platform={platform}")
        if json is not None:
            options.append(f"--graphplat-json={json.absolute()}")
        return int(pytest.main([*options, *arguments, __file__], plugins=[plugin]))
