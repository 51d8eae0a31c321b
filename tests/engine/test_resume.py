"""A resumed run equals the uninterrupted one bit for bit, at every position in an update window."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.calls import interrupted
from tests.support.copies import Copies
from tests.support.settings import settings
from tests.support.training import (
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    OFFLOAD_ALL,
    Delays,
    Training,
    assert_same,
    batch,
    mlp,
)
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.thread_lane import copy_without_gil

SETTINGS = settings(
    "windows auto stale_windows stale_every_step reselecting device_share zero_offload resident twinflow "
    "streamed every_second_streamed windows_and_streamed clipped summed_clipped summed_auto compressed_clipped "
    "compressed_reselecting summed_stale"
)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_resumed_run_equals_the_uninterrupted_one(
    entry: dict[str, Any] | None, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Saving applies updates that are due but must not change later steps: every run saves at one position only."""
    expected = Training(entry, options, dtype).run(0, 13).weights()
    for position in range(5, 9):  # every position of a window of 4
        training = Training(entry, options, dtype).run(0, position)
        saved = training.saved()
        assert_same(training.run(position, 13).weights(), expected)
        for weights_first in (True, False):
            resumed = Training(entry, options, dtype).load(saved, weights_first=weights_first)
            assert resumed.optimizer.engine.step == position
            assert_same(resumed.run(position, 13).weights(), expected)


def test_training_reloads_its_own_checkpoint() -> None:
    """The optimizer that saved the state loads it, with gradients of other steps in update windows and in flight."""
    training = Training(ENTRIES[1]).run(0, 6)
    saved = training.saved()
    expected = training.run(6, 12).weights()
    training.backward(99)
    training.load(saved).optimizer.zero_grad()
    assert_same(training.run(6, 12).weights(), expected)
    training.backward(99)
    training.optimizer.zero_grad()
    assert_same(training.load(saved).run(6, 12).weights(), expected)
    for param in training.model.parameters():
        param.grad = torch.ones_like(param)  # by hand, also of those that are offloaded
    training.load(saved).optimizer.zero_grad()
    assert_same(training.run(6, 12).weights(), expected)


def test_state_dict_shares_no_memory_with_its_loader() -> None:
    options = {"update_interval": 1, "select_interval": 1}
    training = Training(None, options).run(0, 3)
    state = training.optimizer.state_dict()
    kept = copy.deepcopy(state)
    other = Training(None, options)
    other.optimizer.load_state_dict(state)
    other.run(3, 6)
    training.run(3, 6)
    for index, entry in kept["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state["state"][index][name], value), (index, name)


def test_state_contains_gradients_of_open_windows(copies: Copies) -> None:
    """A copy that is still on its way when the state is taken must be waited for."""
    training = Training(ENTRIES[1]).run(0, 7)
    training.optimizer.synchronize()
    copies.make = Delays(0, 100.0).before(copy_without_gil)
    flushed = training.optimizer.engine.steps.windows_flushed
    training.step(7)
    assert training.optimizer.engine.steps.windows_flushed == flushed  # a flush would wait for copies
    early = training.optimizer.state_dict()["state"]
    lane = training.optimizer.engine.registry.transport.to_host
    lane.submit(torch.zeros(1), torch.ones(1), step=0, param="").settle()  # copies end in order
    late = training.optimizer.state_dict()["state"]
    waiting = [(index, f"window{place}") for index, entry in late.items() for place in range(int(entry.get("open", 0)))]
    assert waiting
    for index, name in waiting:
        assert torch.equal(early[index][name], late[index][name])
        assert early[index][name].abs().sum() > 0


def test_half_precision_weights_keep_their_masters() -> None:
    """The cast of a master equals the weight: that must not count as an external write."""
    training = Training(None, {"update_interval": 1}, torch.bfloat16).run(0, 5)
    saved = training.saved()
    state = training.optimizer.state_dict()["state"]
    for weights_first in (True, False):
        resumed = Training(None, {"update_interval": 1}, torch.bfloat16).load(saved, weights_first=weights_first)
        resumed.optimizer.synchronize()
        for index, entry in resumed.optimizer.state_dict()["state"].items():
            assert torch.equal(entry["master"], state[index]["master"])
            assert not torch.equal(entry["master"], entry["master"].bfloat16().float())


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("between", ["synchronize", "optimizer", "model"])
@pytest.mark.parametrize("weights_before", [True, False])
def test_masters_wait_for_their_weights(between: str, staleness: int, weights_before: bool) -> None:
    """Saving, also by a framework, is no first use; with staleness the weights are an update behind."""
    options = {"update_interval": 1, "staleness": staleness}
    training = Training(EAGER_BACKEND, options, torch.bfloat16).run(0, 5)
    saved = training.saved()
    state = training.optimizer.state_dict()["state"]
    expected = training.run(5, 8).weights()
    resumed = Training(EAGER_BACKEND, options, torch.bfloat16).run(0, 1)
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    if weights_before:
        resumed.model.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    read: dict[str, Any] = {
        "synchronize": resumed.optimizer.synchronize,
        "optimizer": resumed.optimizer.state_dict,
        "model": resumed.model.state_dict,
    }
    for _ in range(2):
        read[between]()
    resumed.model.load_state_dict(loaded["model"])
    read[between]()
    for index, entry in resumed.optimizer.state_dict()["state"].items():
        assert torch.equal(entry["master"], state[index]["master"])
    assert_same(resumed.run(5, 8).weights(), expected)


def test_other_weights_than_the_states_count() -> None:
    training = Training(None, {"update_interval": 1}).run(0, 3)
    state = training.optimizer.state_dict()
    resumed = Training(None, {"update_interval": 1})
    with torch.no_grad():
        resumed.model[0].weight.fill_(0.5)
    resumed.optimizer.load_state_dict(state)
    resumed.optimizer.synchronize()
    resumed.step(3)
    resumed.optimizer.synchronize()
    moved = resumed.model[0].weight.detach() - 0.5
    assert 0 < moved.abs().max() < 0.1


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_external_writes_reseed_masters(entry: dict[str, Any] | None, staleness: int) -> None:
    """After ``load_state_dict`` or a write by hand, masters are cast from the weights again, and moments stay."""
    training = Training(entry, {"update_interval": 1, "staleness": staleness}).run(0, 4)
    other = [torch.randn(param.shape, generator=torch.Generator().manual_seed(9)) for param in training.weights()]
    names = [name for name, _ in training.model.named_parameters()]
    training.model.load_state_dict(dict(zip(names, other, strict=True)))
    assert_same(training.weights(), other)
    for index, entry_state in training.optimizer.state_dict()["state"].items():
        assert "master" not in entry_state or torch.equal(entry_state["master"], other[index])
    with torch.no_grad():
        next(training.model.parameters()).fill_(0.5)
    training.step(4)
    moved = training.weights()[0] - 0.5
    assert 0 < moved.abs().max() < 0.1


def test_weights_written_before_the_step_count() -> None:
    training = Training(ENTRIES[1], {"update_interval": 1}).run(0, 3)
    training.backward(3)
    with torch.no_grad():
        training.model[0].weight.fill_(0.5)
    training.optimizer.step()
    training.optimizer.synchronize()
    moved = training.model[0].weight.detach() - 0.5
    assert 0 < moved.abs().max() < 0.1


def test_truncated_file_changes_nothing() -> None:
    training = Training(None).run(0, 3)
    saved = torch.load(io.BytesIO(training.saved()), weights_only=True)["optimizer"]
    before = training.weights()
    del saved["state"][2]
    with pytest.raises(ValueError, match=r"no state for '2\.weight'"):
        training.optimizer.load_state_dict(saved)
    assert_same(training.weights(), before)
    assert training.optimizer.engine.step == 3


def damaged(saved: dict[str, Any], key: str, change: Any) -> dict[str, Any]:
    """Return a copy whose first entry has the result of ``change`` at ``key``, or no such key."""
    other = copy.deepcopy(saved)
    entry = other["state"][0]
    value = entry.pop(key)
    if change is not None:
        entry[key] = change(value)
    return other


def filled(value: float, place: int = 0) -> Any:
    """Return a function that changes one element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[place] = value
        return tensor

    return change


NAN, INF = float("nan"), float("inf")

DAMAGE: list[tuple[str, Any, str]] = [
    *((key, None, f"no '{key}' for '0.weight'") for key in ("mask", "coefficients", "master", "score", "schedule")),
    *((key, None, f"no '{key}' for '0.weight'") for key in ("step", "exp_avg", "plan", "open", "optimizer_step")),
    ("master", lambda value: value[:3], r"'master' of shape \[3, 16\]"),
    ("master", filled(INF), "'master' with values that are not finite"),
    ("exp_avg", torch.Tensor.bfloat16, r"'exp_avg' of shape .* torch\.bfloat16, not .* torch\.float32"),
    ("exp_avg", lambda value: value[:3], r"shape=\[3, 16\] for '0.weight', this optimizer \[32, 16\]"),
    ("exp_avg", torch.Tensor.to_sparse, "'exp_avg' that is not dense"),
    ("exp_avg", filled(NAN), "'exp_avg' with values that are not finite"),
    ("exp_avg_sq", filled(NAN), "'exp_avg_sq' with values that are negative or NaN"),
    ("exp_avg_sq", filled(-1e-9, 5), "'exp_avg_sq' with values that are negative or NaN"),
    ("exp_avg_sq", lambda value: [1.0], "'exp_avg_sq' that is a list instead of a tensor"),
    ("step", filled(-1.0), r"step=-1\.0, which is not a whole number >= 0"),
    ("step", filled(NAN), "step=nan, which is not a whole number"),
    ("step", filled(1.5), r"step=1\.5, which is not a whole number"),
    ("step", filled(5.0), "step=5 with optimizer_step=4"),
    ("optimizer_step", filled(-4), "optimizer_step=-4, which is not a whole number"),
    ("optimizer_step", filled(5), r"saved after \[4, 5\] steps; it is put together of several"),
    ("mask", torch.zeros_like, "'mask' with 0 selected slices, not 3"),
    ("mask", torch.Tensor.int, "'mask' of shape .* torch.int32, not .* torch.bool"),
    ("selected_at", filled(4), "selected_at=4 with optimizer_step=4"),
    ("selected_at", filled(-2), "selected_at=-2, which is not a whole number >= -1"),
    ("open", filled(4), "open=4 with places for 3 gradients"),
    ("open", filled(-1), "open=-1, which is not a whole number >= 0"),
    ("window0", None, "no 'window0'"),
    ("window1", lambda value: value[:1], "'window1' of shape"),
    ("coefficients", lambda value: value[:, :2], r"'coefficients' of shape \[3, 2\]"),
    ("coefficients", filled(NAN), "'coefficients' with values that are not finite"),
    ("coefficients", filled(-1.0), r"'coefficients' that no step has .*lr=-1\.0"),
    ("coefficients", filled(1.0, 1), r"'coefficients' that no step has .*beta1=1\.0"),
    ("coefficients", filled(2.0, 2), r"'coefficients' that no step has .*beta2=2\.0"),
    ("coefficients", filled(-1.0, 3), r"'coefficients' that no step has .*weight_decay=-1\.0"),
    ("schedule", filled(0.5), r"'schedule' with attempted=0\.5"),
    ("schedule", filled(NAN, 2), "'schedule' with waiting=nan"),
    ("schedule", filled(1.0, 4), "'schedule' with half of the latest norms"),
    ("schedule", filled(1.0, 7), "'schedule' with half of the next norms"),
    ("schedule", lambda value: [], "'schedule' that is a list instead of a tensor"),
    ("plan", lambda value: [], "'plan' that is a list instead of a tensor"),
    ("plan", lambda value: value[:0], r"'plan' of shape \[0\]"),
    ("plan", filled(99), "format 99, this version reads .*; go on with the version that"),
    ("plan", filled(7, 1), "'plan' with placement=7 for '0.weight'"),
    ("chosen", filled(0.5), r"'chosen' with policy=0\.5"),
]


@pytest.mark.parametrize(("key", "change", "message"), DAMAGE)
def test_damaged_state_is_named_and_changes_nothing(key: str, change: Any, message: str) -> None:
    training = Training(None).run(0, 4)
    before = training.optimizer.state_dict()
    assert before["state"][0]["open"] == 2
    weights = training.weights()
    bad = damaged(before, key, change)
    bad["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match=message):
        training.optimizer.load_state_dict(bad)
    assert training.optimizer.param_groups[0]["lr"] == 1e-2
    after = training.optimizer.state_dict()
    for index, entry in before["state"].items():
        assert_same(list(after["state"][index].values()), list(entry.values()))
    assert_same(training.weights(), weights)
    training.step(4)


def test_uneven_selection_is_refused() -> None:
    training = Training(None, {"topk_ratio": 0.25}).run(0, 2)
    numbers = torch.arange(32)
    in_one_group = damaged(
        training.optimizer.state_dict(), "mask", lambda mask: ((numbers % 2 == 0) & (numbers < 16)).view_as(mask)
    )
    with pytest.raises(ValueError, match="'mask' that does not select 8 slices evenly in 2 groups"):
        training.optimizer.load_state_dict(in_one_group)


def damaged_group(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**saved, "param_groups": [{**saved["param_groups"][0], **changes}]}


def first_of(key: str, **changes: Any) -> Any:
    """Return a function that changes the first entry of the list at ``key``."""
    return lambda part: {**part, key: [{**part[key][0], **changes}, *part[key][1:]]}


PART_DAMAGE: list[tuple[str | None, Any, str]] = [
    ("state", lambda state: {**state, 0: 3}, "a int instead of a dict for parameter 0"),
    ("state", lambda state: {**state, "\x1b[2J": {}}, r"an entry '\\x1b\[2J' in 'state' that is in no param group"),
    ("state", lambda state: {**state, 0: {**state[0], "\x1b[2J": 1}}, r"an unknown entry '\\x1b\[2J' for '0.weight'"),
    (None, lambda saved: {**saved, "zenflow": {"format": 4}}, "format 4, this version reads .*; go on with"),
    (
        None,
        lambda saved: {"state": saved["state"]},
        "neither of a ZenFlow .* nor of an optimizer of PyTorch",
    ),
    (None, lambda saved: saved["state"], "neither of a ZenFlow .* nor of an optimizer of PyTorch"),
    ("param_groups", lambda groups: [{**groups[0], "params": [[0]] * 6}], "neither numbers nor names for param group"),
    ("param_groups", lambda groups: [{**groups[0], "params": [0] * 6}], "a parameter in its param groups twice"),
    (None, lambda saved: damaged_group(saved, lr=10**400), "in param group 0 of the state dict, "),
    (None, lambda saved: damaged_group(saved, amsgrad=True), "amsgrad=True .*not supported"),
    ("state", lambda state: [], "'state' that is a list instead of a dict"),
    ("param_groups", lambda groups: 3, "'param_groups' that is a int instead of a list"),
    ("param_groups", lambda groups: [{**groups[0], "params": 3}], "'params' that is a int .* for param group 0"),
    (None, first_of("param_groups", lr="x"), "in param group 0 of the state dict, lr='x' must be a number in"),
    (None, first_of("param_groups", lr=-1.0), r"in param group 0 of the state dict, lr=-1\.0 must be"),
    (None, first_of("param_groups", betas=None), "in param group 0 of the state dict, betas=None must be two numbers"),
    (None, first_of("param_groups", betas=(0.9, None)), r"in param group 0 of the state dict, betas\[1\]=None must be"),
]


@pytest.mark.parametrize(("key", "change", "message"), PART_DAMAGE)
def test_state_of_other_types_changes_nothing(key: str | None, change: Any, message: str) -> None:
    training = Training(None).run(0, 4)
    saved = training.optimizer.state_dict()
    bad = change(saved) if key is None else {**saved, key: change(saved[key])}
    training.backward(4)
    with pytest.raises(ValueError, match=message):
        training.optimizer.load_state_dict(bad)
    after = training.optimizer.state_dict()
    assert after["state"][0]["optimizer_step"] == 4
    assert after["param_groups"] == saved["param_groups"]
    assert training.optimizer.engine.steps.has_gradients
    training.optimizer.step()


@pytest.mark.parametrize("policy", ["zenflow", "zero_offload", "resident"])
@pytest.mark.parametrize(
    ("saved", "own"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
def test_state_of_another_dtype_is_refused(policy: str, saved: torch.dtype, own: torch.dtype) -> None:
    state = Training(None, {"policy": policy}, saved).run(0, 2).optimizer.state_dict()
    training = Training(None, {"policy": policy}, own).run(0, 1)
    with pytest.raises(ValueError, match=rf"dtype='{saved}' for '0\.weight', this optimizer '{own}'.*another model"):
        training.optimizer.load_state_dict(state)
    assert training.optimizer.engine.step == 1
    training.step(1)


def test_failed_load_is_repaired_by_another_load() -> None:
    training = Training(None).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()

    restore = training.optimizer.engine.schedule.restore
    with interrupted(restore, MemoryError("nothing left")), pytest.raises(MemoryError):
        training.load(saved)
    with pytest.raises(RuntimeError, match=r"loading of a state, failed half-way.*load the last saved state"):
        training.step(3)
    assert_same(training.load(saved).run(3, 6).weights(), expected)


@pytest.mark.parametrize("cause", ["calls", "frozen"])
def test_other_calls_or_frozen_parameters_convert(cause: str) -> None:
    """Both are planned at the moment they are given: what the device keeps is chosen among the first call's."""
    first, second = mlp(), mlp()
    options: dict[str, Any] = {**OFFLOAD_ALL, "policy": "twinflow", "ratio": 0.5}
    optimizer = ZenFlowAdamW(first[:1].parameters(), **options)
    optimizer.add_param_group({"params": list(first[1:].parameters())})
    if cause == "calls":
        other = ZenFlowAdamW([{"params": second[:1].parameters()}, {"params": second[1:].parameters()}], **options)
    else:
        second[0].weight.requires_grad_(False)
        other = ZenFlowAdamW(second[:1].parameters(), **options)
        other.add_param_group({"params": list(second[1:].parameters())})
    for model, owner in ((first, optimizer), (second, other)):
        for step in range(3 if model is first else 1):
            F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            owner.step()
            owner.zero_grad()
    optimizer.synchronize()
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="saved with other options"):
        other.load_state_dict(optimizer.state_dict())
    for model, owner in ((first, optimizer), (second, other)):
        F.cross_entropy(model(batch(3)[0]), batch(3)[1]).backward()
        if cause == "frozen" and model is first:
            first[0].weight.grad = None
        owner.step()
        owner.synchronize()
    for ours, expected in zip(second.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
