"""Strategies for several devices, in two processes: they equal AdamW, or an error names an alternative."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    PLACEMENT,
    WINDOWED,
    Tokens,
    assert_bitwise,
    assert_trained,
    difference,
    forget_accelerate,
    offloaded,
    tiny_llama,
    weights,
)
from tests.support.processes import chosen_cases, results_of, run_two_processes
from tests.support.training import take_step
from zenflow_compile import ZenFlowAdamW

STEPS = 6
Weights = dict[str, Tensor]


class Net(nn.Module):
    """Two matrices of 512 elements, which are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def adamw(model: nn.Module, options: dict[str, Any] | None) -> Optimizer:
    """The optimizer of a run; ``torch.optim.AdamW`` if there are no options."""
    if options is None:
        return torch.optim.AdamW(model.parameters(), **ADAM)
    return ZenFlowAdamW(model.named_parameters(), process_group=False, **options)


def train(call: Callable[[Tensor], Tensor], optimizer: Any, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        take_step(call(torch.randn(8, 16, generator=generator)).square().mean(), optimizer)


def trained(model: nn.Module, optimizer: Optimizer) -> Weights:
    """The model's weights after a flush."""
    if isinstance(optimizer, ZenFlowAdamW):
        assert offloaded(optimizer)
        optimizer.flush()
    return weights(model)


# Strategies that train


def accelerate_ddp(rank: int, options: dict[str, Any] | None, compiled: str = "no") -> Weights:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = net()
    optimizer = adamw(model, options)
    if compiled == "before":
        model.compile(**EAGER_BACKEND)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    assert isinstance(wrapped, DistributedDataParallel)
    call = torch.compile(wrapped, **EAGER_BACKEND) if compiled == "after" else wrapped
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        accelerator.backward(call(torch.randn(8, 16, generator=generator)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
        prepared.step()
        prepared.zero_grad()
    return trained(model, optimizer)


def hf_trainer(rank: int, options: dict[str, Any] | None, compiled: bool = False) -> Weights:
    from transformers import Trainer, TrainingArguments

    model: Any = tiny_llama()
    optimizer = adamw(model, options)
    if compiled:
        model.compile(**EAGER_BACKEND)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=4,
            per_device_train_batch_size=4,
            max_grad_norm=0.5,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        assert arguments.world_size == 2
        trainer = Trainer(model, arguments, train_dataset=Tokens(), optimizers=(optimizer, None))
        trainer.train()
    return trained(model, optimizer)


def zero_redundancy(rank: int, options: dict[str, Any] | None) -> Weights:
    """Each rank updates some parameters and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    call = DistributedDataParallel(model)
    kind: Any = torch.optim.AdamW
    if options is not None:
        kind = partial(
            ZenFlowAdamW, process_group=False, **{name: options[name] for name in (*PLACEMENT, "update_interval")}
        )
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **ADAM)
    train(call, optimizer, rank)
    if options is not None:
        assert offloaded(optimizer.optim)
    return weights(model)


# Strategies that are refused


def bare_model_then_ddp(rank: int) -> None:
    """Dynamo reuses the graph of the bare model, and compiles nothing that the backend could refuse."""
    model = net()
    optimizer = adamw(model, EXACT)
    model.compile(**EAGER_BACKEND)
    train(model, optimizer, rank, steps=1)
    optimizer.synchronize()  # DistributedDataParallel reads the weights
    train(DistributedDataParallel(model), optimizer, rank, steps=1)


def fully_shard(rank: int, options: dict[str, Any] | None, compiled: bool = False) -> Weights:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    model = net()
    shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adamw(model, options)
    train(torch.compile(model, **EAGER_BACKEND) if compiled else model, optimizer, rank)
    trained(model, optimizer)
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}  # type: ignore[attr-defined]


def fully_shard_late(rank: int, *, compiled: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    model = net()
    optimizer = adamw(model, EXACT)
    shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(torch.compile(model, **EAGER_BACKEND) if compiled else model, optimizer, rank, steps=1)


def tensor_parallel(rank: int, *, optimizer_first: bool) -> None:
    """Only one of the layers is sharded; the other one has gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = net()
    optimizer = adamw(model, EXACT) if optimizer_first else None
    plan = {"up": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    train(model, optimizer or adamw(model, EXACT), 0, steps=1)


def fsdp1(rank: int, *, use_orig_params: bool, optimizer_first: bool, compiled: bool = False) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = net()
    optimizer = adamw(model, EXACT) if optimizer_first else None
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    call = torch.compile(wrapped, **EAGER_BACKEND) if compiled else wrapped
    train(call, optimizer or adamw(wrapped, EXACT), rank, steps=1)


def fsdp1_of_a_used_optimizer(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = net()
    optimizer = adamw(model, EXACT)
    optimizer.state_dict()
    train(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")), optimizer, rank, 1)


def accelerate_fsdp2(rank: int, *, compiled: bool = False) -> None:
    """Accelerate shards on accelerators only, so its state is patched to that."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    model = net()
    if compiled:
        model.compile(**EAGER_BACKEND)
    train(*accelerator.prepare(model, adamw(model, EXACT)), rank, steps=1)


DDP = (
    r"wrapped in DistributedDataParallel.*process_group=.*or train under DistributedDataParallel without torch\.compile"
)
ALTERNATIVE = r".*; leave the model whole on each rank and pass process_group=torch\.distributed\.group\.WORLD"
DTENSOR = "TypeError: a parameter is a DTensor, and no module that fully_shard .* as under tensor" + ALTERNATIVE
EXCHANGED = (
    r"TypeError: the parameters in param_groups were replaced by shards .* as Accelerate .* call .*shard_model\("
    + ALTERNATIVE.replace("; leave", "or leave")
)
REPLACED = r"RuntimeError: \d of the optimizer's parameters are in no module .* replaced them" + ALTERNATIVE
FLAT = "TypeError: a parameter belongs to FullyShardedDataParallel, .* no columns" + ALTERNATIVE

EXACT_RUNS: dict[str, Callable[[int, dict[str, Any] | None], Weights]] = {
    "accelerate_ddp": accelerate_ddp,
    "fully_shard": fully_shard,
    "fully_shard_compiled": partial(fully_shard, compiled=True),
    "hf_trainer": hf_trainer,
    "zero_redundancy": zero_redundancy,
}
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "compiled_then_accelerate_ddp": (partial(accelerate_ddp, options=EXACT, compiled="before"), DDP),
    "accelerate_ddp_then_compiled": (partial(accelerate_ddp, options=EXACT, compiled="after"), DDP),
    "bare_model_then_ddp": (bare_model_then_ddp, DDP),
    "compiled_hf_trainer": (partial(hf_trainer, options=EXACT, compiled=True), DDP),
    "optimizer_then_fully_shard": (fully_shard_late, REPLACED),
    "optimizer_then_fully_shard_compiled": (partial(fully_shard_late, compiled=True), REPLACED),
    "tensor_parallel": (partial(tensor_parallel, optimizer_first=False), DTENSOR),
    "optimizer_then_tensor_parallel": (partial(tensor_parallel, optimizer_first=True), REPLACED),
    "accelerate_fsdp2": (accelerate_fsdp2, EXCHANGED),
    "accelerate_fsdp2_compiled": (partial(accelerate_fsdp2, compiled=True), EXCHANGED),
    "fsdp1": (partial(fsdp1, use_orig_params=True, optimizer_first=False), FLAT),
    "fsdp1_flat": (partial(fsdp1, use_orig_params=False, optimizer_first=False), FLAT),
    "fsdp1_compiled": (partial(fsdp1, use_orig_params=True, optimizer_first=True, compiled=True), FLAT),
    "optimizer_then_fsdp1": (partial(fsdp1, use_orig_params=True, optimizer_first=True), FLAT),
    "optimizer_then_fsdp1_flat": (partial(fsdp1, use_orig_params=False, optimizer_first=True), REPLACED),
    "used_optimizer_then_fsdp1": (fsdp1_of_a_used_optimizer, FLAT),
}


def work(rank: int, chosen: frozenset[str]) -> dict[str, Any]:
    """Run the chosen strategies: by its name, the weights or the text of the error."""
    runs: dict[str, Callable[[int], Any]] = {name: run for name, (run, _) in REFUSED.items() if name in chosen}
    for name, run in EXACT_RUNS.items():
        for label, options in (("adamw", None), ("exact", EXACT), ("windowed", WINDOWED)):
            if name in chosen:
                runs[f"{name}-{label}"] = partial(run, options=options)

    def forget() -> None:
        forget_accelerate()
        torch._dynamo.reset()

    return results_of({name: partial(run, rank) for name, run in runs.items()}, forget)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two_processes(partial(work, chosen=chosen_cases(request)), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", EXACT_RUNS)
def test_two_processes_equal_adamw(name: str, ranks: list[dict[str, Any]]) -> None:
    """The model is not compiled; both processes have the same bits in update windows, too."""
    for label in ("adamw", "exact", "windowed"):
        for results in ranks:
            assert not isinstance(results[f"{name}-{label}"], str), results[f"{name}-{label}"]
        assert_bitwise(ranks[0][f"{name}-{label}"], ranks[1][f"{name}-{label}"])
    expected, exact, windowed = (ranks[0][f"{name}-{label}"] for label in ("adamw", "exact", "windowed"))
    assert_trained(weights(tiny_llama() if name == "hf_trainer" else net()), expected)
    assert difference(exact, expected) <= 1e-5
    assert difference(windowed, expected) > 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_strategy_is_refused_with_an_alternative(name: str, ranks: list[dict[str, Any]]) -> None:
    """Every process raises, so that none hangs."""
    for results in ranks:
        text = results[name]
        assert isinstance(text, str), "nothing was raised"
        assert re.search(REFUSED[name][1], text.partition("\nTraceback")[0]), text


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_data_parallel_without_devices_equals_adamw(compiled: bool) -> None:
    """On a machine without accelerators ``DataParallel`` calls its module."""
    results = []
    for options in (None, EXACT):
        model = net()
        optimizer = adamw(model, options)
        call: Any = nn.DataParallel(model)
        if compiled and options is not None:
            call = torch.compile(call, **EAGER_BACKEND)
        train(call, optimizer, 0)
        results.append(trained(model, optimizer))
    assert_trained(weights(net()), results[0])
    assert difference(*results) <= 1e-5


def test_model_on_several_devices_is_refused(tmp_path: Path) -> None:
    """The model is spread over devices as by ``dispatch_model`` and ``device_map="auto"`` where memory is short."""
    from accelerate import dispatch_model

    model = dispatch_model(net(), {"up": "cpu", "down": "disk"}, offload_dir=tmp_path, main_device="cpu")
    with pytest.raises(ValueError, match=r"on the meta device; materialise the model .* without a device_map"):
        adamw(model, EXACT)
