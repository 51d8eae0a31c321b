"""Makes a page of recordings that needs no network: sentences, lanes to zoom and move in, and the table."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zenflow_compile.checks.validate import printable
from zenflow_compile.profiling.content import rows_of, sentences_of
from zenflow_compile.profiling.gantt import last_steps
from zenflow_compile.profiling.lanes import MARKS, Span, lanes_of
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize
from zenflow_compile.timeline import STEP

_PLACE = "<!-- sections -->"
_HINT = (
    "The height of a bar is its share of the time; the numbers are shares of all the time shown. Scroll to zoom, drag "
    "to move, double-click to see everything; with the keyboard: +, -, 0 and the arrows."
)


def page(recordings: Sequence[Recording], *, steps: int = 4, of_all: bool = True) -> str:
    """Make the page.

    Args:
        recordings: in their order; none gives a page that says that nothing was measured.
        steps: optimizer steps that are shown first.
        of_all: the page has the lanes of all steps, about 30 bytes for each event; else of the first view alone.
    """
    sections = [_section(each, steps, of_all) for each in recordings or [Recording(events=())]]
    before, after = Path(__file__).with_suffix(".html").read_text(encoding="utf-8").split(_PLACE)
    return "".join((before, *sections, after))


def _section(recording: Recording, steps: int, of_all: bool) -> str:
    summary = summarize(recording)
    heading = recording.title or (f"policy {recording.policy}" if recording.policy else "")
    title = f"<h2>{_text(heading)}</h2>" if heading else ""
    first, *others = sentences_of(recording, summary)
    said = f'<p class="first">{_text(first)}</p>' + "".join(f"<p>{_text(each)}</p>" for each in others)
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows_of(recording, summary)
    )
    lanes = _lanes(recording, steps, of_all)
    return f"<section{' data-lanes' if lanes else ''}>{title}{said}{lanes}<table>{rows}</table></section>\n"


def _lanes(recording: Recording, steps: int, of_all: bool) -> str:
    """The canvas of a section and its data; empty without a step to show."""
    if (shown := last_steps(recording, steps)) is None:
        return ""
    all_steps = [event for event in recording.events if event.lane == STEP]
    begin, end = shown[0].start_ns, shown[-1].end_ns
    if of_all:
        begin = min(event.start_ns for event in recording.events)
        end = max(event.end_ns for event in recording.events)
    data = _data(lanes_of(recording, begin, end), begin)
    data["view"] = [shown[0].start_ns - begin, shown[-1].end_ns - begin]
    data["end"] = end - begin
    data["steps"] = [
        (step.start_ns - begin, step.end_ns - begin, step.step) for step in (all_steps if of_all else shown)
    ]
    keys = "".join(
        f'<span class="key" style="--color: var(--{color})">{_text(meaning)}</span>' for meaning, color in data["marks"]
    )
    last = "the last step" if len(shown) == 1 else f"the last {len(shown)} steps"
    wider = '<button data-do="all">all</button>' if of_all else ""
    return (
        f'<div class="bar"><button data-do="last">{last}</button>{wider}<button data-do="in">+</button>'
        f'<button data-do="out">-</button>{keys}</div>'
        f'<canvas tabindex="0" role="img" aria-label="Lanes over time; the table has their numbers"></canvas>'
        f'<p class="detail">{_HINT}</p><script type="application/json">{_json(data)}</script>'
    )


def _data(lanes: dict[str, list[Span]], begin: int) -> dict[str, Any]:
    """The spans as columns of numbers; kinds, parameters and marks are written once."""
    used = {span.mark for spans in lanes.values() for span in spans}
    marks = {mark: number for number, mark in enumerate(mark for mark in MARKS if mark in used)}
    kinds: dict[str, int] = {}
    params: dict[str, int] = {}
    columns = []
    for name, spans in lanes.items():
        starts = [span.start for span in spans]
        columns.append(
            {
                "name": name,
                "starts": [start - before for before, start in zip([begin, *starts], starts, strict=False)],
                "durations": [span.end - span.start for span in spans],
                "marks": [marks[span.mark] for span in spans],
                "kinds": [_number(kinds, span.event.kind) for span in spans],
                "params": [_number(params, span.event.param) for span in spans],
                "steps": [span.event.step for span in spans],
                "bytes": [span.event.bytes for span in spans],
            }
        )
    return {
        "lanes": columns,
        "marks": [(mark.meaning, mark.color) for mark in marks],
        "kinds": _printable(kinds),
        "params": _printable(params),
        "hint": _HINT,
    }


def _number(found: dict[str, int], text: str) -> int:
    return found.setdefault(text, len(found))


def _printable(texts: Iterable[str]) -> list[str]:
    return [printable(text) for text in texts]


def _text(value: str) -> str:
    return html.escape(printable(value))


def _json(data: dict[str, Any]) -> str:
    """JSON in which no name can end the script that it is in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
