"""Prints the report: sentences, lanes over time, a table. For a terminal, a pipe or a log, from 80 columns on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.text import Text

from zenflow_compile.checks.validate import printable
from zenflow_compile.profiling.content import rows_of, sentences_of
from zenflow_compile.profiling.diagnose import percent
from zenflow_compile.profiling.gantt import Cell, Gantt, draw, duration_label
from zenflow_compile.profiling.lanes import BLOCKS, DIGITS, MARKS, Mark
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize

_NARROWEST = 16  # columns of a wrapped text, however narrow the console


def render(recording: Recording, *, width: int = 80, blocks: bool = True, steps: int = 4) -> RenderableType:
    """Make the report as a rich renderable, ``width`` columns wide, with a picture of the last ``steps`` steps.

    It is plain ASCII without ``blocks``, for an output that cannot show block characters.
    """
    summary = summarize(recording)
    parts: list[RenderableType] = []
    if recording.title:
        parts.append(Text(printable(recording.title), style="bold"))
    parts.append(wrapped(sentences_of(recording, summary), width=width))
    gantt = draw(recording, width=width, steps=steps)
    if gantt is not None:
        parts += [Text(), picture(gantt, blocks=blocks)]
    parts += [Text(), table(rows_of(recording, summary), width=width)]
    return Group(*parts)


def wrapped(sentences: Iterable[str], *, width: int) -> Text:
    """Sentences, each on lines of its own, the first one bold."""
    text = Text(end="")
    for number, sentence in enumerate(sentences):
        lines = textwrap.fill(sentence, max(_NARROWEST, width), break_on_hyphens=False)
        text.append(f"{lines}\n", style="" if number else "bold")
    return text


def print_report(recordings: list[Recording], console: Console, *, steps: int = 4) -> None:
    """Print a report per recording."""
    blocks = can_show_blocks(console)
    for position, recording in enumerate(recordings or [Recording(events=())]):
        if position:
            console.print()
        report = render(recording, width=console.width, blocks=blocks, steps=steps)
        console.print(report, highlight=False, soft_wrap=False)


def console_of(given: Console | None, *, stderr: bool = False) -> Console:
    """``given``, or one on standard output or standard error.

    Raises:
        TypeError: it is no console.
    """
    if given is not None and not isinstance(given, Console):
        raise TypeError(
            f"console={given!r} must be a rich.console.Console, such as Console(file=sys.stderr), or None, which takes "
            f"standard {'error' if stderr else 'output'}"
        )
    return given or Console(stderr=stderr)


def can_show_blocks(console: Console) -> bool:
    """Whether every character of the picture can be written to ``console``."""
    try:
        "".join([BLOCKS, *(mark.block for mark in MARKS)]).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def picture(gantt: Gantt, *, blocks: bool) -> Text:
    """The lanes as text, with a ruler above and a legend below."""
    text = Text(f"{duration_label(gantt)}\n", style="", no_wrap=True, overflow="crop", end="")
    text.stylize("bold")
    text.append_text(lanes_text(gantt, blocks=blocks))
    text.append_text(legend(gantt.marks, blocks=blocks, width=gantt.label_width + gantt.slices))
    return text


def lanes_text(gantt: Gantt, *, blocks: bool, ruler: bool = True) -> Text:
    """A row per lane, with a ruler above."""
    text = Text(no_wrap=True, overflow="crop", end="")
    if ruler:
        text.append(" " * gantt.label_width + gantt.ruler.rstrip() + "\n", style="dim")
    for lane, cells in gantt.rows.items():
        text.append(lane.ljust(gantt.label_width))
        for style, same in groupby(cells, key=lambda cell: cell.mark.style):
            text.append("".join(character(cell, blocks) for cell in same), style=style)
        share = gantt.busy.get(lane)
        text.append("\n" if share is None else f"{' ' * (gantt.slices - len(cells))}{percent(share):>5}\n")
    return text


def legend(marks: Sequence[Mark], *, blocks: bool, width: int) -> Text:
    """``character meaning`` for each mark, wrapped into lines."""
    text = Text()
    column = 0
    for mark in marks:
        entry = f"{character(Cell(mark), blocks)} {mark.meaning}"
        if column and column + 3 + len(entry) > width:
            text.append("\n")
            column = 0
        if column:
            text.append("   ")
            column += 3
        text.append(character(Cell(mark), blocks), style=mark.style)
        text.append(entry[1:], style="dim")
        column += len(entry)
    text.append("\n")
    return text


def character(cell: Cell, blocks: bool) -> str:
    if cell.level is not None:
        return (BLOCKS if blocks else DIGITS)[cell.level - 1]
    return cell.mark.block if blocks else cell.mark.ascii


def table(rows: list[tuple[str, str]], *, width: int = 80) -> Text:
    """A name and a value per row, of narrow tables below the name. Wrapped here, so no line ends in blanks."""
    indent = max(len(name) for name, _ in rows) + 2
    narrow = width < 2.5 * indent
    if narrow:
        indent = 2
    text = Text(end="")
    for name, value in rows:
        text.append(f"{name}\n{' ' * indent}" if narrow and name else name.ljust(indent), style="dim")
        text.append(f"\n{' ' * indent}".join(textwrap.wrap(value, max(_NARROWEST, width - indent))) + "\n")
    return text
