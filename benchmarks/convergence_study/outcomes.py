"""The outcomes of the study's runs, written to its results file after every run, so that it can be cut off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.convergence_study.plan import REFERENCE, Phase, Run
from examples.settings import TrainConfig
from examples.stdlib_text import Text, load_headers, load_text, validation_batches
from examples.train_gpt import evaluate, initial_model, train

NAME = "convergence"

Texts = Callable[[Phase, int], Text]


class Outcomes:
    """Rows of the results file ``out``, or of ``benchmarks/results/convergence.json``, one per run."""

    def __init__(self, rows: Iterable[dict[str, Any]] = (), out: Path | None = None) -> None:
        self._rows = list(rows)
        self._out = out

    @classmethod
    def read(cls, out: Path | None = None) -> Outcomes:
        """Read the outcomes of earlier runs, if there are any."""
        path = out or common.RESULTS / f"{NAME}.json"
        rows = json.loads(path.read_text())["rows"] if path.is_file() else ()
        return cls([row | {key: _completed(row.get(key)) for key in ("config", "start")} for row in rows], out)

    def find(self, run: Run) -> dict[str, Any] | None:
        """The row of ``run``, None before it has run with these settings."""
        identity = run.identity()
        return next((row for row in self._rows if identity.items() <= row.items()), None)

    def add(self, run: Run, measured: dict[str, Any]) -> None:
        """Put what ``run`` measured in the place of its earlier row, if any, and write the file."""
        identity = run.identity()
        self._rows = [row for row in self._rows if not identity.items() <= row.items()]
        self._rows.append(identity | measured)
        common.write_results(NAME, self._rows, out=self._out)

    def forget(self, model: str, rules: Container[str]) -> None:
        """Drop the rows of ``model`` under ``rules``, given by name, so that these runs are due again.

        Runs that continue a dropped run are dropped too, since they began with its weights.
        """
        dropped = [row["config"] for row in self._rows if row["model"] == model and row["rule"] in rules]
        self._rows = [
            row
            for row in self._rows
            if row["model"] != model or (row["rule"] not in rules and row["start"] not in dropped)
        ]


def _completed(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Settings that were saved, with those that came later, whose defaults change nothing.

    Settings that this version does not know stay, so that the row is kept in the file, and is that of no run here.
    """
    return None if settings is None else TrainConfig().trajectory() | settings


def perform(run: Run, folder: Path, *, keep: bool, texts: Texts) -> dict[str, Any]:
    """Train once and return what was measured.

    Args:
        run: what to train; the checkpoint it continues, if any, is below ``folder``.
        folder: where checkpoints are.
        keep: leave a checkpoint below ``folder``, because other runs continue this one.
        texts: the text of a phase, at most so many bytes of it.
    """
    text = texts(run.phase, run.config.text_bytes)
    torch.compiler.reset()  # the last run's model can be freed, and its guards do not count
    steps = run.config.steps
    config = replace(run.config, evaluate_every=steps, save_every=steps)
    measured: dict[str, Any] = {}
    if run.start:
        start = checkpoint(run.start, folder)
        assert start is not None  # runs that others continue come first
        config = replace(config, start_from=str(start))
        if run.rule is REFERENCE:  # where all rules of this seed begin
            measured["loss_before"] = _loss_before(config, text)
    if keep:
        config = replace(config, out=str(folder / run.folder()))
    result = train(config, text=text)
    return measured | {
        "validation_loss": result.validation_loss,
        "parameters": result.parameters,
        "seconds": round(result.seconds, 1),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _loss_before(config: TrainConfig, text: Text) -> float:
    batches = validation_batches(text, count=config.evaluation_batches, batch=config.batch, context=config.context)
    return evaluate(initial_model(config), batches, config.torch_device())


def checkpoint(run: Run, folder: Path) -> Path | None:
    """The last checkpoint of ``run``; None if there is none. Repeated runs leave one each, and the newest counts."""
    found = (folder / run.folder()).glob(f"step-{run.config.steps:06d}-*.pt")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@lru_cache(maxsize=2)
def phase_text(phase: Phase, limit_bytes: int) -> Text:
    """Text that is on every machine: Python sources to train from scratch, C++ headers for fine-tuning."""
    return load_text(limit_bytes) if phase == "scratch" else load_headers(limit_bytes)
