"""The pytest plugin of the conformance suite; load it with ``-p graphplat.testing.plugin``.

It gates tests by what the platform declares, gives the fixtures ``platform``, ``device`` and
``host_operator``, marks known failures as strict xfails and writes a JSON report.
With the variable ``GRAPHPLAT_SIMULATED`` it installs that simulated device first.
"""

from __future__ import annotations

import contextlib
import platform as python_platform
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

SUITE = (
    "suite_runtime",
    "suite_contract",
    "suite_replay",
    "suite_lifetimes",
    "suite_failures",
    "suite_threads",
    "suite_breaks",
    "suite_updates",
)
NO_REPORT = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
"""Statuses of runs that leave no report: there is nothing to say about the platform."""

pytest.register_assert_rewrite(*(f"graphplat.testing.{name}" for name in SUITE))


class TestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One test of the suite: ``passed``, ``failed``, ``skipped`` or ``xfailed``, and why."""

    __test__ = False

    name: str
    outcome: str
    seconds: float
    reason: str = ""


class ConformanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the suite against one platform; encodes to JSON for a vendor to publish."""

    platform: str
    device: str
    """As given or, once a test has used it, with its index."""
    capabilities: dict[str, Any]
    versions: dict[str, str]
    totals: dict[str, int]
    tests: tuple[TestOutcome, ...]


@attrs.define(eq=False)
class _Run:
    """What one session has seen so far."""

    platform: Any = None
    device: Any = None
    outcomes: dict[str, TestOutcome] = attrs.field(factory=dict)

    def note(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test; a failing set-up or tear-down counts as its failure."""
        name = report.nodeid.rpartition("::")[2]
        if report.when != "call" and report.passed:
            return
        outcome, reason = report.outcome, ""
        if hasattr(report, "wasxfail"):
            outcome, reason = "xfailed" if report.skipped else "failed", report.wasxfail  # type: ignore[assignment]
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            reason = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
        known = self.outcomes.get(name)
        if known is None or known.outcome != "failed":
            self.outcomes[name] = TestOutcome(
                name=name, outcome=outcome, seconds=round(report.duration, 4), reason=reason
            )

    def fill(self, config: pytest.Config) -> None:
        """Take from the options, and what they resolve to, what no test has shown."""
        from graphplat import GraphplatError, GraphplatWarning, platform_for

        wanted = config.getoption("--graphplat-device")
        if self.platform is None and wanted is not None:
            # Where it cannot be resolved, every test of the platform has failed with the reason.
            with contextlib.suppress(GraphplatError, GraphplatWarning):
                self.platform = platform_for(wanted, name=config.getoption("--graphplat-platform"))
        if self.device is None:
            self.device = wanted or getattr(self.platform, "device_type", None)

    def report(self) -> ConformanceReport:
        """The report of what was seen."""
        tests = tuple(self.outcomes.values())
        found = [test.outcome for test in tests]
        capabilities = {} if self.platform is None else msgspec.to_builtins(self.platform.capabilities)
        return ConformanceReport(
            platform="unknown" if self.platform is None else self.platform.name,
            device="unknown" if self.device is None else str(self.device),
            capabilities=capabilities,
            versions=_versions(self.platform),
            totals={outcome: found.count(outcome) for outcome in sorted(set(found))},
            tests=tests,
        )


_RUN = pytest.StashKey[_Run]()


def _versions(platform: Any) -> dict[str, str]:
    import torch

    from graphplat import __version__
    from graphplat.registry import list_plugins

    found = {
        "python": python_platform.python_version(),
        "torch": str(torch.__version__),
        "graphplat": __version__,
    }
    for plugin in list_plugins() if platform is not None else ():
        if plugin.distribution and platform.name in [one.name for one in plugin.platforms]:
            found[plugin.distribution] = str(plugin.version)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("graphplat")
    group.addoption("--graphplat-device", default=None, help="device to test, such as TYPE or TYPE:1")
    group.addoption(
        "--graphplat-platform", default=None, help="platform by name, where several serve the type"
    )
    group.addoption("--graphplat-json", default=None, help="write a JSON report to this file")
    parser.addini(
        "graphplat_known_failures",
        "tests that are known to fail, one a line: NAME: REASON; one that passes is an error",
        type="linelist",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the simulated device where one is asked for."""
    config.addinivalue_line(
        "markers", "requires(*capabilities): needs the platform to declare these capabilities"
    )
    config.stash[_RUN] = _Run()
    from graphplat.errors import ConfigError
    from graphplat.testing.simulated import install_from_environment

    try:
        install_from_environment()
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark known failures; naming a test that is not there is an error."""
    known = {}
    for line in config.getini("graphplat_known_failures"):
        name, colon, reason = line.partition(":")
        if not colon or not reason.strip():
            raise pytest.UsageError(f"graphplat_known_failures: {line!r} gives no reason; write NAME: REASON")
        known[name.strip()] = reason.strip()
    met = set()
    for item in items:
        for name in {item.name, getattr(item, "originalname", item.name)} & known.keys():
            met.add(name)
            item.add_marker(pytest.mark.xfail(reason=known[name], strict=True))
    if items and (unknown := sorted(known.keys() - met)):
        raise pytest.UsageError(f"graphplat_known_failures names unknown tests: {', '.join(unknown)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Note outcomes of tests that use a platform."""
    report = yield
    if "platform" in getattr(item, "fixturenames", ()):
        item.config.stash[_RUN].note(report)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the JSON report, unless the run itself could not be done as asked."""
    path = session.config.getoption("--graphplat-json")
    if path and exitstatus not in NO_REPORT and not session.config.getoption("collectonly"):
        run = session.config.stash[_RUN]
        run.fill(session.config)
        encoded = msgspec.json.format(msgspec.json.encode(run.report()))
        Path(path).write_bytes(encoded + b"\n")


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest) -> Any:
    """The platform of ``--graphplat-device``; a vendor may define a fixture of this name instead."""
    from graphplat import platform_for

    wanted = request.config.getoption("--graphplat-device", None)
    if wanted is None:
        raise pytest.UsageError("give --graphplat-device TYPE, or define a fixture named platform")
    return platform_for(wanted, name=request.config.getoption("--graphplat-platform", None))


@pytest.fixture
def device(platform: Any, request: pytest.FixtureRequest) -> Any:
    """A device of the platform, with its index where it has one."""
    import torch

    wanted = request.config.getoption("--graphplat-device", None)
    kind = torch.device(wanted if wanted is not None else platform.device_type)
    return torch.zeros(1, device=kind).device


@pytest.fixture
def host_operator() -> Any:
    """An operator whose host lengths this device can update in a captured graph; see ``docs/vendors.md``.

    A vendor that declares ``update_after_capture`` gives a pair: the keyword's name, and a function
    ``(query, key, value, lengths) -> out`` that passes *lengths* under that keyword.
    """
    import torch

    from graphplat.testing.simulated import installed

    if installed() is None:
        pytest.skip("no fixture host_operator gives an operator to update")
    name = "actual_seq_lengths_kv"
    operator = torch.ops.sim.fused_infer_attention

    def attend(query: Any, key: Any, value: Any, lengths: list[int]) -> Any:
        return operator(query, key, value, **{name: lengths})

    return name, attend


@pytest.fixture(autouse=True)
def _declared(request: pytest.FixtureRequest) -> None:
    """Skip a test whose capabilities the platform does not declare."""
    marks = list(request.node.iter_markers("requires"))
    if not marks and "platform" not in request.fixturenames:
        return
    platform = request.getfixturevalue("platform")
    run = request.config.stash.setdefault(_RUN, _Run())
    run.platform = platform
    for mark in marks:
        for name in mark.args:
            if getattr(platform.capabilities, name) in (False, None, "none"):
                pytest.skip(f"platform {platform.name} does not declare {name}")
    if "device" in request.fixturenames:
        run.device = request.getfixturevalue("device")
