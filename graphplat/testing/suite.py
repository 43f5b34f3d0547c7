"""The conformance suite: what every platform must do, gated by what it declares.

A vendor runs it from a test module of two lines and one fixture, with pytest's option
``-p graphplat.testing.plugin``:

.. code-block:: python

    from graphplat.testing.suite import *

    @pytest.fixture
    def platform():
        return AcmePlatform()

Without the fixture, the platform is the one that serves ``--graphplat-device``. New tests
come with minor releases only.
"""

from __future__ import annotations

from graphplat.testing import (
    suite_breaks,
    suite_contract,
    suite_failures,
    suite_lifetimes,
    suite_replay,
    suite_threads,
    suite_updates,
)

MODULES = (
    suite_contract,
    suite_replay,
    suite_lifetimes,
    suite_failures,
    suite_threads,
    suite_breaks,
    suite_updates,
)
"""Where the tests are defined, in the order in which they run."""

TESTS = {name: test for module in MODULES for name, test in vars(module).items() if name.startswith("test_")}
"""Every test by name."""

globals().update(TESTS)
__all__ = sorted(TESTS)  # noqa: PLE0605 - made from what is there
