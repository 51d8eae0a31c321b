"""Lines of a terminal below the cursor, which stay there while the program prints.

The cursor remains where the program left it, also in the middle of a line. Everything that the program writes first
erases what is below the cursor, and then the lines are written again below its new place. So progress bars, which go
back to the beginning of a line or up some lines, find what they wrote.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, Any, Self

# From the next line on, so that what a program wrote before a carriage return stays.
_ERASE_BELOW = "\x1b7\x1b[B\r\x1b[J\x1b8"
_ERASE_AFTER = "\x1b[J"  # from the cursor on: in a child process, which does not know in which row it is
_CODES = re.compile(r"\x1b(?:\[[\d;?]*[A-Za-z]|[78DM])")
_ERASED = re.compile(r"\r +\r?\Z")  # a progress bar that went away
_PER_SECOND = 40.0  # a program that writes more often has the lines erased until ``show``


class StatusArea:
    """Lines below the cursor of a terminal; inside the block, ``sys.stdout`` and ``sys.stderr`` keep them there.

    Attributes:
        line_is_open: the program's last line has text, and no end yet.
    """

    def __init__(self, terminal: IO[str]) -> None:
        self._terminal = terminal
        self._text = ""
        self._left, self._written_at = _PER_SECOND, 0.0  # how often the lines may be written again at once
        self._open = self._shown = False
        self._lock = threading.RLock()  # a handler of a signal may print while its thread prints
        self._process = os.getpid()
        self.line_is_open = False

    def __enter__(self) -> Self:
        self._open = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and not is_closed(stream) and stream.isatty():
                passing = _Stream(stream, self)
                for handler in _stream_handlers():
                    if handler.stream is stream:
                        handler.setStream(passing)
                setattr(sys, name, passing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the lines and give the streams back. A stream that something else keeps passes on what is written."""
        with self._lock:
            self._open = False
            self._redraw()
        for handler in _stream_handlers():
            if not is_closed(handler.stream):  # ``setStream`` flushes
                handler.setStream(_without(handler.stream, self))
        for name in ("stdout", "stderr"):
            setattr(sys, name, _without(getattr(sys, name), self))

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines, each of which must fit the terminal; none erases them."""
        down = len(lines)
        # IND makes room below without leaving the column; nothing scrolls between saving and restoring the cursor.
        room = "\x1bD" * down + f"\x1b[{down}A\x1b7"
        with self._lock:
            self._text = room + "".join(f"\r\n\x1b[2K{line}" for line in lines) + "\x1b8" if lines else ""
            self._left = max(1.0, self._left)
            self._redraw()

    def _redraw(self) -> None:
        if not is_closed(self._terminal):
            self._write(self._terminal, "")

    def pass_on(self, stream: IO[str], text: str) -> int:
        """Write what the program writes."""
        if os.getpid() != self._process:
            # A fork: a thread that is not there may have the lock, and the lines are the other process's.
            return stream.write(_ERASE_AFTER + text) - len(_ERASE_AFTER)
        with self._lock:
            self._note_end(text)
            if not self._open or not self._text:
                return stream.write(text)
            self._write(stream, text)
            return len(text)

    def _note_end(self, text: str) -> None:
        _, ends_line, rest = _CODES.sub("", text).rpartition("\n")
        if _ERASED.search(rest):
            self.line_is_open = False
        elif rest.strip():
            self.line_is_open = True
        elif ends_line:
            self.line_is_open = False

    def _write(self, stream: IO[str], text: str) -> None:
        # In one call, so that nothing flickers.
        now = time.monotonic()
        self._left = min(_PER_SECOND, self._left + (now - self._written_at) * _PER_SECOND)
        self._written_at = now
        above = _ERASE_BELOW if self._shown else ""
        self._shown = self._open and bool(self._text) and self._left >= 1.0
        if self._shown:
            self._left -= 1.0
        stream.write(above + text + (self._text if self._shown else ""))
        stream.flush()


def is_closed(stream: object) -> bool:
    """Return whether the program has closed ``stream``; one that only writes cannot be closed."""
    return bool(getattr(stream, "closed", False))


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Handlers of logs that were made with a stream, and write to it whatever ``sys`` has."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and "stream" in vars(each)]


def _without(stream: Any, area: StatusArea) -> Any:
    """``stream`` without the stand-in of ``area``, which may be that of another area's stand-in."""
    if not isinstance(stream, _Stream):
        return stream
    if stream.area is area:
        return stream.passed_to
    stream.passed_to = _without(stream.passed_to, area)
    return stream


class _Stream:
    """A stream of the program; all but ``write`` is that of the stream itself."""

    def __init__(self, passed_to: IO[str], area: StatusArea) -> None:
        self.passed_to = passed_to
        self.area = area

    def write(self, text: str) -> int:
        return self.area.pass_on(self.passed_to, text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.passed_to, name)
        # Displays of rich write to the stream that their own stand-in for ``sys.stdout`` names.
        return _Stream(found, self.area) if name == "rich_proxied_file" else found
