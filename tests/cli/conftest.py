"""A terminal of 80 columns, and a cache for the searches of ``zenflow-compile plan``, which take seconds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zenflow_compile.cli import plan


@pytest.fixture(scope="session")
def answers() -> dict[str, Any]:
    return {}


@pytest.fixture(autouse=True)
def terminal_and_answers(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command computes each answer once for all of its tables, formats and tests."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("predict", "fit", "frontier"):
        monkeypatch.setattr(plan, name, _remembering(answers, getattr(plan, name)))


def _remembering(answers: dict[str, Any], ask: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(*arguments: Any, **keywords: Any) -> Any:
        question = repr((ask, arguments, keywords))
        if question not in answers:
            answers[question] = ask(*arguments, **keywords)
        return answers[question]

    return remembered
