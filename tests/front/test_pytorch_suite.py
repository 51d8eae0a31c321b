"""PyTorch's own inputs for AdamW, and the cases of its ``test_optim.py``, under ``ZenFlowAdamW`` and under AdamW.

Every difference is documented in docs/adamw.md, and every documented difference is tested.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.pytorch_suite import (
    CASES,
    POLICIES,
    Case,
    Make,
    Numbers,
    Problem,
    both_policies,
    by_keywords,
    optimizer_info,
    outcome,
)
from zenflow_compile import ZenFlowAdamW


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ours(policy: str, made: list[ZenFlowAdamW]) -> Make:
    def make(params: Any, **keywords: Any) -> Optimizer:
        optimizer = ZenFlowAdamW(params, **keywords, **POLICIES[policy])
        made.append(optimizer)
        return optimizer

    return make


def compare(case: Case, policy: str) -> None:
    """The results of ``case`` agree for both optimizers, and depend on the optimizer."""
    made: list[ZenFlowAdamW] = []
    expected = outcome(case, torch.optim.AdamW)
    try:
        actual = outcome(case, ours(policy, made))
    finally:
        for optimizer in made:
            optimizer.__exit__(RuntimeError, None, None)
    assert policy == "resident" or any(optimizer.options.policy == "zenflow" for optimizer in made)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), atol=1e-6, rtol=1e-5)


# PyTorch's inputs


@both_policies
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float_lr", "tensor_lr"])
def test_inputs_of_optim_db(tensor_lr: bool, policy: str) -> None:
    given = optimizer_info(torch.optim.AdamW).optim_inputs_func("cpu")
    assert len(given) >= 5
    for each in given:
        keywords = dict(each.kwargs)
        if tensor_lr:
            keywords["lr"] = torch.tensor(keywords.get("lr", 1e-3))
        if keywords.get("amsgrad"):
            with pytest.raises(ValueError, match="amsgrad=True"):
                ZenFlowAdamW(Problem().params, **keywords, **POLICIES[policy])
        else:
            compare(by_keywords(**keywords), policy)


@both_policies
def test_error_inputs_of_optim_db(policy: str) -> None:
    """Errors have PyTorch's type; the text may differ."""
    given = optimizer_info(torch.optim.AdamW).optim_error_inputs_func("cpu", torch.float32)
    assert len(given) >= 10
    for found in given:
        each, kind = found.optimizer_error_input, found.error_type
        params = Problem().params if each.params is None else each.params
        if kind is UserWarning:
            assert "duplicate" in each.desc
            kind = ValueError
        else:
            with pytest.raises(kind):
                torch.optim.AdamW(params, **each.kwargs)
        if each.kwargs.get("foreach"):
            assert "ensor" in each.desc  # foreach=True changes nothing, so it takes rates and betas that are tensors
            ZenFlowAdamW(params, **each.kwargs, **POLICIES[policy]).close()
            continue
        with pytest.raises(kind):
            ZenFlowAdamW(params, **each.kwargs, **POLICIES[policy])


@both_policies
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cases_of_test_optim(case: Case, policy: str) -> None:
    compare(case, policy)


# Differences


def sparse(make: Make) -> Numbers:
    embedding = nn.Embedding(20, 10, sparse=True)
    optimizer = make(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return []


def lazy(make: Make) -> Numbers:
    model = nn.LazyLinear(4)
    optimizer = make(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return []


def moments_in_place(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make(problem.params)
    problem.train(optimizer, 1)
    optimizer.state[problem.params[0]]["exp_avg"].mul_(0.1)
    return []


def second_step(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make(problem.params)
    problem.loss().backward()
    optimizer.step()
    optimizer.step()
    return []


def two_optimizers(make: Make) -> Numbers:
    params = Problem().params
    earlier = make(params)
    make(params)
    earlier.step()
    return []


def step_without_gradient(make: Make) -> Numbers:
    make(Problem().params).step()
    return []


def construct(params: Callable[[], Any], **keywords: Any) -> Case:
    def case(make: Make) -> Numbers:
        make(params(), **keywords)
        return []

    return case


def set_later(make: Make) -> Numbers:
    problem = Problem()
    optimizer = make(problem.params)
    optimizer.param_groups[0]["lr"] = float("nan")
    problem.loss().backward()
    optimizer.step()
    return []


def twice() -> list[nn.Parameter]:
    return [Problem().weight] * 2


def copied(make: Make) -> Numbers:
    copy.deepcopy(make(Problem().params))
    return []


def pickled(make: Make) -> Numbers:
    pickle.dumps(make(Problem().params))
    return []


def a_parameter(**keywords: Any) -> Callable[[], list[nn.Parameter]]:
    return lambda: [nn.Parameter(torch.ones(8, 8, **keywords))]


IMPLEMENTATIONS = ("capturable", "differentiable")
DIFFERENT: dict[str, list[tuple[Case, type[Exception] | None, type[Exception] | None]]] = {
    "amsgrad": [(by_keywords(amsgrad=True), None, ValueError)],
    "implementations": [
        (construct(lambda: Problem().params, **{name: True}), None, ValueError) for name in IMPLEMENTATIONS
    ],
    "duplicates": [(construct(twice), UserWarning, ValueError)],
    "names": [(construct(lambda: [("a", each) for each in Problem().params]), None, ValueError)],
    "complex": [(construct(a_parameter(dtype=torch.complex64)), None, TypeError)],
    "float8": [
        (construct(lambda: [nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn))]), None, TypeError),
    ],
    "lazy": [(lazy, None, ValueError)],
    "sparse": [(sparse, RuntimeError, TypeError)],
    "devices": [(construct(a_parameter(device="meta")), None, ValueError)],
    "ranges": [
        (by_keywords(lr=float("inf")), None, ValueError),
        (by_keywords(eps=1e31), None, ValueError),
        (set_later, None, ValueError),
    ],
    "integers": [(by_keywords(betas=(0, 0.9)), ValueError, None)],
    "state": [(moments_in_place, None, AttributeError)],
    "second_step": [(second_step, None, RuntimeError)],
    "two_optimizers": [(two_optimizers, None, RuntimeError)],
    "no_gradient": [(step_without_gradient, None, UserWarning)],
    "sharded": [(construct(lambda: [nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))]), None, TypeError)],
    "copies": [(copied, None, TypeError), (pickled, None, TypeError)],
}
"""By the name in docs/adamw.md: what is done, and the errors of AdamW and of ``ZenFlowAdamW``."""


def raised(case: Case, make: Make) -> type[BaseException] | None:
    try:
        outcome(case, make)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.filterwarnings("error:.*duplicate parameters")
@pytest.mark.filterwarnings(r"error:step\(\) updates nothing")
@pytest.mark.parametrize("name", DIFFERENT)
def test_documented_differences_are_there(name: str) -> None:
    for case, theirs, mine in DIFFERENT[name]:
        made: list[ZenFlowAdamW] = []
        assert raised(case, torch.optim.AdamW) is theirs
        assert raised(case, ours("host", made)) is mine
        for optimizer in made:
            optimizer.__exit__(RuntimeError, None, None)


def test_list_of_differences_is_complete() -> None:
    table = (Path(__file__).parents[2] / "docs/adamw.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*DIFFERENT]
