"""Errors that the runtime raises: what happened, and what the user can do about it."""

from __future__ import annotations

from collections.abc import Sized
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.sharding import refuse_sharded


class LostUpdateError(RuntimeError):
    """A weight was written while an update of it was in flight. Weights and state still belong together."""


# Gradients that cannot be used.


def refuse_sparse_grad(param: Parameter, name: str) -> None:
    """Raise TypeError if ``.grad`` is sparse, and set it to None, as before the backward."""
    if param.grad is not None and param.grad.is_sparse:
        param.grad = None
        refuse_sparse(name)


def refuse_sparse(name: str) -> NoReturn:
    raise TypeError(
        f"{name} has a sparse gradient; use dense ones (Embedding(sparse=False)), "
        "or leave the parameter out of this optimizer"
    )


def refuse_gradient_hooks(param: Parameter, name: str) -> None:
    """Raise RuntimeError if a hook waits for the gradient of a parameter that is updated inside the backward."""
    hooks: Sized = param._post_accumulate_grad_hooks or ()
    if len(hooks) > 1:  # ours is one
        raise RuntimeError(
            f"{name} has a post-accumulate-grad hook, but a model compiled without an optimizer object updates its "
            "parameters inside the backward and leaves no gradient to such a hook; to clip, pass max_grad_norm among "
            "the options of torch.compile; to see or change the gradient, use param.register_hook, or create a "
            "ZenFlowAdamW and call its step()"
        )


def refuse_partial_gradient(name: str) -> NoReturn:
    raise RuntimeError(
        f"the gradient of {name} is not complete: its mean over ranks is known when the backward is over, and with "
        "gradient_accumulation_steps=n when the n-th backward is; read it or clip then, or leave that option out to "
        "send gradients after each backward"
    )


def refuse_gradient_of_user(name: str) -> NoReturn:
    """Raise RuntimeError: a rank's gradient was added to a tensor that holds something else, or is held elsewhere."""
    raise RuntimeError(
        f"a backward added the gradient of one rank to .grad of {name}, which holds a tensor of yours, or one that "
        "other code refers to; with a process_group .grad has the mean over all ranks: clear it "
        "(zero_grad(set_to_none=True)) before the backward, and read gradients after it; under "
        "DistributedDataParallel, which puts one there, pass process_group=False"
    )


# Backwards that cannot be served.


def refuse_concurrent_backward() -> NoReturn:
    raise RuntimeError(
        "a backward in another thread has not ended, or has failed: a model that is not compiled, or was compiled "
        "without an optimizer object, can run one backward at a time; run them one after the other, and call "
        "optimizer.zero_grad() after one that failed"
    )


# Optimizers and parameters that cannot be used any more.


def refuse_unseen_write(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} was written through .data, or another alias that autograd does not see, and the optimizer, whose "
        "state has the old values, would undo that: write the parameter itself inside of torch.no_grad(), assign "
        "param.data, or call torch.autograd.graph.increment_version(param) after the write"
    )


def refuse_changed(param: Tensor, plan: ParamPlan, device: torch.device) -> NoReturn:
    """Raise RuntimeError: the parameter has another dtype, shape or device than at the optimizer's first use.

    Raises TypeError if FullyShardedDataParallel has sharded it.
    """
    refuse_sharded([param])
    was = f"{str(plan.dtype).removeprefix('torch.')}{list(plan.whole.shape)} on {device}"
    now = f"{str(param.dtype).removeprefix('torch.')}{list(param.shape)} on {param.device}"
    raise RuntimeError(
        f"{plan.name} was {was} at the optimizer's first use and is {now}: close() the optimizer, create it anew over "
        "model.parameters() after the change, and compile the model again"
    )


def refuse_reordered(name: str) -> NoReturn:
    raise RuntimeError(
        f"the memory of {name} was reordered after the optimizer's first use, as "
        "model.to(memory_format=torch.channels_last) does: close() the optimizer before the change, and create it anew "
        "over model.parameters() after it"
    )


def refuse_in_child(reason: str = "it has neither the threads nor the host memory of its parent") -> NoReturn:
    raise RuntimeError(
        f"this process was forked from the one that trains, and cannot use its optimizer: {reason}; call state_dict() "
        "or synchronize() before the fork, or start the process with the spawn method"
    )


def refuse_failed(cause: BaseException) -> NoReturn:
    """Raise RuntimeError, chained to the failure after which weights and state differ."""
    raise RuntimeError(
        "an earlier step, or the loading of a state, failed half-way, so weights and optimizer state do not belong "
        "together any more; load the last saved state of both"
    ) from cause


def never_queued(interrupt: BaseException | None) -> RuntimeError:
    """Make the error of a job that an interrupted step did not queue, chained to the interrupt, if that is known."""
    error = RuntimeError("the step was interrupted before this job was queued")
    error.__cause__ = interrupt
    return error


def refuse_threads(error: RuntimeError) -> NoReturn:
    raise RuntimeError(
        f"no thread for host updates and copies could be started ({error}): raise the limit on processes (ulimit -u) "
        'or that of the control group (pids.max), run fewer DataLoader workers, or use policy="resident"'
    ) from error


# Remedies, as parts of sentences.


def less_host_memory(options: Options) -> str:
    """Settings that need less host memory than ``options``, as the end of a sentence."""
    no_host_memory = 'policy="resident", which needs no host memory'
    in_files = 'policy="zero_infinity" with nvme_path, which keeps state in files'
    smaller = ["a smaller host_window_bytes, down to the state of the largest parameter"] if options.in_files else []
    if options.policy == "zenflow":
        interval = "shorter windows in update_interval" if options.adaptive else "a smaller update_interval"
        fewer = (
            f"a larger topk_ratio, {interval} or a larger device_share, which move state to the device or "
            "store fewer gradients"
        )
        files = [] if options.in_files else ['offload_device="nvme" with nvme_path, which keeps state in files']
        remedies = [*smaller, fewer, *files]
    elif options.policy == "zero_infinity":
        remedies = smaller
    elif options.policy == "zero_offload":
        remedies = [*smaller, 'policy="twinflow" with a ratio below 1, which keeps the others on the device', in_files]
    else:
        remedies = [*smaller, "a smaller ratio, which keeps more state on the device", in_files]
    return ", or ".join([*remedies, no_host_memory])
