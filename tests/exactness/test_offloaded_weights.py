"""Weights that are in host memory between their uses: every number stays, and the device has few of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.training import EAGER_BACKEND
from tests.support.trajectories import (
    ADAM,
    Trajectory,
    each_member,
    largest_difference,
    loss_of,
    seeded,
    snapshot,
    train,
    train_in_backward,
)
from tests.support.zoo import Member
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.parameters.host_weight import HostWeight
from zenflow_compile.runtime.parameters.host_weights import HostWeights

pytestmark = pytest.mark.timeout(240)

POLICIES: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
    "every step": {"update_interval": 1, "device_share": 0.0},
    "windows": {"update_interval": 4, "select_interval": 4, "device_share": 0.0},
}


class Seen(NamedTuple):
    """Since the step before: most bytes on the device, those that were there at its begin or were held, and loads."""

    peak_bytes: int
    held_bytes: int
    loads: int
    weights: HostWeights


@pytest.fixture(params=[pytest.param("resized", marks=pytest.mark.long), "poisoned"])
def steps(request: pytest.FixtureRequest, small_weights: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """What each step finds, of small weights, too. Poisoned ones are not freed but NaN: a late read shows."""
    seen: list[Seen] = []
    unread = [0]  # bytes of weights that no graph has read
    begin_step = HostWeights.begin_step

    def noting(self: HostWeights) -> dict[int, str]:
        seen.append(Seen(self.peak_bytes, self.held_bytes + unread[-1], self.loads, self))
        fitting = begin_step(self)
        unread.append(self.loaded_bytes)
        assert self.loaded_bytes == sum(each.nbytes for each in self.weights.values() if each.loaded)
        return fitting

    def poison(self: HostWeight) -> None:
        self.param.data.fill_(float("nan"))

    monkeypatch.setattr(HostWeights, "begin_step", noting)
    if request.param == "poisoned":
        monkeypatch.setattr(HostWeight, "_free", poison)
    yield seen
    for each in seen[2:]:
        # The budget is the largest weight. An operator may read its bias, too, or one more weight.
        assert each.peak_bytes <= 2 * each.weights.ring_bytes + each.held_bytes


@pytest.mark.matrix(6)
@each_member()
def test_offloaded_weights_change_no_number(member: Member, steps: list[Seen]) -> None:
    plain = train(member, "eager", 9)
    assert not steps
    offloaded = train(member, "eager", 9, offload_weights=1.0)
    assert steps[-1].loads > 0
    assert offloaded.losses == plain.losses
    assert largest_difference(offloaded, plain, member) == 0.0


@pytest.mark.long
@each_member(["mlp", "conv_batch_norm", "gpt_tied", "gpt_autocast", "llama"])
def test_inductor_reads_loaded_weights(member: Member, steps: list[Seen]) -> None:
    plain = train(member, "inductor", 6)
    offloaded = train(member, "inductor", 6, offload_weights=1.0)
    assert steps[-1].loads > 0
    assert offloaded.losses == plain.losses
    assert largest_difference(offloaded, plain, member) == 0.0


@pytest.mark.matrix(2)
@each_member(["gpt_tied", "llama"], long=["llama"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_updates_weights_on_the_host(member: Member, policy: str, steps: list[Seen]) -> None:
    options = {**POLICIES[policy], "offload_weights": 1.0, "topk_ratio": 0.25}
    plain = train(member, "eager", 14, evaluate=True, **{**options, "offload_weights": False})
    offloaded = train(member, "eager", 14, evaluate=True, **options)
    assert steps[-1].held_bytes == 0
    assert offloaded.losses == plain.losses
    assert offloaded.evaluations == plain.evaluations
    assert largest_difference(offloaded, plain, member) == 0.0
    assert (offloaded.moved_slices > 0) is (policy in ("every step", "windows"))


SCHEDULES: dict[str, dict[str, Any]] = {
    "adaptive": {"update_interval": (1, 4)},
    "late": {"update_interval": 3, "staleness": 1},
    "summed": {"update_interval": 4, "gradient_transfer": "mean"},
    "int8": {"update_interval": 4, "gradient_transfer": "int8"},
    "warming up": {"full_warm_up_rounds": 5},
    "in step": {"overlap_step": False},
    "clipping": {"max_grad_norm": 0.1},
    "files": {"update_interval": 2, "offload_device": "nvme", "host_window_bytes": 1 << 17},
    "all files": {"policy": "zero_infinity", "host_window_bytes": 1 << 17},
    "weights in files": {"policy": "zero_infinity", "host_window_bytes": 1 << 17},
    "reselected weights in files": {
        "update_interval": 2, "select_interval": 2, "offload_device": "nvme",
        "host_window_bytes": 1 << 17,
    },
}  # fmt: skip


OFTEN = "weights in files"


@each_member(["gpt_tied", "llama"], long=["llama"])
@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=() if name == OFTEN else pytest.mark.long) for name in SCHEDULES]
)
def test_every_schedule_updates_weights_on_the_host(
    member: Member, schedule: str, steps: list[Seen], tmp_path: Path
) -> None:
    options = {**SCHEDULES[schedule], **({"nvme_path": tmp_path} if "files" in schedule else {})}
    plain = train(member, "eager", 14, **options)
    if "weights in files" in schedule:
        options["offload_device"] = "nvme_all"
    offloaded = train(member, "eager", 14, offload_weights=1.0, **options)
    assert steps[-1].loads > 0
    assert offloaded.losses == plain.losses
    assert largest_difference(offloaded, plain, member) == 0.0


@each_member(["gpt_tied", "llama"], long=["llama"])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "windows"])
def test_exact_policies_train_as_adamw(member: Member, policy: str, steps: list[Seen]) -> None:
    options = {**POLICIES[policy], "topk_ratio": 0.25, "eps": 1e-4}
    offloaded = train(member, "eager", 20, offload_weights=1.0, **options)
    assert largest_difference(offloaded, train_adamw(member, 20), member) < 1e-6


@each_member(["mlp", "gpt_tied"])
def test_optimizer_in_backward_updates_host_weights(member: Member, steps: list[Seen]) -> None:
    plain = train_in_backward(member, "eager", 9)
    offloaded = train_in_backward(member, "eager", 9, offload_weights=1.0)
    assert steps[-1].loads > 0
    assert offloaded.losses == plain.losses
    assert largest_difference(offloaded, plain, member) == 0.0


def train_adamw(member: Member, steps: int) -> Trajectory:
    """The run of ``torch.optim.AdamW``, with the same eps."""
    model = seeded(member.build)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "eps": 1e-4})
    result = Trajectory()
    for step in range(steps):
        loss_of(member, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    result.weights = snapshot(model)
    return result


LARGE = {"update_interval": 1, "topk_ratio": 0.25, "device_share": 0.0, "eps": 1e-4}


def llama() -> nn.Module:
    """Of 14.7 MB, with a head that is the embedding."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.long), True])
def test_llama_trains_within_a_fraction_of_its_weights(recomputes: bool) -> None:
    """Two backwards a step, with an evaluation in between, within 4% of the bytes of the weights."""
    budget = 600_000

    def run(**options: Any) -> tuple[list[float], list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = llama()
        if recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = ZenFlowAdamW(model.named_parameters(), **{**ADAM, **LARGE, **options})
        call, losses = torch.compile(model, **EAGER_BACKEND), []
        for step in range(6):
            for part in range(2):
                tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(2 * step + part))
                loss = call(input_ids=tokens, labels=tokens).loss
                loss.backward()
                losses.append(loss.item())
            if options and step > 1:
                weights = optimizer.engine.weights
                assert weights.peak_bytes <= budget
                assert weights.loaded_bytes == 0
                assert len(weights.weights) == 43
                assert budget < 0.05 * sum(each.nbytes for each in weights.weights.values())
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses.append(call(input_ids=tokens, labels=tokens).loss.item())
            model.train()
        optimizer.flush()
        found = [param.detach().clone() for param in model.parameters()]
        optimizer.close()
        return losses, found

    losses, weights = run(offload_weights=budget)
    expected_losses, expected = run()
    assert losses == expected_losses
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
