"""``graphplat conformance``, and what a vendor's own test module can rely on."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from graphplat.testing import suite
from graphplat.testing.distributions import expose

BROKEN = """
import pytest
from graphplat import platform_for
from graphplat.testing import broken_runners
from graphplat.testing.broken import FAULTS, broken
from graphplat.testing.suite import *

@pytest.fixture
def platform():
    with broken(FAULTS["LostPadding"], platform_for("cpu")) as platform:
        yield platform
"""
SELECT = ["-k", "padded or fresh"]


@pytest.fixture
def python():
    """Runs Python in a new process; status and output."""

    def run(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def command(python, *arguments, **environment):
    return python(
        "-c", "from graphplat.cli.main import main; main()", "conformance", *arguments, **environment
    )


def reported(python, tmp_path, status, *arguments):
    """The report of a run of the command on the cpu that ends with *status*; it names platform and device."""
    path = tmp_path / "report.json"
    ended, output = command(python, "--device", "cpu", "--output", str(path), *arguments)
    assert ended == status, output
    report = json.loads(path.read_text())
    assert (report["platform"], report["device"]) == ("cpu", "cpu")
    assert report["capabilities"]["graph_capture"] is True
    return report


def test_the_command_reports_as_json(python, tmp_path):
    """
    The command's status is 0, and its report names platform, device, capabilities, versions and every test.
    """
    report = reported(python, tmp_path, 0, "-k", "padded or streams")
    assert {"graphplat", "torch", "python"} <= report["versions"].keys()
    tests = {test["name"]: test for test in report["tests"]}
    assert tests["test_padded_rows_hold_their_fill"]["outcome"] == "passed"
    assert tests["test_streams_can_be_ordered"]["outcome"] == "skipped"
    assert tests["test_streams_can_be_ordered"]["reason"] == "the platform has no streams"
    assert sum(report["totals"].values()) == len(tests)


def test_a_run_that_selects_nothing_names_platform_and_device(python, tmp_path):
    """
    Without any test the report still says what it is about, from the option and what it resolves to.
    """
    report = reported(python, tmp_path, 5, "-k", "nonesuch")
    assert report["tests"] == []


def test_a_report_without_a_platform_still_names_the_device(python, tmp_path):
    """
    Where the device given to pytest has no platform, the device is named and the tests say what is wrong.
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p graphplat.testing.plugin\n")
    (tmp_path / "test_compliance.py").write_text("from graphplat.testing.suite import *\n")
    path = tmp_path / "report.json"
    options = ("-p", "no:cacheprovider", "--graphplat-device=nonesuch", f"--graphplat-json={path}", *SELECT)
    status, output = python("-m", "pytest", str(tmp_path), *options)
    assert status == 1, output
    report = json.loads(path.read_text())
    assert (report["platform"], report["device"]) == ("unknown", "nonesuch")
    assert all("no platform for 'nonesuch'" in test["reason"] for test in report["tests"])
    assert report["tests"]


@pytest.mark.parametrize("arguments", [("-k", "("), ("--known-failure", "without a reason")])
def test_a_run_that_cannot_be_done_prints_no_document(tmp_path, arguments):
    """
    With --json stdout stays empty, whatever an earlier run left in the file; the error is on stderr.
    """
    path = tmp_path / "report.json"
    path.write_text("{}")
    line = ("graphplat", "conformance", "--device", "cpu", "--json", "--output", str(path))
    done = subprocess.run([sys.executable, "-m", *line, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "")
    assert "ERROR: " in done.stderr
    assert path.read_text() == "{}"


def test_pytest_refuses_a_simulated_device_that_cannot_be(python, tmp_path):
    """
    A usage error in one line, as for any bad option, and no traceback.
    """
    (tmp_path / "test_nothing.py").write_text("")
    status, output = python(
        *("-m", "pytest", "-p", "graphplat.testing.plugin", str(tmp_path)), GRAPHPLAT_SIMULATED="cuda"
    )
    assert status == 4, output
    assert "ERROR: GRAPHPLAT_SIMULATED='cuda' cannot be installed" in output
    assert "Traceback" not in output


def test_a_device_without_platform_is_one_message(python):
    """
    An unknown device is refused before any test runs, with the reason and without a traceback.
    """
    status, output = command(python, "--device", "nonesuch")
    assert status == 1
    assert output.startswith("graphplat: no platform for 'nonesuch'")
    assert "Traceback" not in output


def test_without_pytest_it_is_one_line_that_names_the_extra(python):
    """
    The status is 2, and the line says what to install.
    """
    code = "import sys; sys.modules['pytest'] = None; from graphplat.cli.main import main; main()"
    status, output = python("-c", code, "conformance", "--device", "cpu")
    assert status == 2
    assert output == 'graphplat: pytest is not installed. Run: pip install "graphplat[dev]"\n'


def test_it_runs_on_a_vendor_that_is_only_installed(python, tmp_path):
    """
    A simulated device and its vendor's distribution are all that the command needs.
    """
    site = expose(Path(__file__).parents[2] / "plugins" / "graphplat-acme", tmp_path / "site")
    path = tmp_path / "report.json"
    status, output = command(
        python,
        *("--device", "acme:1", "--output", str(path), *SELECT),
        GRAPHPLAT_SIMULATED="acme:2",
        PYTHONPATH=str(site),
    )
    assert status == 0, output
    report = json.loads(path.read_text())
    assert (report["platform"], report["device"]) == ("acme", "acme:1")
    assert report["versions"]["graphplat-acme"] == "0.1.0"


@pytest.fixture
def vendor(python, tmp_path):
    """Runs a vendor's test module of a broken platform with the settings of its project."""

    def run(*known):
        lines = "".join(f"\n    {line}" for line in known)
        (tmp_path / "pytest.ini").write_text(
            f"[pytest]\naddopts = -p graphplat.testing.plugin\ngraphplat_known_failures ={lines}\n"
        )
        (tmp_path / "test_compliance.py").write_text(textwrap.dedent(BROKEN))
        path = tmp_path / "report.json"
        status, output = python(
            *("-m", "pytest", str(tmp_path), "-p", "no:cacheprovider", f"--graphplat-json={path}", *SELECT)
        )
        return status, output, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_broken_platform_fails_the_suite(vendor):
    """
    A vendor's two-line module runs the suite on its own fixture; a fault fails it and is in the report.
    """
    status, output, report = vendor()
    assert status == 1, output
    outcomes = {test["name"]: test["outcome"] for test in report["tests"]}
    assert outcomes["test_padded_rows_hold_their_fill"] == "failed"
    assert outcomes["test_replays_read_fresh_inputs"] == "passed"
    assert report["platform"] == "cpu_LostPadding"


def test_a_known_failure_is_a_strict_xfail(vendor):
    """
    A known failure with a reason does not fail the run; one that passes does.
    """
    status, output, report = vendor("test_padded_rows_hold_their_fill: the driver loses padding, ticket 12")
    assert status == 0, output
    (padded,) = [test for test in report["tests"] if "padded" in test["name"]]
    assert (padded["outcome"], padded["reason"]) == ("xfailed", "the driver loses padding, ticket 12")
    status, output, report = vendor("test_replays_read_fresh_inputs: thought to be broken")
    assert status == 1
    assert "[XPASS(strict)] thought to be broken" in output


@pytest.mark.parametrize("line", ["test_nonesuch: misspelt", "test_padded_rows_hold_their_fill"])
def test_a_known_failure_needs_a_test_and_a_reason(vendor, line):
    """
    A name that no test has, and a line without a reason, are errors.
    """
    status, output, _ = vendor(line)
    assert status == 4, output
    assert "graphplat_known_failures" in output


def test_the_suite_covers_what_it_promises():
    """
    Every test has a docstring that states a behaviour, and a name of its own.
    """
    assert len(suite.TESTS) >= 40
    for name, test in suite.TESTS.items():
        assert test.__doc__, name
        assert len(test.__doc__.split()) > 5, name
    assert set(suite.__all__) == set(suite.TESTS)
