"""Numbers that the device computes in one step and the host reads in the next."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline.events import DeviceEvent


class Readback:
    """A table of f32 numbers on the device, a row per parameter, copied to the host one time per step.

    Cells are filled in step t; the table is copied at the end of that step and read in step t + 1. The lag is fixed, so
    that decisions depend on the data alone: ``take`` waits for a late copy.
    """

    def __init__(self, columns: int, device: Device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._table = torch.zeros((0, columns), dtype=torch.float32, device=device.torch_device)
        self._host = device.host_zeros((0, columns), torch.float32)
        self._cells: dict[tuple[int, int], Tensor] = {}  # views: making one costs as much as an operator
        self._filled: list[tuple[int, int]] = []
        self._copied: list[tuple[int, int]] = []
        self._event: DeviceEvent | None = None

    def grow(self, rows: int) -> None:
        """Have at least ``rows`` rows; filled cells stay. No copy may be in flight: call ``take`` before."""
        if (missing := rows - len(self._table)) > 0:
            self._cells.clear()
            self._table = torch.cat([self._table, self._table.new_zeros((missing, self._table.shape[1]))])
            self._host = self._device.host_zeros(self._table.shape, torch.float32)

    def cell(self, row: int, column: int) -> Tensor:
        """The 0-d cell on the device that the caller fills in this step."""
        self._filled.append((row, column))
        if (cell := self._cells.get((row, column))) is None:
            cell = self._cells[row, column] = self._table[row, column]
        return cell

    def start(self) -> None:
        """Start the copy of this step's cells to the host. The cells of the last copy must have been taken."""
        assert not self._copied
        if not self._filled:
            return
        # On the current stream, as are the writes of cells: a cell is filled again only after this copy has read it.
        self._host.copy_(self._table, non_blocking=True)
        if (streams := self._device.streams) is not None:
            self._event = streams.event()
            self._event.record(streams.current())
        self._copied, self._filled = self._filled, []

    @property
    def pending(self) -> bool:
        """Whether there are values to take."""
        return bool(self._copied)

    def take(self) -> dict[tuple[int, int], float]:
        """The cells of the last copy by (row, column), a single time; waits for a late copy."""
        if not self._copied:
            return {}
        if (event := self._event) is not None:
            late = not event.query()
            with self._recorder.stall(late, param="", on_host=True):
                if late:
                    event.synchronize()
            self._event = None
        copied, self._copied = self._copied, []
        rows = self._host.tolist()
        return {(row, column): rows[row][column] for row, column in copied}

    def forget(self) -> None:
        """Drop filled cells, and those in flight."""
        self.take()
        self._filled = []
