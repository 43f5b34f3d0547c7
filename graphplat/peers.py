"""One decision for all ranks: collectives inside a graph need every rank on the same path.

Everything here is one small ``all_reduce`` of the group that the runtime gave, or of a gloo
group of the same ranks, so that no agreement ever meets a collective of the forward. A message
says where its rank is; ranks that meet at different places all raise instead of mixing.

A rank that fails in a capture, or refuses its batch, says so once, in place of its next message, and the
others raise with it; one that waits in a collective of the forward does so for as long as that
collective's group allows. A rank that hangs, or fails elsewhere (before or after the set-up, as old graphs
are destroyed before a capture, in the replay or eager run of a step), tells nobody: in their next message
the others wait for it as long as :func:`~graphplat.carrier.carrier_of` says. torch breaks a gloo group off
once a collective of it has timed out: what follows in that group fails at once, and only new process groups
help.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import torch
import torch.distributed

from graphplat import guard
from graphplat.carrier import carrier_of, device_of
from graphplat.errors import CaptureError, GraphplatError, ReplayError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from graphplat.keys import ShapeKey

_VALUES = 8
_INTERRUPTED = datetime.timedelta(seconds=2)
"""How long a rank that was interrupted waits for the others to hear of it."""
_NOTHING = -(1 << 40)
"""Less than any value that a rank may bring."""


class Outcome(enum.IntEnum):
    """How one rank's part of a capture went, the worst last."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class Step(msgspec.Struct, frozen=True):
    """What the ranks agreed on for one step."""

    size: int
    """The largest size of any rank; 0 if no rank has work."""
    family: int | None
    """The family that all ranks with work ask for; ``None`` where they ask for different ones."""
    all_graph: bool
    """Whether every rank can replay a graph."""
    any_moved: bool
    """Whether a weight of some rank has moved."""
    same_graphs: bool
    """Whether all ranks hold as many graphs, and have as many shapes that they gave up."""


@attrs.define(eq=False)
class PeerAgreement:
    """Agrees with the other ranks of a ``torch.distributed`` group.

    A step costs one small collective and a host read. The gloo group that carries it is made at
    the first agreement; a group that torch has no ranks for carries it itself.
    """

    group: ProcessGroup
    failure: Outcome = Outcome.DONE
    """The worst outcome that any rank reported of the last stage; ``DONE`` also if a rank stopped."""
    _carrier: Any = None
    _depth: int = 0
    _told: bool = False
    """Whether all ranks know of the failure that is on its way up."""

    @property
    def rank(self) -> int:
        """This process in the group."""
        return self.group.rank()

    # Steps

    def step(
        self, size: int, family: int | None, held: int, *, can_graph: bool, moved: bool, where: str
    ) -> Step:
        """Combine this rank's step with those of all ranks; without work it is size 0 and family ``None``.

        *held* is any number that differs where the graphs of two ranks do.
        Raises :class:`ReplayError` if a rank refused its batch.
        """
        high, low = (_NOTHING, _NOTHING) if family is None else (family, -family)
        message = [size, int(not can_graph), int(moved), high, low, held, -held]
        largest, cannot, any_moved, high, low, most, least = self._exchange(where, message, ReplayError)[:7]
        agreed = high if high == -low else None
        return Step(largest, agreed, not cannot, bool(any_moved), most == -least)

    def refuse(self, where: str, error: BaseException) -> None:
        """Take part in the step at *where* by refusing it: every other rank raises."""
        self._tell(where, error)
        self._told = self._depth > 0

    # Captures

    def same(self, where: str, settings: Any, described: str) -> None:
        """Raise :class:`CaptureError` on every rank unless *settings* encode to the same bytes on all."""
        encoded = msgspec.json.encode(settings, order="deterministic", enc_hook=str)
        digest = int.from_bytes(hashlib.sha256(encoded).digest()[:7], "big")
        highest, lowest = self._exchange(where, [digest, -digest], CaptureError)[:2]
        if highest != -lowest:
            self._told = self._depth > 0
            raise CaptureError(
                f"ranks differ in what they are about to capture; rank {self.rank} has {described}",
                hint="Give every rank the same runtime, GraphConfig and kind of device",
            )

    def same_plan(self, phase: str, settings: Any, keys: Sequence[ShapeKey]) -> None:
        """Raise :class:`CaptureError` on every rank unless all capture the same shapes in the same way."""
        described = f"{len(keys)} shapes: {', '.join(map(str, keys[:4]))}{' …' if len(keys) > 4 else ''}"
        self.same(f"the plan of {phase}", [settings, list(keys)], described)

    @contextlib.contextmanager
    def together(self, where: str) -> Iterator[None]:
        """Run the body on every rank; where it fails on one, every rank raises.

        The rank's own error passes; the others get a :class:`CaptureError`. An interrupted rank waits for
        them two seconds. Nests, and tells a failure once.
        """
        self._depth += 1
        try:
            yield
            self._exchange(where, [], CaptureError)
        except BaseException as error:
            if not self._told:
                self._tell(where, error)
                self._told = True
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._told = False

    @contextlib.contextmanager
    def stage(self, where: str, cost: Cost | None = None) -> Iterator[None]:
        """Run one part of a capture; a :class:`CaptureError` of one rank is raised on all.

        ``failure`` then says whether memory ran out or the capture failed, the same on every rank. What
        *cost* holds after the body becomes the largest of any rank.
        """
        try:
            yield
        except CaptureError as error:
            if not self._told:
                self._settle(where, error, None)
            raise
        except BaseException as error:
            if not self._told:
                self._tell(where, error)
                self._told = True
            raise
        else:
            self._settle(where, None, cost)

    def handled(self) -> None:
        """All ranks have dealt with the failure in the same way; the capture goes on."""
        self._told = False
        self.failure = Outcome.DONE

    def _settle(self, where: str, error: CaptureError | None, cost: Cost | None) -> None:
        self.failure = own = Outcome.DONE
        if error is not None:
            own = Outcome.OUT_OF_MEMORY if guard.is_out_of_memory(error) else Outcome.FAILED
        known = None if cost is None else cost.bytes
        marks = self._marks(failed=error is not None)
        message = [own, int(known is None), known or 0, *marks]
        try:
            worst, unknown, most, *seen = self._exchange(where, message, CaptureError)[:5]
        except CaptureError as lost:
            if error is None:
                raise
            error.add_note(f"The other ranks were not told: {lost}")
            return
        if error is not None:
            self._name_others(error, seen)
        self.failure = Outcome(worst)
        self._told = bool(worst)
        if cost is not None:
            cost.bytes = None if unknown else most
        if worst and error is None:
            what = "ran out of memory" if worst == Outcome.OUT_OF_MEMORY else "failed"
            raise CaptureError(f"a peer rank {what} at {where}", hint="See the error of that rank")

    # Messages

    def _tell(self, where: str, error: BaseException) -> None:
        """Let every rank know of *error*; what goes wrong here is attached to it."""
        patience = None if isinstance(error, Exception) else _INTERRUPTED
        try:
            seen = self._reduce(self._message(where, [], failed=True), patience)[:2]
        except Exception as lost:  # noqa: BLE001 - must not hide the error that it tells of
            error.add_note(f"The other ranks may not have been told: {type(lost).__name__}: {lost}")
        else:
            self._name_others(error, seen)

    def _name_others(self, error: BaseException, seen: list[int]) -> None:
        others = {self.group.size() - seen[0], seen[1] - 1} - {self.rank}
        if others:
            error.add_note(f"Rank {min(others)} failed too, and may have been the first")

    def _exchange(self, where: str, values: list[int], kind: type[GraphplatError]) -> list[int]:
        try:
            first, _, place, other, *largest = self._reduce(self._message(where, values))
        except Exception as error:
            self._told = self._depth > 0
            raise kind(
                f"the ranks could not agree on {where}: {type(error).__name__}: {error}",
                hint="Another rank stopped or hangs, see its error. Its process groups must be made anew",
            ) from error
        if first:
            self._told = self._depth > 0
            raise kind(
                f"rank {self.group.size() - first} failed or refused at {where}",
                hint="See the error of that rank",
            )
        if place != -other:
            self._told = self._depth > 0
            raise kind(
                f"rank {self.rank} is at {where}, another rank elsewhere",
                hint="Call the same methods on all ranks",
            )
        return largest

    def _message(self, where: str, values: list[int], *, failed: bool = False) -> list[int]:
        place = zlib.crc32(where.encode())
        return [*self._marks(failed=failed), place, -place, *values, *[0] * (_VALUES - len(values))]

    def _marks(self, *, failed: bool) -> list[int]:
        """What gives, at their maximum, the first and the last rank that failed."""
        return [self.group.size() - self.rank, self.rank + 1] if failed else [0, 0]

    def _reduce(self, message: list[int], patience: datetime.timedelta | None = None) -> list[int]:
        if self.group.size() == 1:
            return message
        carrier = self._carrier = self._carrier or carrier_of(self.group)
        tensor = torch.tensor(message, dtype=torch.int64, device=device_of(carrier))
        work = torch.distributed.all_reduce(
            tensor, op=torch.distributed.ReduceOp.MAX, group=carrier, async_op=True
        )
        if patience is None:
            work.wait()
        else:
            work.wait(patience)
        return [int(value) for value in tensor.tolist()]


@attrs.define
class Cost:
    """What one captured shape takes, on the rank where it takes most."""

    bytes: int | None = None
    """``None`` where some rank cannot say."""
