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
    assert values.take() == {}
    values.start()
    values.cell(2, 1).fill_(6.0)  # of the next step already
    values.cell(0, 0).fill_(7.0)
    assert values.take() == {(2, 1): 5.0}
    assert values.take() == {}
    values.start()
    assert values.take() == {(2, 1): 6.0, (0, 0): 7.0}
    values.start()
    assert values.take() == {}


def test_grow_keeps_filled_cells() -> None:
    values = readback(1)
    values.cell(0, 0).fill_(1.0)
    values.grow(4)
    values.cell(3, 1).fill_(2.0)
    values.start()
    assert values.take() == {(0, 0): 1.0, (3, 1): 2.0}


def test_forgotten_cells_are_not_returned() -> None:
    values = readback()
    values.cell(0, 0).fill_(1.0)
    values.start()
    values.cell(1, 0).fill_(2.0)
    values.forget()
    assert values.take() == {}
    values.start()
    assert values.take() == {}
