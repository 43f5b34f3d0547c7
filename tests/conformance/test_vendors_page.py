"""``docs/vendors.md`` does what it says, word for word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphplat.testing.distributions import expose

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vendors.md").read_text()
BLOCK = re.compile(r"^(?:`([\w./]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks():
    """Every code block as (file name, language, text), in order."""
    return [match.groups() for match in BLOCK.finditer(PAGE)]


def test_the_example_is_the_one_that_is_tested(blocks):
    """
    The module and the entry point on the page are those of the distribution ``graphplat-acme``.
    """
    files = {name: text for name, _, text in blocks if name}
    project = ROOT / "plugins" / "graphplat-acme"
    assert files["graphplat_acme.py"] == (project / "graphplat_acme.py").read_text()
    shown = set(files["pyproject.toml"].splitlines())
    assert shown <= set((project / "pyproject.toml").read_text().splitlines())


def test_the_page_leads_to_a_passing_run(blocks, tmp_path):
    """
    Its files written and its commands run in order, on the simulated device, end with a conformance run that
    passes, and a vendor's own test module that does.

    Only ``pip install`` is stood in for: the files are laid out as it would, without building a wheel.
    """
    project, site = tmp_path / "project", tmp_path / "site"
    environment = {
        **os.environ,
        "GRAPHPLAT_SIMULATED": "acme",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(site),
    }
    outputs = {}
    for name, language, text in blocks:
        if name:
            path = project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif language == "ini":
            known = text.index("graphplat_known_failures")
            (project / "pytest.ini").write_text(text[:known])
        for line in text.splitlines() if language == "console" else ():
            command = line.removeprefix("$ ")
            if command.startswith("pip install"):
                expose(project, site)
                continue
            done = subprocess.run(
                command.split(), cwd=project, env=environment, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            outputs[command.split()[1]] = done.stdout
    assert "acme" in outputs["platforms"]
    assert "passed" in outputs["conformance"]
    assert " passed" in outputs["tests/test_compliance.py"]
    assert (project / "conformance.json").stat().st_size > 1000
