"""Prints the report: lanes over time, a table, one sentence. For a terminal, a pipe or a log, from 80 columns on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zenflow_compile.checks.validate import printable
from zenflow_compile.performance.equations import Limit, limit_of
from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.profiling.diagnose import diagnose, milliseconds, percent
from zenflow_compile.profiling.gantt import BLOCKS, DIGITS, MARKS, Cell, Gantt, Mark, draw, duration_label
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import Summary, summarize

_NOT_MEASURED = "-"
_TIGHTEST = 3  # blocks in the row on slack
_DENSE_LINES = 3
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
    gantt = draw(recording, width=width, steps=steps)
    if gantt is not None:
        parts += [picture(gantt, blocks=blocks), Text()]
    sentence = textwrap.fill(printable(diagnose(summary)), max(_NARROWEST, width), break_on_hyphens=False)
    rows = _rows(summary) + _limit_rows(recording, summary)
    parts += [table(rows, width=width), Text(), Text(sentence, style="bold")]
    return Group(*parts)


def print_report(recordings: list[Recording], console: Console | None = None, *, steps: int = 4) -> None:
    """Prints a report per recording; ``console`` is standard output by default."""
    console = console or Console()
    blocks = can_show_blocks(console)
    for position, recording in enumerate(recordings or [Recording(events=())]):
        if position:
            console.print()
        report = render(recording, width=console.width, blocks=blocks, steps=steps)
        console.print(report, highlight=False, soft_wrap=False)


def can_show_blocks(console: Console) -> bool:
    """Whether every character of the picture can be written to ``console``."""
    try:
        "".join([BLOCKS, *(mark.block for mark in MARKS)]).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def picture(gantt: Gantt, *, blocks: bool) -> Text:
    """The lanes as text, with a ruler above and a legend below."""
    text = Text(no_wrap=True, overflow="crop", end="")
    text.append(f"{duration_label(gantt)}\n", style="bold")
    text.append(" " * gantt.label_width + gantt.ruler.rstrip() + "\n", style="dim")
    for lane, cells in gantt.rows.items():
        text.append(lane.ljust(gantt.label_width))
        for cell in cells:
            text.append(_character(cell, blocks), style=cell.mark.style)
        share = gantt.busy.get(lane)
        text.append("\n" if share is None else f"{percent(share):>5}\n")
    text.append_text(_legend(gantt.marks, blocks=blocks, width=gantt.label_width + len(gantt.ruler)))
    return text


def _legend(marks: tuple[Mark, ...], *, blocks: bool, width: int) -> Text:
    """``character meaning`` for each mark, wrapped into lines."""
    text = Text()
    column = 0
    for mark in marks:
        entry = f"{_character(Cell(mark), blocks)} {mark.meaning}"
        if column and column + 3 + len(entry) > width:
            text.append("\n")
            column = 0
        if column:
            text.append("   ")
            column += 3
        text.append(_character(Cell(mark), blocks), style=mark.style)
        text.append(entry[1:], style="dim")
        column += len(entry)
    text.append("\n")
    return text


def _character(cell: Cell, blocks: bool) -> str:
    if cell.level is not None:
        return (BLOCKS if blocks else DIGITS)[cell.level - 1]
    return cell.mark.block if blocks else cell.mark.ascii


def table(rows: list[tuple[str, str]], *, width: int = 80) -> Text:
    """A name and a value per row. Wrapped here, so no line ends in blanks."""
    indent = max(len(name) for name, _ in rows) + 2
    text = Text(end="")
    for name, value in rows:
        text.append(name.ljust(indent), style="dim")
        text.append(f"\n{' ' * indent}".join(textwrap.wrap(printable(value), max(_NARROWEST, width - indent))) + "\n")
    return text


def _rows(s: Summary) -> list[tuple[str, str]]:
    """Name and value of every row; a dash where nothing was measured."""
    steps = str(s["steps"])
    if s["warm_up_steps"]:
        steps += f", the first {s['warm_up_steps']} left out below (warm-up)"
    parts = (  # they add up to step_ms
        _ms(s["forward_ms_per_step"], " forward"),
        _ms(s["backward_ms_per_step"], " backward"),
        _ms(s["update_ms_per_step"], " update"),
        _ms(s["merge_ms_per_step"], " merge"),
        _ms(s["select_ms_per_step"], " re-selection"),
        _ms(s["stall_ms_per_step"], " stall"),
        _ms(s["other_ms_per_step"], " other"),
    )
    rows = [
        ("steps", steps),
        (
            "step time",
            _join(_ms(s["step_ms_median"], " median"), _ms(s["step_ms"], " mean"), _ms(s["step_ms_p95"], " p95")),
        ),
        ("parts of a step", _join(*parts, separator=" + ")),
    ]
    if s["compilations"]:
        took = f"{_count(s['compilations'], 'time')}, {milliseconds(s['compilation_ms'])} in all"
        rows.append(("compilation", f"{took}, left out of every other row"))
    if s["evaluation_ms"]:
        rows.append(("evaluation (no_grad)", f"{milliseconds(s['evaluation_ms'])} in all, left out of every other row"))
    rows.append(("stall", _share(s["stall_share"], " of the time")))
    if s["state_note"] is not None:
        rows.append(("state on the host", s["state_note"]))
    busy = _share(s["worker_busy_share"], f" busy ({_count(s['workers'], 'worker')})")
    hidden = _hidden(s)
    rows += [
        ("host update", _join(_ms(s["host_update_ms_per_step"], " per step"), hidden, busy)),
        *_slack_rows(s),
        ("host bandwidth", _rate(s["host_update_gb_per_s"])),
        ("device to host", _join(_size(s["d2h_bytes_per_step"], " per step"), _rate(s["d2h_gb_per_s"]))),
        ("host to device", _join(_size(s["h2d_bytes_per_step"], " per step"), _rate(s["h2d_gb_per_s"]))),
    ]
    if s["state_moves"]:
        rows.append(("of it state", _size(s["state_bytes_per_step"], " per step")))
    if s["weight_bytes_per_step"]:
        rows.append(("of it weights", _size(s["weight_bytes_per_step"], " per step")))
    if s["sent_bytes_per_step"] is not None:
        waits = _ms(s["rank_wait_ms_per_step"], " of waiting")
        rows.append(("other ranks", _join(_size(s["sent_bytes_per_step"], " sent per step"), waits)))
    traffic = _sizes(s["traffic_model_sizes_per_step"], " model sizes per step")
    of_state = _sizes(s["state_model_sizes_per_step"] if s["state_moves"] else None, " of state")
    norm = _share(s["selected_norm_share"], " of the squared gradient norm")
    return [
        *rows,
        ("traffic", _join(traffic, of_state)),
        ("selected norm share", _join(norm, _share(s["selected_share"], " of the elements"), separator=" in ")),
        ("windows flushed", str(s["windows_flushed"])),
        *_adaptive_windows(s),
        ("re-selections", str(s["selections"])),
        *_dense_rows(s),
    ]


def _hidden(s: Summary) -> str:
    """How much of the host's updates ran under the device's work, and how much did not."""
    share = s["hidden_fraction"]
    if share is None:
        return _NOT_MEASURED
    if not s["forward_recorded"]:
        return f"{percent(share)} not waited for (a model that is not compiled records no forward)"
    return f"{percent(share)} hidden, {percent(1 - share)} exposed"


def _dense_rows(summary: Summary) -> list[tuple[str, str]]:
    """The user's lines that gave offloaded parameters dense gradients; no row without any."""
    lines = list(summary["dense_gradients"].items())
    texts = [f"{count}, for {line}" for line, count in lines[:_DENSE_LINES]]
    if others := sum(count for _, count in lines[_DENSE_LINES:]):
        texts.append(f"{others}, for {_count(len(lines) - _DENSE_LINES, 'other line')}")
    return [("dense gradients" if number == 0 else "", text) for number, text in enumerate(texts)]


def _slack_rows(summary: Summary) -> list[tuple[str, str]]:
    """The blocks whose host updates have the least time to spare."""
    if summary["blocking"]:
        return []  # the step waits for every update by design
    tightest = list(summary["slack_by_block"].items())[:_TIGHTEST]
    texts = [
        f"{block}: {milliseconds(times['slack_ms'])} until its next use, {milliseconds(times['taken_ms'])} taken"
        for block, times in tightest
    ]
    return [("least slack" if number == 0 else "", text) for number, text in enumerate(texts)]


def _adaptive_windows(s: Summary) -> list[tuple[str, str]]:
    """Bounds and mean of the length of adaptive update windows; no row where windows are of fixed length."""
    if not s["adaptive_windows"]:
        return []
    longest, mean = s["update_interval"] or 1, s["mean_window_steps"]
    # Norms are used two steps late, so that the first two steps of an update window never flush it.
    shortest = min(3, longest)
    if s["shortest_window_measured"]:
        by_time = s["shortest_window"]
        value = f"auto, {shortest} to {longest}"
        value += ", time not measured yet" if by_time is None else f", at least {by_time} by time"
    else:
        value = f"auto, {max(shortest, s['shortest_window'] or 1)} to {longest}"
    if mean is not None:
        value += f", {mean:.1f} on average"
    return [("update interval", value)]


def _limit_rows(recording: Recording, summary: Summary) -> list[tuple[str, str]]:
    """The shortest step that this machine's bandwidths allow; no rows where they were not measured."""
    step_ms, stall_ms = summary["step_ms_median"], summary["stall_ms_per_step"]
    if recording.traffic is None or recording.bandwidths is None or step_ms is None or stall_ms is None:
        return []
    seen = _reached(recording.bandwidths, summary)
    limit = limit_of(recording.traffic, seen, device_ms=max(0.0, step_ms - stall_ms))
    if limit.step_ms > step_ms:  # the stall that was measured hides some of what the formula adds
        limit = replace(limit, step_ms=step_ms, stall_ms=min(limit.stall_ms, stall_ms))
    needs = [("host", limit.host_ms, seen.host), ("D2H", limit.to_host_ms, seen.to_host)]
    needs.append(("H2D", limit.to_device_ms, seen.to_device))
    if limit.disk_ms and seen.disk is not None:
        needs.append(("disk", limit.disk_ms, seen.disk))
    rates = _join(*(f"{name} {milliseconds(ms)} at {_rate(rate / 1e9)}" for name, ms, rate in needs))
    return [("limit: at least", f"{rates} per step"), ("limit: at best", _at_best(limit, recording.traffic.blocking))]


def _at_best(limit: Limit, blocking: bool) -> str:
    stall = f"{milliseconds(limit.stall_ms)} of it stall" if limit.stall_ms else "no stall"
    step = f"{milliseconds(limit.step_ms)} per step, {stall}"
    if blocking:
        return step
    if limit.smallest_interval is None:
        return f"{step}, and no update_interval hides the host update"
    return f"{step}, and the host update is hidden from update_interval={limit.smallest_interval} on"


def _reached(measured: Bandwidths, summary: Summary) -> Bandwidths:
    """Measured bandwidths, or the run's own where it was faster: the machine may have been busy when measured."""
    return replace(
        measured,
        host=max(measured.host, 1e9 * (summary["host_update_gb_per_s"] or 0.0)),
        to_host=max(measured.to_host, 1e9 * (summary["d2h_gb_per_s"] or 0.0)),
        to_device=max(measured.to_device, 1e9 * (summary["h2d_gb_per_s"] or 0.0)),
    )


def print_ranks(summaries: Sequence[Summary], console: Console | None = None) -> None:
    """Print a table with a row per rank, and one sentence; ``summaries`` are in the order of the ranks."""
    console = console or Console()
    table = Table(title="Ranks, per step", title_justify="left", box=None)
    table.add_column("rank", justify="right")
    for column in ("step", "own work", "waits for ranks", "host update", "D2H MB", "H2D MB", "sent MB"):
        table.add_column(column, justify="right")
    for rank, summary in enumerate(summaries):
        moved = (summary["d2h_bytes_per_step"], summary["h2d_bytes_per_step"], summary["sent_bytes_per_step"])
        table.add_row(
            str(rank),
            *map(_ms, (summary["step_ms"], own_ms(summary), summary["rank_wait_ms_per_step"])),
            _ms(summary["host_update_ms_per_step"]),
            *(_NOT_MEASURED if count is None else f"{count / 1e6:.2f}" for count in moved),
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


def _join(*values: str, separator: str = ", ") -> str:
    """Join the values that were measured; a dash if none was."""
    return separator.join(value for value in values if value != _NOT_MEASURED) or _NOT_MEASURED


def _ms(value: float | None, suffix: str = "") -> str:
    return _NOT_MEASURED if value is None else milliseconds(value) + suffix


def _share(value: float | None, suffix: str) -> str:
    return _NOT_MEASURED if value is None else percent(value) + suffix


def _rate(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return _NOT_MEASURED
    return f"{gb_per_s:.1f} GB/s" if gb_per_s >= 0.1 else f"{1000 * gb_per_s:.2f} MB/s"


def _sizes(value: float | None, suffix: str) -> str:
    return _NOT_MEASURED if value is None else f"{value:.2f}{suffix}"


def _size(count: float | None, suffix: str) -> str:
    """Bytes in the decimal units that bandwidths are given in."""
    if count is None:
        return _NOT_MEASURED
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}{suffix}"
    return f"{count:.0f} bytes{suffix}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
