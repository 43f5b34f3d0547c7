"""Platforms whose captures fail badly, or keep what they should let go; one fault each."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphplat.testing.broken import Base, fault

# Captures that fail


@fault(
    test_a_failed_bucket_runs_eagerly="still being captured|cannot join a capture",
    test_a_failed_capture_leaves_the_device_usable="still being captured|cannot join a capture",
    test_a_host_read_in_a_capture_is_refused="still being captured|cannot join a capture",
)
def forgotten_abort(base: Base) -> Base:
    """Leaves a failed capture open."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            return True

    return Broken


@fault(test_graphs_captured_before_a_failure_stay_usable="ReplayError: .*(not captured|without a preceding)")
def abort_destroys_all(base: Base) -> Base:
    """Destroys every graph when one capture fails."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def create_graph(self, *, updatable: bool = False) -> Any:
            graph = super().create_graph(updatable=updatable)
            self.__dict__.setdefault("_all", []).append(graph)
            return graph

        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            reusable: bool = super().abort_capture(graph, pool=pool, stream=stream)
            for other in self.__dict__.pop("_all"):
                other.reset()
            return reusable

    return Broken


class _Suppressing:
    """A context that swallows what its body raises."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool:
        self.inner.__exit__(*error)
        return True


@fault(test_a_failed_capture_leaves_the_device_usable="Failed: DID NOT RAISE .*KeyboardInterrupt")
def swallowed_failure(base: Base) -> Base:
    """Swallows errors on its capture stream."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def use_stream(self, stream: Any) -> Any:
            return _Suppressing(super().use_stream(stream))

    return Broken


@fault(
    test_a_host_read_in_a_capture_is_refused="Failed: DID NOT RAISE .*CaptureError",
    test_replays_read_fresh_inputs="AssertionError: step 0",
)
def records_nothing(base: Base) -> Base:
    """Runs the forward instead of recording it."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            pass

        def capture_end(self, graph: Any) -> None:
            pass

        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            return True

        def replay(self, graph: Any) -> None:
            pass

    return Broken


@fault(test_two_runners_capture_one_after_the_other="CaptureError: .*capture belongs to another thread")
def only_one_thread_captures(base: Base) -> Base:
    """Captures in the first thread that does, and in no other."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            first = self.__dict__.setdefault("_thread", threading.get_ident())
            if first != threading.get_ident():
                raise RuntimeError("capture belongs to another thread")
            super().capture_begin(graph, pool=pool, stream=stream)

    return Broken


# Lifetimes


@fault(
    test_release_and_recapture="AssertionError: graphs outlive their release",
    test_fifty_cycles_leave_counts_constant="AssertionError: graphs outlive their release",
)
def leaked_graphs(base: Base) -> Base:
    """Keeps every graph that it ever made."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def create_graph(self, *, updatable: bool = False) -> Any:
            graph = super().create_graph(updatable=updatable)
            self.__dict__.setdefault("_kept", []).append(graph)
            return graph

    return Broken


@fault(
    test_fifty_cycles_leave_counts_constant="AssertionError: allocated bytes grew",
    test_the_memory_ledger_balances="AssertionError: .* bytes stay reserved",
    needs="counters",
)
def leaked_bytes(base: Base) -> Base:
    """Allocates scratch memory at each capture and never frees it."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            scratch = torch.zeros(1 << 16, device=stream.device)
            self.__dict__.setdefault("_scratch", []).append(scratch)
            super().capture_begin(graph, pool=pool, stream=stream)

    return Broken


@fault(test_small_buckets_share_the_pool="AssertionError: bytes by bucket", needs="counters")
def pool_for_each_graph(base: Base) -> Base:
    """Ignores the pool that graphs should share."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            super().capture_begin(graph, pool=self.graph_pool(), stream=stream)

    return Broken
