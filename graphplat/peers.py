"""One decision for all ranks: collectives inside a graph need every rank on the same path."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import torch

from graphplat.errors import CaptureError
from graphplat.keys import ShapeKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Agreement(msgspec.Struct, frozen=True):
    """What the ranks agreed on for one step."""

    size: int
    """The largest size of any rank."""
    all_graph: bool
    """Whether every rank can replay a graph."""
    any_error: bool
    """Whether some rank refused its batch."""


@attrs.frozen(eq=False)
class PeerAgreement:
    """Agrees on sizes and paths through a ``torch.distributed`` group.

    Costs one small collective and a host read per step. A group with a CPU backend
    (gloo) keeps the device out of it.
    """

    group: ProcessGroup

    def agree(self, size: int, *, can_graph: bool, error: bool = False) -> Agreement:
        """Combine this rank's *size* and path with those of all ranks; idle ranks pass 0."""
        largest, cannot, failed = self._maximum([size, int(not can_graph), int(error)])
        return Agreement(largest, not cannot, bool(failed))

    def all_ok(self, ok: bool) -> bool:
        """Whether every rank reports success."""
        return not self._maximum([int(not ok)])[0]

    def same_plan(self, keys: Sequence[ShapeKey]) -> None:
        """Raise :class:`CaptureError` on every rank unless all are about to capture the same shapes."""
        encoded = msgspec.json.encode([msgspec.to_builtins(key) for key in keys])
        digest = int.from_bytes(hashlib.sha256(encoded).digest()[:7], "big")
        highest, lowest = self._maximum([digest, -digest])
        if highest != -lowest:
            raise CaptureError(
                "ranks would capture different shapes; "
                f"rank {torch.distributed.get_rank(self.group)} has {len(keys)}: "
                f"{', '.join(map(str, keys[:4]))} …",
                hint="Give every rank the same GraphConfig",
            )

    def _maximum(self, values: list[int]) -> list[int]:
        device = "cpu" if torch.distributed.get_backend(self.group) == "gloo" else None
        tensor = torch.tensor(values, dtype=torch.int64)
        if device is None:
            tensor = tensor.to(_group_device(self.group))
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return [int(value) for value in tensor.tolist()]


def _group_device(group: Any) -> torch.device:
    devices = getattr(group, "_device_types", [torch.device("cpu")])
    return torch.device(devices[0])
