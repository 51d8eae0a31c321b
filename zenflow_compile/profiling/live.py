"""``live()``: what the last steps did, in four lines of a terminal, while the program trains."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from types import TracebackType

from rich.console import Console
from rich.text import Text

from zenflow_compile.checks.validate import printable
from zenflow_compile.profiling.content import size_text
from zenflow_compile.profiling.diagnose import hidden_text, milliseconds, percent
from zenflow_compile.profiling.gantt import draw
from zenflow_compile.profiling.profiler import Profile
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.report import can_show_blocks, console_of, lanes_text
from zenflow_compile.profiling.status_area import StatusArea, is_closed
from zenflow_compile.profiling.summary import Summary, summarize
from zenflow_compile.timeline import STEP

_STEPS = 4
_LINES = 4
_OFTEN_S = 1.0  # between two pictures on a terminal
_SELDOM_S = 30.0  # between two lines where the output is no terminal
_SHARE = 200  # times as long as drawing takes, at least, until the next picture: half a percent of the time


class Live:
    """Records like a profile, and shows the last steps meanwhile; made by ``live``."""

    def __init__(self, profile: Profile, console: Console) -> None:
        self._profile = profile
        self._console = console
        self._ended = threading.Event()
        self._area: StatusArea | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Profile:
        with ExitStack() as entered:
            profile = entered.enter_context(self._profile)
            if not self._console.quiet:
                fits = self._console.height > 2 * _LINES and not self._console.is_dumb_terminal
                if self._console.is_terminal and fits:
                    self._area = entered.enter_context(StatusArea(self._console.file))
                thread = threading.Thread(target=self._show, name="zenflow-live", daemon=True)
                thread.start()
                entered.callback(thread.join)
                entered.callback(self._ended.set)
            self._exit = entered.pop_all()  # nothing failed: the block ends it
        return profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the profile, as ``Profile`` does; the last numbers stay as one line."""
        self._exit.__exit__(kind, error, trace)
        if not self._console.quiet and (last := self._profile.newest(_STEPS)) is not None:
            self._print(last)

    def _show(self) -> None:
        try:
            self._draw()
        except Exception as error:  # a thread that ended by it would write a traceback into the program's output
            if self._area is not None:
                self._area.show([])
            self._say(f"the live view ended, the profile goes on: {printable(f'{type(error).__name__}: {error}')}")

    def _draw(self) -> None:
        pause = _SELDOM_S if self._area is None else _OFTEN_S
        while not self._ended.wait(pause):
            began = time.thread_time()  # without waits for the GIL and for a core
            if (last := self._profile.newest(_STEPS)) is None:
                continue
            if self._area is None:
                self._print(last)
            else:
                self._area.show(self._lines(last))
                pause = max(_OFTEN_S, _SHARE * (time.thread_time() - began))

    def _print(self, last: Recording) -> None:
        self._say(status(last, summarize(last, warm_up=0)))

    def _say(self, text: str) -> None:
        if is_closed(self._console.file):
            return  # the program has closed it
        begin = "\n" if self._area is not None and self._area.line_is_open else ""
        with suppress(OSError):  # its reader is gone, and training does not end for that
            # One line in a log; a terminal would break it inside of words.
            wraps = self._console.is_terminal
            self._console.print(Text(f"{begin}zenflow: {text}"), highlight=False, soft_wrap=not wraps)

    def _lines(self, last: Recording) -> list[str]:
        blocks, width = can_show_blocks(self._console), self._console.width - 1
        text = Text(no_wrap=True)
        text.append(status(last, summarize(last, warm_up=0)))
        text.truncate(width, overflow="ellipsis" if blocks else "crop")
        if (gantt := draw(last, width=width, steps=_STEPS, compact=True)) is not None:
            text.append("\n")
            text.append_text(lanes_text(gantt, blocks=blocks, ruler=False))
        with self._console.capture() as capture:
            self._console.print(text, highlight=False, end="")
        return capture.get().rstrip("\n").split("\n")


def live(
    *optimizers: object,
    console: Console | None = None,
    max_events: int = 100_000,
    flops_per_step: float | None = None,
) -> Live:
    """Record inside the ``with`` block as ``profile`` does, and show the last steps in four lines of the terminal.

    The lines are the numbers of the last four steps (mean time, stall, share of the host update that is hidden,
    memory), and three lanes: compute, copies in both directions, and the host's workers. A thread draws them below what
    the program prints, once a second or, if drawing takes long, less often. Programs go on to print, also progress
    bars, through ``sys.stdout`` and ``sys.stderr``. Where the output is not a terminal, a line with the numbers comes
    every 30 seconds. One such line ends the block in any case. An error of the drawing ends the view, not the profile,
    and is a line, too.

    Args:
        optimizers: see ``profile``.
        console: where to show it; standard error by default. A quiet one shows nothing.
        max_events, flops_per_step: see ``profile``.

    Returns:
        A context manager whose value is the profile: its ``report()`` and ``summary()`` are there after the block, too.

    Raises:
        TypeError, ValueError: see ``profile``; ``console`` is no console of rich.
    """
    shown_on = console_of(console, stderr=True)
    return Live(Profile(*optimizers, max_events=max_events, flops_per_step=flops_per_step), shown_on)


def status(last: Recording, summary: Summary) -> str:
    """The numbers of the last steps, on one line."""
    step = max(event.step for event in last.events if event.lane == STEP)
    parts = [f"step {step}: mean {milliseconds(summary['step_ms'] or 0.0)}"]
    parts.append(f"stall {percent(summary['stall_share'] or 0.0)}")
    if (hidden := hidden_text(summary)) is not None:
        parts.append(f"host update {hidden}")
    if phases := summary["device_bytes_by_phase"]:
        parts.append(f"device memory {size_text(max(phases.values()))}")
    elif last.host_bytes:
        parts.append(f"host state {size_text(last.host_bytes)}")
    return ", ".join(parts)
