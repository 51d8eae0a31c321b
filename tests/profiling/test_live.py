"""``zf.live()``: a profile that is shown while it records."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import zenflow_compile as zf
from tests.support.training import take_step

STATUS = re.compile(
    r"zenflow: step \d+: mean [\d.]+ ms, stall [\d<]+%, (host update [\d<>]+% hidden, )?host state [\d.]+ kB\n"
)


class TerminalFile(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Loop:
    """A model that trains: ``take`` takes a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        self.optimizer = zf.ZenFlowAdamW(model.named_parameters(), update_interval=2, full_warm_up_rounds=0)
        self._compiled = torch.compile(model, backend="zenflow", options={"inner": "eager"})

    def take(self) -> None:
        take_step(self._compiled(torch.ones(8, 64)).square().mean(), self.optimizer)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    with made.optimizer:
        yield made


def test_shows_lanes_on_a_terminal(loop: Loop) -> None:
    file = TerminalFile()
    with zf.live(loop.optimizer, console=Console(file=file, width=100, height=24, force_terminal=True)):
        end = time.monotonic() + 10
        while "workers" not in file.getvalue() and time.monotonic() < end:
            loop.take()
    shown = file.getvalue().split("\x1b7")[1].split("\x1b8")[0]  # what is written while the cursor is kept
    lines = [re.sub(r"\x1b\[[\d;]*[mK]", "", line) for line in shown.split("\r\n")[1:]]
    assert [line.split()[0] for line in lines] == ["step", "compute", "copies", "workers"]
    assert max(map(len, lines)) < 100
    assert STATUS.fullmatch(file.getvalue().rpartition("\x1b8")[2])


def test_the_last_line_is_its_own(loop: Loop) -> None:
    terminal = TerminalFile()
    console = Console(stderr=True, width=30, height=24, force_terminal=True)
    with redirect_stderr(terminal), zf.live(loop.optimizer, console=console):
        loop.take()
        print("1 of 9", end="\r", file=sys.stderr)
    begun, *lines = terminal.getvalue().splitlines()
    assert begun.strip() == "1 of 9"
    assert max(map(len, lines)) <= 30
    assert STATUS.fullmatch(" ".join(" ".join(lines).split()) + "\n")


def test_lines_where_the_output_is_no_terminal(loop: Loop) -> None:
    file = io.StringIO()
    with zf.live(loop.optimizer, console=Console(file=file, width=40)) as profile:
        for _ in range(4):
            loop.take()
    assert STATUS.fullmatch(file.getvalue())
    assert profile.summary()["steps"] == 4


def test_a_quiet_console_shows_nothing(loop: Loop) -> None:
    file = io.StringIO()
    with zf.live(loop.optimizer, console=Console(file=file, quiet=True)) as profile:
        loop.take()
        assert "zenflow-live" not in {thread.name for thread in threading.enumerate()}
    assert file.getvalue() == ""
    assert profile.summary()["steps"] == 1


def test_ends_with_the_block_and_its_error(loop: Loop) -> None:
    file = io.StringIO()
    with pytest.raises(KeyError), zf.live(loop.optimizer, console=Console(file=file)):
        raise KeyError
    assert "zenflow-live" not in {thread.name for thread in threading.enumerate()}
    assert file.getvalue() == ""  # no step
    loop.take()


def test_a_failed_drawing_is_one_line(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(TerminalFile):
        def write(self, text: str) -> int:
            if "\x1bD" in text:  # room for the lines
                raise RuntimeError("no room")
            return super().write(text)

    file = Full()
    with zf.live(loop.optimizer, console=Console(file=file, width=100, height=24, force_terminal=True)) as profile:
        end = time.monotonic() + 10
        while not file.getvalue() and time.monotonic() < end:
            loop.take()
    said = file.getvalue().rpartition("\x1b8")[2].splitlines()
    assert said[0] == "zenflow: the live view ended, the profile goes on: RuntimeError: no room"
    assert STATUS.fullmatch(f"{said[1]}\n")
    assert capsys.readouterr() == ("", "")
    assert profile.summary()["steps"] > 0


def test_closed_streams_are_left_alone(loop: Loop) -> None:
    file = TerminalFile()
    with zf.live(loop.optimizer, console=Console(file=file, width=80, height=24, force_terminal=True)) as profile:
        loop.take()
        file.close()
    assert profile.summary()["steps"] == 1


def test_a_failed_entry_detaches(loop: Loop) -> None:
    class Closed(io.StringIO):
        def isatty(self) -> bool:
            raise ValueError("closed")

    before = loop.optimizer.engine.timeline
    with redirect_stdout(Closed()), pytest.raises(ValueError, match="closed"):
        zf.live(loop.optimizer, console=Console(force_terminal=True, width=80, height=24, stderr=True)).__enter__()
    assert loop.optimizer.engine.timeline is before


@pytest.mark.parametrize("wrong", ["x", io.StringIO()])
def test_refuses_what_is_no_console(wrong: Any) -> None:
    for call in (lambda: zf.live(console=wrong), lambda: zf.profile().report(wrong)):
        with pytest.raises(TypeError, match=r"console=.* must be a rich.console.Console, such as"):
            call()


def test_refuses_what_a_profile_refuses() -> None:
    with pytest.raises(TypeError, match="ZenFlowAdamW"):
        zf.live(nn.Linear(1, 1))
