"""For Accelerate, and with it the Hugging Face Trainer: ``"zenflow"`` as a backend name, and sharding by FSDP2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from accelerate import Accelerator
from accelerate.utils import DynamoBackend, fsdp2_apply_ac, fsdp2_prepare_model
from torch import nn

from zenflow_compile.integrations import add_member
from zenflow_compile.runtime.sharding import leaves_a_rank_empty

_NAME = "ZENFLOW"


def register_backend() -> None:
    """Let Accelerate take ``"zenflow"`` as the name of a ``torch.compile`` backend.

    Afterwards ``TrainingArguments(torch_compile_backend="zenflow")``, ``Accelerator(dynamo_backend="zenflow")`` and
    ``TorchDynamoPlugin(backend="zenflow")`` work in this process. Accelerate passes any name to ``torch.compile``, but
    checks it against the enum ``accelerate.utils.DynamoBackend`` first; this adds a member to the enum. Idempotent. If
    Accelerate already has the name, this does nothing.

    The launcher is another process: ``accelerate launch --dynamo_backend zenflow`` does not know the name. Pass it to
    ``Accelerator`` or ``TrainingArguments`` in the script instead.
    """
    add_member(DynamoBackend, _NAME, _NAME)


def shard_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard ``model`` as ``accelerator.prepare()`` does for FSDP2, so that the optimizer can be created afterwards.

    ``prepare()`` takes the model and the optimizer together, shards the model, and exchanges the parameters of the
    optimizer, which a ``ZenFlowAdamW`` refuses. It leaves a model alone that is sharded already, so call this first,
    then create the optimizer, without ``process_group``, then call ``prepare()``. All ranks call it. Activation
    checkpointing of the plugin is applied here, and switched off in the plugin: ``prepare()`` would apply it again.

    Args:
        accelerator: with a ``FullyShardedDataParallelPlugin(fsdp_version=2)``, such as ``trainer.accelerator``.
        model: not sharded, and in no optimizer yet. It is changed in place.

    Returns:
        ``model``.

    Raises:
        ValueError: the accelerator does not shard by FSDP2. Or two parameters would have no slice on one rank, as with
            fewer rows than there are ranks: ``prepare()`` would take one for another. Nothing has been changed then.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"the accelerator trains as {accelerator.distributed_type}, without FSDP2; create it with "
            "FullyShardedDataParallelPlugin(fsdp_version=2) under accelerate launch or torchrun, or leave out "
            "shard_model() and create the optimizer with process_group=False"
        )
    mesh, ranks = accelerator.torch_device_mesh, accelerator.num_processes
    if mesh is not None:  # fsdp2_prepare_model shards over these alone, not over replicas
        ranks = mesh[accelerator.parallelism_config.fsdp_dim_names[-1]].size()
    empty = [name for name, param in _to_shard(accelerator, model) if leaves_a_rank_empty(param.shape[0], ranks)]
    if len(empty) > 1:
        raise ValueError(
            f"{', '.join(empty)} would have no slice on one of the {ranks} ranks, and Accelerate's prepare() cannot "
            "tell them apart; use fewer ranks, or call fully_shard in a loop of your own, without Accelerate"
        )
    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
        plugin.activation_checkpointing = False
    return cast(nn.Module, fsdp2_prepare_model(accelerator, model))


def _to_shard(accelerator: Accelerator, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters, by name, that ``fsdp2_prepare_model`` shards by rows: all but those of ignored modules."""
    ignored = accelerator.state.fsdp_plugin.ignored_modules or ()
    if isinstance(ignored, str):
        ignored = [module for name, module in model.named_modules() if re.fullmatch(ignored, name)]
    whole = {id(param) for module in ignored for param in module.parameters()}
    # fully_shard refuses scalars.
    return ((name, param) for name, param in model.named_parameters() if param.dim() and id(param) not in whole)
