"""Time of PyTorch's clipping over gradients of offloaded parameters and over dense ones, and time to set ``.grad``.

Two models of 300 weights and no biases take turns: one under ``torch.optim.AdamW``, with dense gradients, and one under
``ZenFlowAdamW``, with all weights offloaded. In every step both call PyTorch's
``clip_grad_norm_`` twice after the backward. The second call reuses the norms of the first and multiplies its factor.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zenflow_compile as zf
from benchmarks.common import Spread, Target, interleaved, option_parser, write_results
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient

TARGET_RATIO, TARGET_GRAD_US = 2.5, 4.0


class Layers(nn.Module):
    """Weights without biases, each in a separate product, so that the backward is short."""

    def __init__(self, width: int, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


class Training:
    """A model that is trained and clipped.

    Attributes:
        first_us, second_us: of each step, what the two calls of ``clip_grad_norm_`` took per tensor.
    """

    def __init__(self, width: int, tensors: int, *, offloaded: bool) -> None:
        torch.manual_seed(0)
        self.model = Layers(width, tensors)
        self.params = list(self.model.parameters())
        self.batch = torch.randn(4, width)
        self.optimizer: Any = (
            zf.ZenFlowAdamW(self.params, device_share=0.0, min_offload_size=1)
            if offloaded
            else torch.optim.AdamW(self.params)
        )
        self.first_us: list[float] = []
        self.second_us: list[float] = []

    def step(self) -> float:
        """Train one step, and return the us per tensor of its first clipping."""
        self.model(self.batch).backward()
        for times in (self.first_us, self.second_us):
            began = time.perf_counter()
            nn.utils.clip_grad_norm_(self.params, 1e-3)
            times.append(1e6 * (time.perf_counter() - began) / len(self.params))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.first_us[-1]


def grad_us(training: Training, repeats: int) -> Spread:
    """Time to make a record and its tensor and to assign them to ``.grad``, in us."""
    offloaded = next(iter(training.optimizer.engine.offloaded.values()))
    param = offloaded.param

    def put() -> None:
        param.grad = OffloadedGradient.of(GradientRecord(offloaded.shown.like, offloaded.shown.me))

    times = timeit.repeat(put, number=1000, repeat=repeats)
    param.grad = None
    return Spread.of([1e6 * each / 1000 for each in times])


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks clipping``."""
    parser = option_parser("clipping", __doc__, rounds=60)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256], help="features per layer (%(default)s)")
    parser.add_argument("--tensors", type=int, default=300, help="weights of the model (%(default)s)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for width in given.width:
        dense, offloaded = (Training(width, given.tensors, offloaded=offloaded) for offloaded in (False, True))
        for training in (dense, offloaded):
            for _ in range(5):  # a window of every phase, and caches
                training.step()
            training.first_us.clear()
            training.second_us.clear()
        interleaved(given.rounds, {"dense": dense.step, "offloaded": offloaded.step}, warm_up=0)
        engine = offloaded.optimizer.engine
        assert len(engine.offloaded) == given.tensors
        ratios = [mine / other for mine, other in zip(offloaded.first_us, dense.first_us, strict=True)]
        put = grad_us(offloaded, given.rounds)
        row = {
            "width": width,
            "tensors": given.tensors,
            "dense_gradients": engine.registry.gradients.dense,
            "ratio": Spread.of(ratios).row(),
            "clip_us": {"dense": Spread.of(dense.first_us).row(), "offloaded": Spread.of(offloaded.first_us).row()},
            "second_clip_us": {
                "dense": Spread.of(dense.second_us).row(),
                "offloaded": Spread.of(offloaded.second_us).row(),
            },
            "grad_us": put.row(),
        }
        rows.append(row)
        theirs, ours = Spread.of(dense.first_us), Spread.of(offloaded.first_us)
        print(f"width {width}: {theirs} us per tensor dense, {ours} offloaded")
        ratio = Spread.of(ratios).median
        targets += [
            Target(f"clipping over dense gradients, width {width}", ratio, TARGET_RATIO, at_least=False),
            Target(f"us to set .grad and its record, width {width}", put.median, TARGET_GRAD_US, at_least=False),
            Target(f"dense gradients, width {width}", float(row["dense_gradients"]), 0.0, at_least=False),
        ]
        offloaded.optimizer.close()
    for target in targets:
        print(target)
    print(f"wrote {write_results('clipping', rows, out=given.out, seed=0, targets=targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
