"""Platforms broken in what only a device has: streams, modes, updates; one fault each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphplat.testing.broken import Base, fault

# Streams, on devices that have them


@fault(
    test_a_stream_is_restored_however_the_body_ends="AssertionError: after a body that ended well",
    test_a_capture_leaves_things_as_they_were="AssertionError: another stream was left current",
    needs="streams",
)
def unrestored_stream(base: Base) -> Base:
    """Leaves its stream current."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        @contextlib.contextmanager
        def use_stream(self, stream: Any) -> Iterator[Any]:
            super().use_stream(stream).__enter__()
            yield stream

    return Broken


@fault(
    test_streams_can_be_ordered="AssertionError: read before the other stream was waited for",
    test_a_side_stream_that_joins_is_captured="AssertionError: 8 rows",
    test_side_streams_are_joined_before_a_segment_ends="AssertionError: 8 rows",
    needs="streams",
    deferred=True,
)
def lost_order(base: Base) -> Base:
    """Does not order one stream after another."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def wait_stream(self, waiting: Any, awaited: Any) -> None:
            pass

    return Broken


@fault(test_a_side_stream_that_never_joins_is_refused="Failed: DID NOT RAISE .*CaptureError", needs="streams")
def swallowed_end(base: Base) -> Base:
    """Swallows the error that ends an invalid capture."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_end(self, graph: Any) -> None:
            with contextlib.suppress(Exception):
                super().capture_end(graph)

    return Broken


@fault(
    test_synchronize_waits_for_asynchronous_copies="AssertionError: the copy had not arrived",
    needs="counters",
    deferred=True,
)
def no_synchronize(base: Base) -> Base:
    """Returns from a synchronize at once."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def synchronize(self, device: torch.device) -> None:
            pass

    return Broken


@fault(
    test_every_size_equals_the_reference="CaptureError: .*device synchronization: operation not permitted",
    needs="api",
)
def wrong_device_sync(base: Base) -> Base:
    """Synchronizes the device inside a capture."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            super().capture_begin(graph, pool=pool, stream=stream)
            getattr(torch, self.device_type).synchronize()

    return Broken


@fault(
    test_every_size_equals_the_reference="CaptureError: .*unexpected keyword argument 'error_mode'",
    needs="api",
)
def wrong_keyword(base: Base) -> Base:
    """Gives the device's graph a keyword that it does not know."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            graph.capture_begin(pool=pool, error_mode="thread_local")

    return Broken


@fault(
    test_other_threads_may_use_the_device_during_a_capture="CaptureError: .*allocation: .* not permitted",
    needs="api",
)
def process_wide_capture(base: Base) -> Base:
    """Declares thread-local captures and begins one that forbids other threads the device."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            graph.capture_begin(pool=pool, capture_error_mode="global")

    return Broken


# Updates, on devices that have them


@fault(
    test_updated_host_values_count_at_each_replay="AssertionError: lengths .* of step 0 were not used",
    test_an_update_that_reaches_nothing_is_an_error="Failed: DID NOT RAISE .*Exception",
    test_a_failing_update_reaches_the_caller="Failed: DID NOT RAISE .*Exception",
    needs="updates",
)
def stale_update(base: Base) -> Base:
    """Updates a graph with the values that it was captured with, whatever is asked for."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def update_graph(self, graph: Any, values: Any) -> None:
            records = graph.graph_dispatch_mode.graph_dispatch_records
            if records:
                graph.update(cpu_update_input=[{}] * len(records))

    return Broken


@fault(
    test_without_updates_such_batches_run_eagerly="Failed: DID NOT RAISE .*GraphplatError", needs="no_updates"
)
def ignored_update(base: Base) -> Base:
    """Accepts updates that it cannot do."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def update_graph(self, graph: Any, values: Any) -> None:
            pass

    return Broken
