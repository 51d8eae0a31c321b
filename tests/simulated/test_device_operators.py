"""Operators return the bits, shapes and strides that they return on the CPU, and wait for nothing."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from tests.simulated.plain_training import equal, gpt, gpt_loss
from tests.simulated.process import in_simulator
from tests.simulated.simulator import Simulator

OF_DATABASE = """
abs add addbmm addcdiv addcmul addmm addmv all amax any arange argmax argsort as_strided_copy baddbmm bmm bucketize cat
ceil clamp clone column_stack contiguous cumprod cumsum diag_embed diagonal div dot einsum eq erf exp expand fill
flatten flip floor full_like gather ge index_add index_copy index_fill index_put index_select isfinite isnan
kthvalue lerp linspace log logsumexp masked_fill masked_scatter matmul max maximum mean median min mm mul mv nan_to_num
native_layer_norm ne neg new_zeros nn.functional.adaptive_avg_pool2d nn.functional.avg_pool2d nn.functional.batch_norm
nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d nn.functional.cross_entropy
nn.functional.embedding nn.functional.gelu nn.functional.group_norm nn.functional.interpolate nn.functional.layer_norm
nn.functional.linear nn.functional.max_pool2d nn.functional.mse_loss nn.functional.nll_loss nn.functional.normalize
nn.functional.pad nn.functional.relu nn.functional.rms_norm nn.functional.silu nn.functional.softplus norm ones_like
outer permute pow prod reciprocal remainder repeat reshape roll round rsqrt scatter scatter_add scatter_reduce select
select_scatter sigmoid sign sin slice slice_scatter softmax sort split sqrt square squeeze stack std sub sum take
take_along_dim tanh tile topk transpose trapezoid tril triu true_divide unbind unfold unsqueeze var view where zero_
zeros_like
"""  # names in torch.testing's operator database


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return device if isinstance(value, str | torch.device) and str(value) == "cpu" else value


def _differences(simulator: Simulator, function: Callable[..., Any], sample: Any, *, in_place: bool) -> str | None:
    """How the operator differs from that on the CPU for one sample; None if it does not, or the CPU refuses it."""
    try:
        expected = function(sample.input.clone() if in_place else sample.input, *sample.args, **sample.kwargs)
    except Exception:
        return None
    moved = tree_map(lambda value: _moved(value, simulator.device), (sample.input, sample.args, sample.kwargs))
    simulator.reset_counts()
    actual = function(moved[0], *moved[1], **moved[2])
    waits = {name for name in simulator.counts() if name.startswith(("SLOW", "LAYOUT"))}
    if waits:
        return f"{waits}"
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if not isinstance(other, Tensor):
            continue
        if (one.shape, one.dtype, one.device.type) != (other.shape, other.dtype, "sim"):
            return f"{one.shape} {one.dtype} {one.device} is not {other.shape} {other.dtype}"
        if other.numel() > 1 and one.is_contiguous() != other.is_contiguous():
            return f"strides {one.stride()} are not {other.stride()}"
        if not torch.allclose(one.cpu(), other, rtol=0, atol=0, equal_nan=True):
            return "other values"
    return None


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@in_simulator(timeout=120)
def test_operators_equal_those_of_the_cpu(simulator: Simulator, dtype: torch.dtype, in_place: bool) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    simulator.configure(delays="random")
    seen, wrong = 0, {}
    for operator in op_db:
        function = operator.inplace_variant if in_place else operator
        if operator.name not in OF_DATABASE.split() or function is None or dtype not in operator.dtypes:
            continue
        for sample in itertools.islice(operator.sample_inputs("cpu", dtype), 6):
            if not (in_place and (not isinstance(sample.input, Tensor) or sample.broadcasts_input)):
                found = _differences(simulator, function, sample, in_place=in_place)
                if found:
                    wrong[operator.name] = found
                seen += 1
    assert not wrong
    assert seen > (50 if in_place else 200)


def _train_with_tools(device: torch.device) -> list[Tensor]:
    """Gradient scaling, clipping, a copied model, a checkpoint file."""
    torch.manual_seed(0)
    model = gpt().to(device)
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    for step in range(3):
        scaler.scale(gpt_loss(trained, step, device)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert next(iter(saved["model"].values())).device.type == device.type
    model.load_state_dict(saved["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(saved["optimizer"])
    return [*(param.detach().cpu() for param in model.parameters()), norm.cpu()]


@in_simulator
def test_tools_of_training_work(simulator: Simulator) -> None:
    expected = _train_with_tools(torch.device("cpu"))
    simulator.configure(delays="random")
    assert equal(_train_with_tools(simulator.device), expected)


@in_simulator
def test_checkpointing_restores_random_numbers(simulator: Simulator) -> None:
    values = torch.ones(64, device=simulator.device, requires_grad=True)
    dropped = checkpoint(torch.nn.Dropout(0.5), values, use_reentrant=False)
    dropped.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad.cpu(), dropped.detach().cpu())


@in_simulator
def test_autocast_lowers_matmuls(simulator: Simulator) -> None:
    values = torch.randn(4, 4, device=simulator.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = torch.nn.functional.linear(values, values)
        assert product.dtype == torch.bfloat16
        assert torch.nn.functional.mse_loss(product, product).dtype == torch.float32


@in_simulator
def test_default_device_may_be_the_simulated_one(simulator: Simulator) -> None:
    with torch.device("sim"):
        made = [torch.arange(3), torch.randperm(5), torch.tensor([1.0]), torch.eye(2), torch.tril_indices(3, 3)]
        with sdpa_kernel(SDPBackend.MATH):
            made.append(torch.nn.MultiheadAttention(8, 2)(*[torch.randn(3, 1, 8)] * 3)[0])
    assert all(tensor.device == simulator.device for tensor in made)


@in_simulator
def test_wrong_arguments_raise_in_the_call(simulator: Simulator) -> None:
    matrix = torch.ones(2, 3, device=simulator.device)
    calls: list[Callable[[], Tensor]] = [
        lambda: matrix @ matrix,
        lambda: matrix.add_(torch.ones(4, device=simulator.device)),
        lambda: matrix.T @ matrix.double(),  # a Meta kernel accepts it
    ]
    for function in calls:
        with pytest.raises(RuntimeError, match=r"must match|cannot be multiplied|same dtype"):
            function()
    assert torch.ones(1, device=simulator.device).item() == 1


@in_simulator
def test_inference_mode_copies_and_views(simulator: Simulator) -> None:
    simulator.configure(delays="random")
    values = torch.arange(6.0, device=simulator.device).view(2, 3)
    with torch.inference_mode():
        transposed, made = values.t(), values.clone()
        made.copy_(transposed.contiguous().view(2, 3))
        transposed.add_(1)
        assert not transposed.is_inference()
        assert made.t().is_inference()
    transposed.mul_(2)
    assert values.tolist() == [[2, 4, 6], [8, 10, 12]]
    assert made.tolist() == [[0, 3, 1], [4, 2, 5]]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        made.mul_(2)
