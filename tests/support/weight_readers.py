"""Ways in which code reads or writes a weight without a call of its module."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import re
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel


def step_of(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Parameter], Any]:
    def step(weight: Parameter) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer([weight], lr=0.1, **options).step()  # type: ignore[call-arg]

    return step


def write_without_autograd(weight: Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


# Of a weight of 64 x 32.
READERS: dict[str, Callable[[Parameter], Any]] = {
    "norm": lambda weight: weight.norm(),
    "clone": lambda weight: weight.clone(),
    "linear": lambda weight: F.linear(torch.zeros(2, 32), weight),
    "linear under autocast": torch.autocast("cpu", torch.bfloat16)(lambda weight: F.linear(torch.zeros(2, 32), weight)),
    "matmul": lambda weight: torch.zeros(2, 64) @ weight,
    "embedding": lambda weight: F.embedding(torch.tensor([1, 2]), weight),
    "parameters_to_vector": lambda weight: inspect.unwrap(nn.utils.parameters_to_vector)([weight]),
    "numpy": lambda weight: weight.detach().numpy(),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "tolist": lambda weight: weight.tolist(),
    "item": lambda weight: weight[0, 0].item(),
    "row": lambda weight: weight[2].sum(),
    "print": repr,
    "torch.save": lambda weight: torch.save(weight, io.BytesIO()),
    "torch.save, old format": lambda weight: torch.save(weight, io.BytesIO(), _use_new_zipfile_serialization=False),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "data_ptr": lambda weight: weight.data_ptr(),
    "storage of floats": lambda weight: weight.storage().tolist(),
    "storage": lambda weight: weight.untyped_storage().clone(),
    "storage on the CPU": lambda weight: weight.untyped_storage()[0],
    "storage that is resized": lambda weight: weight.untyped_storage().resize_(0),
    "share_memory_": lambda weight: weight.share_memory_(),
    "is_pinned": lambda weight: weight.is_pinned(),
    "data.mul_": lambda weight: weight.data.mul_(2),
    "no_grad": write_without_autograd,
    "data.zero_": lambda weight: weight.data.zero_(),
    "init": nn.init.normal_,
    "equal": lambda weight: torch.equal(weight, torch.zeros(64, 32)),
    "isfinite": lambda weight: torch.isfinite(weight).all(),
    "cast": lambda weight: weight.to(torch.bfloat16),
    "copy": lambda weight: torch.empty(64, 32).copy_(weight.detach()),
    "get_total_norm": lambda weight: nn.utils.get_total_norm([weight]),
    "foreach": lambda weight: torch._foreach_norm([weight.detach()]),
    "AdamW": step_of(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": step_of(torch.optim.AdamW, foreach=True),
    "AdamW, fused": step_of(torch.optim.AdamW, fused=True),
    "SGD": step_of(torch.optim.SGD),
    "t": lambda weight: weight.t().sum(),
    "view": lambda weight: weight.view(-1).sum(),
    "as_strided": lambda weight: weight.as_strided((2, 2), (1, 1)).sum(),
    "split": lambda weight: weight.split(32)[1].sum(),
    "to": lambda weight: weight.to("cpu").sum(),
    "cpu": lambda weight: weight.cpu().sum(),
    "float": lambda weight: float(weight[3, 3]),
    "bool": lambda weight: bool(weight[3, 3] > 0),
    "array": lambda weight: np.asarray(weight.detach()),
    "numpy, forced": lambda weight: weight.numpy(force=True),
    "iteration": lambda weight: [row.sum() for row in weight],
    "mask": lambda weight: weight[weight > 0],
    "cat": lambda weight: torch.cat([weight, weight]),
    "stack": lambda weight: torch.stack([weight, weight]),
    "einsum": lambda weight: torch.einsum("ij,kj->ik", weight, torch.zeros(2, 32)),
    "convolution": lambda weight: F.conv1d(torch.zeros(1, 32, 4), weight[:, :, None]),
    "vmap": lambda weight: torch.func.vmap(torch.sum)(weight),
    "jit.trace": lambda weight: torch.jit.trace(lambda x: x @ weight.detach(), torch.zeros(2, 64)),
    "gradient": lambda weight: torch.autograd.grad((weight * weight).sum(), weight),
    "assert_close": lambda weight: torch.testing.assert_close(weight.detach(), torch.zeros(64, 32)),
    "state_dict of a list": lambda weight: copy.deepcopy(nn.ParameterList([weight]).state_dict()),
    "histogram": lambda weight: torch.histc(weight.detach()),
    "fill by index": lambda weight: weight.data.__setitem__(0, 0.0),
    "data.copy_": lambda weight: weight.data.copy_(torch.zeros(64, 32)),
    "data.clamp_": lambda weight: weight.data.clamp_(-1, 1),
    "lerp_": lambda weight: weight.detach().lerp_(torch.zeros(64, 32), 0.5),
    "foreach_add_": lambda weight: torch._foreach_add_([weight.detach()], 1.0),
    "foreach_mul": lambda weight: torch._foreach_mul([weight.detach()], 2.0),
    "foreach_copy_": lambda weight: torch._foreach_copy_([torch.empty(64, 32)], [weight.detach()]),
    "foreach_copy_ to it": lambda weight: torch._foreach_copy_([weight.detach()], [torch.empty(64, 32)]),
    "foreach_lerp_": lambda weight: torch._foreach_lerp_([torch.zeros(64, 32)], [weight.detach()], 0.5),
    "out": lambda weight: torch.zeros(64, 32, out=weight.detach()),
    "average": lambda weight: AveragedModel(nn.ParameterList([weight])),
    "pruning": lambda weight: prune.L1Unstructured(0.5).prune(weight),
    "process": lambda weight: ForkingPickler.dumps(weight),
}


def use_readers(weight: Parameter, expected: str) -> int:
    """Use all of ``READERS``, and return how many had the expected outcome; print the others.

    Call it in a child: readers that are not refused change the weight.
    """
    count = 0
    for name in sorted(READERS, key=lambda name: "resized" in name):  # the last one takes the memory away
        try:
            READERS[name](weight)
            told = "returned"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        weight.grad = None
        if re.match(expected, told):
            count += 1
        else:
            os.write(2, f"{name}: {told}\n".encode())
    return count


def read_all(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], int]:
    """Read each parameter directly; those that refuse it are read behind ``synchronize()``.

    Returns:
        The values in the order of the parameters, and how many of them refused.
    """
    params = list(model.parameters())
    found: dict[int, Tensor] = {}
    for index, param in enumerate(params):
        try:
            found[index] = param.detach().clone()
        except RuntimeError as error:
            if not re.search("is in flight|is in host memory", str(error)):
                raise
    refused = len(params) - len(found)
    if refused:
        optimizer.synchronize()
    return [found[index] if index in found else param.detach().clone() for index, param in enumerate(params)], refused


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda weight: weight.t(),
    "view": lambda weight: weight.view(-1, 8),
    "as_strided": lambda weight: weight.as_strided((4, 4), (1, 32), 3),
    "split": lambda weight: weight.detach().split(32)[1],
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "alias": lambda weight: weight.cpu(),
    "saved": lambda weight: (weight * weight).grad_fn._saved_self,  # type: ignore[union-attr]
}


def check_metadata(weight: Tensor) -> None:
    """Read what is known of a weight ``[64, 32]`` without its memory."""
    assert (weight.shape, weight.stride(), weight.is_contiguous()) == ((64, 32), (32, 1), True)
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert not weight.is_shared()
    assert torch.empty_like(weight).shape == weight.shape
    with torch._subclasses.FakeTensorMode() as mode:
        assert mode.from_tensor(weight).t().shape == (32, 64)
