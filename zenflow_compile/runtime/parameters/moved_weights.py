"""Weights whose memory is emptied and filled in place, and models that are moved to a device without them.

PyTorch cannot resize the memory of weights that come from a file, from numpy or from another library. They get memory
of their own before it is emptied for the first time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow_compile.native.storage_reads import allow_reads, own_memory, refuse_reads, storage_reads
from zenflow_compile.planning.weight_memory import SMALLEST_WEIGHT_BYTES

SHARED = "it shares memory with other tensors"


def not_emptied(param: Tensor) -> str | None:
    """Why the memory of ``param`` cannot be emptied; None if it can, after ``have_own_memory``."""
    storage = param.untyped_storage()
    if not param.is_contiguous():
        return "its memory is not contiguous"
    if param.storage_offset() or storage.nbytes() != param.nbytes:
        return SHARED
    if param.is_cpu and storage.is_shared():
        return "other processes may share its memory"
    if not storage.resizable() and not param.is_cpu:
        return "PyTorch cannot resize its memory, which another library has allocated"
    return None


def have_own_memory(param: Tensor) -> None:
    """Move ``param``, and all tensors that share its storage, to memory that can be emptied. Idempotent.

    Needs memory for two such weights at a time.
    """
    storage = param.untyped_storage()
    if not storage.resizable():
        own_memory(storage)


_HOST_VALUES = "_zenflow_host_values"
_REFUSED = (
    "a weight of shape {} is in host memory, where move_to_device() or the end of an optimizer has left it: pass it to "
    "ZenFlowAdamW(..., offload_weights=...) and compile the model, before code reads it; save a model before "
    "optimizer.close()"
)


def move_to_device(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a model to a device, and leave its large weights in host memory for ``offload_weights``.

    ``model.to(device)`` needs memory for all weights at a time. Here, each weight of at least 64 KiB that requires a
    gradient becomes a parameter on the device without memory. An optimizer with ``offload_weights`` takes its values
    over. Until then, code that reads the weight raises ``RuntimeError``. An optimizer without that option loads it.

    Parameters become new objects, so make the optimizer afterwards. Modules that share one still do.

    Args:
        model: on the CPU, without gradients.

    Returns:
        The model.

    Raises:
        ValueError: a parameter is not on the CPU, or has a gradient. Nothing has been moved then.
        RuntimeError: there is no C++ compiler, likewise.
    """
    storage_reads()  # which empty storages need, before anything is moved
    device = torch.device(device)
    for param in model.parameters():
        if not param.is_cpu:
            raise ValueError(
                f"a parameter is on {param.device}; move_to_device() takes a model on the CPU: build or load it there"
            )
        if param.grad is not None:
            raise ValueError("a parameter has a gradient; call model.zero_grad() before move_to_device()")
    moved: dict[Parameter, Parameter] = {}
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                if own not in moved:
                    moved[own] = _moved(own, device)
                module._parameters[name] = moved[own]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def _moved(param: Parameter, device: torch.device) -> Parameter:
    owns_memory = param.untyped_storage().nbytes() == param.nbytes and param.is_contiguous()
    large = type(param) is Parameter and param.nbytes >= SMALLEST_WEIGHT_BYTES
    is_left = device.type != "cpu" and param.requires_grad and owns_memory and large
    data = torch.empty(param.shape, dtype=param.dtype, device=device) if is_left else param.data.to(device)
    new = Parameter(data, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    if is_left:
        leave_on_host(new, param.data)
    return new


def leave_on_host(param: Parameter, values: Tensor) -> None:
    """Empty the memory of ``param``, whose values are those in host memory from now on."""
    storage = param.untyped_storage()
    allow_reads(storage)
    storage.resize_(0)
    refuse_reads(storage, param.nbytes, _REFUSED.format(list(param.shape)).encode())
    setattr(param, _HOST_VALUES, values)


def is_left_on_host(param: Tensor) -> bool:
    """Whether the values of ``param`` were left in host memory, and no optimizer has taken them."""
    return hasattr(param, _HOST_VALUES)


def take_host_values(param: Parameter) -> bool:
    """Load the values that were left in host memory. Returns whether there were any."""
    values: Tensor | None = getattr(param, _HOST_VALUES, None)
    if values is None:
        return False
    storage = param.untyped_storage()
    allow_reads(storage)
    try:
        storage.resize_(values.nbytes)
        param.data.copy_(values)
    except BaseException:  # no memory: the values stay where they are
        leave_on_host(param, values)
        raise
    delattr(param, _HOST_VALUES)
    return True
