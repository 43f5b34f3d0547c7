"""The contract of every runner, and the check of every batch."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.buffers import check_tensor
from graphplat.errors import InputError, ReplayError
from graphplat.inputs import HostSpec, InputSpec
from graphplat.report import Decision, RunnerStats

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner
    from graphplat.runners.context import RunnerContext


class BaseRunner(abc.ABC):
    """Runs batches. :meth:`execute` is what a runtime calls every step."""

    context: RunnerContext
    stats: RunnerStats

    @property
    @abc.abstractmethod
    def buckets(self) -> tuple[int, ...]:
        """Sizes that have a graph, ascending."""

    @abc.abstractmethod
    def explain(self, batch: ForwardBatch) -> Decision:
        """What :meth:`execute` would do with *batch*, without doing it.

        Raises :class:`InputError` for a batch that is not what was declared.
        """

    @abc.abstractmethod
    def execute(self, batch: ForwardBatch) -> Any:
        """Run *batch* and return the forward's output for its real rows.

        Raises :class:`InputError` naming the field before anything is changed.
        """

    def buffers(
        self,
        size: int,
        *,
        requests: int | None = None,
        variant: str | None = None,
        present: Iterable[str] = (),
        host: Mapping[str, Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The static inputs of the graph that holds *size*; raises :class:`ReplayError` where none does."""
        raise ReplayError(
            f"no graph holds {size}: this runner has none",
            platform=self.context.platform.name,
            hint="Pass tensors of your own; the report says why there are no graphs",
        )

    @property
    def model_runner(self) -> ModelRunner:
        """The runtime whose batches this runs."""
        return self.context.model_runner

    def can_run_graph(self, batch: ForwardBatch) -> bool:
        """Whether :meth:`execute` would replay a graph."""
        return self.explain(batch).is_graph

    def capture(self) -> None:  # noqa: B027 - an eager runner has nothing to record
        """Record this runner's graphs; nothing to do for an eager runner."""

    def release(self) -> None:  # noqa: B027 - nor anything to destroy
        """Destroy this runner's graphs; steps run eagerly until :meth:`recapture`."""

    def recapture(self) -> None:
        """Destroy this runner's graphs and record them again."""
        self.release()
        self.capture()


def expect_batch(value: object, phase: Phase, error: AttributeError) -> None:
    """Raise :class:`InputError` from *error*, a read of *value*, if that is no :class:`ForwardBatch`."""
    if not isinstance(value, ForwardBatch):
        raise InputError(
            f"expected a ForwardBatch, found {type(value).__name__}",
            phase=phase,
            hint=f'Pass ForwardBatch(phase="{phase}", num_requests=..., num_tokens=..., inputs={{...}})',
        ) from error


@attrs.frozen(eq=False)
class CheckedBatch:
    """A batch that is what its spec declares, with its leaves at hand."""

    leaves: dict[str, Any]
    over: str | None
    """A dimension beyond what graphs hold, or ``None``."""


class BatchChecker:
    """Checks batches of one phase against the input spec, before any buffer is touched."""

    def __init__(self, phase: Phase, spec: InputSpec, device: torch.device, tokens_per_request: int) -> None:
        self.phase = phase
        self.spec = spec
        self.device = device
        self.tokens_per_request = tokens_per_request
        self._names = frozenset(spec.fields)

    def check(self, batch: ForwardBatch) -> CheckedBatch:
        """The leaves of *batch*; raises :class:`InputError` naming field, expected and found."""
        outer = sys.exception()
        try:
            self._check_sizes(batch)
            leaves = self._leaves(batch.inputs)
            over = None
            for path, spec in self.spec.tensors.items():
                value = leaves.get(path)
                if value is None:
                    continue
                over = check_tensor(path, spec, value, batch.num_requests, batch.num_tokens) or over
                self._check_device(path, value)
            for path, host in self.spec.hosts.items():
                _check_host(path, host, leaves[path], batch)
        except InputError as error:
            raise InputError(
                error.what, phase=self.phase, field=error.field, hint=error.hint, bucket=error.bucket
            ) from _reason(error, outer)  # the error itself would say all this twice
        except AttributeError as error:
            expect_batch(batch, self.phase, error)
            raise
        return CheckedBatch(leaves, over)

    def _check_sizes(self, batch: ForwardBatch) -> None:
        if batch.phase is not self.phase:
            raise InputError(f"expected a {self.phase} batch, found {batch.phase}", field="phase")
        requests, tokens = batch.num_requests, batch.num_tokens
        for name, value in (("num_requests", requests), ("num_tokens", tokens)):
            if type(value) is not int or value < 0:
                raise InputError(f"expected a count, found {value!r}", field=name)
        if self.phase is Phase.DECODE:
            if tokens != requests * self.tokens_per_request:
                raise InputError(
                    f"expected {requests} requests x {self.tokens_per_request} tokens, found {tokens} tokens",
                    field="num_tokens",
                )
        elif tokens < requests or (tokens and not requests):
            raise InputError(f"{requests} requests cannot have {tokens} tokens", field="num_tokens")

    def _leaves(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(inputs, dict):
            raise InputError(f"expected a dict of inputs, found {type(inputs).__name__}", field="inputs")
        # No "None in values": comparing a tensor with None runs an operator.
        if self.spec.is_flat and inputs.keys() == self._names and not any(v is None for v in inputs.values()):
            return inputs
        return self.spec.read(inputs)

    def _check_device(self, path: str, value: torch.Tensor) -> None:
        device = value.device
        if device.type == "cpu" or (
            device.type == self.device.type and self.device.index in (None, device.index)
        ):
            return
        raise InputError(f"expected a tensor on {self.device} or the host, found {device}", field=path)


def _reason(error: BaseException, outer: BaseException | None) -> BaseException | None:
    """What *error* was raised from, or while handling; not *outer*, which its caller's caller handles."""
    if error.__suppress_context__ or error.__context__ is outer:
        return error.__cause__
    return error.__context__


def _check_host(path: str, spec: HostSpec, value: Any, batch: ForwardBatch) -> None:
    if isinstance(value, torch.Tensor):
        raise InputError("expected a host value, found a tensor", field=path)
    if spec.update:
        wanted = spec.rows(batch.num_requests, batch.num_tokens)
        if not isinstance(value, (list, tuple)) or any(type(item) is not int for item in value):
            raise InputError(f"expected a list of integers, found {value!r}", field=path)
        if len(value) != wanted:
            raise InputError(f"expected {wanted} numbers, found {len(value)}", field=path)
    elif spec.maximum is not None and (
        isinstance(value, bool) or not isinstance(value, type(spec.maximum) | int)
    ):
        raise InputError(f"expected a {type(spec.maximum).__name__}, found {value!r}", field=path)
