"""Prints the report: sentences, lanes over time, a table. For a terminal, a pipe or a log, from 80 columns on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zenflow_compile.checks.validate import printable
from zenflow_compile.profiling.content import NOT_MEASURED, ms_text, rows_of, sentences_of
from zenflow_compile.profiling.diagnose import milliseconds, percent
from zenflow_compile.profiling.gantt import Cell, Gantt, draw, duration_label
from zenflow_compile.profiling.lanes import BLOCKS, DIGITS, MARKS, Mark
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import Summary, summarize

_EVEN = 0.05  # spread of ranks over the mean below which none is late
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


def print_ranks(summaries: Sequence[Summary], console: Console) -> None:
    """Print a table with a row per rank, and one sentence; ``summaries`` are in the order of the ranks."""
    table = Table(title="Ranks, per step", title_justify="left", box=None)
    table.add_column("rank", justify="right")
    for column in ("step", "own work", "waits for ranks", "host update", "D2H MB", "H2D MB", "sent MB"):
        table.add_column(column, justify="right")
    for rank, summary in enumerate(summaries):
        moved = (summary["d2h_bytes_per_step"], summary["h2d_bytes_per_step"], summary["sent_bytes_per_step"])
        table.add_row(
            str(rank),
            *map(ms_text, (summary["step_ms"], own_ms(summary), summary["rank_wait_ms_per_step"])),
            ms_text(summary["host_update_ms_per_step"]),
            *(NOT_MEASURED if count is None else f"{count / 1e6:.2f}" for count in moved),
        )
    console.print()
    console.print(table, highlight=False)
    console.print(Text(slowest(summaries), style="bold"), highlight=False)


def own_ms(summary: Summary) -> float | None:
    """Time of a step without waits for other ranks: steps of ranks that wait for each other take equal time."""
    step, waits = summary["step_ms"], summary["rank_wait_ms_per_step"]
    return None if step is None else step - (waits or 0.0)


def slowest(summaries: Sequence[Summary]) -> str:
    """Say which rank the others wait for."""
    own = [own_ms(summary) for summary in summaries]
    known = [each for each in own if each is not None]
    if not known or not sum(known):
        return "Nothing was measured on any rank: no optimizer step ended while the profile was on."
    mean = sum(known) / len(known)
    spread = (max(known) - min(known)) / mean
    if spread < _EVEN:
        return f"The ranks are even: {milliseconds(mean)} of own work per step, {percent(spread)} apart."
    return (
        f"Rank {own.index(max(known))} is the slowest: {milliseconds(max(known))} of own work per step, where the mean "
        f"is {milliseconds(mean)}; the others wait for it."
    )
