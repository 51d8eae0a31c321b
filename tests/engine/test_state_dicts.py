"""``torch.distributed.checkpoint`` and ``torch.optim.AdamW`` can use our state dicts."""

from __future__ import annotations

import copy
import io
import os
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn import functional as F
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

from tests.support.settings import settings
from tests.support.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, Training, assert_same, batch, mlp
from zenflow_compile.integrations.checkpoint import StateStager
from zenflow_compile.runtime.checkpoint.format import layout

# A single process may save and load without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SETTINGS = settings(
    "resident zero_offload twinflow zero_infinity each_step stale stale_windows summed_auto all_selected none_selected "
    "warm_up",
    streamed="every_second_streamed",
    windows="selecting_windows",
    auto="long_auto",
    int8="compressed",
    summed="summed_windows",
)
STEP, END = 6, 10  # in the middle of update windows of most parameters


@pytest.fixture(params=[False], ids=["alone"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Run the test without a process group, or in a group of one rank."""
    if not request.param:
        yield
        return
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield
    dist.destroy_process_group()


in_both = pytest.mark.parametrize("group", [False, True], ids=["alone", "process_group"], indirect=True)


Make = Callable[..., Training]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a training; those with state in files have a directory each."""

    def made(options: dict[str, Any], entry: dict[str, Any] | None = None, *args: Any) -> Training:
        if options.get("policy") == "zero_infinity":
            folder = tmp_path / f"state{len(os.listdir(tmp_path))}"
            folder.mkdir()
            options = {**options, "nvme_path": str(folder)}
        return Training(entry, options, *args)

    return made


def assert_equal_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two states are equal in names, shapes, dtypes and bits."""
    assert actual["param_groups"] == expected["param_groups"]
    assert list(actual["state"]) == list(expected["state"])
    for index, entry in expected["state"].items():
        assert list(actual["state"][index]) == list(entry)
        for name, value in entry.items():
            other = actual["state"][index][name]
            assert other.dtype == value.dtype
            assert torch.equal(other, value), (index, name)


def resumes(training: Training, folder: Path, before: dict[str, Any], expected: list[torch.Tensor]) -> None:
    """It loads the state ``before`` from ``folder``, and trains on to the ``expected`` weights."""
    dcp.load({"model": training.model, "optimizer": training.optimizer}, checkpoint_id=folder / "saved")
    assert_equal_states(training.optimizer.state_dict(), before)
    assert_same(training.run(STEP, END).weights(), expected)


CASES = [
    *((name, torch.float32) for name in SETTINGS),
    *((name, torch.bfloat16) for name in ("resident", "streamed", "windows", "stale", "int8", "summed")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_entries_follow_from_the_plan(name: str, dtype: torch.dtype, make: Make) -> None:
    options = SETTINGS[name]
    training = make(options, None, dtype)
    engine = training.optimizer.engine
    expected = [layout(plan, adaptive=engine.plan.adaptive) for plan in engine.plan.params]
    for step in (0, STEP):
        state = training.run(0, step).optimizer.state_dict()
        assert list(state) == ["state", "param_groups"]
        for entry, fields in zip(state["state"].values(), expected, strict=True):
            found = {name: (tuple(value.shape), value.dtype) for name, value in entry.items()}
            assert found == {name: tuple(field) for name, field in fields.items()}
            assert all(value.device.type == "cpu" for value in entry.values())
            assert entry["step"] == step
    if options.get("update_interval") == 4:
        assert any(entry["open"] > 0 for entry in state["state"].values() if "open" in entry)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_dcp_resumes_bitwise(name: str, dtype: torch.dtype, make: Make, tmp_path: Path) -> None:
    """A fresh optimizer and one that has trained differently load the state; nothing of their own state is left."""
    options = SETTINGS[name]
    training = make(options, None, dtype).run(0, STEP)
    before = training.optimizer.state_dict()
    dcp.save({"model": training.model, "optimizer": training.optimizer}, checkpoint_id=tmp_path / "saved")
    assert_equal_states(training.optimizer.state_dict(), before)
    expected = training.run(STEP, END).weights()
    for other_steps in (0, 9):
        resumes(make(options, None, dtype).run(0, other_steps), tmp_path, before, expected)


DISTRIBUTED = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full_cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@in_both
@pytest.mark.parametrize(("name", "how"), [("windows", how) for how in DISTRIBUTED])
def test_windows_resume_from_parameter_names(name: str, how: str, make: Make, group: None, tmp_path: Path) -> None:
    resumes_from_names(make, SETTINGS[name], DISTRIBUTED[how], tmp_path)


@pytest.mark.parametrize("how", ["plain", "flat"])
@pytest.mark.parametrize("name", ["resident", "stale", "int8", "summed_auto"])
def test_settings_resume_from_parameter_names(name: str, how: str, make: Make, tmp_path: Path) -> None:
    resumes_from_names(make, SETTINGS[name], DISTRIBUTED[how], tmp_path)


def resumes_from_names(make: Make, options: dict[str, Any], how: StateDictOptions, tmp_path: Path) -> None:
    """Save and load a state with parameter names through a file, as tools for many ranks do."""
    training = make(options).run(0, STEP)
    before = training.optimizer.state_dict()
    model, optimizer = get_state_dict(training.model, training.optimizer, options=how)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    assert_equal_states(training.optimizer.state_dict(), before)
    expected = training.run(STEP, END).weights()
    for other_steps in (0, 9):
        resumed = make(options).run(0, other_steps)
        model, optimizer = get_state_dict(resumed.model, resumed.optimizer, options=how)
        dcp.load(template := {"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
        states = {"model_state_dict": template["model"], "optim_state_dict": template["optimizer"]}
        set_state_dict(resumed.model, resumed.optimizer, **states, options=how)
        assert_equal_states(resumed.optimizer.state_dict(), before)
        assert_same(resumed.run(STEP, END).weights(), expected)


@in_both
def test_async_save_keeps_the_state_of_its_call(make: Make, group: None, tmp_path: Path) -> None:
    training = make(SETTINGS["windows"]).run(0, STEP)
    before = training.optimizer.state_dict()
    everything = {"model": training.model, "optimizer": training.optimizer}
    future = dcp.async_save(everything, checkpoint_id=tmp_path / "saved")
    expected = training.run(STEP, END).weights()
    future.result()
    resumes(make(SETTINGS["windows"]), tmp_path, before, expected)


@in_both
def test_stager_copies_weights_only(make: Make, group: None, tmp_path: Path) -> None:
    training = make(SETTINGS["windows"]).run(0, STEP)
    stager = StateStager(training.optimizer)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    other = torch.zeros(3)
    staged = stager.stage({"model": model, "optimizer": optimizer, "other": other})
    for name, entry in optimizer["state"].items():
        for key, value in entry.items():
            assert staged["optimizer"]["state"][name][key] is value
    assert staged["other"] is not other
    assert all(staged["model"][name].data_ptr() != value.data_ptr() for name, value in model.items())

    before = training.optimizer.state_dict()
    everything = {"model": training.model, "optimizer": training.optimizer}
    future = dcp.async_save(everything, checkpoint_id=tmp_path / "saved", async_stager=stager)
    expected = training.run(STEP, END).weights()
    future.result()
    stager.close()
    resumes(make(SETTINGS["windows"]), tmp_path, before, expected)


def test_compiled_training_resumes_from_names(make: Make) -> None:
    training = make(SETTINGS["windows"], EAGER_BACKEND).run(0, STEP)
    model, optimizer = get_state_dict(training.call, training.optimizer)
    model, optimizer = copy.deepcopy((model, optimizer))
    assert list(optimizer["state"]) == [name for name, _ in training.model.named_parameters()]
    expected = training.run(STEP, END).weights()
    resumed = make(SETTINGS["windows"], EAGER_BACKEND).run(0, 3)
    set_state_dict(resumed.call, resumed.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert_same(resumed.run(STEP, END).weights(), expected)


@pytest.mark.parametrize("steps", [0, STEP])
@pytest.mark.parametrize("name", ["resident", "streamed", "each_step", "windows", "stale"])
def test_reading_the_state_trains_nothing(name: str, steps: int, make: Make) -> None:
    """torch.distributed.checkpoint makes a step with zero gradients if ``optimizer.state`` is empty."""
    training = make(SETTINGS[name]).run(0, steps)
    weights, state = training.weights(), training.optimizer.state_dict()
    for _ in range(2):
        get_optimizer_state_dict(training.model, training.optimizer)
    assert training.optimizer.engine.step == steps
    assert_same(training.weights(), weights)
    assert_equal_states(training.optimizer.state_dict(), state)
    assert_same(training.run(steps, END).weights(), make(SETTINGS[name]).run(0, END).weights())


def test_names_of_frozen_parameters_may_be_missing() -> None:
    training = Training()
    training.model[2].requires_grad_(False)
    training.run(0, STEP)
    saved = get_optimizer_state_dict(training.model, training.optimizer)
    model = copy.deepcopy(training.model.state_dict())
    expected = training.run(STEP, END).weights()
    resumed = Training()
    resumed.model[2].requires_grad_(False)
    set_optimizer_state_dict(resumed.model, resumed.optimizer, saved)  # leaves their entries out
    resumed.model.load_state_dict(model)
    assert_same(resumed.run(STEP, END).weights(), expected)


def test_states_of_two_steps_are_refused() -> None:
    training = Training().run(0, 3)
    saved = training.optimizer.state_dict()
    later = training.run(3, 4).optimizer.state_dict()
    mixed = {**saved, "state": {**saved["state"], 2: later["state"][2]}}
    with pytest.raises(ValueError, match=r"saved after \[3, 4\] steps; it is put together of several"):
        training.optimizer.load_state_dict(mixed)


# ``optimizer.state``.


@pytest.mark.parametrize("name", ["resident", "streamed", "zero_offload", "windows", "summed", "none_selected"])
def test_state_shows_gradients_taken(name: str, make: Make) -> None:
    training = make(SETTINGS[name])
    first = next(iter(training.model.parameters()))
    assert {float(entry["step"]) for entry in training.optimizer.state.values()} == {0.0}
    for step in range(3):
        training.backward(step)
        first.grad = None if step == 1 else first.grad
        training.optimizer.step()
        training.optimizer.zero_grad()
        shown = [float(entry["step"]) for entry in training.optimizer.state.values()]
        assert shown == [[1, 1, 2][step]] + [step + 1] * 5
        assert shown == [float(entry["step"]) for entry in training.optimizer.state_dict()["state"].values()]
    added = nn.Parameter(torch.ones(16, 16))
    training.optimizer.add_param_group({"params": [("added", added)]})
    assert float(training.optimizer.state[added]["step"]) == 0.0
    fresh = make(SETTINGS[name])
    fresh.optimizer.add_param_group({"params": [("added", nn.Parameter(torch.ones(16, 16)))]})
    fresh.optimizer.load_state_dict(training.optimizer.state_dict())
    assert [float(entry["step"]) for entry in fresh.optimizer.state.values()] == [2, 3, 3, 3, 3, 3, 0]


def test_cleared_state_is_refused() -> None:
    training = Training().run(0, 2)
    saved, weights = training.optimizer.state_dict(), training.weights()
    with pytest.raises(AttributeError, match="clearing, replacing or writing it changes nothing"):
        training.optimizer.state = saved["state"]
    training.optimizer.state.clear()
    training.backward(2)
    with pytest.raises(RuntimeError, match=r"optimizer\.state was cleared.*create a new optimizer"):
        training.optimizer.step()
    assert_same(training.weights(), weights)
    training.optimizer.load_state_dict(saved)
    training.optimizer.zero_grad()
    assert_same(training.run(2, 5).weights(), Training().run(0, 5).weights())


@pytest.mark.parametrize("place", [0, 1], ids=["offloaded", "resident"])
@pytest.mark.parametrize("edit", ["moments", "empty", "delete", "step", "add"])
def test_written_state_is_refused(edit: str, place: int) -> None:
    """The state is also refused if code reads ``optimizer.state`` after the write."""
    training = Training().run(0, 2)
    saved, weights = training.optimizer.state_dict(), training.weights()
    state, param = training.optimizer.state, list(training.model.parameters())[place]
    if edit == "moments":
        state[param]["exp_avg"] = torch.zeros_like(param)
    elif edit == "empty":
        state[param] = {}
    elif edit == "delete":
        del state[param]["step"]
    elif edit == "step":
        state[param]["step"].zero_()
    else:
        state[param]["average"] = param.detach().clone()
    assert training.optimizer.state is state
    training.backward(2)
    with pytest.raises(RuntimeError, match=r"optimizer\.state was cleared or written.*create a new optimizer"):
        training.optimizer.step()
    assert_same(training.weights(), weights)
    assert_equal_states(training.optimizer.state_dict(), saved)
    training.optimizer.load_state_dict(saved)
    training.optimizer.zero_grad()
    assert_same(training.run(2, 5).weights(), Training().run(0, 5).weights())


USES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda state: state["exp_avg"].mul_(0.001),
    "zero_": lambda state: state["exp_avg_sq"].zero_(),
    "operator": lambda state: state["exp_avg"] * 0.001,
    "function": lambda state: torch.zeros_like(state["exp_avg"]),
    "index": lambda state: state["exp_avg"][0],
}


@pytest.mark.parametrize("use", USES)
def test_moments_in_the_state_name_the_way(use: str) -> None:
    training = Training().run(0, 2)
    for place in (0, 1):  # offloaded, resident
        state = training.optimizer.state[list(training.model.parameters())[place]]
        with pytest.raises(
            (AttributeError, TypeError), match=r"state = optimizer\.state_dict\(\).*load_state_dict\(state\)"
        ):
            USES[use](state)
        assert not hasattr(state["exp_avg"], "to")
        copy.deepcopy(state)
    training.run(2, 4)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_moments_reset_as_in_adamw(name: str, entry: dict[str, Any] | None, make: Make) -> None:
    """As ReLoRA does. Exact policies train on as AdamW does."""
    training, theirs = make(SETTINGS[name], entry).run(0, STEP), Reference().run(0, STEP)
    state = training.optimizer.state_dict()
    for entries in (state["state"], theirs.optimizer.state):
        for values in entries.values():
            values["exp_avg"].mul_(0.001)
            values["exp_avg_sq"].mul_(0.01)
    training.optimizer.load_state_dict(state)
    assert_equal_states(training.optimizer.state_dict(), state)
    training.run(STEP, END)
    if name in ("resident", "zero_offload", "zero_infinity", "twinflow", "streamed", "each_step"):
        theirs.run(STEP, END)
        torch.testing.assert_close(training.weights(), list(theirs.model.parameters()), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["resident", "streamed", "zero_infinity", "windows", "int8"])
def test_state_that_requires_gradients_loads(name: str, make: Make) -> None:
    training, expected = make(SETTINGS[name]).run(0, STEP), make(SETTINGS[name]).run(0, STEP)
    state = training.optimizer.state_dict()
    for entry in state["state"].values():
        for value in entry.values():
            value.requires_grad_(value.is_floating_point())
    training.optimizer.load_state_dict(state)
    expected.optimizer.load_state_dict(expected.optimizer.state_dict())
    assert not any(
        value.requires_grad for entry in training.optimizer.state_dict()["state"].values() for value in entry.values()
    )
    assert_same(training.run(STEP, END).weights(), expected.run(STEP, END).weights())


def test_state_may_be_replaced_by_an_equal_one() -> None:
    """Lightning moves states to the device so; others look up parameters that the optimizer does not have."""
    training = Training().run(0, 2)
    for param, entry in training.optimizer.state.items():
        training.optimizer.state[param] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()
        }
    assert training.optimizer.state[torch.zeros(1)] == {}
    training.run(2, 5)
    assert {float(entry["step"]) for entry in training.optimizer.state.values() if entry} == {5.0}
    assert_same(training.weights(), Training().run(0, 5).weights())


# torch.optim.AdamW.


class Reference:
    """Plain PyTorch on the data of ``Training``."""

    def __init__(self, dtype: torch.dtype = torch.float32, **keywords: Any) -> None:
        self.model = mlp(dtype)
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), **{**ADAM, **keywords})

    def run(self, begin: int, end: int, skip: Callable[[int], bool] = lambda step: False) -> Reference:
        for step in range(begin, end):
            backward(self.model, step, self.dtype, skip(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def backward(model: nn.Module, step: int, dtype: torch.dtype, skip_first: bool) -> None:
    """Run a backward, without a gradient of the first parameter if that is to be skipped."""
    inputs, targets = batch(step, dtype)
    F.cross_entropy(model(inputs).float(), targets).backward()
    if skip_first:
        next(iter(model.parameters())).grad = None


def every_third(step: int) -> bool:
    return step % 3 == 0


EXACT = {name: SETTINGS[name] for name in ("resident", "zero_offload", "twinflow", "streamed", "each_step")}


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_adamw_state_continues_here(options: dict[str, Any], weights_first: bool) -> None:
    """The parameters have taken different numbers of gradients, and the groups have a scheduler's entries."""
    theirs = Reference(lr=3e-3, fused=True).run(0, STEP, every_third)
    theirs.optimizer.param_groups[0]["initial_lr"] = 0.5
    model, state = through_file(theirs.model.state_dict()), through_file(theirs.optimizer.state_dict())
    training = Training(None, options).run(0, 2)
    if weights_first:
        training.model.load_state_dict(model)
    training.optimizer.load_state_dict(state)
    if not weights_first:
        training.model.load_state_dict(model)
    assert training.optimizer.engine.step == STEP
    assert training.optimizer.param_groups[0]["lr"] == 3e-3
    assert training.optimizer.param_groups[0]["initial_lr"] == 0.5
    for step in range(STEP, END):
        backward(training.model, step, torch.float32, every_third(step))
        training.optimizer.step()
        training.optimizer.zero_grad()
    theirs.run(STEP, END, every_third)
    torch.testing.assert_close(training.weights(), list(theirs.model.parameters()), atol=1e-6, rtol=0)
    mine, reference = training.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]
    assert {int(entry["step"]) for entry in mine.values()} == {6, END}
    assert all(entry["step"] == reference[index]["step"] for index, entry in mine.items())


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_state_continues_in_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    training = Training(entry, options).run(0, STEP)
    theirs = Reference(lr=0.5)
    training.optimizer.synchronize()
    theirs.model.load_state_dict(training.model.state_dict())
    theirs.optimizer.load_state_dict(through_file(training.optimizer.state_dict()))
    assert theirs.optimizer.param_groups[0]["lr"] == ADAM["lr"]
    theirs.run(STEP, END)
    torch.testing.assert_close(training.run(STEP, END).weights(), list(theirs.model.parameters()), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["each_step", "windows", "resident"])
def test_state_returns_from_adamw(name: str, dtype: torch.dtype, make: Make) -> None:
    """AdamW keeps the entries that it does not know, as old as they were when it loaded them."""
    training = make(SETTINGS[name], None, dtype).run(0, STEP)
    training.optimizer.flush()
    theirs = Reference(dtype)
    theirs.model.load_state_dict(training.model.state_dict())
    theirs.optimizer.load_state_dict(through_file(training.optimizer.state_dict()))
    theirs.run(STEP, END)
    state = through_file(theirs.optimizer.state_dict())
    back, expected = make(SETTINGS[name], None, dtype), make(SETTINGS[name], None, dtype)
    for each in (back, expected):
        each.model.load_state_dict(theirs.model.state_dict())
    back.optimizer.load_state_dict(state)
    names = ("step", "exp_avg", "exp_avg_sq")
    known = {index: {key: entry[key] for key in names} for index, entry in state["state"].items()}
    expected.optimizer.load_state_dict({**state, "state": known})
    assert_equal_states(back.optimizer.state_dict(), expected.optimizer.state_dict())
    assert {int(entry["step"]) for entry in back.optimizer.state_dict()["state"].values()} == {END}
    assert_same(back.run(END, END + 3).weights(), expected.run(END, END + 3).weights())


def test_gradients_that_adamw_dropped_are_named() -> None:
    training = Training().run(0, STEP)
    theirs = Reference()
    theirs.optimizer.load_state_dict(training.optimizer.state_dict())
    before = training.optimizer.state_dict()
    with pytest.raises(ValueError, match=r"in the update window of '.*', which it has not applied: call flush"):
        training.optimizer.load_state_dict(theirs.optimizer.state_dict())
    assert_equal_states(training.optimizer.state_dict(), before)


def test_fresh_states_go_both_ways() -> None:
    """Parameters without a gradient have no entry in AdamW's states, and zeros in ours."""
    expected = Reference().run(0, 3)
    training = Training(None, EXACT["each_step"]).run(0, 5)
    training.optimizer.load_state_dict(Reference().optimizer.state_dict())
    training.model.load_state_dict(mlp().state_dict())
    torch.testing.assert_close(training.run(0, 3).weights(), list(expected.model.parameters()), atol=1e-6, rtol=0)
    theirs = Reference()
    theirs.optimizer.load_state_dict(Training(None, EXACT["each_step"]).optimizer.state_dict())
    theirs.run(0, 3)
    assert_same(list(theirs.model.parameters()), list(expected.model.parameters()))


@pytest.mark.parametrize("name", ["resident", "each_step", "windows", "int8", "stale"])
def test_low_precision_adamw_state_is_taken(name: str, make: Make) -> None:
    """AdamW keeps moments in the weights' dtype and no masters: these start from the weights."""
    theirs = Reference(torch.bfloat16).run(0, STEP)
    training = make(SETTINGS[name], None, torch.bfloat16).run(0, 2)
    training.model.load_state_dict(theirs.model.state_dict())
    training.optimizer.load_state_dict(theirs.optimizer.state_dict())
    state = training.optimizer.state_dict()["state"]
    reference = theirs.optimizer.state_dict()["state"]
    for (index, entry), param in zip(reference.items(), theirs.model.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[index][key], entry[key].float())
        assert torch.equal(state[index]["master"], param.detach().float())
        assert state[index]["step"] == STEP
        assert state[index].get("selected_at", torch.tensor(-1)) == -1
        assert state[index].get("open", torch.tensor(0)) == 0
    other = make(SETTINGS[name], None, torch.bfloat16)  # and nothing of what was trained before is left
    other.model.load_state_dict(theirs.model.state_dict())
    other.optimizer.load_state_dict(theirs.optimizer.state_dict())
    assert_same(training.run(STEP, END).weights(), other.run(STEP, END).weights())
    back = Reference(torch.bfloat16)
    back.optimizer.load_state_dict(training.optimizer.state_dict())
    back.run(END, END + 1)


def test_variants_of_adamw_are_refused() -> None:
    training = Training().run(0, 2)
    before = training.optimizer.state_dict()

    def adam(**keywords: Any) -> dict[str, Any]:
        return Reference(**keywords).run(0, 1).optimizer.state_dict()

    amsgrad = adam(amsgrad=True)
    hidden = {**amsgrad, "param_groups": adam()["param_groups"]}
    coupled = Reference()
    coupled.optimizer = torch.optim.Adam(coupled.model.parameters(), weight_decay=0.1)  # type: ignore[assignment]
    cut = adam()
    del cut["state"][0]["exp_avg_sq"]
    infinite = adam()
    infinite["state"][0]["exp_avg"].fill_(torch.inf)
    for state, message in (
        (amsgrad, "amsgrad=True .*not supported"),
        (hidden, "'max_exp_avg_sq' for '0.weight', of a torch.optim.AdamW with amsgrad=True"),
        (coupled.run(0, 1).optimizer.state_dict(), r"decoupled_weight_decay=False is torch\.optim\.Adam's"),
        (torch.optim.SGD(mlp().parameters(), momentum=0.9).state_dict(), "its param groups have no 'betas'"),
        (cut, "no 'exp_avg_sq' for '0.weight'"),
        (infinite, "'exp_avg' with values that are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            training.optimizer.load_state_dict(state)
    assert_equal_states(training.optimizer.state_dict(), before)
    training.step(2)


def test_fp64_states_keep_their_bits(tmp_path: Path) -> None:
    training = Training(None, {"policy": "resident"}, torch.float64).run(0, STEP)
    theirs = Reference(torch.float64).run(0, STEP)
    dcp.save({"optimizer": training.optimizer}, checkpoint_id=tmp_path / "saved")
    resumed = Training(None, {"policy": "resident"}, torch.float64)
    dcp.load({"optimizer": resumed.optimizer}, checkpoint_id=tmp_path / "saved")
    for state in (resumed.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]):
        for index, entry in training.optimizer.state_dict()["state"].items():
            assert state[index]["exp_avg"].dtype == torch.float64
            torch.testing.assert_close(state[index]["exp_avg"], entry["exp_avg"], atol=1e-12, rtol=0)


class Verifier(VerifyStateDictMixin, unittest.TestCase):  # type: ignore[misc]
    """PyTorch's own checks of what its functions for distributed states return, compared with ``state_dict()``."""

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802
        if isinstance(first, dict) and "state" in first:
            assert_equal_states(first, second)
        else:
            assert first == second, msg


@pytest.mark.parametrize("name", ["resident", "streamed", "windows", "stale", "int8", "summed_auto"])
def test_state_passes_pytorchs_own_checks(name: str, make: Make) -> None:
    training, other, verify = make(SETTINGS[name]).run(0, STEP), make(SETTINGS[name]).run(0, 2), Verifier()
    for how in (DISTRIBUTED["plain"], DISTRIBUTED["full"]):
        model, optimizer = get_state_dict(training.model, training.optimizer, options=how)
        verify._verify_msd(training.model.state_dict(), model)
        verify._verify_osd(training.model, training.optimizer, training.optimizer.state_dict(), optimizer)
        verify._verify_osd_by_load(other.model, training.optimizer, other.optimizer, optimizer)
