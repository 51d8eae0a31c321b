"""A resumed run is exact to the bit whatever the steps after the checkpoint use, and in how many contributions."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.ranks.models import LARGEST
from tests.support.settings import settings
from tests.support.training import ADAM, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, assert_same
from zenflow_compile import ZenFlowAdamW

STEPS = 12
CUTS = (5, 6, 7, 8)  # every position in an update window of 4


class Routed(nn.Module):
    """A model with an expert, which a forward uses or does not; matrices of both selection dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.expert, self.down = nn.Linear(32, 40), nn.Linear(40, 36), nn.Linear(36, 40)
        self.head = nn.Linear(40, 32)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if use:
            hidden = hidden + self.down(torch.tanh(self.expert(hidden)))
        return self.head(hidden).square().mean()


def inputs(number: int) -> Tensor:
    """Return the data of a micro-batch, the same at every call."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(number))


class Case(NamedTuple):
    """What the steps of a run do, by their place behind the checkpoint: it is negative before.

    Attributes:
        uses: for each micro-batch of a step, whether it uses the expert.
        evaluates: an evaluation uses the expert behind the first step.
    """

    uses: Callable[[int], Sequence[bool]]
    evaluates: bool = False


def skips(place: int) -> Sequence[bool]:
    return [place != 0]


def counts(place: int) -> Sequence[bool]:
    """Two micro-batches before the checkpoint, and then one."""
    return [True] * (2 if place < 0 else 1)


def sometimes(place: int) -> Sequence[bool]:
    """Both micro-batches use the expert before the checkpoint, and then one of them in turn."""
    return [True, True] if place < 0 else [place % 2 == 0, place % 2 == 1]


def grows(place: int) -> Sequence[bool]:
    """One micro-batch before the checkpoint, and then one, two, three, ..."""
    return [True] * max(1, 1 + place)


CASES = {
    "skips": Case(skips),
    "skips, evaluates": Case(skips, evaluates=True),
    "counts": Case(counts),
    "sometimes": Case(sometimes),
    "grows": Case(grows),
}
POLICIES = {
    **settings("windows zero_offload twinflow resident streamed stale_windows summed"),
    "every_step": {"update_interval": 1},
    "zero_infinity": {"policy": "zero_infinity", "host_window_bytes": LARGEST, "nvme_path": ""},
}


class Run:
    """A run of a case, with a checkpoint in front of step ``cut``."""

    def __init__(self, case: Case, cut: int, entry: dict[str, Any] | None, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.case, self.cut = case, cut
        self.model = Routed()
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **options})
        self.call: Any = torch.compile(self.model, **entry) if entry else self.model
        self.found: list[Tensor] = []

    def steps(self, first: int, stop: int) -> Run:
        for step in range(first, stop):
            for part, use in enumerate(self.case.uses(step - self.cut)):
                self.call(inputs(10 * step + part), use).backward()
            self.found.append(clip_grad_norm_(self.model.parameters(), 0.05).clone())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.case.evaluates and step == self.cut:
                with torch.no_grad():
                    self.found.append(self.call(inputs(999), True))
        return self

    def ended(self) -> list[Tensor]:
        """The norms and losses of the steps since the checkpoint, and the weights."""
        self.optimizer.synchronize()
        weights = [param.detach().clone() for param in self.model.parameters()]
        self.optimizer.close()
        return [*self.found, *weights]


def assert_resumes(name: str, cut: int, entry: dict[str, Any] | None, options: dict[str, Any]) -> None:
    run, file = Run(CASES[name], cut, entry, options).steps(0, cut), io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    run.found.clear()
    expected = run.steps(cut, STEPS).ended()
    resumed = Run(CASES[name], cut, entry, options)
    weights, state = torch.load(io.BytesIO(file.getvalue()))
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    assert_same(resumed.steps(cut, STEPS).ended(), expected)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_resumed_uses_are_exact_without_a_graph(name: str, cut: int) -> None:
    assert_resumes(name, cut, None, POLICIES["windows"])


@pytest.mark.matrix(32)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_resumed_uses_are_bitwise_equal(
    name: str, cut: int, policy: str, state_dtype: str, entry: dict[str, Any] | None, tmp_path: Path
) -> None:
    options = POLICIES[policy] | {"state_dtype": state_dtype}
    if "nvme_path" in options:
        options["nvme_path"] = str(tmp_path)
    assert_resumes(name, cut, entry, options)


def test_resumed_graph_keeps_its_overlap() -> None:
    """From the first fetch of a weight on, ``step()`` does not wait for its updates."""
    case, options = CASES["skips"], POLICIES["every_step"]
    run = Run(case, 5, ENTRIES[1], options).steps(0, 5)
    resumed = Run(case, 5, ENTRIES[1], options)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(run.optimizer.state_dict())
    in_flight = []
    for step in (5, 6):
        resumed.steps(step, step + 1)
        in_flight.append([bool(each.host.flushed) for each in resumed.optimizer.engine.offloaded.values()])
    assert in_flight == [[True, False, False, True], [True] * 4]
