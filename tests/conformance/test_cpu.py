"""The conformance suite on recorded graphs of the CPU, as a vendor writes it."""

import pytest

from graphplat import platform_for
from graphplat.testing.suite import *  # noqa: F403


@pytest.fixture
def platform():
    """The platform under test."""
    return platform_for("cpu")
