"""Counts the places at which a step makes the host wait for the device."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.common import ROOT, Spread
from benchmarks.evidence.loop import WARM_UP, Loop
from benchmarks.evidence.setting import Emit, Row, Setting
from zenflow_compile.runtime.device.devices import device_of

_SELECT_INTERVAL = 12
_STEPS = 3 * _SELECT_INTERVAL
_WARNING = "called a synchronizing CUDA operation"


@dataclass(slots=True)
class _Steps:
    """The steps of one kind.

    Attributes:
        syncs: warnings of PyTorch in each step; places: the lines that they name, over all steps.
        blocking: blocking copies of the runtime in each step; reasons: what for, over all steps.
    """

    syncs: list[int] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    blocking: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def row(self, *, cuda: bool) -> Row:
        """For the results file."""
        row: Row = {
            "steps": len(self.blocking),
            "blocking_copies_per_step": Spread.of(self.blocking).row(),
            "blocking_copies": dict(self.reasons.most_common()),
        }
        if not cuda:
            return {**row, "left_out": "syncs: torch.cuda.set_sync_debug_mode needs a CUDA device"}
        return {**row, "syncs_per_step": Spread.of(self.syncs).row(), "syncs": dict(self.places.most_common())}


@contextmanager
def counted_syncs(found: Counter[str], *, cuda: bool) -> Iterator[None]:
    """Count PyTorch's warnings about synchronizing operations, by ``file:line``; on the CPU there are none.

    PyTorch does not warn about ``torch.cuda.synchronize`` and about waits for events.
    """
    if not cuda:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # a place may warn several times in a step
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if _WARNING in str(each.message):
            found[f"{os.path.relpath(each.filename, ROOT)}:{each.lineno}"] += 1


def measure(setting: Setting, emit: Emit) -> None:
    """One row per kind of step: steady, steady with ``clip_grad_norm_``, and re-selecting ones."""
    # Re-selections at known steps; with the default they depend on the gradients.
    options = {"select_interval": _SELECT_INTERVAL}
    with Loop(setting, options) as loop:
        loop.steps(WARM_UP)
        for clip in (False, True):
            for kind, steps in _kinds(loop, setting, clip).items():
                emit({"step": kind, "clip_grad_norm": clip, **loop.described(), **steps.row(cuda=setting.cuda)})


def _kinds(loop: Loop, setting: Setting, clip: bool) -> dict[str, _Steps]:
    """``_STEPS`` steps; a step is re-selecting if it applied an update window that brought a new selection."""
    engine = loop.optimizer.engine
    blocking = device_of(next(iter(loop.optimizer.param_groups[0]["params"])).device).blocking
    kinds: dict[str, _Steps] = {}
    for _ in range(_STEPS):
        selections, copies, syncs = engine.uploads.selections, blocking.copy(), Counter[str]()
        with counted_syncs(syncs, cuda=setting.cuda):
            loop.step(clip=clip)
        steps = kinds.setdefault("steady" if engine.uploads.selections == selections else "re-selecting", _Steps())
        copied = blocking - copies
        steps.syncs.append(syncs.total())
        steps.places += syncs
        steps.blocking.append(copied.total())
        steps.reasons += copied
    return kinds
