"""Numbers that the device computes in one step and the host reads in a later one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import DeviceEvent

LAG = 2
"""Values of step t are read in step t + 2. They are on the host by then: the step before last has ended on the device
when a step begins (``step/run_ahead.py``)."""


@dataclass(eq=False, slots=True)
class Reading:
    """The cells that one step filled, on their way to the host."""

    _cells: list[tuple[int, int]]
    _host: Tensor
    _event: DeviceEvent | None
    _device: Device
    _recorder: Recorder

    def values(self) -> dict[tuple[int, int], float]:
        """The cells by (row, column); waits for a late copy. Until the second ``start`` after the one of this step."""
        if not self._cells:
            return {}
        if (event := self._event) is not None:
            with self._recorder.stall(not event.query(), param="", on_host=True):
                self._device.wait_for(event, "scheduling inputs")
            self._event = None
        rows = self._host.tolist()
        return {(row, column): rows[row][column] for row, column in self._cells}


class Readback:
    """A table of f32 numbers on the device, a row per parameter, copied to the host one time per step.

    Args:
        ranks: whose tables are added up first; all of them fill the same cells.
    """

    def __init__(self, columns: int, device: Device, recorder: Recorder, ranks: RankGroup | None = None) -> None:
        self._device = device
        self._recorder = recorder
        self._ranks = ranks
        self._table = torch.zeros((0, columns), dtype=torch.float32, device=device.torch_device)
        # In turns: at the end of a step, the copy of the step before may not have been read.
        self._hosts = [device.host_zeros((0, columns), torch.float32) for _ in range(LAG)]
        self._cells: dict[tuple[int, int], Tensor] = {}  # views: making one costs as much as an operator
        self._filled: list[tuple[int, int]] = []

    def grow(self, rows: int) -> None:
        """Have at least ``rows`` rows; filled cells stay, and so do readings."""
        if (missing := rows - len(self._table)) > 0:
            self._cells.clear()
            self._table = torch.cat([self._table, self._table.new_zeros((missing, self._table.shape[1]))])
            self._hosts = [self._device.host_zeros(self._table.shape, torch.float32) for _ in range(LAG)]

    def cell(self, row: int, column: int) -> Tensor:
        """The 0-d cell on the device that the caller fills in this step."""
        self._filled.append((row, column))
        if (cell := self._cells.get((row, column))) is None:
            cell = self._cells[row, column] = self._table[row, column]
        return cell

    def start(self) -> Reading:
        """Start the copy of this step's cells to the host. All readings but the last one must have been taken."""
        host, event = self._hosts[0], None
        if self._filled:
            self._hosts = [*self._hosts[1:], host]
            # On the current stream, as are the writes of cells: a cell is filled again only after this copy read it.
            table = self._table
            if self._ranks is not None:
                table = self._ranks.all_reduce(table.clone()).wait("scheduling inputs")
            host.copy_(table, non_blocking=True)
            if (streams := self._device.streams) is not None:
                event = streams.event()
                event.record(streams.current())
        reading = Reading(self._filled, host, event, self._device, self._recorder)
        self._filled = []
        return reading

    def forget(self) -> None:
        """Drop filled cells."""
        self._filled = []

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""
        found.content(self._table)
