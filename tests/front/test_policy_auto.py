"""``policy="auto"``: chosen once, before planning, from what is measured; seen in the options and kept in the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.calls import calls_of
from tests.support.machines import SLOW_HOST, measured_as, scenario
from tests.support.training import ENTRIES, ENTRY_IDS, OFFLOAD_ALL, Training, assert_same, batch, mlp
from zenflow_compile import ZenFlow, ZenFlowAdamW, rules
from zenflow_compile.backend import split_backend_options
from zenflow_compile.compiler.ownership import optimizer_of
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import shape_of
from zenflow_compile.planning import cached_state
from zenflow_compile.prediction.auto_policy import choose
from zenflow_compile.prediction.predict import predict
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.runtime.checkpoint.format import chosen
from zenflow_compile.runtime.parameters.capacity import specs_of

AUTO: dict[str, Any] = {"policy": "auto", "tokens_per_step": 8, "update_interval": 1}


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a model with more matrices than the cache of state in files holds."""
    layers = [module for _ in range(6) for module in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(16, 10)).to(dtype)


def needed(policy: str, memory: str = "device", build: Callable[[], nn.Module] = mlp) -> int:
    """Return the bytes that the model of the tests needs of a memory under a policy."""
    shape = shape_of(specs_of([list(build().named_parameters())], [ADAMW]))
    found = predict(scenario(Options(**OFFLOAD_ALL, **AUTO), SLOW_HOST, shape, tokens=8)).forecasts
    needs = min((each for each in found if each.policy == policy), key=lambda each: each.step_s).needs
    return sum(getattr(needs, memory).values())


@pytest.fixture
def measured() -> Iterator[list[Hardware]]:
    """What this machine is: the first of the list."""
    with measured_as(SLOW_HOST) as left:
        yield left


@pytest.fixture
def tight() -> Hardware:
    """Return a machine whose device has too little memory for all state."""
    return replace(SLOW_HOST, device_bytes=needed("resident") - 1)


def test_state_stays_on_the_device_if_it_fits(measured: list[Hardware]) -> None:
    training = Training(None, AUTO).run(0, 1)
    assert training.optimizer.options.policy == training.optimizer.engine.plan.policy == "resident"
    training.optimizer.close()


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_auto_trains_as_the_chosen_policy_by_name(
    entry: dict[str, Any] | None, measured: list[Hardware], tight: Hardware
) -> None:
    measured[0] = tight
    training = Training(entry, AUTO)
    chosen = training.optimizer.options
    assert chosen.policy not in ("resident", "auto")
    assert training.optimizer.engine.offloaded or training.optimizer.engine.registry.streamed.params
    by_name = {name: getattr(chosen, name) for name in ("policy", "ratio", "update_stride", "device_share")}
    expected = Training(entry, {"update_interval": 1, **by_name}).run(0, 4).weights()
    assert_same(training.run(0, 4).weights(), expected)
    training.optimizer.close()


def test_choice_is_deterministic(measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = tight
    chosen = [Training(None, AUTO).optimizer.options for _ in range(2)]
    specs = specs_of([list(mlp().named_parameters())], [ADAMW])
    options = Options(**OFFLOAD_ALL, **AUTO)
    expected = choose(scenario(options, tight, shape_of(specs), tokens=8))
    assert chosen[0] == chosen[1] == expected


def test_convergence_options_are_kept(measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = tight
    given = {"topk_ratio": 0.25, "update_interval": 3, "max_grad_norm": 1.0, "full_warm_up_rounds": 2}
    options = Training(None, {**AUTO, **given}).optimizer.options
    assert {name: getattr(options, name) for name in given} == given


def test_error_names_missing_host_memory(measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = replace(tight, host_bytes=1.0)
    with pytest.raises(ValueError, match=r"no policy fits 'round': .* lacks .* GB of (host|device) memory; use fewer"):
        Training(None, AUTO).run(0, 1)
    model = mlp()
    optimizer = ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL, **AUTO)
    with pytest.raises(ValueError, match="no policy fits"):
        _ = optimizer.options
    optimizer.close()
    ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL).close()  # the parameters have no owner


@pytest.fixture
def short_host(measured: list[Hardware]) -> Iterator[None]:
    """A machine whose host has too little memory for the state of ``deep``."""
    host_bytes = needed("zero_offload", "host", deep) - 1
    measured[0] = replace(SLOW_HOST, device_bytes=needed("zero_offload", build=deep), host_bytes=host_bytes)
    # The least window would hold all of so small a model.
    with mock.patch.object(cached_state, "FILE_WINDOW_BYTES", 0):
        yield


def test_files_are_chosen_if_host_memory_is_short(short_host: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no policy fits.*of host memory; .*give nvme_path"):
        Training(None, AUTO, build=deep).run(0, 1)
    training = Training(None, {**AUTO, "nvme_path": str(tmp_path)}, build=deep).run(0, 2)
    assert training.optimizer.options.in_files
    assert training.optimizer.options.nvme_path == str(tmp_path)
    saved = training.saved()
    training.optimizer.close()
    with pytest.warns(UserWarning, match="saved with other options"):
        Training(None, {"policy": "resident"}, build=deep).load(saved)


def test_matrices_outside_of_chosen_files_warn(short_host: None, measured: list[Hardware], tmp_path: Path) -> None:
    # Both memories are large enough for state in files alone; matrices are updated on the device.
    measured[0] = replace(SLOW_HOST, device_bytes=50_000, host_bytes=20_000)
    *others, last = (layer for layer in deep() if isinstance(layer, nn.Linear))
    groups = [
        {"params": [last.weight], "rule": rules.Muon()},
        {"params": [param for layer in others for param in layer.parameters()]},
    ]
    optimizer = ZenFlow(groups, ADAMW, **OFFLOAD_ALL, **AUTO, nvme_path=str(tmp_path))
    with pytest.warns(UserWarning, match=r"updated whole \(Muon\) stays in host memory"):
        assert optimizer.options.in_files
    optimizer.close()


def test_state_of_another_choice_converts(measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = tight
    saving = Training(None, AUTO).run(0, 3)
    options = saving.optimizer.options
    saved = saving.saved()
    values = chosen(saving.optimizer.state_dict()["state"][0]["chosen"])
    for name in ("policy", "ratio", "update_stride", "device_share", "offload_device"):
        assert values[name] == getattr(options, name)
    expected = saving.run(3, 5).weights()
    measured[0] = SLOW_HOST  # another machine, or a less busy day
    with pytest.warns(UserWarning, match="saved with other options"):
        resumed = Training(None, AUTO).load(saved)
    assert resumed.optimizer.options.policy == "resident"
    for ours, theirs in zip(resumed.run(3, 5).weights(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_later_groups_follow_the_choice(measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = tight
    with ZenFlowAdamW([{"params": mlp().parameters(), "lr": 1e-3}], **OFFLOAD_ALL, **AUTO) as optimizer:
        chosen = optimizer.options
        measured.clear()  # and nothing is measured again
        optimizer.add_param_group({"params": mlp().parameters(), "lr": 1e-4})
        assert optimizer.options is chosen
        assert optimizer.engine.plan.policy == chosen.policy
        assert len(optimizer.engine.params) == 12


def test_choice_covers_all_param_groups(measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = tight
    model = mlp()
    matrices = [param for param in model.parameters() if param.ndim > 1]
    biases = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices}, {"params": biases, "weight_decay": 0.0}]
    optimizer = ZenFlowAdamW(groups, lr=1e-2, **OFFLOAD_ALL, **AUTO)
    assert optimizer.options.policy not in ("resident", "auto")
    inputs, targets = batch(0)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_optimizer_in_backward_chooses_a_policy(room: str, measured: list[Hardware], tight: Hardware) -> None:
    measured[0] = SLOW_HOST if room == "roomy" else tight
    model = mlp()
    compiled = torch.compile(model, backend="zenflow", options={"inner": "eager", "lr": 1e-2, **OFFLOAD_ALL, **AUTO})
    before = [param.detach().clone() for param in model.parameters()]
    inputs, targets = batch(0)
    nn.functional.cross_entropy(compiled(inputs), targets).backward()
    policy = optimizer_of(compiled).options.policy
    assert (policy == "resident") is (room == "roomy")
    optimizer_of(compiled).close()
    assert all(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("in_backward", [False, True])
def test_choice_knows_optimizer_in_backward(in_backward: bool, measured: list[Hardware]) -> None:
    model = mlp()
    with calls_of(choose) as made:
        if in_backward:
            compiled = torch.compile(model, backend="zenflow", options={"inner": "eager", **OFFLOAD_ALL, **AUTO})
            compiled(batch(0)[0])
            optimizer_of(compiled).close()
        else:
            optimizer = ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL, **AUTO)
            assert optimizer.options.policy != "auto"
            optimizer.close()
    assert [call.arguments["scenario"].in_backward for call in made] == [in_backward]


@pytest.mark.parametrize("in_backward", [False, True])
def test_measuring_keeps_random_numbers(in_backward: bool) -> None:
    model = mlp()
    options = {**OFFLOAD_ALL, **AUTO, "workers": 1, "device_share": "fill"}
    given = torch.random.get_rng_state()
    if in_backward:
        compiled = torch.compile(model, backend="zenflow", options={"inner": "eager", **options})
        compiled(batch(0)[0])
        optimizer = optimizer_of(compiled)
    else:
        optimizer = ZenFlowAdamW(model.parameters(), **options)
    assert optimizer.options.policy == optimizer.engine.plan.policy != "auto"
    assert torch.equal(torch.random.get_rng_state(), given)
    optimizer.close()


def test_empty_parameters_need_no_memory(measured: list[Hardware]) -> None:
    optimizer = ZenFlowAdamW([nn.Parameter(torch.ones(0, 4))], **OFFLOAD_ALL, **AUTO)
    assert optimizer.options.policy == "resident"
    optimizer.close()


NEEDS_TOKENS = r'tokens_per_step=None under policy="auto" must be an integer >= 1.*tokens_per_step=batch_size'


@pytest.mark.parametrize("make", [Options.from_keywords, lambda **options: split_backend_options(options)])
def test_bad_input(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=NEEDS_TOKENS):
        make(policy="auto")
    for value, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("auto", TypeError)):
        for policy in ("auto", "zenflow"):
            with pytest.raises(error, match=f"tokens_per_step={value!r} must be"):
                make(policy=policy, tokens_per_step=value)
    with pytest.raises(ValueError, match=r'offload_device="nvme" under policy=\'auto\''):
        make(**AUTO, offload_device="nvme", nvme_path="scratch")
    with pytest.raises(
        ValueError, match="select_interval=2 must be at least update_interval=4"
    ):  # zenflow may be chosen
        make(**AUTO | {"update_interval": 4}, select_interval=2)
