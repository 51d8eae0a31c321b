"""Small numbers on their way from the device to the host, read one step after they were computed."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_compile.runtime.recorder import Recorder


class Readback:
    """A table of f32 numbers, a row per parameter, that crosses to the host with one copy per step.

    Cells are filled on the device in step t; the table is copied at the end of that step and read in step t + 1. The
    lag is fixed, so that decisions are a function of the data: whoever reads waits if the copy is late, and the copy is
    late where the device has not finished the step when the host reads.

    Table, copy and the next step's cells are on the device's current stream: a cell is filled again only after the copy
    that reads it. The host's side is pinned, or the copy would block, and is written again only after ``take``.
    """

    def __init__(self, columns: int, device: torch.device, recorder: Recorder) -> None:
        self._recorder = recorder
        self._table = torch.zeros((0, columns), dtype=torch.float32, device=device)
        self._host = self._host_like(self._table)
        self._filled: list[tuple[int, int]] = []
        self._copied: list[tuple[int, int]] = []
        self._event: torch.cuda.Event | None = None

    def make_room(self, rows: int) -> None:
        """Have at least ``rows`` rows; what is in the table stays. Nothing may be on its way (``take`` came before)."""
        if (missing := rows - len(self._table)) > 0:
            self._table = torch.cat([self._table, self._table.new_zeros((missing, self._table.shape[1]))])
            self._host = self._host_like(self._table)

    def cell(self, row: int, column: int) -> Tensor:
        """The 0-d cell that is to be filled now, on the device."""
        self._filled.append((row, column))
        return self._table[row, column]

    def start(self) -> None:
        """The step is over: what was filled in it sets off. What set off before must have been taken."""
        assert not self._copied
        if not self._filled:
            return
        self._host.copy_(self._table, non_blocking=True)
        if self._table.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._table.device))
        self._copied, self._filled = self._filled, []

    def take(self) -> dict[tuple[int, int], float]:
        """What set off last, by (row, column), and only once; waits for it if it is late."""
        if not self._copied:
            return {}
        if (event := self._event) is not None:
            late = not event.query()  # type: ignore[no-untyped-call]
            with self._recorder.stall(late, param="", on_host=True):
                if late:
                    event.synchronize()
            self._event = None
        copied, self._copied = self._copied, []
        rows = self._host.tolist()
        return {(row, column): rows[row][column] for row, column in copied}

    def forget(self) -> None:
        """Drop what was filled or is on its way."""
        self.take()
        self._filled = []

    @staticmethod
    def _host_like(table: Tensor) -> Tensor:
        return torch.zeros(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
