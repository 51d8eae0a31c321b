"""``compare()``: several recordings on one time scale, one above the other."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from zenflow_compile.checks.validate import check_integer, printable
from zenflow_compile.profiling.content import size_text
from zenflow_compile.profiling.diagnose import hidden_text, milliseconds
from zenflow_compile.profiling.gantt import draw, label_width_of, last_steps
from zenflow_compile.profiling.lanes import MARKS, Mark, lanes_of
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.report import can_show_blocks, lanes_text, legend, wrapped
from zenflow_compile.profiling.summary import Summary, summarize

_MANY_WORKERS = 4  # lanes of them above which a picture has one for all


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The last steps of several runs; ``print`` and rich's consoles show it. Made by ``compare``.

    Attributes:
        recordings, names: of the runs, in their order; the first one is what the others are compared with.
        steps: how many of the last steps of each are drawn.
    """

    recordings: tuple[Recording, ...]
    names: tuple[str, ...]
    steps: int

    @property
    def ratios(self) -> list[float]:
        """How many times as fast each run is as the first one, by their mean step times."""
        times = [_step_ms(summarize(recording)) for recording in self.recordings]
        return [times[0] / each for each in times]

    def render(self, *, width: int, blocks: bool = True) -> Text:
        """The picture as text, ``width`` columns wide; plain ASCII without ``blocks``."""
        summaries = [summarize(recording) for recording in self.recordings]
        shown = [last_steps(recording, self.steps) or [] for recording in self.recordings]
        spans = [(steps[0].start_ns, steps[-1].end_ns) for steps in shown]
        lanes = [lanes_of(each, *span) for each, span in zip(self.recordings, spans, strict=True)]
        compact = max(len(recording.worker_lanes) for recording in self.recordings) > _MANY_WORKERS
        text = wrapped(self._sentences(summaries), width=width)
        used: set[Mark] = set()
        for name, recording, summary in zip(self.names, self.recordings, summaries, strict=True):
            gantt = draw(
                recording,
                width=width,
                steps=self.steps,
                scale_ns=max(end - start for start, end in spans),
                label_width=0 if compact else max(map(label_width_of, lanes)),
                compact=compact,
            )
            assert gantt is not None  # checked by ``compare``
            used.update(gantt.marks)
            text.append(f"\n{name}", style="bold")
            text.append(f"  {'predicted, ' if recording.predicted else ''}{_numbers(summary)}\n")
            text.append_text(lanes_text(gantt, blocks=blocks))
        text.append("\n")
        text.append_text(legend([mark for mark in MARKS if mark in used], blocks=blocks, width=width))
        return text

    def _sentences(self, summaries: Sequence[Summary]) -> Iterator[str]:
        first, of_first = self.names[0], milliseconds(_step_ms(summaries[0]))
        for name, summary, ratio in zip(self.names[1:], summaries[1:], self.ratios[1:], strict=True):
            step = milliseconds(_step_ms(summary))
            yield f"{name} takes {step} per step on average, {first} {of_first}: {name} is {ratio:.2f} times as fast."
        if len(self.names) == 1:
            yield f"{first} takes {of_first} per step on average."
        sizes = [size_text(recording.model_bytes) for recording in self.recordings]
        if len(set(sizes)) > 1:
            models = ", ".join(f"{size} in {name}" for name, size in zip(self.names, sizes, strict=True))
            yield f"The runs train different models: {models}."

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.render(width=options.max_width, blocks=can_show_blocks(console))

    def __str__(self) -> str:
        shown = Console()
        plain = Console(file=io.StringIO(), width=shown.width, color_system=None)
        with plain.capture() as capture:
            plain.print(self.render(width=shown.width, blocks=can_show_blocks(shown)), end="")
        return capture.get().rstrip("\n")

    __repr__ = __str__


def compare(runs: Sequence[object], *, names: Sequence[str] | None = None, steps: int = 4) -> Comparison:
    """Put several runs on one time scale, one above the other.

    Args:
        runs: profiles (``zf.profile``), and recordings of profiles and of ``zf.simulate``. A profile of several
            optimizers is as many runs.
        names: of the runs; None takes their policies, of equal ones with what differs (``predicted``, the
            ``update_interval``) or with a number.
        steps: how many of the last steps of each are drawn.

    Returns:
        A ``Comparison`` to print, with step times and their quotients.

    Raises:
        TypeError: ``runs`` is no list, or has something else in it, or ``names`` is a string.
        ValueError: there is no run, or one without a step, or ``names`` has another length.
    """
    check_integer("steps", steps, 1)
    if isinstance(runs, (str, Mapping)) or not isinstance(runs, Iterable):
        remedy = "list(runs.values()), names=list(runs)" if isinstance(runs, Mapping) else "[before, after]"
        raise TypeError(f"compare() got a {type(runs).__name__}; it takes a list of runs: zf.compare({remedy})")
    if isinstance(names, str):
        raise TypeError(f"names={names!r} must be a list of strings, one for each run, not a string")
    recordings = [recording for number, run in enumerate(runs) for recording in _recordings_of(number, run, steps)]
    if not recordings:
        raise ValueError(
            "compare() got no recorded step; pass profiles and recordings of runs, such as [before, after]"
        )
    named = _policies(recordings) if names is None else [printable(name) for name in names]
    if len(named) != len(recordings):
        raise ValueError(f"names={list(names or ())!r} must be one name for each of the {len(recordings)} runs")
    return Comparison(tuple(recordings), tuple(named), steps)


def _recordings_of(number: int, run: object, steps: int) -> list[Recording]:
    """The recordings of run ``number``, each of which has a step."""
    found = getattr(run, "recordings", None)
    if not isinstance(run, Recording) and not callable(found):
        remedy = "; zf.simulate() records what zf.plan() forecasts" if isinstance(run, Mapping) else ""
        raise TypeError(f"compare() got a {type(run).__name__}; it takes zf.profile() objects and recordings{remedy}")
    recordings: list[Recording] = [run] if isinstance(run, Recording) else found()  # type: ignore[misc]
    if not recordings or any(last_steps(recording, steps) is None for recording in recordings):
        raise ValueError(
            f"run {number} has no optimizer step that ended while it was recorded; record some of its steps"
        )
    return recordings


def _policies(recordings: Sequence[Recording]) -> list[str]:
    names = []
    for recording in recordings:
        alike = [each for each in recordings if each.policy == recording.policy]
        details = ["predicted"] if recording.predicted and not all(each.predicted for each in alike) else []
        if len({each.update_interval for each in alike}) > 1:
            details.append(f"update_interval={recording.update_interval}")
        names.append((recording.policy or "run") + (f" ({', '.join(details)})" if details else ""))
    return [
        name if names.count(name) == 1 else f"{name} {names[: number + 1].count(name)}"
        for number, name in enumerate(names)
    ]


def _step_ms(summary: Summary) -> float:
    step_ms = summary["step_ms"]
    assert step_ms is not None  # there is a step
    return step_ms


def _numbers(summary: Summary) -> str:
    parts = [
        f"{milliseconds(_step_ms(summary))} per step",
        f"{milliseconds(summary['stall_ms_per_step'] or 0.0)} stall",
    ]
    if (hidden := hidden_text(summary)) is not None:
        parts.append(f"host update {hidden}")
    return ", ".join(parts)
