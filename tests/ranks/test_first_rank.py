"""What the first rank alone does for the examples: all ranks get its result, or raise its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from examples.ranks import on_first_rank
from tests.support.rank_processes import RankProcesses, messages


class OfTwoError(Exception):
    """Is pickled, but cannot be unpickled: it is called with its text alone then."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")


class HeldError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.call = lambda: text


def full_disk() -> None:
    raise OSError(28, "no space left")


def of_two() -> None:
    raise OfTwoError("run.pt", "no space left")


def held() -> None:
    raise HeldError("no space left")


def unsendable() -> Callable[[], None]:
    return lambda: None


def only_first(rank: int, call: Callable[[], Any]) -> Any:
    def checked() -> Any:
        assert rank == 0
        return call()

    return on_first_rank(checked)


def answer() -> dict[str, int]:
    return {"a": 1}


def test_all_ranks_get_the_result(two_ranks: RankProcesses) -> None:
    assert two_ranks.call(only_first, answer) == [{"a": 1}] * 2


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (full_disk, OSError, "[Errno 28] no space left"),
        (of_two, RuntimeError, "OfTwoError: run.pt: no space left"),
        (held, RuntimeError, "HeldError: no space left"),
        (unsendable, Exception, "local object"),
    ],
)
def test_all_ranks_raise_its_error(
    two_ranks: RankProcesses, call: Callable[[], Any], kind: type[Exception], text: str
) -> None:
    outcomes = two_ranks.outcomes(only_first, call)
    assert all(type(each) is type(outcomes[0]) and isinstance(each, kind) for each in outcomes)
    assert all(text in message for message in messages(outcomes)), messages(outcomes)
