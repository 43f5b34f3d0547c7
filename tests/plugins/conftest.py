"""Throwaway distributions, found by their metadata just as installed ones are."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from graphplat import registry

PLATFORM = """
from graphplat import Platform, PlatformCapabilities, hookimpl
import plugin_log

plugin_log.events.append("import " + __name__)

class {cls}(Platform):
    name = {name!r}
    device_type = {device_type!r}
    capabilities = PlatformCapabilities(graph_capture={graphs})

    def __init__(self):
        plugin_log.events.append("make " + self.name)

    def is_out_of_tree(self):
        return {foreign}

    def probe(self):
        plugin_log.events.append("probe " + self.name)
        {probe}

@hookimpl
def provide_platforms():
    plugin_log.events.append("provide " + {name!r})
    return [{cls}]
"""


class Site:
    """A folder of distributions at the front of ``sys.path``.

    A stand-in for the distribution ``graphplat`` hides the real one, so that a
    test decides which plugins are built in: at first only ``cpu``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: list[Path] = []
        self._count = itertools.count()

    def install(
        self, distribution: str, entries: dict[str, str], version: str = "1.0", **modules: str
    ) -> Path:
        """Lay out one distribution: entry points by name, and modules by name."""
        folder = self.root / f"{next(self._count)}-{distribution}"
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[graphplat]", *lines, ""]))
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(source))
        self.folders.append(folder)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        return folder

    def vendor(
        self, entry: str, name: str, *, probe: str = "pass", tail: str = "", graphs: bool = False
    ) -> str:
        """Install ``dist-NAME``: module ``mod_NAME`` with one platform; returns the module."""
        self.install(
            f"dist-{name}",
            {entry: f"mod_{name}"},
            **{
                f"mod_{name}": self.source(name, entry.partition("-")[0], probe=probe, graphs=graphs)
                + textwrap.dedent(tail)
            },
        )
        return f"mod_{name}"

    def builtin(self, **probes: str) -> None:
        """Make these device types built in, with the given bodies of ``probe()``."""
        for folder in [one for one in self.folders if one.name.endswith("-graphplat")]:
            self.folders.remove(folder)
            sys.path.remove(str(folder))
        self.install(
            "graphplat",
            {kind: f"own_{kind}" for kind in probes},
            **{
                f"own_{kind}": self.source(kind, kind, probe=probe, own=True)
                for kind, probe in probes.items()
            },
        )

    @staticmethod
    def source(
        name: str, device_type: str, *, probe: str = "pass", own: bool = False, graphs: bool = False
    ) -> str:
        """A plugin module that brings one platform and logs what is done to it."""
        return PLATFORM.format(
            cls=f"{name.capitalize()}Platform",
            name=name,
            device_type=device_type,
            foreign=not own,
            probe=probe,
            graphs=graphs,
        )

    @property
    def events(self) -> list[str]:
        """What plugins logged, in order."""
        return importlib.import_module("plugin_log").events

    def python(self, code: str, **environment: str) -> str:
        """Run *code* in a new process that sees this site; returns what it prints."""
        path = os.pathsep.join([*map(str, reversed(self.folders)), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site with the one built-in platform ``cpu``; everything is as before afterwards."""
    for variable in ("PLATFORM", "DISABLED_PLUGINS", "STRICT_PLUGINS", "PROBE_TIMEOUT"):
        monkeypatch.delenv(f"GRAPHPLAT_{variable}", raising=False)
    before, path = set(sys.modules), list(sys.path)
    one = Site(tmp_path)
    one.install("plugin-log", {}, plugin_log="events = []\n")
    one.builtin(cpu="pass")
    registry.reset_registry()
    yield one
    registry.reset_registry()
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
