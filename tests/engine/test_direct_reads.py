"""Code that reads a weight while it is in host memory gets an error that says what to do; nothing crashes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from tests.support.processes import in_child
from tests.support.training import EAGER_BACKEND, take_step
from tests.support.weight_readers import READERS, VIEWS, check_metadata, use_readers
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.native import build, storage_reads

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_weights")]

ADAM: dict[str, Any] = {
    "lr": 1e-2, "eps": 1e-4, "update_interval": 1, "topk_ratio": 0.25, "device_share": 0.0, "min_offload_size": 1,
    "offload_weights": 1.0,
}  # fmt: skip
REMEDY = r"0\.weight is in host memory.*`with optimizer\.loaded_weights\(\):`, or after optimizer\.synchronize\(\)"


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


class Trained:
    """A model of which all weights are in host memory."""

    def __init__(self, **backend: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **ADAM)
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model, **(backend or EAGER_BACKEND))
        self.train(2)
        self.model.state_dict()  # no update is on its way behind it
        self.weight: Parameter = self.model[0].weight  # type: ignore[assignment]

    def train(self, steps: int, rows: int = 8) -> None:
        for _ in range(steps):
            take_step(self.call(batch(rows)).square().mean(), self.optimizer)

    def close(self) -> None:
        self.optimizer.close()


@pytest.fixture
def trained() -> Iterator[Trained]:
    made = Trained()
    yield made
    made.close()


def test_direct_reads_raise(trained: Trained) -> None:
    assert in_child(use_readers, trained.weight, f"RuntimeError: {REMEDY}") == f"returned {len(READERS)}"


def test_readers_that_raise_change_nothing(trained: Trained) -> None:
    expected = copy.deepcopy(trained.model.state_dict())
    for name in ("norm", "deepcopy", "data.mul_", "share_memory_", "torch.save", "t"):
        with pytest.raises(RuntimeError, match=REMEDY):
            READERS[name](trained.weight)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, expected[name])
    with trained.optimizer.loaded_weights():
        assert torch.equal(trained.weight, expected["0.weight"])
    trained.train(2)


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "saved"])
def test_views_of_unloaded_weights_follow_it(trained: Trained, name: str) -> None:
    view = VIEWS[name](trained.weight)
    with pytest.raises(RuntimeError, match=REMEDY):
        view.sum()
    with trained.optimizer.loaded_weights():
        assert torch.equal(view, VIEWS[name](trained.weight.clone()))
    with pytest.raises(RuntimeError, match=REMEDY):
        view.sum()


def test_metadata_is_read_without_loading(trained: Trained) -> None:
    weight = trained.weight
    check_metadata(weight)
    version = weight._version
    torch.autograd.graph.increment_version(weight)
    assert weight._version == version + 1
    assert trained.optimizer.engine.weights.loaded_bytes == 0
    trained.train(1)


def test_recompiled_graphs_find_weights(trained: Trained) -> None:
    for rows in (3, 5):
        trained.train(2, rows)
    with torch.no_grad():
        trained.call(batch(6))
    assert trained.optimizer.engine.weights.loaded_bytes == 0
    with pytest.raises(RuntimeError, match=REMEDY):
        trained.weight.norm()


def test_inductor_takes_unloaded_weights() -> None:
    trained, other = Trained(backend="zenflow"), Trained()
    trained.train(2, rows=4)
    other.train(2, rows=4)
    with pytest.raises(RuntimeError, match=REMEDY):
        trained.weight.norm()
    for one, another in zip(trained.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.allclose(one, another, atol=1e-5)
    trained.close()
    other.close()


def test_profiler_runs_behind_synchronize(trained: Trained) -> None:
    trained.optimizer.synchronize()
    with torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True) as profile:
        trained.train(2)
    assert "zenflow::load_weight_" in {event.key for event in profile.key_averages()}
    trained.train(1)
    with pytest.raises(RuntimeError, match=REMEDY):
        trained.weight.norm()


class Eager(nn.Module):
    """Reads a weight in a graph, and behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.eye(32))

    @torch._dynamo.disable
    def read(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def forward(self, x: Tensor, breaks: bool = False) -> Tensor:
        hidden = F.linear(x, self.weight)
        return self.read(hidden) if breaks else hidden


def test_read_behind_a_graph_break_is_right() -> None:
    torch._dynamo.reset()
    model = Eager()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM)
    call = torch.compile(model, **EAGER_BACKEND)
    for _ in range(2):
        take_step(call(batch()).square().mean(), optimizer)
    with torch.no_grad():
        found = call(batch(), True)
        weight = model.state_dict()["weight"]
        assert torch.equal(found, F.linear(F.linear(batch(), weight), weight))
    optimizer.close()


def test_closed_optimizer_leaves_usual_weights() -> None:
    trained = Trained()
    expected = copy.deepcopy(trained.model.state_dict())
    trained.close()
    assert not trained.weight.untyped_storage().__dict__
    assert torch.equal(copy.deepcopy(trained.weight), expected["0.weight"])
    trained.weight.share_memory_()
    assert trained.weight.is_shared()
    assert torch.equal(trained.weight, expected["0.weight"])


def test_replaced_memory_is_readable(trained: Trained) -> None:
    old, new = trained.weight.data, torch.ones(64, 32)
    trained.weight.data = new
    assert trained.weight.norm() == new.norm()
    with pytest.raises(RuntimeError, match=REMEDY):
        old.norm()
    trained.train(1)
    with pytest.raises(RuntimeError, match=REMEDY):
        trained.weight.norm()


def test_headers_of_another_pytorch_are_noticed() -> None:
    """The library does nothing: as one that writes other fields of a storage."""

    class Nothing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: None

    with pytest.raises(build.BuildError, match="do not belong to the PyTorch that runs"):
        storage_reads._check(Nothing())  # type: ignore[arg-type]
