"""The group that carries agreements between ranks, beside the one that the forward uses."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def carrier_of(group: ProcessGroup) -> ProcessGroup:
    """A gloo group of the same ranks, or *group* itself where torch knows none for it.

    A message waits for twice the timeout of *group* and 5 seconds, since a peer may come late from a
    collective that timed out; the first one, which finds the peers through torch's store, a moment longer.
    Where *group* itself carries messages, they wait as long as it does; where torch does not tell its
    timeout, torch's default of 30 minutes stands for it.
    """
    distributed = torch.distributed
    try:
        ranks = distributed.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return group
    if not distributed.is_gloo_available():
        return group
    made: Any = distributed.new_group(
        ranks,
        timeout=2 * _timeout(group) + datetime.timedelta(seconds=5),
        backend="gloo",
        use_local_synchronization=True,
    )
    return made  # type: ignore[no-any-return]


def _timeout(group: Any) -> datetime.timedelta:
    # torch has no public way to read a group's timeout.
    fallback = torch.distributed.distributed_c10d.default_pg_timeout
    for device in getattr(group, "_device_types", ()):
        found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(found, datetime.timedelta):
            return found
    return fallback


def device_of(group: Any) -> torch.device:
    """Where tensors lie that *group* works on: the host, if it can."""
    if torch.distributed.get_backend(group) == "gloo":
        return torch.device("cpu")
    devices = getattr(group, "_device_types", None) or [torch.device("cpu")]
    return torch.device(devices[0])
