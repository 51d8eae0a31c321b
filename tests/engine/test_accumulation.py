"""Gradients are split at once, or at the last of the declared backwards."""

from __future__ import annotations

import pytest

from tests.support.training import EAGER_BACKEND, Training


@pytest.mark.tier1
@pytest.mark.parametrize(("declared", "copied_after"), [(None, [True, False]), (2, [False, True])])
def test_declared_backwards_copy_in_the_last_one(declared: int | None, copied_after: list[bool]) -> None:
    """Undeclared, the first backward is copied on speculation, and the second one makes the parameter accumulate."""
    training = Training(EAGER_BACKEND, {"gradient_accumulation_steps": declared})
    seen = []
    for index in range(2):
        training.loss(index).backward()
        states = training.optimizer.engine.offloaded.values()
        assert states
        seen.append(all(state.parts.copy is not None for state in states))
    assert seen == copied_after
    training.optimizer.step()
