"""Describes what one system trains, in a form that can be sent to its process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.systems.workloads import DTYPES, WORKLOADS, Workload

SYSTEMS = {
    "forward_backward": "forward and backward alone (torch.compile), nothing is updated",
    "adamw": "torch.compile and torch.optim.AdamW(fused=True), everything on the device; several ranks: under DDP",
    "resident": 'ZenFlowAdamW, policy="resident"',
    "zero_offload": 'ZenFlowAdamW, policy="zero_offload"',
    "twinflow": 'ZenFlowAdamW, policy="twinflow"',
    "deep_optimizer_states": 'ZenFlowAdamW, policy="deep_optimizer_states"',
    "zero_infinity": 'ZenFlowAdamW, policy="zero_infinity"',
    "zenflow": 'ZenFlowAdamW, policy="zenflow"',
    "deepspeed_zero_offload": "DeepSpeed ZeRO stage 2 with offload_optimizer",
    "deepspeed_zenflow": "the same with the zenflow block, overlap_step",
    "torchao_offload": "torchao CPUOffloadOptimizer, gradients offloaded",
    "fsdp2_offload": "FSDP2 of one rank with CPUOffloadPolicy",
    "zero_1": "adamw of several ranks, which divide its state: PyTorch's ZeroRedundancyOptimizer (ZeRO stage 1)",
    "fsdp2": "FSDP2 of several ranks, each block sharded and compiled, and torch.optim.AdamW(fused=True)",
    "fsdp2_zenflow": 'the same with backend="zenflow" and ZenFlowAdamW',
}
OURS = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity")
COMPARED_BY_POLICIES = ("resident", "twinflow", "deep_optimizer_states", "zero_infinity")
"""Our systems that ``peers`` runs only if asked; the benchmark ``policies`` compares them."""
DEEPSPEED = ("deepspeed_zero_offload", "deepspeed_zenflow")
CUDA_ONLY = ("torchao_offload", "fsdp2_offload")
SEVERAL_RANKS_ONLY = ("zero_1", "fsdp2", "fsdp2_zenflow")

LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
"""Of AdamW, the same under every system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One system on one workload.

    Attributes:
        system: one of ``SYSTEMS``.
        model: one of ``WORKLOADS``.
        tokens: per step, for language models; None takes the workload's.
        dtype: of weights, activations and gradients. AdamW's state is fp32 under every system but torchao's, which
            keeps it in the dtype of the weights.
        device: ``"cpu"`` or ``"cuda"``.
        cores: logical cores that the process, with all its threads and children, may use.
        threads: intra-op threads of its training process.
        seed: of weights and data.
        clip: bound on the global gradient norm, or None.
        update_interval, topk_ratio: of zenflow, ours and DeepSpeed's.
        memory_bytes: CUDA memory that the process may allocate, or None.
        inner: what compiles the graphs: ``"inductor"``, or ``"eager"`` in quick tests.
        options: further keywords of ``ZenFlowAdamW``.
        ranks: processes that train the model together, each with batches of its own.
    """

    system: str
    model: str
    tokens: int | None = None
    dtype: str = "fp32"
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    threads: int = 1
    seed: int = 0
    clip: float | None = None
    update_interval: int = 4
    topk_ratio: float = 0.1
    memory_bytes: int | None = None
    inner: str = "inductor"
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, known in (("system", SYSTEMS), ("model", WORKLOADS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        self.workload()

    def described(self) -> dict[str, Any]:
        """The workload, for a results file."""
        workload = self.workload()
        return {
            "model": self.model,
            "summary": workload.summary,
            "tokens": workload.rows * workload.context or None,
            "dtype": self.dtype,
            "device": self.device,
            "ranks": self.ranks,
        }

    def workload(self) -> Workload:
        """Model and batch size."""
        workload = WORKLOADS[self.model]
        return workload if self.tokens is None else workload.with_tokens(self.tokens)

    def to_json(self) -> str:
        """Encode for the command line of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, "cores": tuple(values["cores"])})
