"""PyTorch's own inputs for its optimizers, and the cases of its ``test_optim.py``, by our rules."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.support.pytorch_suite import (
    CASES,
    POLICIES,
    Case,
    Make,
    Problem,
    both_policies,
    by_keywords,
    optimizer_info,
    outcome,
)
from zenflow_compile import ZenFlow, rules
from zenflow_compile.integrations.pytorch_rules import rule_of

KINDS = [getattr(torch.optim, name) for name in ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "SGD")]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def theirs(kind: type[Optimizer]) -> Make:
    """``kind``, without the arguments of a case that it does not have."""
    known = inspect.signature(kind).parameters

    def make(params: Any, **keywords: Any) -> Optimizer:
        return kind(params, **{name: value for name, value in keywords.items() if name in known})  # type: ignore[arg-type]

    return make


def ours(kind: type[Optimizer], policy: str, made: list[ZenFlow]) -> Make:
    """As ``zenflow-compile run`` makes it."""
    signature = inspect.signature(kind)

    def make(params: Any, **keywords: Any) -> Optimizer:
        if isinstance(params, Tensor):
            return ZenFlow(params, rules.SGD(), **POLICIES[policy])  # refuses it
        known = {name: value for name, value in keywords.items() if name in signature.parameters}
        given = signature.bind(list(params), **known)
        given.apply_defaults()
        rule = rule_of(kind.__name__, given.arguments)
        if rule is None:  # Adam's without weight decay
            rule = rules.Adam(**{name: given.arguments[name] for name in rules.Adam.defaults})
        optimizer = ZenFlow(given.arguments["params"], rule, maximize=given.arguments["maximize"], **POLICIES[policy])
        made.append(optimizer)
        return optimizer

    return make


def compare(case: Case, kind: type[Optimizer], policy: str) -> None:
    made: list[ZenFlow] = []
    expected = outcome(case, theirs(kind))
    try:
        actual = outcome(case, ours(kind, policy, made))
    finally:
        for optimizer in made:
            optimizer.__exit__(RuntimeError, None, None)
    assert made
    assert policy == "resident" or any(optimizer.options.policy == "zenflow" for optimizer in made)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), atol=1e-6, rtol=1e-5)


@both_policies
@every_kind
def test_inputs_of_optim_db(kind: type[Optimizer], policy: str) -> None:
    given = optimizer_info(kind).optim_inputs_func("cpu")
    assert len(given) >= 5
    for each in given:
        if each.kwargs.get("decoupled_weight_decay") or each.kwargs.get("initial_accumulator_value"):
            with pytest.raises(ValueError, match=r"decoupled_weight_decay|sums begin at 0"):
                ours(kind, policy, [])(Problem().params, **each.kwargs)
        else:
            compare(by_keywords(**each.kwargs), kind, policy)


@both_policies
@every_kind
def test_error_inputs_of_optim_db(kind: type[Optimizer], policy: str) -> None:
    """Errors have PyTorch's type; the text may differ."""
    given = optimizer_info(kind).optim_error_inputs_func("cpu", torch.float32)
    assert len(given) >= 7
    for found in given:
        each, error = found.optimizer_error_input, found.error_type
        if "foreach" in each.kwargs:
            continue  # no argument of a rule
        params = Problem().params if each.params is None else each.params
        with pytest.raises(ValueError if error is UserWarning else error):
            ours(kind, policy, [])(params, **each.kwargs)


@pytest.mark.matrix(4)
@both_policies
@every_kind
@pytest.mark.parametrize("case", CASES)
def test_cases_of_test_optim(case: str, kind: type[Optimizer], policy: str) -> None:
    if case == "tensor_betas" and kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax):
        with pytest.raises(RuntimeError, match="broadcast shape"):
            outcome(CASES[case], theirs(kind))  # betas of three dimensions, which only Adam takes
        return
    compare(CASES[case], kind, policy)
