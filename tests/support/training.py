"""A small model, its data, and the ways to train it that the tests of the engine share."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zenflow_compile import ZenFlow, ZenFlowAdamW, rules

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01}

# Every matrix goes to the host, and no kernel is compiled for it.
OFFLOAD_ALL: dict[str, Any] = {"min_offload_size": 100, "device_share": 0.0}

# Of the matrices below in bytes, fp32: with a window of so much, every state in a file is read and written at each use.
LARGEST_STATE = 12 * 32 * 32

EAGER_BACKEND: dict[str, Any] = {"backend": "zenflow", "options": {"inner": "eager"}}
# What code outside of graphs gets that reads or writes a weight whose update is in flight.
IN_FLIGHT = r"an update of \S+ is in flight.*optimizer\.synchronize\(\)"

ENTRIES = [None, EAGER_BACKEND]
ENTRY_IDS = ["hooks", "graph"]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights at every call: matrices of 512, 1024 and 320 elements."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the data of a step, the same at every call."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator).to(dtype), torch.randint(0, 10, (8,), generator=generator)


def take_step(loss: Any, *optimizers: Any) -> None:
    """Run a backward, and a step of each optimizer."""
    loss.backward()
    del loss  # and the graph, as where nothing keeps it
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def by_adamw(model: nn.Module, **options: Any) -> ZenFlow:
    return ZenFlowAdamW(model.named_parameters(), **options)


def by_muon(model: nn.Module, lr: float, weight_decay: float, **options: Any) -> ZenFlow:
    """Matrices by Muon, and the others by AdamW with the numbers that are given."""
    adamw = rules.AdamW(lr=lr, weight_decay=weight_decay)
    return ZenFlow(rules.muon_groups(model, rules.Muon(lr=0.02)), adamw, **options)


@dataclass
class Training:
    """A model, its optimizer and how it is called.

    Attributes:
        entry: arguments for ``torch.compile``; None to train without it.
        options: of the optimizer, over those that the tests share.
        make: makes the optimizer.
    """

    entry: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    build: Callable[[torch.dtype], nn.Module] = mlp
    make: Callable[..., Any] = by_adamw

    def __post_init__(self) -> None:
        self.model = self.build(self.dtype)
        self.optimizer = self.make(self.model, **{**ADAM, **OFFLOAD_ALL, **self.options})
        self.call = torch.compile(self.model, **self.entry) if self.entry else self.model

    def loss(self, step: int) -> Tensor:
        inputs, targets = batch(step, self.dtype)
        return F.cross_entropy(self.call(inputs).float(), targets)

    def backward(self, step: int) -> None:
        self.loss(step).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, begin: int, end: int) -> Training:
        for step in range(begin, end):
            self.step(step)
        return self

    def weights(self) -> list[Tensor]:
        """Copy the weights after all due updates were applied."""
        self.optimizer.synchronize()
        return self.weights_as_they_are()

    def weights_as_they_are(self) -> list[Tensor]:
        """Copy the weights without applying updates in flight."""
        return [param.detach().clone() for param in self.model.parameters()]

    def saved(self) -> bytes:
        """Return a checkpoint as a file would hold it."""
        file = io.BytesIO()
        torch.save({"optimizer": self.optimizer.state_dict(), "model": self.model.state_dict()}, file)
        return file.getvalue()

    def load(self, saved: bytes, *, weights_first: bool = True) -> Training:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        if weights_first:
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if not weights_first:
            self.model.load_state_dict(state["model"])
        return self


class Recorded:
    """A compiled model, its optimizer, and the losses and weights that it had."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        torch._dynamo.reset()
        self.model = model
        self.optimizer = ZenFlowAdamW(model.named_parameters(), **options)
        self.call = torch.compile(model, **EAGER_BACKEND)
        self.losses: list[Tensor] = []

    @property
    def weights(self) -> Any:
        return self.optimizer.engine.weights

    def equals(self, other: Recorded) -> bool:
        """Close both optimizers, and compare bit for bit."""
        bits = []
        for run in (self, other):
            run.optimizer.close()
            bits.append([*run.losses, *run.model.parameters()])
        return all(torch.equal(mine, theirs) for mine, theirs in zip(*bits, strict=True))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """All weights are equal bit for bit."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"parameter {index} differs by up to {(a.float() - b.float()).abs().max():.1e}"


def host_masters(optimizer: ZenFlowAdamW) -> list[Tensor]:
    """Return the fp32 masters of all offloaded parameters, both sides, in the parameters' shapes."""
    state = optimizer.state_dict()["state"]
    return [state[index]["master"] for index in optimizer.engine.offloaded]


class Delays:
    """Sleeps of seeded random length; as many as there are calls."""

    def __init__(self, seed: int, longest_ms: float) -> None:
        self.calls = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._longest_ms = longest_ms

    def seconds(self) -> float:
        """The next length, for one more call."""
        self.calls += 1
        return float(torch.rand((), generator=self._generator)) * self._longest_ms / 1000

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with a delay before each call."""

        def delayed(*args: Any, **keywords: Any) -> Any:
            time.sleep(self.seconds())
            return function(*args, **keywords)

        return delayed
