"""Lines below the cursor, read from a small terminal, while programs print and redraw bars."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from zenflow_compile.profiling.status_area import StatusArea

AREA = ["~ one", "~ two"]


class Terminal(io.StringIO):
    """A terminal of ``rows`` lines, with the few codes that rich, tqdm and the area write."""

    _CODE = re.compile(r"\x1b(?:\[(\??[\d;]*)([A-Za-z])|([D78]))|([\r\n])|([^\x1b\r\n]+)")

    def __init__(self, rows: int = 12) -> None:
        super().__init__()
        self.lines = [""] * rows
        self.row = self.column = 0
        self._saved = (0, 0)
        self.written = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        self.written += len(text)
        for count, code, single, control, plain in self._CODE.findall(text):
            times = int(count or 1) if count.isdigit() or not count else 0
            if plain:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + len(plain) :]
                self.column += len(plain)
            elif control == "\r":
                self.column = 0
            elif control == "\n" or single == "D":
                self.column = 0 if control else self.column
                if self.row + 1 == len(self.lines):
                    self.lines = [*self.lines[1:], ""]
                else:
                    self.row += 1
            elif single == "7":
                self._saved = (self.row, self.column)
            elif single == "8":
                self.row, self.column = self._saved
            elif code in ("A", "B"):
                self.row = min(max(0, self.row + (times if code == "B" else -times)), len(self.lines) - 1)
            elif code == "J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                self.lines[self.row + 1 :] = [""] * (len(self.lines) - self.row - 1)
            elif code == "K":
                self.lines[self.row] = "" if count == "2" else self.lines[self.row][: self.column]
            else:
                assert code in "mhl", (count, code)
        return len(text)

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    """A terminal as standard output and standard error."""
    made = Terminal()
    with redirect_stdout(made), redirect_stderr(made):
        yield made


@contextmanager
def with_area() -> Iterator[tuple[Terminal, StatusArea]]:
    with on_terminal() as terminal, StatusArea(terminal) as area:
        area.show(AREA)
        yield terminal, area


def test_printed_lines_stay_above() -> None:
    with with_area() as (terminal, area):
        for number in range(3):
            print("line", number)
            area.show(AREA)
        assert terminal.shown == ["line 0", "line 1", "line 2", *AREA]
        area.show(["~ changed"])
        assert terminal.shown == ["line 0", "line 1", "line 2", "~ changed"]


def test_scrolls_at_the_bottom() -> None:
    with with_area() as (terminal, area):
        for number in range(30):
            print("line", number)
            area.show(AREA)
        assert terminal.shown[-3:] == ["line 29", *AREA]
        assert terminal.shown[:-2] == [f"line {number}" for number in range(30 - len(terminal.shown) + 2, 30)]


def test_unfinished_lines_go_on() -> None:
    with with_area() as (terminal, area):
        for _ in range(3):
            print(".", end="", flush=True)
            area.show(AREA)
        print()
        area.show(AREA)
        assert terminal.shown == ["...", *AREA]


def test_lines_are_there_after_each_write() -> None:
    with on_terminal() as terminal, StatusArea(terminal) as area:
        area.show(AREA)
        print("line")
        assert terminal.shown == ["line", *AREA]
        for number in range(1000):  # in quick succession: most of them do not pay for the lines
            print(number)
        assert terminal.written < 20_000
        area.show(AREA)
        assert terminal.shown[-3:] == ["999", *AREA]


def test_a_line_before_a_carriage_return_stays() -> None:
    with with_area() as (terminal, area):
        for number in range(3):
            print(f"{number} of 3", end="\r", flush=True)
            area.show(AREA)
            assert terminal.shown == [f"{number} of 3", *AREA]


def test_tqdm_keeps_its_line() -> None:
    with with_area() as (terminal, area):
        for number in tqdm(range(4), file=sys.stderr, mininterval=0, ncols=60):
            area.show(AREA)
            assert sum("|" in line for line in terminal.shown) == 1, number
            assert terminal.shown[-2:] == AREA
        assert sum("4/4" in line for line in terminal.shown) == 1


@pytest.mark.parametrize("started", ["before", "after"])
def test_rich_progress_keeps_its_lines(started: str) -> None:
    with on_terminal() as terminal:
        progress = Progress(console=Console(width=60, force_terminal=True), auto_refresh=False)
        first, second = progress, StatusArea(terminal)
        if started == "after":
            first, second = second, first  # type: ignore[assignment]
        with first, second:
            area = first if isinstance(first, StatusArea) else second
            task = progress.add_task("training", total=3)
            for number in range(3):
                progress.advance(task)
                progress.refresh()
                progress.console.print("a line above")
                assert not number or terminal.shown[-2:] == AREA
                area.show(AREA)  # type: ignore[attr-defined]
                assert sum("training" in line for line in terminal.shown) == 1
                assert terminal.shown[-2:] == AREA
        assert terminal.shown.count("a line above") == 3
        assert not [line for line in terminal.shown if line.startswith("~")]


def test_logs_stay_above() -> None:
    with on_terminal() as terminal:
        logger, handler = logging.getLogger("tests.status_area"), logging.StreamHandler(sys.stderr)
        logger.addHandler(handler)
        with StatusArea(terminal) as area:
            for number in range(3):
                area.show(AREA)
                logger.warning("log %d", number)
            assert terminal.shown == ["log 0", "log 1", "log 2", *AREA]
        assert handler.stream is terminal
        logger.removeHandler(handler)


def test_areas_end_in_any_order() -> None:
    with on_terminal() as terminal:
        first, second = StatusArea(terminal), StatusArea(terminal)
        made_before = logging.StreamHandler(sys.stderr)
        logging.getLogger("tests.status_area").addHandler(made_before)
        first.__enter__()
        second.__enter__()
        made_inside = logging.StreamHandler(sys.stderr)
        logging.getLogger("tests.status_area").addHandler(made_inside)
        first.__exit__(None, None, None)
        second.show(AREA)
        print("a line")
        assert terminal.shown == ["a line", *AREA]
        second.__exit__(None, None, None)
        assert (sys.stdout, sys.stderr) == (terminal, terminal)
        for handler in (made_before, made_inside):
            assert handler.stream is terminal
            logging.getLogger("tests.status_area").removeHandler(handler)


def test_streams_that_the_program_closes() -> None:
    logger = logging.getLogger("tests.status_area")
    with on_terminal() as terminal:
        with StatusArea(terminal) as area:
            area.show(AREA)
            logger.addHandler(handler := logging.StreamHandler(sys.stderr))
            sys.stderr.close()
            area.show(AREA)
            with pytest.raises(ValueError, match="closed file"):
                print("a line", file=sys.stderr)
        assert sys.stderr is terminal
        with StatusArea(terminal):
            assert sys.stderr is terminal
        logger.removeHandler(handler)


def test_child_processes_leave_nothing_of_the_lines() -> None:
    with with_area() as (terminal, _):
        print("parent")
        if not (child := os.fork()):
            try:
                print("child")  # on a terminal of its own, which is a copy
                os._exit(0 if terminal.shown == ["parent", "child"] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("written", "is_open"),
    [
        (["line\n"], False), (["."], True), (["a", " "], True), (["1 of 3", "\r"], True),
        (["1 of 3", "\r      "], False), (["\r", "bar", "\n", "\x1b[A"], False),
        (["line\nand"], True), ([".", "\x1b[?25h"], True), (["\n"], False),
    ],
)  # fmt: skip
def test_knows_whether_the_line_is_open(written: list[str], is_open: bool) -> None:
    with on_terminal() as terminal, StatusArea(terminal) as area:
        for text in written:
            sys.stdout.write(text)
        assert area.line_is_open is is_open


def test_ends_without_a_trace() -> None:
    with on_terminal() as terminal:
        with StatusArea(terminal) as area:
            area.show(AREA)
            kept = sys.stdout
            assert kept is not terminal
        assert sys.stdout is terminal
        assert terminal.shown == []
        print("after", file=kept)  # as a handler that holds the stream does
        assert terminal.shown == ["after"]


def test_files_are_left_alone() -> None:
    with on_terminal() as terminal:
        file = io.StringIO()
        with redirect_stdout(file), StatusArea(terminal) as area:
            area.show(AREA)
            print("a line")
            assert sys.stdout is file
        assert file.getvalue() == "a line\n"
