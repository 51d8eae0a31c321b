"""Train a small GPT on the source of Python's standard library, with optimizer state in host memory.

    python -m examples.train_gpt                        zenflow
    python -m examples.train_gpt --policy resident      plain AdamW on the device
    python -m examples.train_gpt --compare              all three policies, one table
    python -m examples.train_gpt --resume runs/train_gpt/step-000200-1f3a9c02.pt
    torchrun --standalone --nproc-per-node 2 -m examples.train_gpt
    torchrun --standalone --nproc-per-node 2 -m examples.train_gpt --fsdp

On a machine with CUDA it trains there, with bf16 weights; without, the CPU is the device and host at once. The ranks
that torchrun starts divide each batch, the optimizer's state and its updates, and with ``--fsdp`` the weights. A
checkpoint of one number of ranks continues on any other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import zenflow_compile as zf
from examples.arguments import POLICIES, parse
from examples.checkpoint import CheckpointFolder, load_checkpoint, load_sharded, load_weights, restore_rng
from examples.display import RunDisplay, StepClock, comparison, tokens_per_second
from examples.gpt import GPT
from examples.ranks import own_part, process_group, ranks
from examples.settings import TrainConfig, TrainResult
from examples.stdlib_text import Text, load_text, training_batch, validation_batches
from zenflow_compile.rules import KINDS, Muon, muon_groups

CORES_OF_PYTORCH = 0.5  # where the device is the CPU itself


def train(config: TrainConfig, *, text: Text | None = None, console: Console | None = None) -> TrainResult:
    """Train one model.

    Args:
        config: the run's settings.
        text: what to train on; the standard library's source if None.
        console: where progress, validation losses and the overlap report go; None is silent.

    Raises:
        ValueError: if ``config.resume`` names a checkpoint of a run with other settings, or a finished or damaged one;
            or ``config.start_from`` one of a model with other sizes, or a damaged one; or if the ranks cannot divide a
            batch evenly; or if ``config.fsdp`` is set outside of a process group.
        FileNotFoundError: if there is no such checkpoint, or no text to train on.
    """
    started = time.perf_counter()
    console = console or Console(quiet=True)
    text = text or load_text(config.text_bytes)
    device = config.torch_device()
    resumed = load_checkpoint(config.resume) if config.resume else None
    first_step: int = resumed["step"] if resumed else 0
    if resumed:
        config.must_continue(resumed["config"])
    if config.fsdp and not dist.is_initialized():
        raise ValueError(
            "--fsdp shards the model over the ranks that torchrun starts, also over one: "
            "torchrun --standalone --nproc-per-node 1 -m examples.train_gpt"
        )
    if first_step >= config.steps:
        raise ValueError(f"resume={config.resume} is the end of a run of {config.steps} steps; nothing is left to do")

    model = initial_model(config)
    flops = model.flops_per_token * config.batch * config.context / ranks()[1]
    if config.fsdp:
        shard(model)
    elif resumed:
        model.load_state_dict(resumed["model"])
    optimizer = make_optimizer(config, model)
    scheduler = LambdaLR(optimizer, config.rate)
    compiled = compile_model(config, model)
    if resumed and config.resume:
        if config.fsdp:
            load_sharded(config.resume, model, optimizer)
        else:
            optimizer.load_state_dict(resumed["optimizer"])
        scheduler.load_state_dict(resumed["scheduler"])
        restore_rng(resumed)

    held_out = validation_batches(text, count=config.evaluation_batches, batch=config.batch, context=config.context)
    clock = StepClock(device)
    checkpoint = None
    checkpoints = CheckpointFolder(config.out, resumed["run"] if resumed else None) if config.out else None
    validation_loss = float("nan")
    # Profiling starts after compilation and the synchronous warm-up.
    measured_from = min(max(first_step + 2, config.warm_up), config.steps - 1)
    with optimizer:
        with ExitStack() as measured, RunDisplay(console, config, first_step) as display:
            for step in range(first_step, config.steps):
                if step == measured_from:
                    evaluate(compiled, held_out[:1], device)  # compiles what validations run, before steps are timed
                    profile = measured.enter_context(recorded(config, optimizer, flops, console))
                tokens, targets = training_batch(
                    text, seed=config.seed, step=step, batch=config.batch, context=config.context
                )
                tokens, targets = own_part(tokens).to(device), own_part(targets).to(device)
                clock.start()
                loss = compiled(tokens, targets)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                clock.stop(keep=step >= measured_from)

                done = step + 1
                display.step(done, loss.detach(), clock)
                if done == config.steps:
                    measured.close()
                if done % config.evaluate_every == 0 or done == config.steps:
                    validation_loss = evaluate(compiled, held_out, device)
                    display.validated(done, validation_loss)
                if checkpoints and (done % config.save_every == 0 or done == config.steps):
                    checkpoint = checkpoints.save(config, done, model, optimizer, scheduler)
        device_bytes, host_bytes = optimizer.device_bytes, optimizer.host_bytes
        if ranks()[1] > 1:
            profile.report_ranks(console)  # all ranks call it, and the first one prints
        elif not console.quiet:
            profile.report(console)
    if checkpoint:
        console.print(f"checkpoint: {checkpoint}", highlight=False)
    summary = profile.summary()
    step_ms = summary["step_ms"] or float("nan")
    return TrainResult(
        config=config,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        validation_loss=validation_loss,
        step_ms=step_ms,
        tokens_per_second=tokens_per_second(config, step_ms),
        seconds=time.perf_counter() - started,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        profile=dict(summary),
        checkpoint=checkpoint,
    )


def recorded(
    config: TrainConfig, optimizer: zf.ZenFlow, flops: float, console: Console
) -> AbstractContextManager[zf.Profile]:
    """A profile of the steps inside the block, which the terminal shows meanwhile under ``config.live``."""
    if config.live:
        return zf.live(optimizer, flops_per_step=flops, console=Console(stderr=True, quiet=console.quiet))
    return zf.profile(optimizer, flops_per_step=flops)


def shard(model: GPT) -> None:
    """Divide the parameters of each block, and the others, among the ranks."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def compile_model(config: TrainConfig, model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile the model, or each of its blocks where weights are gathered between them."""
    if not config.fsdp:
        return torch.compile(model, backend="zenflow", options={"inner": config.inner})
    for block in model.blocks:
        block.compile(backend="zenflow", options={"inner": config.inner})
    return model


def make_optimizer(config: TrainConfig, model: GPT) -> zf.ZenFlow:
    """The optimizer: the one line that differs from a loop under ``torch.optim.AdamW``."""
    windows: dict[str, Any] = {
        "update_interval": config.update_interval,
        "staleness": config.staleness,
        "full_warm_up_rounds": config.warm_up,
    }
    on_host: dict[str, Any] = {"state_dtype": config.state_dtype}
    numbers: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    params: Iterable[Any] = model.named_parameters()
    if config.optimizer == "Muon":
        params = muon_groups(model, Muon(**numbers, adjust_lr_fn="match_rms_adamw"))
    rule = KINDS["AdamW" if config.optimizer == "Muon" else config.optimizer](**numbers)
    return zf.ZenFlow(  # with the rule AdamW it is zf.ZenFlowAdamW
        params,
        rule,
        policy=config.policy,
        **(windows if config.policy == "zenflow" else {}),
        **({} if config.policy == "resident" else on_host),
        max_grad_norm=config.max_grad_norm,
        process_group=dist.group.WORLD if ranks()[1] > 1 and not config.fsdp else None,
        workers=1.0 - CORES_OF_PYTORCH if config.torch_device().type == "cpu" else None,
    )


def initial_model(config: TrainConfig) -> GPT:
    """Make the model on its device, with weights from the seed or from ``config.start_from``.

    Raises:
        ValueError: if those weights are of a model with other sizes.
        FileNotFoundError: if there is no such checkpoint.
    """
    device = config.torch_device()
    torch.manual_seed(config.seed)
    model = GPT(config.gpt()).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if config.start_from and not config.resume:  # a resumed run has moved on from them
        start = load_checkpoint(config.start_from)
        config.must_fit(start["config"])
        load_weights(start, config.start_from, model)
    return model


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor, Tensor], Tensor], batches: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> float:
    """Mean loss of ``model`` over ``batches``, in nats per byte.

    A compiled model applies pending updates first, so that this sees the weights after the last step.
    """
    losses = [model(tokens.to(device), targets.to(device)).float() for tokens, targets in batches]
    return torch.stack(losses).mean().item()


def compare(config: TrainConfig, *, text: Text | None = None, console: Console | None = None) -> list[TrainResult]:
    """Train every policy from the same seed, one after another, and print one table."""
    console = console or Console(quiet=True)
    text = text or load_text(config.text_bytes)
    results = []
    for policy in POLICIES:
        torch.compiler.reset()  # each run pays for its own compilation, and the last run's model can be freed
        results.append(train(replace(config, policy=policy), text=text, console=console))
    console.print(comparison(results))
    return results


def share_cores(device: torch.device) -> None:
    """Confine PyTorch to ``CORES_OF_PYTORCH`` of the cores, under every policy, where the device is the CPU itself.

    The others run host updates. A parallel region of PyTorch lasts as long as its slowest thread, so that one core
    shared with a worker would slow down all.
    """
    if device.type == "cpu":
        torch.set_num_threads(max(1, int(CORES_OF_PYTORCH * torch.get_num_threads())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m examples.train_gpt``."""
    config, comparing = parse(arguments)
    device = config.torch_device()
    share_cores(device)
    with process_group(device):
        console = Console(quiet=ranks()[0] > 0)
        if comparing:
            compare(config, console=console)
        else:
            train(config, console=console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
