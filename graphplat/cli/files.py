"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from graphplat.errors import ConfigError


def check_file(path: Path, field: str) -> None:
    """Raise :class:`ConfigError` if no file can be written at *path*."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(
            f"{path} cannot be written", field=field, hint="Name a file in a folder that exists"
        )


def write_json(report: Any, path: Path) -> None:
    """Write *report* to *path*. Raises :class:`ConfigError` if that cannot be."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", field="output") from error
