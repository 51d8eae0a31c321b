"""Prints work, waits and bytes of all ranks side by side, and names the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zenflow_compile.profiling.diagnose import milliseconds, percent
from zenflow_compile.profiling.summary import Summary

_EVEN = 0.05  # spread over the mean below which no rank is late


def print_ranks(summaries: Sequence[Summary], console: Console | None = None) -> None:
    """Print a table with a row per rank, and one sentence.

    Args:
        summaries: of all ranks, by rank.
        console: standard output by default.
    """
    console = console or Console()
    table = Table(title="Ranks, per step", title_justify="left", box=None)
    table.add_column("rank", justify="right")
    for column in ("step", "own work", "waits for ranks", "host update", "D2H MB", "H2D MB", "sent MB"):
        table.add_column(column, justify="right")
    for rank, summary in enumerate(summaries):
        table.add_row(
            str(rank),
            *map(_ms, (summary["step_ms"], own_ms(summary), summary["rank_wait_ms_per_step"])),
            _ms(summary["host_update_ms_per_step"]),
            *(_mb(summary[key]) for key in ("d2h_bytes_per_step", "h2d_bytes_per_step", "sent_bytes_per_step")),
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


def _ms(value: float | None) -> str:
    return "-" if value is None else milliseconds(value)


def _mb(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.2f}"
