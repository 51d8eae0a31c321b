"""``compare()``: several recordings on one time scale, one above the other."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from zenflow_compile.checks.validate import check_integer, printable
from zenflow_compile.profiling.diagnose import milliseconds, percent
from zenflow_compile.profiling.gantt import draw, label_width_of, last_steps
from zenflow_compile.profiling.lanes import MARKS, Mark, lanes_of
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.report import can_show_blocks, lanes_text, legend, wrapped
from zenflow_compile.profiling.summary import Summary, summarize


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
        """How many times as fast each run is as the first one, by their median step times."""
        times = [_step_ms(summarize(recording)) for recording in self.recordings]
        return [times[0] / each for each in times]

    def render(self, *, width: int, blocks: bool = True) -> Text:
        """The picture as text, ``width`` columns wide; plain ASCII without ``blocks``."""
        summaries = [summarize(recording) for recording in self.recordings]
        shown = [last_steps(recording, self.steps) or [] for recording in self.recordings]
        spans = [(steps[0].start_ns, steps[-1].end_ns) for steps in shown]
        lanes = [lanes_of(each, *span) for each, span in zip(self.recordings, spans, strict=True)]
        text = wrapped(self._sentences(summaries), width=width)
        used: set[Mark] = set()
        for name, recording, summary in zip(self.names, self.recordings, summaries, strict=True):
            gantt = draw(
                recording,
                width=width,
                steps=self.steps,
                scale_ns=max(end - start for start, end in spans),
                label_width=max(map(label_width_of, lanes)),
            )
            assert gantt is not None  # checked by ``compare``
            used.update(gantt.marks)
            text.append(f"\n{name}", style="bold")
            text.append(f"  {_numbers(summary)}\n")
            text.append_text(lanes_text(gantt, blocks=blocks))
        text.append("\n")
        text.append_text(legend([mark for mark in MARKS if mark in used], blocks=blocks, width=width))
        return text

    def _sentences(self, summaries: Sequence[Summary]) -> Iterable[str]:
        first, of_first = self.names[0], milliseconds(_step_ms(summaries[0]))
        for name, summary, ratio in zip(self.names[1:], summaries[1:], self.ratios[1:], strict=True):
            step = milliseconds(_step_ms(summary))
            yield f"{name} takes {step} per step, {first} {of_first}: {name} is {ratio:.2f} times as fast."
        if len(self.names) == 1:
            yield f"{first} takes {of_first} per step."

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
        names: of the runs; None takes their policies, with a number if several have one.
        steps: how many of the last steps of each are drawn.

    Returns:
        A ``Comparison`` to print, with step times and their quotients.

    Raises:
        TypeError: ``runs`` has something else in it.
        ValueError: there is no run, or one without a step, or ``names`` has another length.
    """
    check_integer("steps", steps, 1)
    recordings = [recording for run in runs for recording in _recordings_of(run)]
    if not recordings:
        raise ValueError(
            "compare() got no recorded step; pass profiles and recordings of runs, such as [before, after]"
        )
    for number, recording in enumerate(recordings):
        if last_steps(recording, steps) is None:
            raise ValueError(
                f"run {number} has no optimizer step that ended while it was recorded; record some of its steps"
            )
    named = _policies(recordings) if names is None else [printable(name) for name in names]
    if len(named) != len(recordings):
        raise ValueError(f"names={list(names or ())!r} must be one name for each of the {len(recordings)} runs")
    return Comparison(tuple(recordings), tuple(named), steps)


def _recordings_of(run: object) -> list[Recording]:
    if isinstance(run, Recording):
        return [run]
    found = getattr(run, "recordings", None)
    if not callable(found):
        raise TypeError(f"compare() got a {type(run).__name__}; it takes zf.profile() objects and recordings")
    recordings: list[Recording] = found()
    return recordings


def _policies(recordings: Sequence[Recording]) -> list[str]:
    policies = [recording.policy or "run" for recording in recordings]
    return [
        name if policies.count(name) == 1 else f"{name} {policies[: number + 1].count(name)}"
        for number, name in enumerate(policies)
    ]


def _step_ms(summary: Summary) -> float:
    step_ms = summary["step_ms_median"]
    assert step_ms is not None  # there is a step
    return step_ms


def _numbers(summary: Summary) -> str:
    hidden = summary["hidden_fraction"]
    parts = [
        f"{milliseconds(_step_ms(summary))} per step",
        f"{milliseconds(summary['stall_ms_per_step'] or 0.0)} stall",
    ]
    if hidden is not None:
        parts.append(f"host update {percent(hidden)} hidden")
    return ", ".join(parts)
