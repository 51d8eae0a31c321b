"""Terminal output of a run: progress, step times, and the table that compares policies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from examples.settings import TrainConfig, TrainResult

_LOSS_EVERY = 10  # steps between readings of the loss, because reading it waits for the device


class StepClock:
    """Times steps: on CUDA between events on the current stream, on the CPU by the wall."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_ms: list[float] = []
        self._started: torch.cuda.Event | float = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = self._event() if self._cuda else time.perf_counter()

    def stop(self, *, keep: bool) -> None:
        """The step is over; only those to ``keep`` count."""
        if not keep:
            return
        if isinstance(self._started, float):
            self._times_ms.append((time.perf_counter() - self._started) * 1e3)
        else:
            self._spans.append((self._started, self._event()))

    def median_ms(self) -> float | None:
        """Median step time so far; waits for the device. None before the first step that counts."""
        if self._spans:
            self._spans[-1][1].synchronize()
            self._times_ms += [start.elapsed_time(end) for start, end in self._spans]
            self._spans.clear()
        return statistics.median(self._times_ms) if self._times_ms else None

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RunDisplay:
    """The progress bar of one run, with loss and tokens per second, and the lines above it."""

    def __init__(self, console: Console, config: TrainConfig, first_step: int) -> None:
        self._config = config
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar: TaskID = self._progress.add_task(
            config.policy, total=config.steps, completed=first_step, loss="-", pace="compiling"
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, done: int, loss: Tensor, clock: StepClock) -> None:
        """``done`` steps are finished; ``loss`` is that of the last one."""
        if done % _LOSS_EVERY == 0 or done == self._config.steps:
            median_ms = clock.median_ms()
            pace = "warm-up" if median_ms is None else f"{tokens_per_second(self._config, median_ms):,.0f} tokens/s"
            self._progress.update(self._bar, loss=f"{loss.item():.3f}", pace=pace)
        self._progress.update(self._bar, completed=done)

    def validated(self, done: int, validation_loss: float) -> None:
        """The validation loss after ``done`` steps."""
        self._progress.console.print(
            f"{self._config.policy}: step {done}, validation loss {validation_loss:.4f}", highlight=False
        )


def tokens_per_second(config: TrainConfig, step_ms: float) -> float:
    """Pace of a run whose steps take ``step_ms``."""
    return config.batch * config.context / step_ms * 1e3


def comparison(results: Sequence[TrainResult]) -> Table:
    """One row per policy; losses are also given relative to the first row's. Fits 80 columns."""
    config, reference = results[0].config, results[0].validation_loss
    table = Table(
        title=f"{results[0].parameters / 1e6:.1f}M parameters, {config.steps} steps of "
        f"{config.batch * config.context:,} bytes, seed {config.seed}, on {config.torch_device().type}",
        caption="device, host: optimizer state. Traffic: both ways, in model sizes per step.\n"
        "Times are means per step, after the warm-up.",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for heading in ("validation loss", "step ms", "stall ms", "device MB", "host MB", "traffic"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.config.policy,
            f"{result.validation_loss:.4f} ({result.validation_loss / reference - 1:+.1%})",
            f"{result.step_ms:.1f}",
            _number(result.profile.get("stall_ms_per_step"), "{:.1f}"),
            f"{result.device_bytes / 1e6:.1f}",
            f"{result.host_bytes / 1e6:.1f}",
            _number(result.profile.get("traffic_model_sizes_per_step"), "{:.2f}"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
