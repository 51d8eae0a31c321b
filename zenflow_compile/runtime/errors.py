"""Errors of the runtime: what each refuses, why, and what the user can do about it."""

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


def refuse_sparse_grad(param: Parameter, name: str) -> None:
    """Raise if ``.grad`` is sparse, and leave none behind, as before the backward.

    Raises:
        TypeError: it is sparse.
    """
    if param.grad is not None and param.grad.is_sparse:
        param.grad = None
        refuse_sparse(name)


def refuse_sparse(name: str) -> NoReturn:
    """
    Raises:
        TypeError: always: the gradient is sparse.
    """
    raise TypeError(
        f"{name} has a sparse gradient; use dense ones (Embedding(sparse=False)), "
        "or leave the parameter out of this optimizer"
    )


def refuse_forked(name: str) -> NoReturn:
    """
    Raises:
        RuntimeError: always: a forked process reads a gradient in host memory that it does not share.
    """
    raise RuntimeError(
        f"cannot read the gradient of {name} in a forked process, which does not have the host memory of offloaded "
        "gradients; read it before the fork, or pass a clone()"
    )


def refuse_other_dtype(name: str, found: torch.dtype, expected: torch.dtype) -> NoReturn:
    """
    Raises:
        TypeError: always: the parameter changed its dtype.
    """
    raise TypeError(
        f"{name} or its gradient is {found} now, and was {expected} when its optimizer was made; change the model's "
        "dtype first, then create the optimizer and compile the model"
    )


def refuse_changed(param: Tensor, plan: ParamPlan, device: torch.device) -> NoReturn:
    """
    Raises:
        TypeError: FullyShardedDataParallel sharded the parameter since the optimizer's first use.
        RuntimeError: something else changed it.
    """
    refuse_sharded([param])
    was = f"{str(plan.dtype).removeprefix('torch.')}{list(plan.shape)} on {device}"
    now = f"{str(param.dtype).removeprefix('torch.')}{list(param.shape)} on {param.device}"
    raise RuntimeError(
        f"{plan.name} was {was} at the optimizer's first use and is {now}: close() the optimizer, create it anew over "
        "model.parameters() after the change, and compile the model again"
    )


def refuse_stale_grad(name: str) -> NoReturn:
    """
    Raises:
        RuntimeError: always: a gradient came through ``.grad`` while an update of its parameter was on its way.
    """
    raise RuntimeError(
        f"{name} was read outside of the compiled model while an update of it was on its way, so this gradient "
        "is of old weights; call optimizer.synchronize() before running the model uncompiled"
    )


def refuse_second_grad(name: str) -> NoReturn:
    """
    Raises:
        RuntimeError: always: a gradient appeared in ``.grad`` of a parameter that is updated inside the backward.
    """
    raise RuntimeError(
        f"{name} has a gradient from a backward and another in .grad, which was written by hand or by "
        "DistributedDataParallel; a model compiled without an optimizer object cannot use both: create a ZenFlowAdamW "
        "and call its step()"
    )


def refuse_mixed_grad(name: str) -> NoReturn:
    """
    Raises:
        RuntimeError: always: the first gradient of a backward was added to one of a backward that was cut short.
    """
    raise RuntimeError(
        f"the gradient of {name} was added to what an interrupted or failed backward had left, and cannot be taken "
        "apart, so both backwards were dropped; run this forward and backward again"
    )


def refuse_gradient_hooks(param: Parameter, name: str) -> None:
    """
    Raises:
        RuntimeError: a hook waits for the gradient of a parameter that is updated inside the backward.
    """
    hooks: Sized = param._post_accumulate_grad_hooks or ()
    if len(hooks) > 1:  # ours is one
        raise RuntimeError(
            f"{name} has a post-accumulate-grad hook, but a model compiled without an optimizer object updates its "
            "parameters inside the backward and leaves no gradient to such a hook; to clip, pass max_grad_norm among "
            "the options of torch.compile; to see or change the gradient, use param.register_hook, or create a "
            "ZenFlowAdamW and call its step()"
        )


def refuse_nested_backward() -> NoReturn:
    """
    Raises:
        RuntimeError: always: the backward ran inside another one, and nobody else calls the step.
    """
    raise RuntimeError(
        "a backward inside another one (torch.utils.checkpoint with use_reentrant=True) does not tell when "
        "the step may run; use use_reentrant=False, or create a ZenFlowAdamW and call its step()"
    )


def refuse_concurrent_backward() -> NoReturn:
    """
    Raises:
        RuntimeError: always: another thread runs a backward, or one of its backwards has failed.
    """
    raise RuntimeError(
        "a backward in another thread has not ended, or has failed: a model that is not compiled, or was compiled "
        "without an optimizer object, can run one backward at a time; run them one after the other, and call "
        "optimizer.zero_grad() after one that failed"
    )


def refuse_compiled_autograd() -> NoReturn:
    """
    Raises:
        RuntimeError: always: nothing tells when a backward under compiled autograd ends, and the step is due then.
    """
    raise RuntimeError(
        "a model compiled without an optimizer object steps at the end of its backward, and compiled autograd does not "
        "tell when that is; run the backward without compiled autograd, or create a ZenFlowAdamW and call its step()"
    )


def refuse_closed() -> NoReturn:
    """
    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("this optimizer is closed; create a new one, and compile the model again")


def refuse_in_child(reason: str = "it has neither the threads nor the host memory of its parent") -> NoReturn:
    """
    Raises:
        RuntimeError: always: a forked process uses an optimizer of its parent.
    """
    raise RuntimeError(
        f"this process was forked from the one that trains, and cannot use its optimizer: {reason}; call state_dict() "
        "or synchronize() before the fork, or start the process with the spawn method"
    )


def refuse_failed(cause: BaseException) -> NoReturn:
    """
    Raises:
        RuntimeError: always, chained to what failed.
    """
    raise RuntimeError(
        "an earlier step, or the loading of a state, failed half-way, so weights and optimizer state do not belong "
        "together any more; load the last saved state of both"
    ) from cause


_NO_HOST_MEMORY = 'policy="resident", which needs no host memory'


_IN_FILES = 'policy="zero_infinity" with nvme_path, which keeps state in files'


def less_host_memory(options: Options) -> str:
    """Settings that need less host memory than ``options``, as the end of a sentence."""
    if options.policy == "zenflow":
        windows = "max_update_interval" if options.update_interval == "auto" else "update_interval"
        fewer = f"a larger topk_ratio, a smaller {windows} or a larger device_share, which move state to the device or "
        files = _smaller_window(options) or ['offload_device="nvme" with nvme_path, which keeps state in files']
        knobs = [fewer + "store fewer gradients", *files]
    elif options.policy == "zero_infinity":
        knobs = _smaller_window(options)
    elif options.policy == "zero_offload":
        knobs = ['policy="twinflow" with a ratio below 1, which keeps the others on the device', _IN_FILES]
    else:
        knobs = ["a smaller ratio, which keeps more state on the device", _IN_FILES]
    return ", or ".join([*knobs, _NO_HOST_MEMORY])


def smaller_uploads(options: Options) -> str:
    """Settings under which less is uploaded at once, as a part of a sentence with a comma behind it; or nothing."""
    return "raise topk_ratio, " if options.policy == "zenflow" else ""


def refuse_threads(error: RuntimeError) -> NoReturn:
    """
    Raises:
        RuntimeError: always: the system starts no further thread.
    """
    raise RuntimeError(
        f"no thread for host updates and copies could be started ({error}): raise the limit on processes (ulimit -u) "
        'or that of the control group (pids.max), run fewer DataLoader workers, or use policy="resident"'
    ) from error


def _smaller_window(options: Options) -> list[str]:
    if not options.in_files:
        return []
    return ["a smaller host_window_bytes, down to the state of the largest parameter"]
