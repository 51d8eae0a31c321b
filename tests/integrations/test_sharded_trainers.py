"""Frameworks that shard by FSDP2, in two processes: they train as with AdamW, or both processes raise one error."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.integrations.compare import (
    ADAM,
    PLACEMENT,
    Tokens,
    assert_bitwise,
    assert_trained,
    difference,
    forget_accelerate,
    offloaded,
    tiny_llama,
    weights,
)
from tests.integrations.test_documented_recipes import DOCUMENT, IMPORTS, RECIPES, SHARDED
from tests.integrations.test_several_devices import STEPS, Weights, net
from tests.support.processes import chosen_cases, results_of, run_two_processes
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(180)

SHARP: dict[str, Any] = {**ADAM, "eps": 1e-4}
"""With a small eps AdamW divides the noise of tiny gradients by itself."""
OPTIONS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "exact": {**SHARP, **PLACEMENT, "update_interval": 1},
    "windowed": {**SHARP, **PLACEMENT, "update_interval": 4},
}


def over(model: nn.Module, options: dict[str, Any] | None) -> Optimizer:
    """The optimizer of a run; ``torch.optim.AdamW`` if there are no options."""
    if options is None:
        return torch.optim.AdamW(model.parameters(), **SHARP)
    return ZenFlowAdamW(model.named_parameters(), **options)


def whole(model: nn.Module, optimizer: Any) -> Weights:
    """The weights of all ranks together, after a flush."""
    if isinstance(optimizer, ZenFlowAdamW):
        assert offloaded(optimizer)
        optimizer.flush()
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}  # type: ignore[attr-defined]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def use_fsdp2(accelerator: Any, **keywords: Any) -> None:
    """Accelerate shards on accelerators only, so its state is patched to that."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **keywords)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # other instances copy it
    assert accelerator.is_fsdp2


def accelerate(
    rank: int,
    options: dict[str, Any] | None,
    *,
    build: Callable[[], nn.Module] = net,
    plugin: dict[str, Any] | None = None,
) -> Weights:
    from accelerate import Accelerator

    from zenflow_compile.integrations.accelerate import shard_model

    accelerator = Accelerator(cpu=True)
    use_fsdp2(accelerator, **(plugin or {}))
    model = shard_model(accelerator, build())
    optimizer = over(model, options)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    assert prepared is model
    for step in range(STEPS):
        accelerator.backward(prepared(batch(rank, step)).square().mean())
        accelerator.clip_grad_norm_(prepared.parameters(), 0.05)
        wrapped.step()
        wrapped.zero_grad()
    return whole(model, optimizer)


@contextmanager
def shared_folder(rank: int) -> Iterator[str]:
    """A folder of all ranks, until the block ends."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    yield folder[0]
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def resumed(rank: int, options: dict[str, Any] | None, *, kind: str) -> Weights:
    """Go on from ``save_state`` in the middle of an update window, and compare with the run that saved."""
    from accelerate import Accelerator

    from zenflow_compile.integrations.accelerate import shard_model

    def begin() -> tuple[Any, Any, Any, Any]:
        forget_accelerate()
        accelerator = Accelerator(cpu=True)
        use_fsdp2(accelerator, state_dict_type=kind)
        model = shard_model(accelerator, net())
        optimizer = over(model, options)
        return accelerator, optimizer, *accelerator.prepare(model, optimizer)

    def train(accelerator: Any, model: Any, wrapped: Any, first: int, stop: int) -> None:
        for step in range(first, stop):
            accelerator.backward(model(batch(rank, step)).square().mean())
            wrapped.step()
            wrapped.zero_grad()

    accelerator, optimizer, model, wrapped = begin()
    train(accelerator, model, wrapped, 0, STEPS)
    with shared_folder(rank) as folder:
        accelerator.save_state(folder)
        train(accelerator, model, wrapped, STEPS, 2 * STEPS)
        expected = whole(model, optimizer)
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.close()
        accelerator, optimizer, model, wrapped = begin()
        accelerator.load_state(folder)
    train(accelerator, model, wrapped, STEPS, 2 * STEPS)
    found = whole(model, optimizer)
    assert_bitwise(found, expected)
    return found


def hf_training(folder: str, options: dict[str, Any] | None, *, resume: bool = False, shard: bool = True) -> Weights:
    """Train, and save after five steps; or go on from there."""
    from transformers import Trainer, TrainingArguments

    from zenflow_compile.integrations.accelerate import shard_model
    from zenflow_compile.integrations.transformers import ZenFlowCallback

    forget_accelerate()
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        weight_decay=SHARP["weight_decay"],
        max_steps=8,
        per_device_train_batch_size=4,
        max_grad_norm=0.5,
        report_to=[],
        save_strategy="steps",
        save_steps=5,
        disable_tqdm=True,
    )
    trainer = Trainer(
        tiny_llama(),
        arguments,
        train_dataset=Tokens(),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, SHARP) if options is None else (ZenFlowAdamW, options),
        callbacks=[] if options is None else [ZenFlowCallback()],
    )
    use_fsdp2(trainer.accelerator, state_dict_type="SHARDED_STATE_DICT")
    trainer.is_fsdp_enabled = True
    if shard:
        shard_model(trainer.accelerator, trainer.model)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-5" if resume else None)
    optimizer: Any = trainer.optimizer.optimizer
    trained = whole(trainer.model, optimizer)
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.close()
    return trained


def hf_trainer(rank: int, options: dict[str, Any] | None, **keywords: Any) -> Weights:
    """And go on from the middle of an update window, as the run that saved did."""
    with shared_folder(rank) as folder:
        trained = hf_training(folder, options, **keywords)
        assert_bitwise(hf_training(folder, options, resume=True), trained)
        return trained


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        fully_shard(child, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


PARALLEL: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def torchrun() -> Any:
    """What Lightning takes for the environment of ``torchrun``, whose variables are set."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    os.environ["GROUP_RANK"] = "0"
    return TorchElasticEnvironment()


def fabric(rank: int, options: dict[str, Any] | None) -> Weights:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(parallelize_fn=parallelize, **PARALLEL)
    loop = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[torchrun()])
    loop.launch()
    model = loop.setup_module(net())
    optimizer = over(model, options)
    wrapped = loop.setup_optimizers(optimizer)
    for step in range(STEPS):
        loop.backward(model(batch(rank, step)).square().mean())
        loop.clip_gradients(model, wrapped, max_norm=0.05)
        wrapped.step()
        wrapped.zero_grad()
    return {name.removeprefix("_forward_module."): weight for name, weight in whole(model.module, optimizer).items()}


def lightning_trainer(rank: int, options: dict[str, Any] | None) -> Weights:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from zenflow_compile.integrations.lightning import ZenFlowCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_model(self) -> None:
            parallelize(self.net, self.device_mesh)

        def training_step(self, part: Any, index: int) -> Tensor:
            loss: Tensor = self.net(batch(rank, index)).square().mean()
            return loss

        def configure_optimizers(self) -> Optimizer:
            return over(self, options)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(**PARALLEL),
        plugins=[torchrun()],
        max_steps=STEPS,
        gradient_clip_val=0.05,
        callbacks=[] if options is None else [ZenFlowCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(range(2 * STEPS)))  # type: ignore[arg-type]
    return whole(module.net, trainer.optimizers[0])


CHECKPOINTED = {
    "activation_checkpointing": True,
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Linear"],
}
RUNS: dict[str, Callable[[int, dict[str, Any] | None], Weights]] = {
    "accelerate": accelerate,
    "accelerate_whole_weights_on_one_rank": partial(accelerate, plugin={"cpu_ram_efficient_loading": True}),
    "accelerate_checkpointed_activations": partial(accelerate, plugin=CHECKPOINTED),
    "accelerate_resumed": partial(resumed, kind="SHARDED_STATE_DICT"),
    "accelerate_resumed_whole": partial(resumed, kind="FULL_STATE_DICT"),
    "hf_trainer": hf_trainer,
    "fabric": fabric,
    "lightning": lightning_trainer,
}


# What is refused


def single_output() -> nn.Module:
    """A weight and a bias of one row: the second rank has nothing of either."""
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))


def empty_parts(rank: int) -> None:
    """A refused model is as it was, and modules that are not sharded count for nothing."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import FSDPModule

    from zenflow_compile.integrations.accelerate import shard_model

    accelerator = Accelerator(cpu=True)
    use_fsdp2(accelerator, **{**CHECKPOINTED, "ignored_modules": "1"})
    try:
        assert isinstance(shard_model(accelerator, single_output()), FSDPModule)
    except ValueError as error:
        raise AssertionError("a module that is not sharded was counted") from error
    use_fsdp2(accelerator, **CHECKPOINTED)
    model = single_output()
    before = dict(model.named_parameters())
    try:
        shard_model(accelerator, model)
    finally:
        assert accelerator.state.fsdp_plugin.activation_checkpointing
        assert not isinstance(model, FSDPModule)
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is param for name, param in before.items())


def without_fsdp2(rank: int) -> None:
    from accelerate import Accelerator

    from zenflow_compile.integrations.accelerate import shard_model

    shard_model(Accelerator(cpu=True), net())


EXACT: Any = OPTIONS["exact"]
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "accelerate_empty_parts": (
        empty_parts,
        r"1\.weight, 1\.bias would have no slice on one of the 2 ranks.*use fewer ranks",
    ),
    "accelerate_without_fsdp2": (without_fsdp2, r"trains as .*MULTI_CPU, without FSDP2; .*fsdp_version=2"),
    "hf_trainer_without_sharding": (
        partial(hf_trainer, options={**EXACT, "process_group": False}, shard=False),
        r"replaced by shards .* as Accelerate does for FSDP2; call .*shard_model\(accelerator, model\) before",
    ),
}


def recipe(rank: int) -> Weights:
    """Run the recipe of docs/integrations.md as it is written, on an accelerator of CPUs."""
    import accelerate
    from accelerate import Accelerator

    def on_cpu(fsdp_plugin: Any) -> Accelerator:
        accelerator = Accelerator(cpu=True)
        use_fsdp2(accelerator)
        assert fsdp_plugin.fsdp_version == 2
        return accelerator

    names: dict[str, Any] = {
        "model": tiny_llama(hidden_size=64, intermediate_size=128),
        "loader": torch.utils.data.DataLoader(Tokens(), batch_size=4),
    }
    before = weights(names["model"])
    with patch.object(accelerate, "Accelerator", on_cpu):
        exec(compile(IMPORTS + RECIPES[SHARDED], f"{DOCUMENT}: {SHARDED}", "exec"), names)
    after = {name: param.full_tensor().detach() for name, param in names["model"].named_parameters()}
    assert offloaded(names["optimizer"])
    assert_trained(before, after)
    return after


def work(rank: int, chosen: frozenset[str]) -> dict[str, Any]:
    """Run what is chosen: by its name, the weights or the text of the error."""
    runs: dict[str, Callable[[int], Any]] = {name: run for name, (run, _) in REFUSED.items() if name in chosen}
    if test_documented_recipe_trains.__name__ in chosen:
        runs["recipe"] = recipe
    for name, run in RUNS.items():
        for label, options in OPTIONS.items():
            if name in chosen:
                runs[f"{name}-{label}"] = partial(run, options=options)

    def forget() -> None:
        forget_accelerate()
        for variable in [variable for variable in os.environ if variable.startswith(("ACCELERATE_", "FSDP_"))]:
            del os.environ[variable]

    return results_of({name: partial(run, rank) for name, run in runs.items()}, forget)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two_processes(partial(work, chosen=chosen_cases(request)), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RUNS)
def test_sharded_trainer_equals_adamw(name: str, ranks: list[dict[str, Any]]) -> None:
    for label in OPTIONS:
        for results in ranks:
            assert not isinstance(results[f"{name}-{label}"], str), results[f"{name}-{label}"]
        assert_bitwise(ranks[0][f"{name}-{label}"], ranks[1][f"{name}-{label}"])
    expected, exact, windowed = (ranks[0][f"{name}-{label}"] for label in ("adamw", "exact", "windowed"))
    before = dict(tiny_llama().named_parameters()) if name == "hf_trainer" else weights(net())
    assert_trained({each: before[each.replace("_checkpoint_wrapped_module.", "")] for each in expected}, expected)
    assert difference(exact, expected) < 1e-6
    assert difference(windowed, expected) > 1e-4


def test_documented_recipe_trains(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert not isinstance(results["recipe"], str), results["recipe"]
    assert_bitwise(ranks[0]["recipe"], ranks[1]["recipe"])


@pytest.mark.parametrize("name", REFUSED)
def test_each_process_raises(name: str, ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        text = results[name]
        assert isinstance(text, str), "nothing was raised"
        assert re.search(REFUSED[name][1], text.partition("\nTraceback")[0], re.DOTALL), text
