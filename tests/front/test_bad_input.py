"""Bad input raises before anything is changed, and says what it is, which value, what is allowed and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import zenflow_compile
from tests.support.host import host_memory
from tests.support.training import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    OFFLOAD_ALL,
    Training,
    assert_same,
    batch,
    mlp,
)
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.host import arena


def untouched(model: nn.Module) -> bool:
    """No optimizer owns the model's parameters, and no hook is left on them."""
    return all(
        ops.owner_of(param) is None and not param._post_accumulate_grad_hooks and not hasattr(param, "_zenflow_owner")
        for param in model.parameters()
    )


# Options.

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "zenflo"}, ValueError, r'policy=\'zenflo\' is not one of .*did you mean "zenflow"\?'),
    ({"policy": "zero"}, ValueError, r'did you mean "zero_offload"\?'),
    ({"topk_ration": 0.1}, TypeError, r"unknown option 'topk_ration'; did you mean \"topk_ratio\"\?"),
    ({"update_intervals": 2}, TypeError, r'did you mean "update_interval"\?'),
    ({"amsgrad": True}, ValueError, r"amsgrad=True of torch.optim.AdamW is not supported: .*use amsgrad=False"),
    ({"capturable": True}, ValueError, r"capturable=True .*use capturable=False"),
    ({"differentiable": True}, ValueError, r"differentiable=True .*use differentiable=False"),
    ({"maximize": 1}, TypeError, r"maximize=1 must be True or False, not int"),
    ({"fused": "yes"}, TypeError, r"fused='yes' must be True or False, not str"),
    ({"foreach": 1}, TypeError, r"foreach=1 must be True or False, not int"),
    ({"_implicit": True}, TypeError, r"unknown option '_implicit'"),
    ({"topk_ratio": 1.5}, ValueError, r"topk_ratio=1.5 must be a number in \[0, 1\]"),
    ({"topk_ratio": -0.1}, ValueError, r"topk_ratio=-0.1"),
    ({"topk_ratio": float("nan")}, ValueError, r"topk_ratio=nan"),
    ({"auto_ratio": 2}, ValueError, r"auto_ratio=2"),
    ({"device_share": 1.1}, ValueError, r"device_share=1.1"),
    (
        {"device_share": -1},
        ValueError,
        r"device_share=-1 must be a number in \[0, 1\], an integer of bytes, or \"fill\"",
    ),
    ({"device_share": "fill"}, ValueError, r'"fill" under policy=.zenflow. is not supported.*an integer of bytes'),
    ({"update_interval": (0, 4)}, ValueError, r"update_interval\[0\]=0 must be an integer in \[1, 4\]: no more than"),
    ({"update_interval": [3, 2]}, ValueError, r"update_interval\[0\]=3 must be an integer in \[1, 2\]: no more than"),
    ({"update_interval": (None, 0)}, ValueError, r"update_interval\[1\]=0 must be an integer in \[1, 64\]"),
    ({"update_interval": (1, 10**40)}, ValueError, r"update_interval\[1\]=10+ must be an integer in \[1, 64\]"),
    ({"update_interval": (2, 4, 8)}, ValueError, r"update_interval=\(2, 4, 8\) must be two numbers of steps"),
    ({"workers": 0}, ValueError, r"workers=0 must be an integer >= 1, a share of the cores in"),
    ({"workers": 10_000}, ValueError, r"workers=10000 must be in \[1, \d+\]: .*physical core.*lower it, or leave it"),
    ({"workers": [99_999]}, ValueError, r"workers=\[99999\] must name .*may use: \[0"),
    ({"workers": 50.0}, ValueError, r"workers=50.0 must be a number in \[0, 1\]"),
    (
        {"workers": 2.0},
        ValueError,
        r"workers=2.0 must be a number in \[0, 1\], a share .* integer is a number of threads",
    ),
    ({"workers": [0.5]}, TypeError, r"workers\[0\]=0.5 must be an integer"),
    ({"update_interval": 0}, ValueError, r"update_interval=0 must be an integer in \[1, 64\], \"auto\", or its"),
    ({"update_interval": 10**6}, ValueError, r"update_interval=1000000 must be an integer in \[1, 64\]"),
    ({"update_interval": 2**63}, ValueError, r"update_interval=9223372036854775808 must be an integer in \[1, 64\]"),
    ({"full_warm_up_rounds": 2**63}, ValueError, r"full_warm_up_rounds=\d+ must be at most 2\*\*63 - 1"),
    ({"min_offload_size": 10**5000}, ValueError, r"min_offload_size=\(an integer of 16610 bits\) must be at most"),
    ({"select_interval": 0}, ValueError, r"select_interval=0 must be an integer >= 1"),
    (
        {"select_interval": 2, "update_interval": 4},
        ValueError,
        r"select_interval=2 .*must be at least update_interval=4.*raise select_interval or lower update_interval",
    ),
    ({"weight_grad_bytes": -1}, ValueError, r'weight_grad_bytes=-1 must be an integer >= 0 or "auto"'),
    ({"gradient_transfer": "int4"}, ValueError, r"gradient_transfer='int4' is not one of \"each\", \"mean\", \"int8\""),
    ({"gradient_transfer": 8}, TypeError, r"gradient_transfer=8 must be a string"),
    ({"gradient_accumulation_steps": 0}, ValueError, r"gradient_accumulation_steps=0"),
    ({"max_grad_norm": 0}, ValueError, r"max_grad_norm=0 must be a finite number > 0; None turns clipping off"),
    ({"lr": -1.0}, ValueError, r"lr=-1.0 must be a number in \[0, 1e\+30\]"),
    ({"lr": 1e308}, ValueError, r"lr=1e\+308 must be a number in \[0, 1e\+30\]"),
    ({"lr": 10**400}, ValueError, r"lr=10+\.\.\. \(401 characters\) must be a number in"),
    ({"lr": torch.ones(2)}, ValueError, r"lr is a tensor of 2 elements; it must be a number, or a tensor of one"),
    ({"lr": 1e20, "weight_decay": 1e20}, ValueError, r"lr=1e\+20 times weight_decay=1e\+20 must be at most 1e\+30"),
    ({"betas": (0.9, torch.tensor(0.99))}, ValueError, r"betas=.* both of them floats or both tensors"),
    ({"betas": (torch.ones(2), torch.ones(2))}, ValueError, r"betas\[0\] is a tensor of 2 elements"),
    ({"betas": (2, 0.9)}, ValueError, r"betas\[0\]=2 must be"),
    ({"lr": "fast"}, TypeError, r"lr='fast' must be"),
    ({"lr": True}, TypeError, r"lr=True must be"),
    ({"eps": -1e-8}, ValueError, r"eps=-1e-08"),
    ({"weight_decay": float("inf")}, ValueError, r"weight_decay=inf"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas=\(0.9, 1.0\) must be two numbers in \[0, 1\)"),
    ({"betas": 0.9}, ValueError, r"betas=0.9"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = mlp()
    with pytest.raises(kind, match=message):
        ZenFlowAdamW(model.parameters(), **options)
    assert untouched(model)
    # The same in the form without an optimizer object, when the model first runs.
    torch._dynamo.reset()
    with pytest.raises(kind, match=message):
        torch.compile(model, backend="zenflow", options={"inner": "eager", **options})(batch(0)[0])
    assert untouched(model)
    ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL)


# Parameters.


def test_complex_parameters() -> None:
    good = mlp()
    bad = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"dtype torch\.complex64; only real floating-point.*leave it out"):
        ZenFlowAdamW([*good.parameters(), bad])
    assert untouched(good)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_parameters(dtype: torch.dtype) -> None:
    good, bad = mlp(), nn.Parameter(torch.zeros(64, 64).to(dtype))
    with pytest.raises(TypeError, match=f"dtype {dtype}; only parameters of torch.float32.*leave it out"):
        ZenFlowAdamW([*good.parameters(), bad], policy="zero_offload", offload_weights=1.0)
    assert untouched(good)


def test_parameters_that_are_not_tensors() -> None:
    with pytest.raises(TypeError, match="params has a str"):
        ZenFlowAdamW(["weight"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="set"):
        ZenFlowAdamW([{"params": set(mlp().parameters())}])
    with pytest.raises(ValueError, match="empty parameter list"):
        ZenFlowAdamW([])
    with pytest.raises(ValueError, match="no parameter"):
        ZenFlowAdamW([{"params": []}])


def test_sparse_parameter() -> None:
    bad = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo; only dense"):
        ZenFlowAdamW([bad])


def test_parameter_twice_in_one_group() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="twice"):
        ZenFlowAdamW([*model.parameters(), model[0].weight])
    assert untouched(model)


def test_parameters_on_different_devices() -> None:
    model = mlp()
    with FakeTensorMode():  # a second device, whatever this machine has
        other = nn.Parameter(torch.zeros(4, 4, device="cuda"))
    with pytest.raises(ValueError, match=r"on cuda:0 and the others are on cpu; move the model to one device first"):
        ZenFlowAdamW([*model.parameters(), other])
    with pytest.raises(ValueError, match=r"on the meta device; materialise the model"):
        ZenFlowAdamW([*model.parameters(), nn.Parameter(torch.zeros(4, 4, device="meta"))])
    assert untouched(model)
    optimizer = ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL)
    with pytest.raises(ValueError, match=r"on cuda:0 and the others are on cpu"):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1


def test_bad_input_takes_no_parameter_over() -> None:
    model, other = mlp(), mlp()
    first = ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL)
    with pytest.raises(ValueError, match="topk_ratio=2"):
        ZenFlowAdamW([*other.parameters(), model[2].weight], topk_ratio=2)
    assert untouched(other)
    second = ZenFlowAdamW(other.parameters(), **OFFLOAD_ALL)
    with pytest.raises(ValueError, match="betas"):
        second.add_param_group({"params": [model[2].weight], "betas": (1.0, 1.0)})
    assert len(second.param_groups) == 1
    assert ops.owner_of(model[2].weight) == (first.engine, 2)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    first.step()
    first.close()
    ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL)


# Gradients.


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.Embedding(20, 16, sparse=True)
        self.head = nn.Linear(16, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


@pytest.mark.parametrize("offloaded", [True, False])
def test_sparse_gradient(offloaded: bool) -> None:
    model = Bag()
    size = 100 if offloaded else 10_000
    optimizer = ZenFlowAdamW(model.named_parameters(), **{**OFFLOAD_ALL, "min_offload_size": size})
    state = optimizer.state_dict()["state"]
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(
        TypeError, match=r"bag.weight has a sparse gradient; use dense ones \(Embedding\(sparse=False\)\)"
    ):
        model(torch.tensor([1, 2])).sum().backward()
    assert model.bag.weight.grad is None
    optimizer.zero_grad()
    assert_same(list(model.parameters()), before)
    after = optimizer.state_dict()["state"]
    assert after.keys() == state.keys()
    assert all(torch.equal(after[i]["exp_avg"], state[i]["exp_avg"]) for i in state)
    model.bag.weight.grad = torch.eye(20, 16).to_sparse()  # by hand
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()
    assert_same(list(model.parameters()), before)
    # Leaving it out helps, as the message says.
    optimizer.close()
    optimizer = ZenFlowAdamW(model.head.parameters(), **OFFLOAD_ALL)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert model.bag.weight.grad is not None
    assert model.bag.weight.grad.is_sparse


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_parameter_without_an_owner_trains_normally(entry: dict[str, Any] | None) -> None:
    model, twin = mlp(), mlp()
    optimizer = ZenFlowAdamW(model[:3].parameters(), **OFFLOAD_ALL)
    call = torch.compile(model, **entry) if entry else model
    for each in (call, twin):
        F.cross_entropy(each(batch(0)[0]), batch(0)[1]).backward()
    for a, b in zip(model[4].parameters(), twin[4].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    before = model[4].weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model[4].weight, before)
    assert model[4].weight.grad is not None  # not ours to zero


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_optimizer_of_other_parameters_warns(entry: dict[str, Any] | None) -> None:
    model, other = mlp(), mlp()
    optimizer = ZenFlowAdamW(other.parameters(), **OFFLOAD_ALL)
    call = torch.compile(model, **entry) if entry else model
    F.cross_entropy(call(batch(0)[0]), batch(0)[1]).backward()
    before = [param.detach().clone() for param in other.parameters()]
    optimizer.step()
    assert optimizer.engine.step == 0
    assert_same(list(other.parameters()), before)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_step_without_gradients_does_nothing(entry: dict[str, Any] | None) -> None:
    training = Training(entry).run(0, 3)
    before = training.weights()
    training.optimizer.step()
    training.backward(3)
    training.optimizer.zero_grad()
    training.optimizer.step()
    assert training.optimizer.engine.step == 3
    assert_same(training.weights(), before)
    training.run(3, 5)


# Machines.


def test_more_host_memory_than_there_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    needed = 2 * 64 * 64 * (3 * 4 + 4)
    options = {**OFFLOAD_ALL, "topk_ratio": 0.0, "update_interval": 1}
    message = (
        r"need 128\.0 KiB of host memory, but only 128\.0 KiB are available \(the machine\); .*"
        r"larger topk_ratio, a smaller update_interval or a larger device_share.*policy=\"resident\""
    )
    with host_memory(needed - 1), pytest.raises(ValueError, match=message):
        ZenFlowAdamW(model.parameters(), **options)
    # Groups count together.
    with host_memory(needed - 1), pytest.raises(ValueError, match="host memory"):
        ZenFlowAdamW([{"params": layer.parameters()} for layer in model], **options)
    assert untouched(model)
    with host_memory(needed):
        optimizer = ZenFlowAdamW(model.parameters(), **options)
        assert optimizer.host_bytes >= needed
    with host_memory(10), pytest.raises(ValueError, match="host memory"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(64, 64))]})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.engine.params) == 4


REMEDIES = {
    "zero_offload": ({}, r'or choose policy="twinflow" with a ratio below 1'),
    "twinflow": ({"ratio": 0.9}, "a smaller ratio"),
    "deep_optimizer_states": ({"update_stride": 1}, "a smaller ratio"),
    "zero_infinity": ({"nvme_path": "."}, "a smaller host_window_bytes"),
    "zenflow": ({}, 'a smaller update_interval.*or offload_device="nvme" with nvme_path'),
    "zenflow, auto": ({"update_interval": "auto"}, "shorter windows in update_interval"),
    "zenflow, nvme": ({"offload_device": "nvme", "nvme_path": "."}, "a smaller host_window_bytes"),
}


@pytest.mark.parametrize("label", REMEDIES)
def test_remedies_are_options_of_the_policy(label: str) -> None:
    """Options that other policies read would not help."""
    given, host = REMEDIES[label]
    policy = label.split(",")[0]
    options = {**OFFLOAD_ALL, "policy": policy, **given}
    others = {"topk_ratio", "update_interval", "device_share"} if policy != "zenflow" else {"a smaller ratio"}
    with host_memory(10), pytest.raises(ValueError, match=rf'{host}.*policy="resident"') as error:
        ZenFlowAdamW(mlp().parameters(), **options)
    assert not any(other in str(error.value) for other in others)


@host_memory(5 << 30, "the machine has 8.0 GiB")
def test_missing_memory_is_named_in_gib() -> None:
    with pytest.raises(ValueError, match=r"need 7\.5 GiB of host memory, but only 5\.0 GiB are available"):
        arena.require_host_memory(15 << 29, "a smaller model")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("PyTorch was built without gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.tier1
@pytest.mark.parametrize("inside", [False, True], ids=["compile_ddp", "ddp_of_compiled"])
def test_distributed_data_parallel(inside: bool, process_group: None) -> None:
    model = Net()
    optimizer = ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL)
    ddp = nn.parallel.DistributedDataParallel
    call = ddp(torch.compile(model, **EAGER_BACKEND)) if inside else torch.compile(ddp(model), **EAGER_BACKEND)
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*compile and train the bare module"):
        call(batch(0)[0])
    assert not optimizer.engine.steps.has_gradients
    F.cross_entropy(torch.compile(model, **EAGER_BACKEND)(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("views", [False, True])
def test_data_parallel_without_compile(views: bool, process_group: None) -> None:
    """Its reducer reads and writes gradients as any other tool."""
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    optimizer = ZenFlowAdamW(ours.parameters(), **ADAM, **OFFLOAD_ALL, update_interval=1)
    adam = torch.optim.AdamW(theirs.parameters(), **ADAM)
    for model, each in ((ours, optimizer), (theirs, adam)):
        call = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        for step in range(4):
            F.cross_entropy(call(batch(step)[0]), batch(step)[1]).backward()
            each.step()
            each.zero_grad()
    optimizer.synchronize()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), atol=1e-5, rtol=0)


# States.


def grown() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 10))


def state_over(build: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    model = build()
    optimizer = ZenFlowAdamW(model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **options})
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.close()
    return state


def test_state_dict_of_another_model_or_plan() -> None:
    training = Training(None).run(0, 3)
    before = training.optimizer.state_dict()
    loads: list[tuple[dict[str, Any], str]] = [
        (state_over(grown), r"shape=\[48, 32\] for '2.weight', this optimizer \[32, 32\].*another model"),
        (state_over(lambda: mlp()[:3]), r"param groups of sizes \[4\], this optimizer \[6\]"),
        ({}, r"neither of a ZenFlow .* nor of an optimizer of PyTorch"),
        ({"\x1b[2J": 1}, r"neither of a ZenFlow "),
    ]
    for state, message in loads:
        with pytest.raises(ValueError, match=message):
            training.optimizer.load_state_dict(state)
    after = training.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert_same(list(after["state"][index].values()), list(entry.values()))
    with pytest.raises(TypeError):
        training.optimizer.load_state_dict(None)  # type: ignore[arg-type]


def test_closed_optimizer_of_a_compiled_model() -> None:
    training = Training(EAGER_BACKEND).run(0, 2)
    training.optimizer.synchronize()
    loss = training.loss(2)
    training.optimizer.engine.close(flush=False)  # leaves the weights that the forward saved
    with pytest.raises(RuntimeError, match=r"closed; compile the model again"):
        loss.backward()
    with pytest.raises(ValueError, match="no ZenFlowAdamW owns a parameter"):
        zenflow_compile.optimizer_of(training.call)
