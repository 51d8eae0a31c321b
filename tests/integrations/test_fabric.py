"""Lightning Fabric: set-up before and after compilation, clipping, precision, checkpoints, its optimizer wrapper."""

from __future__ import annotations

import gc
import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning  # before torch.compile is used, whose arguments Fabric repeats
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.nn import functional as F

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    FIRST_USES,
    INTERVALS,
    Layers,
    Numbers,
    assert_as_adamw,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    nudge,
    offloaded,
    open_gradients,
    weights,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")]
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

STEPS = 8


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), 3 * torch.randn(8, 2, generator=generator)


class Trained(SimpleNamespace):
    """The results of one loop."""


class Loop:
    """A model and its optimizer under Fabric.

    Args:
        options: of ``ZenFlowAdamW``; None for ``torch.optim.AdamW``.
        entry: when the model is compiled: never ("hooks"), before ``fabric.setup`` as an ``OptimizedModule`` or in
            place, or after it.
        clip: keywords of ``fabric.clip_gradients``.
        separate: the model and the optimizer are set up by a call each.
        nudged: change the first weights in their last place, towards this number.
    """

    def __init__(
        self,
        options: dict[str, Any] | None,
        entry: str = "hooks",
        clip: dict[str, Any] | None = None,
        precision: Any = "32-true",
        separate: bool = False,
        backend: dict[str, Any] = EAGER_BACKEND,
        strategy: Any = "auto",
        nudged: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision, strategy=strategy)
        self.fabric.launch()
        self.model, self.clip = Layers(), clip
        if nudged is not None:
            nudge(self.model, nudged)
        self.before = weights(self.model)
        self.inner: torch.optim.Optimizer
        if options is None:
            self.inner = torch.optim.AdamW(self.model.parameters(), **ADAM)
        else:
            self.inner = zf.ZenFlowAdamW(self.model.named_parameters(), **options)
        module: Any = self.model
        if entry == "before":
            module = torch.compile(module, **backend)
        elif entry == "in_place":
            module.compile(**backend)
        if separate:
            self.call = self.fabric.setup_module(module)
            self.optimizer: Any = self.fabric.setup_optimizers(self.inner)
        else:
            self.call, self.optimizer = self.fabric.setup(module, self.inner)
        if entry == "after":
            self.call = torch.compile(self.call, **backend)
        self.norms: list[float] = []
        self.losses: list[float] = []

    def run(self, first: int, stop: int, accumulated: int = 2) -> Loop:
        for step in range(first, stop):
            for part in range(accumulated):
                with self.fabric.no_backward_sync(self.call, enabled=part + 1 < accumulated):
                    inputs, targets = batch(accumulated * step + part)
                    loss = F.mse_loss(self.call(inputs).float(), targets) / accumulated
                    self.fabric.backward(loss)
                self.losses.append(loss.item())
            if self.clip is not None:
                norm = self.fabric.clip_gradients(self.call, self.optimizer, **self.clip)
                self.norms += [] if norm is None else [float(norm)]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def logged(self) -> dict[str, list[float]]:
        return {"losses": self.losses, "norms": self.norms}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.call, "optimizer": self.optimizer, "step": 0}


CLIPS: dict[str, dict[str, Any] | None] = {"none": None, "norm": {"max_norm": 0.3}, "value": {"clip_val": 0.02}}


@cache
def adamw(clip: str, precision: str) -> list[Loop]:
    """The same loop under AdamW; in half precision also over weights that differ in the last place."""
    nudges = [None] if precision == "32-true" else [None, math.inf, -math.inf]
    return [Loop(None, clip=CLIPS[clip], precision=precision, nudged=each).run(0, STEPS) for each in nudges]


def assert_equal(loop: Loop, variants: Sequence[Loop]) -> None:
    assert_trained(loop.before, weights(loop.model))
    assert_as_adamw(*(Numbers(weights(each.model), each.logged) for each in (loop, *variants)))
    assert offloaded(loop.inner) == 2


LONG = pytest.mark.long


@pytest.mark.parametrize("entry", ["hooks", "before", "in_place", "after"])
@pytest.mark.parametrize("clip", [pytest.param("none", marks=LONG), "norm", "value"])
@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-mixed", marks=LONG), pytest.param("16-mixed", marks=LONG)]
)
def test_fabric_equals_adamw(precision: str, clip: str, entry: str) -> None:
    loop = Loop(EXACT, entry, CLIPS[clip], precision, separate=clip == "norm")
    with zf.profile() as profile:
        loop.run(0, STEPS)
    assert_equal(loop, adamw(clip, precision))
    # Clipping by value writes every element of two offloaded gradients.
    assert sum(dense_gradients(profile).values()) == (2 * STEPS if clip == "value" else 0)


def test_inductor_graph_equals_adamw() -> None:
    loop = Loop(EXACT, "before", CLIPS["norm"], backend={"backend": "zenflow"}).run(0, STEPS)
    assert_equal(loop, adamw("norm", "32-true"))


@pytest.mark.parametrize("entry", ["hooks", "before"])
@pytest.mark.parametrize("interval", INTERVALS)
def test_resume_is_bitwise(interval: int, entry: str, tmp_path: Path) -> None:
    """A run that resumes from the middle of an update window through ``fabric.load`` equals the uninterrupted one."""
    whole = Loop(INTERVALS[interval], entry, CLIPS["norm"]).run(0, 6)
    whole.fabric.save(tmp_path / "state.ckpt", whole.state)
    assert (open_gradients(whole.inner.state_dict()) > 0) == (interval == 4)
    whole.run(6, 12)
    resumed = Loop(INTERVALS[interval], entry, CLIPS["norm"])
    resumed.fabric.load(tmp_path / "state.ckpt", resumed.state)
    resumed.run(6, 12)
    assert_trained(whole.before, weights(whole.model))
    assert_bitwise(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("entry", ["before", "in_place", "after"])
def test_compiled_data_parallel_is_refused(entry: str, tmp_path: Path) -> None:
    """A process group of one process is enough: Fabric wraps the model."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with patch.dict(os.environ):  # the launcher writes the variables of a group
            loop = Loop(EXACT, entry, strategy=DDPStrategy(parallel_devices=[torch.device("cpu")]))
        with pytest.raises(Exception, match=r"wrapped in DistributedDataParallel.*or train under DistributedData"):
            loop.run(0, 1)
    finally:
        torch.distributed.destroy_process_group()
    assert_bitwise(weights(loop.model), loop.before)


# The wrapper: an instance of a class derived from ours, whose attributes are those of the wrapped optimizer.


@pytest.mark.parametrize("entry", ["hooks", pytest.param("before", marks=LONG)])
@pytest.mark.parametrize("first", FIRST_USES)
def test_first_use_through_the_wrapper(first: str, entry: str) -> None:
    loop = Loop(EXACT, entry)
    FIRST_USES[first](loop.optimizer)
    loop.run(0, STEPS)
    assert_equal(loop, adamw("none", "32-true"))
    assert isinstance(loop.optimizer, zf.ZenFlowAdamW)
    assert loop.optimizer.engine is loop.inner.engine
    states = [each.state_dict()["state"] for each in (loop.inner, loop.optimizer)]
    assert [[int(entry["step"]) for entry in state.values()] for state in states] == [[STEPS] * 6] * 2


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "lightning": LightningOptimizer,
    "fabric": lambda optimizer: _FabricOptimizer(optimizer, lightning.Fabric(accelerator="cpu", devices=1)._strategy),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("first", FIRST_USES)
def test_bare_wrapper_shares_the_engine(first: str, wrapper: str) -> None:
    """The two share one engine, whichever is used first."""
    model = Layers()
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), **EXACT)
    wrapped = WRAPPERS[wrapper](optimizer)
    FIRST_USES[first](wrapped)
    for step in range(3):
        F.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        wrapped.zero_grad()
    assert wrapped.engine is optimizer.engine
    assert {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {3}
    wrapped.close()
    with pytest.raises(RuntimeError, match="this ZenFlowAdamW is closed"):
        optimizer.state_dict()


@pytest.mark.parametrize("interval", INTERVALS)
def test_flush_and_close_through_the_wrapper(interval: int) -> None:
    loops = [Loop(INTERVALS[interval], "before", CLIPS["norm"]).run(0, 6) for _ in range(3)]
    before = weights(loops[2].model)
    loops[0].optimizer.flush()
    loops[1].optimizer.close()
    loops[2].inner.flush()
    for loop in loops[:2]:
        assert_bitwise(weights(loop.model), weights(loops[2].model))
    assert (difference(before, weights(loops[2].model)) > 1e-4) == (interval == 4)
    for optimizer in (loops[1].optimizer, loops[1].inner):
        with pytest.raises(RuntimeError, match="this ZenFlowAdamW is closed"):
            optimizer.step()
    zf.ZenFlowAdamW(loops[1].model.parameters(), **EXACT).close()


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_collection_of_the_wrapper_closes_nothing(used: bool) -> None:
    loop = Loop(EXACT)
    if used:
        loop.run(0, 2)
    died = weakref.ref(loop.optimizer)
    loop.optimizer = None
    gc.collect()
    assert died() is None
    loop.optimizer = loop.fabric.setup_optimizers(loop.inner)
    loop.run(2 if used else 0, STEPS)
    assert_equal(loop, adamw("none", "32-true"))
