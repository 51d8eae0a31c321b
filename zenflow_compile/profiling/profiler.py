"""``profile()``: attaches a timeline to engines, and reports on it."""

from __future__ import annotations

import dataclasses
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from os import PathLike
from types import TracebackType
from typing import Self, cast

from rich.console import Console

from zenflow_compile.checks.validate import check_integer
from zenflow_compile.measure import bandwidth
from zenflow_compile.profiling.chrome_trace import write_chrome_trace
from zenflow_compile.profiling.recording import Recording, recording_of
from zenflow_compile.profiling.report import print_ranks, print_report
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
        self.replaced = engine.timeline
        self.device = engine.device
        self.worker_cores = engine.worker_cores
        self.refresh()

    def refresh(self) -> None:
        """Read the plan again: parameters may be added while the profile is on."""
        if (engine := self.engine()) is not None:
            self.plan, self.model_bytes = engine.plan, engine.model_bytes
            self.adaptive_windows = engine.adaptive_windows


class Profile:
    """Records what optimizers do inside the ``with`` block; made by ``profile``.

    Results may be read after the block, or inside it: then they cover the events recorded so far.
    """

    def __init__(self, *optimizers: object, max_events: int = 1_000_000) -> None:
        for optimizer in optimizers:
            if not _is_engine(getattr(optimizer, "engine", None)):
                raise TypeError(
                    f"profile() got a {type(optimizer).__name__}; it takes ZenFlowAdamW optimizers (that of "
                    "a model compiled with options only is zf.optimizer_of(model)), or nothing, to record all"
                )
        max_events = check_integer("max_events", max_events, 1, remedy="; leave it out to keep the newest 1000000")
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
            RuntimeError: a worker or a copy failed.
        """
        assert self._exit is not None
        self._exit.close()
        attached = list(self._attached())
        try:
            if error is None:  # otherwise a failure in flight would hide the error of the block
                for _, engine in attached:
                    engine.synchronize()
        finally:
            for attachment, engine in attached:
                attachment.refresh()
                if engine.timeline is attachment.timeline:
                    engine.timeline = attachment.replaced

    def attach(self, candidate: object) -> None:
        """Give an engine a timeline of this profile. Of nested profiles the innermost records."""
        if not _is_engine(candidate):
            return  # a recording engine of the tests, which keeps no timeline
        engine = cast(Engine, candidate)
        if engine.id not in self._attachments:
            timeline = Timeline(max_events=self._max_events)
            self._attachments[engine.id] = _Attachment(engine, timeline)
            engine.timeline = timeline

    def recordings(self) -> list[Recording]:
        """Return one recording per optimizer that stepped, in the order of attachment."""
        return self._recordings(measure=False)

    def _recordings(self, *, measure: bool) -> list[Recording]:
        found = []
        for attachment in self._attachments.values():
            attachment.refresh()
            recording = _recording(attachment)
            if measure and recording.traffic is not None:
                # Memory may be too full to measure: the report then leaves the limits out.
                with suppress(RuntimeError, MemoryError):
                    measured = bandwidth.rates(attachment.device, attachment.worker_cores)
                    recording = dataclasses.replace(recording, bandwidths=measured)
            if any(event.lane == STEP for event in recording.events):
                found.append(recording)
        if len(found) == 1:
            return found
        titles = (f"optimizer {number} of {len(found)}" for number in range(1, len(found) + 1))
        return [dataclasses.replace(recording, title=title) for recording, title in zip(found, titles, strict=True)]

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
        """Print the last ``steps`` steps as lanes over time, the table, and what limits the run.

        The first report of a process measures the bandwidths of memory and links, which takes about a second and slows
        training in other threads down.

        Args:
            console: standard output by default; its width, color and encoding are respected.
            steps: how many of the last steps to draw.
        """
        seen = console is None or not console.quiet
        print_report(self._recordings(measure=seen), console, steps=steps)

    def report_ranks(self, console: Console | None = None, *, steps: int = 4) -> None:
        """Print the first rank's report there, and a table of all ranks. All ranks call it, before ``close()``.

        Args: see ``report``.

        Raises:
            RuntimeError: not exactly one recorded optimizer is open and has a ``process_group`` or a sharded model,
                or not all ranks call it, or one has failed.
        """
        found = [(each, engine.calls) for each, engine in self._attached() if engine.calls is not None]
        if len(found) != 1:
            text = (
                "report_ranks() is for one open optimizer with a process_group or a sharded model, and this profile "
                f"has {len(found)}; profile(optimizer) records one, and report() prints this rank alone"
            )
            for _, calls in found:
                calls.group.announce(text)  # the others may wait for its message
            raise RuntimeError(text)
        ((attachment, calls),) = found
        attachment.refresh()
        with calls.group.announcing():
            texts = calls.group.gather_texts(Call.REPORT, json.dumps(summarize(_recording(attachment))))
        if calls.group.message_rank == 0:
            self.report(console, steps=steps)
            print_ranks([json.loads(text) for text in texts], console)

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


def profile(*optimizers: object, max_events: int = 1_000_000) -> Profile:
    """Record compute, copies, host updates and waits inside the ``with`` block.

    Entering waits for nothing; leaving waits for the work in flight. A step counts if it ends inside the block.

    Args:
        optimizers: ``ZenFlowAdamW`` optimizers to record; none for all that are alive when the block is entered and all
            that the same thread creates inside it, first compilations included.
        max_events: how many events to keep per optimizer, about 200 bytes each; older ones are dropped.

    Returns:
        A context manager with ``report()``, ``report_ranks()``, ``summary()``, ``summaries()`` and
        ``export_chrome_trace()``.

    Raises:
        TypeError: an optimizer is not a ``ZenFlowAdamW``, or ``max_events`` is not an integer.
        ValueError: ``max_events`` is below 1.
    """
    return Profile(*optimizers, max_events=max_events)


def _is_engine(candidate: object) -> bool:
    names = ("timeline", "plan", "model_bytes", "adaptive_windows", "worker_cores", "synchronize")
    return all(hasattr(candidate, name) for name in names)


def _recording(attachment: _Attachment) -> Recording:
    recording = recording_of(attachment.plan, attachment.timeline.events(), attachment.model_bytes)
    norms = attachment.timeline.norm_sums()
    return dataclasses.replace(recording, adaptive_windows=attachment.adaptive_windows, norms=norms)
