"""Triton's compilations for a plan, in a thread: otherwise each would stop the first step that launches its kernel.

A kernel is compiled again for each dtype and tile, and for sizes that are multiples of 16 or not. A weight's update
begins with the first flush, so that these stops would be spread over the first steps.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Self

import torch

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.features.feature import EngineParts, Feature, FeatureCalls
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam


class CompiledKernels(Feature):
    """Compiles what the parameters ``offloaded`` launch on ``device``, in a thread for each call of ``start``.

    What is not compiled here, or fails here, the launch compiles, and raises then.
    """

    def __init__(self, offloaded: Mapping[int, OffloadedParam], device: torch.device, *, host_weights: bool) -> None:
        self._offloaded, self._device, self._host_weights = offloaded, device, host_weights
        self._known: set[Hashable] = set()
        self._closed = False

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
        plans = {_shapes(each.plan): each.plan for each in self._offloaded.values()}
        for known in plans.keys() & self._known:
            del plans[known]
        if not plans:
            return
        self._known |= plans.keys()
        # Not daemonic: the interpreter would end under a thread that is inside of LLVM.
        thread = threading.Thread(target=self._compile, args=(list(plans.values()),), name="zenflow-compiler")
        with suppress(RuntimeError):  # the system starts no thread
            thread.start()

    def _compile(self, plans: list[ParamPlan]) -> None:
        with suppress(Exception), device_of(self._device).use():
            from zenflow_compile.runtime.features.compiled_kernels.launches import launches_of

            for plan in plans:
                for launch in launches_of(plan, host_weights=self._host_weights):
                    if self._closed or not threading.main_thread().is_alive():
                        return
                    with suppress(Exception):
                        launch()

    def close(self) -> None:
        """Compile no further kernel than the one in hand.

        Hazard: nothing may wait for the thread. The caller may be in it, or in Triton with a lock that it needs: a
        garbage collection closes engines wherever it runs.
        """
        self._closed = True


def _shapes(plan: ParamPlan) -> Hashable:
    """What the launches of a plan depend on."""
    alone = replace(plan, index=0, name="", phase=0, pool=None, share=None, flat=None, shard=None)
    return alone, None if plan.share is None else (plan.of_weight.matrix_shape, plan.of_weight.dim, plan.share.parts)
