"""``profile()``: attaches a timeline to engines, and reports on it."""

from __future__ import annotations

import dataclasses
import html
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch
from rich.console import Console

from zenflow_compile.checks.validate import check_integer, check_positive
from zenflow_compile.measure import bandwidth
from zenflow_compile.profiling.chrome_trace import write_chrome_trace
from zenflow_compile.profiling.page import page
from zenflow_compile.profiling.ranks import Common, RankPart, meetings, on_one_clock, print_ranks
from zenflow_compile.profiling.recording import Recording, recording_of
from zenflow_compile.profiling.report import console_of, print_report
from zenflow_compile.profiling.summary import Summary, summarize
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.ranks.rank_group import Call
from zenflow_compile.timeline import COMPUTE, STEP, Timeline, attaching_new_engines
from zenflow_compile.torch_internals.torch_private_compiler import watch_compilations


class _Attachment:
    """One engine under this profile, referenced weakly: a profile must not keep a deleted model's memory."""

    def __init__(self, engine: Engine, timeline: Timeline) -> None:
        self.engine = weakref.ref(engine)
        self.timeline = timeline
        self.device = engine.device
        self.worker_cores = engine.worker_cores
        self.end_collectives = engine.record_collectives()
        self.refresh()

    def detach(self, engine: Engine) -> None:
        """End the timeline, which those of profiles that were entered later may have replaced."""
        if engine.timeline is self.timeline:
            engine.timeline = self.timeline.replaced
            return
        above = engine.timeline
        while above is not None and above.replaced is not self.timeline:
            above = above.replaced
        if above is not None:
            above.replaced = self.timeline.replaced

    def refresh(self) -> None:
        """Read the plan again: parameters may be added while the profile is on."""
        if (engine := self.engine()) is not None:
            self.plan, self.model_bytes = engine.plan, engine.registry.model_bytes
            self.adaptive_windows = engine.schedule.adaptive_windows
            self.rows = tuple(engine.report_rows)


class Profile:
    """Records what optimizers do inside the ``with`` block; made by ``profile``.

    Results may be read after the block, or inside it: then they cover the events recorded so far.
    """

    def __init__(self, *optimizers: object, max_events: int = 1_000_000, flops_per_step: float | None = None) -> None:
        for optimizer in optimizers:
            if not _is_engine(getattr(optimizer, "engine", None)):
                raise TypeError(
                    f"profile() got a {type(optimizer).__name__}; it takes ZenFlowAdamW optimizers (that of "
                    "a model compiled with options only is zf.optimizer_of(model)), or nothing, to record all"
                )
        max_events = check_integer("max_events", max_events, 1, remedy="; leave it out to keep the newest 1000000")
        if flops_per_step is not None:
            remedy = "; leave it out if the work of the model is not known"
            flops_per_step = check_positive("flops_per_step", flops_per_step, remedy=remedy)
        self._flops_per_step = flops_per_step
        self._optimizers = optimizers
        self._max_events = max_events
        self._attachments: dict[int, _Attachment] = {}
        self._exit: ExitStack | None = None
        self._compilation_began = 0

    def __enter__(self) -> Self:
        if self._exit is not None:
            raise RuntimeError("this profile was already entered; make a new one with zf.profile()")
        self._exit = ExitStack()
        for optimizer in self._optimizers:
            self.attach(getattr(optimizer, "engine", None))
        if not self._optimizers:
            for engine in ops.live_engines():
                self.attach(engine)
            self._exit.enter_context(attaching_new_engines(self.attach))
        self._begin_compilation()  # of one that is under way, only what comes from here on is recorded
        self._exit.callback(watch_compilations(self._begin_compilation, self._end_compilation))
        return self

    def _begin_compilation(self) -> None:
        self._compilation_began = time.perf_counter_ns()

    def _end_compilation(self) -> None:
        """Record a compilation for every optimizer: each of them waits for it."""
        now = time.perf_counter_ns()
        for attachment, engine in self._attached():
            began = self._compilation_began
            attachment.timeline.add(COMPUTE, "compile", began, now, step=engine.step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for work in flight, so that its events are recorded, and detach.

        Raises:
            RuntimeError: a worker or a copy failed, or the profile was not entered.
        """
        if self._exit is None:
            raise RuntimeError("this profile was not entered; use it as `with zf.profile() as profile:`")
        self._exit.close()
        attached = list(self._attached())
        try:
            if error is None:  # otherwise a failure in flight would hide the error of the block
                for _, engine in attached:
                    engine.access.synchronize()
        finally:
            for attachment, engine in attached:
                attachment.detach(engine)
            for attachment, _ in attached:
                attachment.refresh()
            for attachment in self._attachments.values():
                attachment.end_collectives()  # also where the optimizer was closed inside of the block

    def attach(self, candidate: object) -> None:
        """Give an engine a timeline of this profile. Of several profiles that are on, the last one records."""
        if not _is_engine(candidate):
            return  # a recording engine of the tests, which keeps no timeline
        engine = cast(Engine, candidate)
        if engine.id not in self._attachments:
            timeline = Timeline(max_events=self._max_events)
            timeline.replaced = engine.timeline
            self._attachments[engine.id] = _Attachment(engine, timeline)
            engine.timeline = timeline

    def recordings(self) -> list[Recording]:
        """Return one recording per optimizer that stepped, in the order of attachment; if none did, that evaluated."""
        return self._recordings(measure=False)

    def _recordings(self, *, measure: bool) -> list[Recording]:
        found = []
        for attachment in self._attachments.values():
            attachment.refresh()
            recording = dataclasses.replace(_recording(attachment), flops_per_step=self._flops_per_step)
            if measure:
                recording = _measured(recording, attachment)
            found.append(recording)
        stepped = [each for each in found if any(event.lane == STEP for event in each.events)]
        found = stepped or [each for each in found if each.evaluation]
        if len(found) == 1:
            return found
        titles = (f"optimizer {number} of {len(found)}" for number in range(1, len(found) + 1))
        return [dataclasses.replace(recording, title=title) for recording, title in zip(found, titles, strict=True)]

    def newest(self, steps: int) -> Recording | None:
        """Return the last ``steps`` steps of the optimizer with the most parameter bytes, of what has been finished.

        Waits for nothing, and may be called by another thread. None before the first step.
        """
        found = []
        for attachment in list(self._attachments.values()):
            events = attachment.timeline.last_events(steps)
            if any(event.lane == STEP for event in events):
                found.append((attachment.model_bytes, attachment.plan, events))
        if not found:
            return None
        model_bytes, plan, events = max(found, key=lambda each: each[0])
        return recording_of(plan, events, model_bytes)

    def summary(self) -> Summary:
        """Return the numbers of the report; ``Summary`` defines each.

        With several optimizers these are the numbers of the one with the most parameter bytes; ``summaries`` has all.
        """
        recordings = self.recordings() or [Recording(events=())]
        return summarize(max(recordings, key=lambda recording: recording.model_bytes))

    def summaries(self) -> list[Summary]:
        """Return the numbers of every optimizer that stepped, in the order of attachment."""
        return [summarize(recording) for recording in self.recordings()]

    def report(self, console: Console | None = None, *, steps: int = 4) -> None:
        """Print what limits the run, the last ``steps`` steps as lanes over time, and the table.

        The first report of a process measures the bandwidths of memory and links, which takes about a second and slows
        training in other threads down.

        Args:
            console: standard output by default; its width, color and encoding are respected.
            steps: how many of the last steps to draw.

        Raises:
            TypeError, ValueError: ``console`` is no console of rich, or ``steps`` no integer >= 1.
        """
        shown_on = console_of(console)
        check_integer("steps", steps, 1)
        print_report(self._recordings(measure=not shown_on.quiet), shown_on, steps=steps)

    def report_ranks(
        self, console: Console | None = None, *, steps: int = 4, trace: str | PathLike[str] | None = None
    ) -> None:
        """Print the first rank's report there, a table of all ranks, and their compute on one time scale.

        All ranks call it, with the same arguments, before ``close()``.

        Args:
            console, steps: see ``report``.
            trace: a file for the first rank to write as ``export_chrome_trace`` does, with the events of all ranks on
                its own clock. Clocks of other machines are compared by messages, to half of the time of the quickest.

        Raises:
            RuntimeError: not exactly one recorded optimizer is open and has a ``process_group`` or a sharded model,
                or not all ranks call it, or one has failed.
            TypeError, ValueError: see ``report``.
            OSError: the file cannot be written.
        """
        found = [(each, group) for each, engine in self._attached() if (group := engine.calls.group) is not None]
        if len(found) != 1:
            text = (
                "report_ranks() is for one open optimizer with a process_group or a sharded model, and this profile "
                f"has {len(found)}; profile(optimizer) records one, and report() prints this rank alone"
            )
            for _, group in found:
                group.announce(text)  # the others may wait for its message
            raise RuntimeError(text)
        ((attachment, group),) = found
        with group.announcing():
            attachment.refresh()
            shown_on = console_of(console)
            check_integer("steps", steps, 1)
            path = None if trace is None else Path(trace)
            exchange, recording = partial(group.exchange, Call.REPORT), _recording(attachment)
            common = Common.of(recording, exchange, steps=steps, whole=path is not None)
            own = RankPart.of(recording, meetings(exchange), common)
            sent = group.gather_at_first(Call.REPORT, own.encoded())
        if group.message_rank != 0:
            return
        parts = [RankPart.decoded(each) for each in sent]
        recordings = on_one_clock(parts)
        self.report(shown_on, steps=steps)
        summaries = [part.summary for part in parts]
        print_ranks(summaries, recordings, shown_on, steps=steps, complete=group.measures_collectives)
        if path is not None:
            write_chrome_trace(recordings, path)

    def save_html(self, path: str | PathLike[str], *, steps: int = 4) -> None:
        """Write the report as a page that needs no network, with lanes of all recorded steps to zoom and move in.

        It measures as ``report`` does. The file has about 30 bytes for each event.

        Args:
            path: of the file, which is replaced.
            steps: how many of the last steps are shown first.

        Raises:
            TypeError, ValueError: ``steps`` is no integer >= 1.
            OSError: the file cannot be written.
        """
        check_integer("steps", steps, 1)
        Path(path).write_text(page(self._recordings(measure=True), steps=steps), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page of the last steps, in a frame of its own: a notebook keeps it, so it has no others."""
        text = html.escape(page(self.recordings(), of_all=False))
        return (
            f'<iframe srcdoc="{text}" sandbox="allow-scripts" style="width: 100%; height: 46rem; border: 0"></iframe>'
        )

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        write_chrome_trace(self.recordings(), path)

    def _attached(self) -> Iterator[tuple[_Attachment, Engine]]:
        """The engines that are alive and open; a closed one has applied all its updates."""
        live = {engine.id for engine in ops.live_engines()}
        for attachment in self._attachments.values():
            engine = attachment.engine()
            if engine is not None and engine.id in live:
                yield attachment, engine


def profile(*optimizers: object, max_events: int = 1_000_000, flops_per_step: float | None = None) -> Profile:
    """Record compute, copies, host updates and waits inside the ``with`` block.

    Entering waits for nothing; leaving waits for the work in flight. A step counts if it ends inside the block.

    Args:
        optimizers: ``ZenFlowAdamW`` optimizers to record; none for all that are alive when the block is entered and all
            that the same thread creates inside it, first compilations included.
        max_events: how many events to keep per optimizer, about 200 bytes each; older ones are dropped.
        flops_per_step: of the forwards and backwards of a step on this device, without recomputation, for the row
            ``device work``: 6 per token and element of the matrices that tokens are multiplied with, and 12 * layers *
            hidden * context per token for attention. None leaves the row out: a graph does not tell them.

    Returns:
        A context manager with ``report()``, ``report_ranks()``, ``save_html()``, ``summary()``, ``summaries()`` and
        ``export_chrome_trace()``; a notebook shows the report.

    Raises:
        TypeError: an optimizer is not a ``ZenFlowAdamW``, or a number is of the wrong type.
        ValueError: ``max_events`` is below 1, or ``flops_per_step`` not above 0.
    """
    return Profile(*optimizers, max_events=max_events, flops_per_step=flops_per_step)


def _is_engine(candidate: object) -> bool:
    names = ("timeline", "plan", "registry", "schedule", "worker_cores", "access")
    return all(hasattr(candidate, name) for name in names)


def _measured(recording: Recording, attachment: _Attachment) -> Recording:
    """Add the rates of this machine that the report compares with; none where memory is too full to measure."""
    with suppress(RuntimeError, MemoryError):
        if recording.traffic is not None:
            rates = bandwidth.rates(attachment.device, attachment.worker_cores)
            recording = dataclasses.replace(recording, bandwidths=rates)
        if recording.flops_per_step is not None:
            sizes = Counter[torch.dtype]()
            for param in attachment.plan.params:
                sizes[param.dtype] += param.numel
            ((dtype, _),) = sizes.most_common(1)
            flops = bandwidth.matmul_flops(attachment.device, dtype)
            recording = dataclasses.replace(recording, device_flops=flops)
    return recording


def _recording(attachment: _Attachment) -> Recording:
    recording = recording_of(attachment.plan, attachment.timeline.events(), attachment.model_bytes)
    norms = attachment.timeline.norm_sums()
    return dataclasses.replace(
        recording,
        adaptive_windows=attachment.adaptive_windows,
        norms=norms,
        rows=attachment.rows,
        older_dropped=attachment.timeline.older_dropped,
    )
