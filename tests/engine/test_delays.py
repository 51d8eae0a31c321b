"""Overlap changes time, never numbers: workers and copies that are late at random, or not overlapped at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.copies import copied_by
from tests.support.gated_jobs import gated
from tests.support.settings import settings
from tests.support.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, Delays, Training, assert_same
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.thread_lane import copy_without_gil

SETTINGS = settings("windows stale_every_step reselecting auto summed compressed_stale summed_stale_warm_up")
STREAMED = settings("streamed every_second_streamed windows_and_streamed")
THREE_WORKERS = {"workers": 1.0}


@contextmanager
def delay(seed: int, longest_ms: float = 4.0) -> Iterator[Delays]:
    """Make every copy and every job late."""
    delays = Delays(seed, longest_ms)
    with copied_by(delays.before(copy_without_gil)), gated(delays.seconds):
        yield delays


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", [*SETTINGS.values(), *STREAMED.values()], ids=[*SETTINGS, *STREAMED])
def test_delays_leave_weights_unchanged(entry: dict[str, Any] | None, options: dict[str, Any]) -> None:
    expected = Training(entry, {**options, **THREE_WORKERS}).run(0, 10).weights()
    for seed in (0, 1):
        with delay(seed) as delays:
            late = Training(entry, {**options, **THREE_WORKERS}).run(0, 10)
            assert_same(late.weights(), expected)
            assert delays.calls > 40


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_overlap_leaves_weights_unchanged(options: dict[str, Any]) -> None:
    overlapped = Training(EAGER_BACKEND, options).run(0, 10).weights()
    assert_same(Training(EAGER_BACKEND, {**options, "overlap_step": False}).run(0, 10).weights(), overlapped)
    with delay(3):
        assert_same(Training(EAGER_BACKEND, {**options, "overlap_step": False}).run(0, 10).weights(), overlapped)


class Chain(nn.Module):
    """Twelve equal layers: as soon as one gradient has been read, its memory suits the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def chain_weights(compiled: dict[str, Any] | None, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(3)
    model = Chain()
    optimizer = ZenFlowAdamW(model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **options})
    call: Callable[[Tensor], Tensor] = torch.compile(model, **compiled) if compiled else model
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        call(torch.randn(8, 64, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    weights = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return weights


@pytest.mark.parametrize("compiled", [EAGER_BACKEND, {"backend": "zenflow"}], ids=["eager", "inductor"])
def test_slow_copy_survives_reused_gradient_memory(compiled: dict[str, Any]) -> None:
    """Copies start 10 ms late, when the compiler has long given the gradient's memory to the next layer's."""
    options = {"update_interval": 1}
    expected = chain_weights(compiled, options)
    delays = Delays(0, 10.0)
    with copied_by(delays.before(copy_without_gil)):
        assert_same(chain_weights(compiled, options), expected)
    assert delays.calls > 80


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_synchronize_leaves_weights_unchanged(entry: dict[str, Any] | None, staleness: int) -> None:
    options = {"update_interval": 2, "staleness": staleness, "select_interval": 2}
    expected = Training(entry, options).run(0, 9).weights()
    training = Training(entry, options)
    for step in range(9):
        training.optimizer.synchronize()
        training.backward(step)
        training.optimizer.synchronize()
        training.optimizer.step()
        training.optimizer.synchronize()
        training.optimizer.zero_grad()
        training.optimizer.state_dict()
    assert_same(training.weights(), expected)
