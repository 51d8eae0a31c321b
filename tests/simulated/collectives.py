"""Collectives of the simulated accelerator: the group's stream is as late as any other one."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from tests.simulated import device_module
from tests.simulated.simulator import load_simulator
from tests.simulated.streams import Stream
from tests.support.stream_collectives import StreamGroup
from zenflow_compile.runtime.device.devices import device_of

BACKEND = "simulated"
_STREAMS: list[Stream] = []


def streams_of_groups() -> list[Stream]:
    """The streams of all groups, in the order in which they were made."""
    return list(_STREAMS)


class SimulatedGroup(StreamGroup):
    """Its flags are no part of what the package queues."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(BACKEND, device_of(load_simulator().device), store, rank, size, timeout)
        _STREAMS.append(self.stream)

    def write_value(self, address: int, value: int) -> None:
        load_simulator().write_value(self.stream, address, value, inside=True)

    def wait_value(self, address: int, value: int) -> None:
        load_simulator().wait_value(self.stream, address, value, inside=True)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout)


@cache
def group_of_all() -> dist.ProcessGroup:
    """All ranks, with collectives for tensors of the simulated device."""
    dist.Backend.register_backend(BACKEND, _make, devices=[device_module.NAME])
    group: dist.ProcessGroup = dist.new_group(backend=BACKEND)
    return group
