"""The ranks of the examples: all get what the first one returns, or raise its error, and each has its own device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.ranks import on_first_rank, process_group
from tests.support.host import launched_with, torchrun
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


def test_one_gpu_for_all_ranks_is_refused() -> None:
    with (
        launched_with({"TORCHELASTIC_RUN_ID": "run", **torchrun("0", None)}),
        pytest.raises(ValueError, match=r"--device cuda:1 is one GPU, .* use --device cuda"),
        process_group(torch.device("cuda:1")),
    ):
        pass
