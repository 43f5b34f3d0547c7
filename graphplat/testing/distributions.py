"""Make a plugin project discoverable without installing it, for tests."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path


def expose(project: Path, site: Path, *, name: str | None = None) -> Path:
    """Lay the modules and entry points of *project* out in the folder *site*; returns *site*.

    What an installer would do for a project whose modules lie beside its
    ``pyproject.toml``: with *site* on ``sys.path`` its plugins are found, and without it
    nothing of them is left. *name* poses as another distribution.
    """
    settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = name or settings["name"], settings["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    lines = []
    for group, points in settings.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for module in project.glob("*.py"):
        shutil.copy2(module, site / module.name)
    return site
