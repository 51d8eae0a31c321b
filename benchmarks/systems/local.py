"""The systems that run in the project's own environment: plain PyTorch, this project, torchao, FSDP2.

Each system imports its packages when it is made, so that a missing package skips that system only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.systems.case import BETAS, EPS, LR, OURS, SEVERAL_RANKS_ONLY, WEIGHT_DECAY, Case
from benchmarks.systems.workloads import DTYPES, Batch

_RANK_SECONDS = 120
"""How long a rank waits for the others, which may compile."""

_UPDATED_TOGETHER = 100_000_000
"""Elements of parameters that resident AdamW updates at a time."""

ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


class System(Protocol):
    """A trainer of one model."""

    def step(self, batch: Batch) -> Tensor:
        """One training step, and its loss, detached; nothing waits for the device."""
        ...

    def facts(self) -> dict[str, Any]:
        """Facts for this system's row: shares, counts, notes."""
        ...

    def close(self) -> None:
        """End threads and processes that the system started."""
        ...


def make_local(case: Case, model: nn.Module) -> System:
    """The system of ``case`` around ``model``. Several ranks join their process group first.

    Raises:
        ImportError: its package is not installed.
    """
    if case.system in SEVERAL_RANKS_ONLY and case.dtype != "fp32":
        raise ImportError("PyTorch has no fp32 masters that are divided among ranks: it is compared in fp32 only")
    if case.ranks > 1:
        dist.init_process_group(timeout=timedelta(seconds=_RANK_SECONDS))
    if case.system in OURS:
        return Ours(case, model)
    if case.system == "torchao_offload":
        return TorchAO(case, model)
    if case.system == "fsdp2_offload":
        return FSDP2(case, model)
    if case.system in ("fsdp2", "fsdp2_zenflow"):
        return Sharded(case, model)
    return Plain(case, model, update=case.system != "forward_backward")


class Plain:
    """``torch.compile``, and fused AdamW on the device or nothing.

    With bf16 weights AdamW works on fp32 masters that are cast into the weights after each step: mixed precision as
    every other system here has it. Fused AdamW alone would keep its moments in bf16. Parameters are updated in groups
    of ``_UPDATED_TOGETHER`` elements, so that fp32 gradients exist for one group at a time: 16 bytes per parameter.
    """

    def __init__(self, case: Case, model: nn.Module, *, update: bool) -> None:
        self._params: list[Tensor] = list(model.parameters())
        wrapped = DistributedDataParallel(model) if case.ranks > 1 and update else model
        self._compiled = torch.compile(wrapped, backend=case.inner, dynamic=False)
        self._clip = case.clip
        groups = _groups(self._params, _UPDATED_TOGETHER if case.dtype != "fp32" else None) if update else []
        optimizer = _divided_adamw if case.system == "zero_1" else _fused_adamw
        self._groups = [_Group(group, optimizer, with_masters=case.dtype != "fp32") for group in groups]

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        loss: Tensor = self._compiled(*batch)
        loss.backward()
        if self._groups and self._clip is not None:
            nn.utils.clip_grad_norm_(self._params, self._clip)
        for group in self._groups:
            group.update()
        for param in self._params:
            param.grad = None
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        """State is all on the device, or there is none."""
        return {"resident_share": 1.0 if self._groups else None}

    def close(self) -> None:
        """Nothing was started."""


class _Group:
    """Parameters that one fused kernel updates, and their fp32 masters if they have some."""

    def __init__(
        self, params: Sequence[Tensor], optimizer: Callable[[Sequence[Tensor]], Optimizer], *, with_masters: bool
    ) -> None:
        self._params = params
        self._masters = [param.detach().float().requires_grad_() for param in params] if with_masters else []
        self._optimizer = optimizer(self._masters or params)

    def update(self) -> None:
        for master, param in zip(self._masters, self._params, strict=False):
            assert param.grad is not None
            master.grad = param.grad.float()
        self._optimizer.step()
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._params), self._masters)
            self._optimizer.zero_grad()


def _fused_adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, fused=True, **ADAM)


def _divided_adamw(params: Sequence[Tensor]) -> Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, fused=True, **ADAM)


def _groups(params: Sequence[Tensor], elements: int | None) -> list[list[Tensor]]:
    """``params`` in their order, in groups that end with the parameter that brings them to ``elements``."""
    if elements is None:
        return [list(params)]
    groups: list[list[Tensor]] = [[]]
    for param in params:
        if sum(each.numel() for each in groups[-1]) >= elements:
            groups.append([])
        groups[-1].append(param)
    return groups


class Ours:
    """This project, under the policy that the system is named after."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        import zenflow_compile as zf

        options: dict[str, Any] = {"policy": case.system, "max_grad_norm": case.clip}
        if case.system == "zenflow":
            options |= {"update_interval": case.update_interval, "topk_ratio": case.topk_ratio}
        if case.ranks > 1:
            options["process_group"] = dist.group.WORLD
        self.optimizer = zf.ZenFlowAdamW(model.named_parameters(), **ADAM, **(options | case.options))
        backend: dict[str, Any] = {"backend": "zenflow", "options": {"inner": case.inner}}
        self._compiled = torch.compile(model, dynamic=False, **backend)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        loss: Tensor = self._compiled(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        """Where the state is, and how many workers update it."""
        params = self.optimizer.engine.plan.params
        on_device = sum(_elements_on_device(param) for param in params)
        return {
            "resident_share": on_device / sum(param.numel for param in params),
            "optimizer_device_bytes": self.optimizer.device_bytes,
            "optimizer_host_bytes": self.optimizer.host_bytes,
            "optimizer_file_bytes": self.optimizer.engine.plan.file_bytes,
            "update_stride": self.optimizer.options.update_stride,
        }

    def close(self) -> None:
        """Apply pending updates, end the workers."""
        self.optimizer.close()


def _elements_on_device(param: Any) -> int:
    if param.streamed:
        return 0
    return int(param.k * param.length if param.offloaded else param.numel)


class TorchAO:
    """torchao's ``CPUOffloadOptimizer`` around fused AdamW. It keeps state in the dtype of the weights."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        from torchao.optim import CPUOffloadOptimizer

        if case.clip is not None:
            raise ImportError("CPUOffloadOptimizer moves gradients in the backward, so that nothing can clip them")
        self._compiled = torch.compile(model, backend=case.inner, dynamic=False)
        self._optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **ADAM
        )

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward with the gradients' copies, update on the host."""
        loss: Tensor = self._compiled(*batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        """Everything is on the host."""
        return {"resident_share": 0.0, "note": "state in the weights' dtype"}

    def close(self) -> None:
        """Nothing was started."""


class _Gathered:
    """A step with parameters that FSDP2 gathers block by block."""

    _model: Callable[..., Tensor]
    _params: list[nn.Parameter]
    _clip: float | None
    _optimizer: Optimizer

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update of the shards."""
        loss: Tensor = self._model(*batch)
        loss.backward()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._params, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class FSDP2(_Gathered):
    """FSDP2 of one rank: fp32 parameters and state on the host, cast to the case's dtype on the device."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        os.environ.update(rank_environment())
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
        model.float()
        policies: dict[str, Any] = {
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
            "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[case.dtype], reduce_dtype=torch.float32),
        }
        for block in _blocks(model):
            fully_shard(block, **policies)
        fully_shard(model, **policies)
        self._clip = case.clip
        self._params = list(model.parameters())
        self._model = torch.compile(model, backend=case.inner, dynamic=False)
        self._optimizer = torch.optim.AdamW(self._params, fused=True, **ADAM)

    def facts(self) -> dict[str, Any]:
        """Everything is on the host, the weights too."""
        return {"resident_share": 0.0, "note": "weights are on the host too"}

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()


class Sharded(_Gathered):
    """FSDP2 of several ranks: every block and the rest sharded, each block compiled, as torchtitan has it."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        ours = case.system == "fsdp2_zenflow"
        for block in _blocks(model):
            if ours:
                block.compile(backend="zenflow", options={"inner": case.inner}, dynamic=False)
            else:
                block.compile(backend=case.inner, dynamic=False)
            fully_shard(block)
        fully_shard(model)
        self._model, self._clip, self._params = model, case.clip, list(model.parameters())
        self._optimizer = self._zenflow(case) if ours else _fused_adamw(self._params)

    def _zenflow(self, case: Case) -> Optimizer:
        import zenflow_compile as zf

        windows = {"update_interval": case.update_interval, "topk_ratio": case.topk_ratio}
        return zf.ZenFlowAdamW(self._params, **ADAM, **(windows | case.options))

    def facts(self) -> dict[str, Any]:
        """Each rank has a part of the weights and of the state."""
        return {"resident_share": None}

    def close(self) -> None:
        """Apply pending updates, end the workers."""
        if callable(close := getattr(self._optimizer, "close", None)):
            close()


def rank_environment(rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """What PyTorch's and DeepSpeed's process groups read, for one of this machine's ``ranks``; a port that is free."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The members of the longest list of modules: a transformer's blocks, or a stack's layers."""
    lists = [list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    return max(lists, key=len, default=[])
