"""A training loop of zenflow in this process, for parts that look inside a step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

import zenflow_compile as zf
from benchmarks.evidence.setting import Setting
from benchmarks.systems.local import ADAM
from benchmarks.systems.workloads import DTYPES

MODEL = "qwen2.5-3b"
CLIP = 1.0
WARM_UP = 12
"""Steps before anything is measured: compilation, first update windows, first selections."""


class Loop:
    """One model under policy ``zenflow``; a context manager that closes the optimizer."""

    def __init__(self, setting: Setting, options: Mapping[str, Any] | None = None) -> None:
        case = setting.case("zenflow", MODEL)
        torch.manual_seed(case.seed)
        torch.set_num_threads(case.threads)
        self.device = torch.device(case.device)
        self.case = case
        workload = case.workload()
        with self.device:
            model = workload.build()
        model.to(DTYPES[case.dtype])
        self._params = list(model.parameters())
        self._batches = workload.batches(case.seed, DTYPES[case.dtype], self.device)
        self._numbers = count()
        self.optimizer = zf.ZenFlowAdamW(
            model.named_parameters(), policy="zenflow", update_interval=case.update_interval, **ADAM, **(options or {})
        )
        backend: dict[str, Any] = {"backend": "zenflow", "options": {"inner": case.inner}}
        self._compiled = torch.compile(model, dynamic=False, **backend)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.optimizer.close()

    def step(self, *, clip: bool = False) -> None:
        """One training step. It reads no loss, so that only the optimizer can wait for the device."""
        self._compiled(*self._batches[next(self._numbers) % len(self._batches)]).backward()
        if clip:
            nn.utils.clip_grad_norm_(self._params, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int) -> None:
        """``number`` steps."""
        for _ in range(number):
            self.step()

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def described(self) -> dict[str, Any]:
        """The model, for a row."""
        workload = self.case.workload()
        return {
            "model": self.case.model,
            "summary": workload.summary,
            "tokens": workload.rows * workload.context or None,
            "dtype": self.case.dtype,
            "device": self.case.device,
        }
