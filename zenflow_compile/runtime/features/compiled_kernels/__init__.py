"""Triton's compilations for a plan, in a thread: otherwise each would stop the first step that launches its kernel.

A kernel is compiled again for each dtype and tile, and for sizes that are multiples of 16 or not. A weight's update
begins with the first flush, so that these stops would be spread over the first steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Self

import torch

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.features.feature import EngineParts, Feature, FeatureCalls
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam


class CompiledKernels(Feature):
    """Compiles what the parameters ``offloaded`` launch on ``device``, a thread for each call of ``start``.

    What is not compiled here, or fails here, the launch compiles, and raises then.
    """

    def __init__(self, offloaded: Mapping[int, OffloadedParam], device: torch.device, *, host_weights: bool) -> None:
        self._offloaded, self._device, self._host_weights = offloaded, device, host_weights
        self._known: set[ParamPlan] = set()
        self._threads: list[threading.Thread] = []
        self.closed = False

    @classmethod
    def of(cls, engine: EngineParts) -> Self | None:
        if not device_of(engine.device).has_triton:
            return None
        host_weights = engine.options.offload_weights is not False
        return cls(engine.registry.offloaded, engine.device, host_weights=host_weights)

    def calls(self) -> FeatureCalls:
        return {"allocated": self.start, "close": self.close}

    def start(self) -> None:
        """Begin with parameters of further shapes."""
        shapes = (replace(each.plan, index=0, name="", phase=0, pool=None) for each in self._offloaded.values())
        plans = [plan for plan in dict.fromkeys(shapes) if plan not in self._known]
        if not plans:
            return
        self._known.update(plans)
        # Not daemonic: the interpreter would end under a thread that is inside of LLVM.
        thread = threading.Thread(target=self._compile, args=(plans,), name="zenflow-compiler")
        with suppress(RuntimeError):  # the system starts no thread
            thread.start()
            self._threads.append(thread)

    def _compile(self, plans: list[ParamPlan]) -> None:
        from zenflow_compile.runtime.device_updates import triton_kernels
        from zenflow_compile.runtime.features.compiled_kernels.launches import launches_of

        with triton_kernels.compiling_for(self._device), suppress(Exception):
            for plan in plans:
                for launch in launches_of(plan, host_weights=self._host_weights):
                    if self.closed or not threading.main_thread().is_alive():
                        return
                    launch()

    def close(self) -> None:
        """Compile no further kernel, and wait for the one in hand. Idempotent."""
        self.closed = True
        for thread in self._threads:
            thread.join()
