"""Cells cross once, at the end of their step, and nothing of another step comes with them."""

from __future__ import annotations

import torch

from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.readback import Readback
from zenflow_compile.runtime.recorder import Recorder

CPU = torch.device("cpu")


def readback(rows: int = 3) -> Readback:
    made = Readback(2, device_of(CPU), Recorder())
    made.grow(rows)
    return made


def test_cells_are_copied_once_at_step_end() -> None:
    values = readback()
    values.cell(2, 1).fill_(5.0)
    first = values.start()
    values.cell(2, 1).fill_(6.0)  # of the next step already
    values.cell(0, 0).fill_(7.0)
    second = values.start()
    assert first.values() == {(2, 1): 5.0}
    assert second.values() == {(2, 1): 6.0, (0, 0): 7.0}
    assert values.start().values() == {}


def test_steps_without_cells_overwrite_no_reading() -> None:
    values = readback()
    values.cell(0, 0).fill_(1.0)
    first = values.start()
    values.start()
    values.cell(0, 0).fill_(2.0)
    second = values.start()
    assert (first.values(), second.values()) == ({(0, 0): 1.0}, {(0, 0): 2.0})


def test_grow_keeps_filled_cells_and_readings() -> None:
    values = readback(1)
    values.cell(0, 0).fill_(1.0)
    reading = values.start()
    values.cell(0, 0).fill_(3.0)
    values.grow(4)
    values.cell(3, 1).fill_(2.0)
    assert values.start().values() == {(0, 0): 3.0, (3, 1): 2.0}
    assert reading.values() == {(0, 0): 1.0}


def test_forgotten_cells_are_not_returned() -> None:
    values = readback()
    values.cell(1, 0).fill_(2.0)
    values.forget()
    assert values.start().values() == {}
