"""Writes that move no version, as those through ``.data`` do, are noticed by samples of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

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
    take_step,
)
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.parameters.unseen_writes import SAMPLED, UnseenWrites, sample_of

pytestmark = pytest.mark.timeout(60)

NOTICED = r"was written through \.data.*torch\.no_grad\(\)"
EXACT: dict[str, Any] = {"update_interval": 1, "overlap_step": False}
POLICIES: dict[str, dict[str, Any]] = {
    "zenflow": EXACT,
    "windows": {"update_interval": 4},
    "staleness": {"update_interval": 1, "staleness": 1},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
    "streamed": {"policy": "deep_optimizer_states", "ratio": 1.0, "update_stride": 2},
    "files": {"policy": "zero_infinity"},
}


def write_all(training: Training) -> None:
    for param in training.model.parameters():
        param.data.mul_(0.5)


@pytest.mark.filterwarnings("ignore:policy=:UserWarning")
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_data_write_raises_in_the_next_step(policy: str, entry: dict[str, Any] | None, tmp_path: Path) -> None:
    options = {**POLICIES[policy], **({"nvme_path": tmp_path} if policy == "files" else {})}
    training = Training(entry, options).run(0, 5)
    training.optimizer.synchronize()
    write_all(training)
    training.backward(5)
    before = training.weights_as_they_are()
    with pytest.raises(RuntimeError, match=NOTICED):
        training.optimizer.step()
    assert_same(training.weights_as_they_are(), before)


@pytest.mark.parametrize("policy", ["resident", "streamed", "zenflow"])
@pytest.mark.filterwarnings("ignore:policy=:UserWarning")
def test_data_write_to_weights_with_masters_raises(policy: str) -> None:
    training = Training(None, POLICIES.get(policy, {"policy": policy}), torch.bfloat16).run(0, 3)
    training.optimizer.synchronize()
    write_all(training)
    with pytest.raises(RuntimeError, match=NOTICED):
        training.step(3)


def test_optimizer_in_backward_notices_data_writes() -> None:
    model = mlp()
    call = torch.compile(model, backend="zenflow", options={"inner": "eager", **ADAM, **OFFLOAD_ALL, **EXACT})
    for step in range(3):
        call(batch(step)[0]).square().mean().backward()
    model[0].weight.data.zero_()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=NOTICED):
        call(batch(3)[0]).square().mean().backward()
    assert_same([*model.parameters()], before)


@pytest.mark.tier1
@pytest.mark.parametrize("repair", ["increment_version", "no_grad", "assignment"])
def test_error_names_ways_that_equal_adamw(repair: str) -> None:
    training = Training(EAGER_BACKEND, EXACT).run(0, 3)
    twin = Training(EAGER_BACKEND, EXACT).run(0, 3)
    write_all(training)
    with pytest.raises(RuntimeError, match=NOTICED):
        training.step(3)
    training.optimizer.zero_grad()
    for param, other in zip(training.model.parameters(), twin.model.parameters(), strict=True):
        if repair == "increment_version":
            torch.autograd.graph.increment_version(param)
        elif repair == "no_grad":
            with torch.no_grad():
                param.copy_(param.clone())
        else:
            param.data = param.data.clone()
        with torch.no_grad():
            other.mul_(0.5)
    assert_same(training.run(3, 6).weights(), twin.run(3, 6).weights())


@pytest.mark.parametrize("between", ["synchronize", "evaluation", "state_dict", "flush"])
def test_write_after_an_applied_update_is_noticed(between: str) -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 2}).run(0, 4)
    if between == "evaluation":
        with torch.no_grad():
            training.loss(9)
    elif between == "state_dict":
        training.model.state_dict()
    else:
        getattr(training.optimizer, between)()
    write_all(training)
    with pytest.raises(RuntimeError, match=NOTICED):
        training.step(4)


def large(dtype: torch.dtype) -> nn.Module:
    """A matrix of which one element in four is sampled."""
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 512), nn.GELU(), nn.Linear(512, 10)).to(dtype)


@pytest.mark.parametrize(
    ("build", "offset", "noticed"), [(large, 4, True), (large, 5, False), (mlp, 0, True), (mlp, 1, True)]
)
def test_one_element_is_noticed_if_it_is_sampled(build: Any, offset: int, noticed: bool) -> None:
    training = Training(None, EXACT, build=build).run(0, 2)
    training.model[2].weight.data.view(-1)[offset] += 1
    if noticed:
        with pytest.raises(RuntimeError, match=NOTICED):
            training.step(2)
    else:
        training.step(2)


def test_share_that_is_noticed_is_as_documented() -> None:
    """1 - (1 - q)^n: of 200 writes to 2 of 10,000 elements, 118 on average; six deviations are 42."""
    weight, noticed = torch.zeros(256, 192), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        written = weight + (torch.rand(256, 192, generator=generator) < 2e-4)
        noticed += not torch.equal(sample_of(written), sample_of(weight))
    assert abs(noticed - 200 * (1 - (1 - 2e-4) ** len(sample_of(weight)))) < 42


def layouts() -> dict[str, Tensor]:
    wide = torch.arange(64 * 96.0).view(64, 96)
    return {
        "matrix": wide,
        "tall": torch.arange(4096 * 3.0).view(4096, 3),
        "wide": torch.arange(3 * 4096.0).view(3, 4096),
        "square of a power of two": torch.arange(1024 * 1024.0).view(1024, 1024),
        "transposed": wide.t(),
        "part": wide[:, 8:80],
        "convolution": torch.arange(32 * 16 * 9.0).view(32, 16, 3, 3),
        "channels last": torch.arange(32 * 16 * 9.0).view(32, 16, 3, 3).contiguous(memory_format=torch.channels_last),
        "bias": torch.arange(7.0),
        "half": torch.arange(2000.0).bfloat16().view(40, 50),
        "scalar": torch.tensor(3.0),
        "one element": torch.ones(1, 1),
    }


@pytest.mark.parametrize("name", layouts())
def test_sample_has_distinct_elements_of_the_weight(name: str) -> None:
    weight = layouts()[name]
    sample = sample_of(weight)
    positions = [sample.storage_offset() + index * sample.stride(0) for index in range(len(sample))]
    inside = weight.new_zeros(weight.untyped_storage().nbytes() // weight.element_size(), dtype=torch.bool)
    inside.as_strided(weight.shape, weight.stride(), weight.storage_offset()).fill_(True)
    dense = inside[weight.storage_offset() :].count_nonzero() == weight.numel() and name != "part"
    assert len(set(positions)) == len(sample) >= min(SAMPLED, weight.numel()) if dense else 32
    assert all(inside[position] for position in positions)
    if dense:  # all that follow one another in memory, and all columns of a matrix that is not flat
        lines = {(position - weight.storage_offset()) // max([1, *weight.stride()]) for position in positions}
        assert len(lines) == weight.numel() // max([1, *weight.stride()])
        if weight.dim() == 2 and weight.shape[0] >= weight.shape[1]:
            assert len({position % weight.shape[1] for position in positions}) == weight.shape[1]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_parameters_without_elements_are_left_out(shape: tuple[int, ...]) -> None:
    def build(dtype: torch.dtype) -> nn.Module:
        model = mlp(dtype)
        model.register_parameter("empty", nn.Parameter(torch.ones(shape)))
        return model

    Training(None, EXACT, build=build).run(0, 3)


@pytest.mark.parametrize(
    "shape",
    [
        (768, 768),
        (32000, 64),
        (50257, 48),
        (64, 32000),
        (1000, 999),
        (512, 32),
        (32, 16, 3, 3),
        (64, 32, 3, 3),
        (8, 64, 96),
    ],
)
def test_write_to_any_row_is_noticed(shape: tuple[int, ...]) -> None:
    """A codebook's entry, a token, a neuron, a filter, an expert."""
    weight = torch.zeros(shape)
    sample = sample_of(weight)
    for row in {0, 1, *range(0, shape[0], 1 + shape[0] // 100), shape[0] - 2, shape[0] - 1}:
        weight.data[row].fill_(1.0)
        assert sample.any()
        weight.data[row].zero_()


@pytest.mark.parametrize("policy", ["zero_offload", "zenflow"])
def test_restarted_row_of_an_embedding_is_noticed(policy: str) -> None:
    codebook = nn.Embedding(512, 32)
    optimizer = ZenFlowAdamW(codebook.parameters(), policy=policy, min_offload_size=1)
    for _ in range(2):
        take_step(codebook.weight.square().sum(), optimizer)
    codebook.weight.data[7] = 3.0
    with pytest.raises(RuntimeError, match=NOTICED):
        take_step(codebook.weight.square().sum(), optimizer)


def test_nan_is_no_write() -> None:
    training = Training(None, EXACT).run(0, 2)
    with torch.no_grad():
        training.model[2].weight.fill_(torch.nan)
    training.run(2, 4)


@pytest.mark.parametrize("policy", ["zenflow", "resident"])
def test_weights_written_while_frozen_are_taken(policy: str) -> None:
    """The optimizer compares them with their masters when they are unfrozen."""
    dtype = torch.bfloat16 if policy == "resident" else torch.float32
    training = Training(None, EXACT if policy == "zenflow" else {"policy": policy}, dtype).run(0, 2)
    twin = Training(None, EXACT if policy == "zenflow" else {"policy": policy}, dtype).run(0, 2)
    for each in (training, twin):
        weight = each.model[2].weight
        weight.requires_grad_(False)
        each.run(2, 4)
        if each is training:
            weight.data.mul_(0.5)
        else:
            with torch.no_grad():
                weight.mul_(0.5)
        each.run(4, 6)
        weight.requires_grad_(True)
    assert_same(training.run(6, 9).weights(), twin.run(6, 9).weights())


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_is_no_write(weights_first: bool, dtype: torch.dtype) -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 2}, dtype).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    assert_same(training.load(saved, weights_first=weights_first).run(3, 6).weights(), expected)


@pytest.mark.parametrize("end", ["flush", "close"])
def test_last_write_survives_the_end(end: str) -> None:
    training = Training(None, {"update_interval": 4}).run(0, 6)
    training.optimizer.synchronize()
    write_all(training)
    written = training.weights_as_they_are()
    with pytest.warns(UserWarning, match="were dropped, because these weights were written or loaded"):
        getattr(training.optimizer, end)()
    assert_same(training.weights_as_they_are(), written)


def wgan(params: list[Parameter], step: int) -> None:
    for param in params:
        param.data.clamp_(-0.05, 0.05)


def federated(params: list[Parameter], step: int) -> None:
    for param in params:
        param.data = 0.5 * (param.data + torch.full_like(param.data, 0.01 * step))


def lookahead(params: list[Parameter], step: int) -> None:
    for param in params:
        slow = param.__dict__.setdefault("slow", torch.zeros_like(param))
        slow.lerp_(param.detach(), 0.5)
        param.data.copy_(slow)


def averaged(params: list[Parameter], step: int) -> None:
    """diffusers: EMAModel.store, copy_to and restore."""
    stored = [param.detach().clone() for param in params]
    for param in params:
        param.data.copy_(torch.zeros_like(param))
    for param, value in zip(params, stored, strict=True):
        param.data.copy_(value)


def outcome(write: Callable[[list[Parameter], int], None], entry: dict[str, Any] | None) -> str:
    """Return "raises", or "equal" if the run with the writes is AdamW's."""
    expected, training = mlp(), Training(entry, EXACT)
    adamw = torch.optim.AdamW(expected.parameters(), **ADAM)
    for step in range(4):
        take_step(nn.functional.cross_entropy(expected(batch(step)[0]), batch(step)[1]), adamw)
        write([*expected.parameters()], step)
        try:
            training.step(step)
        except RuntimeError as error:
            return "raises" if "was written through .data" in str(error) else str(error)
        write([*training.model.parameters()], step)
    pairs = zip(training.weights(), expected.parameters(), strict=True)
    return "equal" if all(torch.allclose(ours, theirs, atol=1e-5, rtol=0) for ours, theirs in pairs) else "differs"


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize(
    ("write", "expected"), [(wgan, "raises"), (federated, "equal"), (lookahead, "raises"), (averaged, "equal")]
)
def test_known_writers_are_right_or_loud(
    write: Callable[[list[Parameter], int], None], expected: str, entry: dict[str, Any] | None
) -> None:
    assert outcome(write, entry) == expected


def test_long_training_raises_nothing() -> None:
    model = mlp()
    optimizer = ZenFlowAdamW(model.parameters(), **ADAM, **OFFLOAD_ALL, update_interval=3, topk_ratio=0.25)
    call = torch.compile(model, **EAGER_BACKEND)
    for step in range(60):
        take_step(call(batch(step)[0]).square().mean(), optimizer)
        if step % 7 == 0:
            copy.deepcopy(model)
        if step % 11 == 0:
            optimizer.flush()


def test_mutant_without_samples_fails_the_first_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(UnseenWrites, "begin_step", lambda self: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_data_write_raises_in_the_next_step("zenflow", None, tmp_path)
