"""The report of all ranks: what each one sends to the first, and what that one shows.

Every process has a clock of its own, of which ranks of one machine have the same. Messages bound the difference: of two
ranks that exchange messages, none has got the other's before it was sent.
"""

from __future__ import annotations

import json
import platform
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zenflow_compile.profiling.content import NOT_MEASURED, ms_text
from zenflow_compile.profiling.diagnose import milliseconds, percent
from zenflow_compile.profiling.gantt import draw_together, last_steps
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.report import can_show_blocks, picture
from zenflow_compile.profiling.summary import Summary, summarize
from zenflow_compile.timeline import COMPUTE, STEP, Event

_EVEN = 0.05  # of a step: a spread below which no rank is late
_ROUNDS = 8  # of messages, of which the quickest bounds a clock
_MOST_ROWS = 16
_NOT_KNOWN = (
    "Which rank is the slowest is not known: waits for replicas, or for pieces of parameters, are not recorded, and "
    "count as work."
)


class Meeting(NamedTuple):
    """Nanoseconds of a rank's clock before it sent a message, and when it had those of all ranks."""

    sent: int
    received: int


class Common(NamedTuple):
    """What all ranks do alike.

    Attributes:
        first_step: the number of the first step that counts, behind the warm-up of each rank.
        steps: of the picture; whole: all events are sent, for a trace.
    """

    first_step: int
    steps: int
    whole: bool

    @classmethod
    def of(cls, recording: Recording, exchange: Callable[[bytes], list[bytes]], *, steps: int, whole: bool) -> Common:
        """Agree with the other ranks, of whatever this one was asked for."""
        numbers = sorted(event.step for event in recording.events if event.lane == STEP)
        first = (numbers[summarize(recording)["warm_up_steps"] :] or [0])[0]
        own = b"".join(number.to_bytes(8, "little") for number in (first, steps, whole))
        found = [[int.from_bytes(each[at : at + 8], "little") for at in (0, 8, 16)] for each in exchange(own)]
        first, steps, any_whole = (max(column) for column in zip(*found, strict=True))
        return cls(first, steps, bool(any_whole))


def meetings(exchange: Callable[[], object]) -> list[Meeting]:
    """Exchange messages with all ranks, by ``exchange``, and note when."""
    found = []
    for _ in range(_ROUNDS):
        sent = time.perf_counter_ns()
        exchange()
        found.append(Meeting(sent, time.perf_counter_ns()))
    return found


def clock_difference(first: Sequence[Meeting], other: Sequence[Meeting]) -> int:
    """Nanoseconds by which the clock of ``other`` is ahead: 0 where it may be the same, or the middle of the bounds."""
    least = max(there.sent - here.received for here, there in zip(first, other, strict=True))
    most = min(there.received - here.sent for here, there in zip(first, other, strict=True))
    return 0 if least <= 0 <= most else (least + most) // 2


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank tells of itself.

    Attributes:
        summary: its numbers.
        recording: all events, or those of the picture.
        clock: its meetings with all ranks.
        machine: its name.
    """

    summary: Summary
    recording: Recording
    clock: list[Meeting]
    machine: str

    @classmethod
    def of(cls, recording: Recording, clock: list[Meeting], common: Common) -> RankPart:
        """That of this rank: with the compute of the last steps, or the whole run."""
        events = recording.events
        warm_up = sum(event.lane == STEP and event.step < common.first_step for event in events)
        if not common.whole:
            shown = last_steps(recording, common.steps) or []
            begin = min((step.start_ns for step in shown), default=0)
            events = tuple(event for event in events if event.lane in (COMPUTE, STEP) and event.end_ns > begin)
        return cls(summarize(recording, warm_up=warm_up), replace(recording, events=events), clock, platform.node())

    def encoded(self) -> bytes:
        recording = self.recording
        told = {
            "summary": self.summary,
            "events": [astuple(event) for event in recording.events],
            "policy": recording.policy,
            "clock": self.clock,
            "machine": self.machine,
        }
        return zlib.compress(json.dumps(told).encode())

    @classmethod
    def decoded(cls, sent: bytes) -> RankPart:
        told = json.loads(zlib.decompress(sent))
        names = ("lane", "kind", "start_ns", "end_ns", "step", "param", "bytes")
        events = tuple(Event(**dict(zip(names, each, strict=True))) for each in told["events"])
        clock = [Meeting(*each) for each in told["clock"]]
        return cls(told["summary"], Recording(events=events, policy=told["policy"]), clock, told["machine"])


def on_one_clock(parts: Sequence[RankPart]) -> list[Recording]:
    """The recordings of all ranks, in the first one's time, with their names."""
    several = len({part.machine for part in parts}) > 1
    recordings = []
    for rank, part in enumerate(parts):
        ahead = clock_difference(parts[0].clock, part.clock)
        events = [
            replace(event, start_ns=event.start_ns - ahead, end_ns=event.end_ns - ahead)
            for event in part.recording.events
        ]
        title = f"rank {rank} on {part.machine}" if several else f"rank {rank}"
        recordings.append(replace(part.recording, events=tuple(events), title=title))
    return recordings


def print_ranks(
    summaries: Sequence[Summary],
    recordings: Sequence[Recording],
    console: Console,
    *,
    steps: int = 4,
    complete: bool = True,
) -> None:
    """Print a table and a picture with a row per rank, and one sentence. Of many ranks, the slowest have rows.

    Args:
        summaries, recordings: in the order of the ranks, of one clock.
        complete: all collectives are recorded; otherwise a rank may wait that seems to work.
    """
    table = Table(title="Ranks, per step", title_justify="left", box=None)
    table.add_column("rank", justify="right")
    for column in ("step", "own work", "stall", "waits for ranks", "host update", "D2H MB", "H2D MB", "sent MB"):
        table.add_column(column, justify="right")
    ranks = _slowest_first(summaries)[:_MOST_ROWS]
    for rank in sorted(ranks):
        summary = summaries[rank]
        moved = (summary["d2h_bytes_per_step"], summary["h2d_bytes_per_step"], summary["sent_bytes_per_step"])
        table.add_row(
            str(rank),
            *map(ms_text, (summary["step_ms"], _own_ms(summary), summary["stall_ms_per_step"])),
            *map(ms_text, (summary["rank_wait_ms_per_step"], summary["host_update_ms_per_step"])),
            *(NOT_MEASURED if count is None else f"{count / 1e6:.2f}" for count in moved),
        )
    console.print()
    console.print(table, highlight=False)
    if left := len(summaries) - len(ranks):
        console.print(Text(f"{left} ranks more, which the others wait less for."), highlight=False)
    gantt = draw_together(
        {f"rank {rank}": recordings[rank] for rank in sorted(ranks)}, width=console.width, steps=steps
    )
    if gantt is not None:
        console.print()
        console.print(picture(gantt, blocks=can_show_blocks(console)), highlight=False, end="")
    console.print(Text(slowest(summaries) if complete else _NOT_KNOWN, style="bold"), highlight=False)


def slowest(summaries: Sequence[Summary]) -> str:
    """Say which rank the others wait for: the one that is least in collectives, in which it comes last."""
    waits = [each for summary in summaries if (each := summary["in_collectives_ms_per_step"]) is not None]
    steps = [each for summary in summaries if (each := summary["step_ms"]) is not None]
    if not waits or not sum(steps):
        return "Nothing was measured on any rank: no optimizer step ended while the profile was on."
    least, mean, step = min(waits), sum(waits) / len(waits), sum(steps) / len(steps)
    if (spread := (max(waits) - least) / step) < _EVEN:
        return f"The ranks are even: {milliseconds(step)} per step, and their waits differ by {percent(spread)} of it."
    return (
        f"Rank {_slowest_first(summaries)[0]} is the slowest: the others wait for it. It is in collectives for "
        f"{milliseconds(least)} of a step of {milliseconds(step)}, where the mean is {milliseconds(mean)}."
    )


def _slowest_first(summaries: Sequence[Summary]) -> list[int]:
    """The ranks, by the time that they are in collectives; those of which nothing is known last."""
    waits = [summary["in_collectives_ms_per_step"] for summary in summaries]
    return sorted(range(len(waits)), key=lambda rank: float("inf") if (own := waits[rank]) is None else own)


def _own_ms(summary: Summary) -> float | None:
    """Time of a step without waits for other ranks: steps of ranks that wait for each other take equal time."""
    step, waits = summary["step_ms"], summary["rank_wait_ms_per_step"]
    return None if step is None else step - (waits or 0.0)
