"""The conformance suite, with work that runs at once and with work that queues until a synchronize."""

import pytest

from graphplat.testing.suite import *  # noqa: F403


@pytest.fixture(params=["immediate", "deferred"], autouse=True)
def timing(request, sim):
    """How the device's streams run."""
    if request.param == "deferred":
        sim.set_deferred(True)
        yield
        sim.set_deferred(False)
    else:
        yield
