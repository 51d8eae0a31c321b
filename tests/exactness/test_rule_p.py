"""``zenflow`` with update windows longer than a step equals a synchronous oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.exactness.rule_p import Hyper, RuleP
from tests.support.trajectories import OFFLOAD_ALL, compiled, each_member, loss_of, seeded, snapshot
from tests.support.zoo import BY_NAME, Member
from zenflow_compile.optimizer import ZenFlowAdamW
from zenflow_compile.planning.plan import ParamPlan

STEPS = 40

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "staleness": {"staleness": 1},
    "synchronous_start": {"full_warm_up_rounds": 7},
    "reselecting": {"select_interval": 4, "topk_ratio": 0.3},
    "stale_and_reselecting": {"select_interval": 6, "staleness": 1},
    "stale_after_a_synchronous_start": {"staleness": 1, "full_warm_up_rounds": 6, "update_interval": 2},
    "windows_of_three": {"update_interval": 3, "topk_ratio": 0.5},
    "nothing_selected": {"topk_ratio": 0.0},
    "blocking": {"overlap_step": False},
    "summed": {"gradient_transfer": "mean"},
    "summed_stale_and_reselecting": {
        "gradient_transfer": "mean",
        "select_interval": 6,
        "staleness": 1,
    },
    "summed_after_a_synchronous_start": {"gradient_transfer": "mean", "full_warm_up_rounds": 7},
    "summed_in_windows_of_three": {"gradient_transfer": "mean", "update_interval": 3, "topk_ratio": 0.0},
}


def hyper(step: int) -> Hyper:
    """Every step has its own rate, decay and betas, so that a use of another step's is seen."""
    return Hyper(
        lr=2e-3 * (1.0 + 0.5 * math.sin(step)),
        weight_decay=0.1 + 0.02 * (step % 3),
        beta1=0.9 - 0.05 * (step % 2),
        beta2=0.99,
        eps=1e-7,
    )


def set_hyper(optimizer: torch.optim.Optimizer, now: Hyper) -> None:
    """Set the coefficients between backward and step, as a scheduler does."""
    for group in optimizer.param_groups:
        group.update(lr=now.lr, weight_decay=now.weight_decay, betas=(now.beta1, now.beta2), eps=now.eps)


class Runs:
    """ZenFlow and the oracle, each with its own copy of a model, trained in the same loop."""

    def __init__(self, member: Member, inner: str | None, options: dict[str, Any]) -> None:
        self.member = member
        self.model, self.expected = seeded(member.build), seeded(member.build)
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **{**OFFLOAD_ALL, **options})
        self.run = compiled(self.model, inner)
        self.expected_run = compiled(self.expected, inner)
        self.plans: tuple[ParamPlan, ...] = self.optimizer.engine.plan.params
        self.rules = {
            "full_warm_up_rounds": options.get("full_warm_up_rounds", 0),
            "select_interval": options.get("select_interval"),
        }

    def differences(self, oracle: RuleP, flushes: Sequence[int] = ()) -> tuple[float, float]:
        """Train both, and return the largest differences of losses and of final weights.

        Args:
            flushes: steps after which windows are flushed.
        """
        loss_difference = 0.0
        for step in range(STEPS):
            loss, expected = loss_of(self.member, self.run, step), loss_of(self.member, self.expected_run, step)
            loss_difference = max(loss_difference, abs(loss.item() - expected.item()))
            loss.backward()
            expected.backward()
            set_hyper(self.optimizer, hyper(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
            oracle.step(hyper(step))
            if step in flushes:
                self.optimizer.flush()
                oracle.flush()
        self.optimizer.synchronize()
        weights, expected_weights = snapshot(self.model), snapshot(self.expected)
        return loss_difference, max((weights[name] - expected_weights[name]).abs().max().item() for name in weights)

    def oracle(self, plans: tuple[ParamPlan, ...] | None = None, **rules: int) -> RuleP:
        """Make the oracle for ``plans``, by default those of the engine."""
        return RuleP(list(self.expected.parameters()), plans or self.plans, **{**self.rules, **rules})


def check(runs: Runs, flushes: Sequence[int] = ()) -> None:
    """Losses, weights and selections equal the oracle's, and windows were longer than a step."""
    oracle = runs.oracle()
    loss_difference, weight_difference = runs.differences(oracle, flushes)
    engine = runs.optimizer.engine
    # Gradients may cancel in a mean down to eps, where their rounding errors are a visible part of a step.
    summed = any(plan.summed for plan in runs.plans)
    assert loss_difference < 1e-5
    assert weight_difference < (1e-4 if summed else 1e-5)
    assert 0 < engine.steps.windows_flushed < STEPS * len(engine.offloaded)
    assert engine.uploads.selections == sum(each.selections for each in oracle.split.values())
    for each in engine.offloaded.values():
        expected = oracle.split[each.plan.name].selected.nonzero().flatten().tolist()
        assert sorted(each.device.selection.selected.tolist()) == expected


@pytest.mark.matrix(3)
@each_member(["gpt", "unused_parameters"])
@pytest.mark.parametrize("case", CASES)
def test_zenflow_follows_rule_p(member: Member, case: str) -> None:
    runs = Runs(member, "eager", CASES[case])
    with runs.optimizer:
        check(runs)
        assert {plan.dim for plan in runs.plans if plan.offloaded} == {0, 1}
        assert len({plan.phase for plan in runs.plans if plan.offloaded}) > 1, "windows should be staggered"


@each_member(["conv_batch_norm", "mixtral"])
def test_zenflow_follows_rule_p_in_other_shapes(member: Member) -> None:
    runs = Runs(member, "eager", {})
    with runs.optimizer:
        check(runs)


@each_member(["gpt"])
@pytest.mark.parametrize("inner", [None, "eager"])
@pytest.mark.parametrize("case", ["defaults", "stale_and_reselecting", "summed", "blocking"])
def test_flushed_windows_follow_rule_p(member: Member, case: str, inner: str | None) -> None:
    runs = Runs(member, inner, CASES[case])
    with runs.optimizer:
        check(runs, flushes=[1, 6, 7, 21, 38])


@each_member(["gpt"])
@pytest.mark.parametrize("case", ["defaults", "stale_and_reselecting", "synchronous_start", "summed"])
def test_eager_entry_follows_rule_p(member: Member, case: str) -> None:
    runs = Runs(member, None, CASES[case])
    with runs.optimizer:
        check(runs)


@pytest.mark.parametrize("wrong", ["phase", "interval", "staleness", "selection", "synchronous_start", "summed"])
def test_control_another_rule_differs(wrong: str) -> None:
    """Control: an oracle with one changed rule differs from the optimizer."""
    runs = Runs(BY_NAME["gpt"], None, {})
    plans = runs.plans
    if wrong == "phase":
        plans = tuple(replace(plan, phase=(plan.phase + 1) % 4) for plan in plans)
    elif wrong == "interval":
        plans = tuple(replace(plan, interval=5) for plan in plans)
    elif wrong == "staleness":
        plans = tuple(replace(plan, staleness=1) for plan in plans)
    elif wrong == "summed":
        plans = tuple(replace(plan, summed=True) for plan in plans)
    rules = {"selection": {"select_interval": 1000}, "synchronous_start": {"full_warm_up_rounds": 7}}.get(wrong, {})
    with runs.optimizer:
        _, weight_difference = runs.differences(runs.oracle(plans, **rules))
    assert weight_difference > 1e-3
