"""Models and loops that several ranks train, and one process over the joint batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zenflow_compile
from tests.support.training import EAGER_BACKEND
from zenflow_compile import ZenFlowAdamW

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
"""With a small eps AdamW divides the noise of tiny gradients by itself."""
BATCH = 12
LARGEST = 12 * 66 * 33
"""Bytes of the largest state: with a window of so much, in one process every state is read and written each time."""
OFFLOAD: dict[str, Any] = {"min_offload_size": 1, "device_share": 0.0}

ALL_POLICIES: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "zero_offload": {"policy": "zero_offload", **OFFLOAD},
    "twinflow": {"policy": "twinflow", "ratio": 0.5, **OFFLOAD},
    "deep_optimizer_states": {"policy": "deep_optimizer_states", "update_stride": 2, **OFFLOAD},
    "zero_infinity": {"policy": "zero_infinity", "host_window_bytes": LARGEST, "nvme_path": "", **OFFLOAD},
    "zenflow": {"update_interval": 1, "topk_ratio": 0.25, **OFFLOAD},
}
"""Exact ones: their weights are those of AdamW."""

WINDOWED: dict[str, dict[str, Any]] = {
    "re-selecting": {"update_interval": 4, "select_interval": 4},
    "drifting": {"update_interval": 2, "select_interval": "auto"},
    "adaptive": {"update_interval": (1, 4)},
    "late": {"update_interval": 3, "staleness": 1},
    "summed": {"update_interval": 4, "gradient_transfer": "mean"},
    "int8": {"update_interval": 4, "gradient_transfer": "int8"},
    "files": {"update_interval": 2, "offload_device": "nvme", "host_window_bytes": LARGEST, "nvme_path": ""},
}
WINDOWED = {name: {"topk_ratio": 0.25, **OFFLOAD, **options} for name, options in WINDOWED.items()}

BACKEND_OF_DEVICES = "nccl"
"""Of collectives of tensors that are not on the CPU."""


class Uneven(nn.Module):
    """Matrices of 40, 66, 33 and 40 slices, and vectors: few of these numbers divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 66)
        self.middle = nn.Linear(66, 33)
        self.down = nn.Linear(33, 40)
        self.single = nn.Parameter(torch.randn(1, 40))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.up(self.norm(self.embedding(x)))))
        return self.down(torch.tanh(hidden)) * (1 + 0.1 * self.single)


def uneven() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Uneven()


def batch(step: int, rank: int = 0, ranks: int = 1, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """A rank's part of the batch of a step, which has ``rows``."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 40, (rows,), generator=generator) for _ in range(2))
    part = slice(rows * rank // ranks, rows * (rank + 1) // ranks)
    return x[part], y[part]


def optimizer_over(model: nn.Module, options: dict[str, Any] | None, folder: str, **keywords: Any) -> Any:
    """The optimizer of a run; ``torch.optim.AdamW`` without options."""
    if options is None:
        return torch.optim.AdamW(model.parameters(), **ADAM)
    if "nvme_path" in options:
        options = {**options, "nvme_path": folder}
    return ZenFlowAdamW(model.named_parameters(), **ADAM, workers=1, **options, **keywords)


@cache
def group_for(device: str) -> Any:
    """All ranks, with collectives for tensors of a device."""
    return dist.group.WORLD if device == "cpu" else dist.new_group(backend=BACKEND_OF_DEVICES)


def train(
    options: dict[str, Any] | None,
    rank: int = 0,
    ranks: int = 1,
    *,
    steps: int = 10,
    compiled: bool | str = False,
    clip: float | None = None,
    backwards: int = 1,
    build: Callable[[], nn.Module] = uneven,
    device: str = "cpu",
    folder: str | None = None,
    group: Any = None,
    rows: int = BATCH,
) -> list[Tensor]:
    """The weights after training as one of ``ranks``; of one process over the joint batch if there is one."""
    if folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return train(
                options, rank, ranks, steps=steps, compiled=compiled, clip=clip, backwards=backwards, build=build,
                device=device, folder=folder, group=group, rows=rows,
            )  # fmt: skip
    model = build().to(device)
    if group is None and ranks > 1:
        group = group_for(device)
    optimizer = optimizer_over(model, options, folder, **({} if options is None else {"process_group": group}))
    call = model
    if compiled:
        call = (
            torch.compile(model, backend="zenflow") if compiled == "inductor" else torch.compile(model, **EAGER_BACKEND)
        )
    for step in range(steps):
        for part in range(backwards):
            x, y = (each.to(device) for each in batch(step * backwards + part, rank, ranks, rows))
            (F.cross_entropy(call(x), y) / backwards).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    if options is not None:
        optimizer.flush()
    weights = [param.detach().to("cpu", copy=True) for param in model.parameters()]
    if options is not None:
        optimizer.close()
    return weights


def on_ranks(model: nn.Module, *, group: Any = None, **options: Any) -> ZenFlowAdamW:
    """An optimizer that divides ``model`` among the ranks of ``group``, or all; without options an exact one."""
    keywords = options or ALL_POLICIES["zenflow"]
    return ZenFlowAdamW(model.named_parameters(), **ADAM, **keywords, process_group=group or dist.group.WORLD)


def backward(model: Callable[[Tensor], Tensor], step: int, rank: int) -> None:
    """The backward of one of two ranks."""
    x, y = batch(step, rank, 2)
    F.cross_entropy(model(x).float(), y).backward()


def train_in_backward(options: dict[str, Any], rank: int, steps: int) -> list[Tensor]:
    """As ``train``, with an optimizer that the backend makes and that steps in the backward."""
    model = uneven()
    settings = {**EAGER_BACKEND["options"], **ADAM, **options, "process_group": dist.group.WORLD}
    call = torch.compile(model, backend="zenflow", options=settings)
    for step in range(steps):
        backward(call, step, rank)
    optimizer = zenflow_compile.optimizer_of(call)
    optimizer.flush()
    weights = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return weights


def in_backward_as_rank(rank: int, options: dict[str, Any], steps: int) -> list[Tensor]:
    return train_in_backward(options, rank, steps)


def as_rank(rank: int, ranks: int, options: dict[str, Any], **keywords: Any) -> list[Tensor]:
    """``train`` as a rank, for ``RankProcesses``."""
    return train(options, rank, ranks, **keywords)


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of any weight; NaN differs."""
    return max(float((a - b).abs().max().nan_to_num(torch.inf)) for a, b in zip(one, other, strict=True))
