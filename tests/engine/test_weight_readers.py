"""Code outside of our graphs reads weights that are in host memory, or an error says what to do; nothing crashes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile as zf
from tests.support.processes import in_child
from tests.support.training import EAGER_BACKEND, take_step
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.torch_internals.torch_private import refusal_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_weights")]

ADAM: dict[str, Any] = {
    "lr": 1e-2, "eps": 1e-4, "update_interval": 1, "topk_ratio": 0.25, "device_share": 0.0, "min_offload_size": 1,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.own = nn.Parameter(torch.randn(32, 32) / 6)
        self.up = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(torch.tanh(x @ self.own)))))


def batch(step: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


class Pair:
    """A model whose weights are in host memory, and one that trains without."""

    def __init__(self, build: Callable[[], nn.Module] = Net, **options: Any) -> None:
        torch._dynamo.reset()
        self.model, self.plain = build(), build()
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **{**ADAM, **options}, offload_weights=1.0)
        self.other = ZenFlowAdamW(self.plain.named_parameters(), **{**ADAM, **options})
        self.call = torch.compile(self.model, **EAGER_BACKEND)
        self.plain_call = torch.compile(self.plain, **EAGER_BACKEND)

    def train(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            for call, optimizer in ((self.call, self.optimizer), (self.plain_call, self.other)):
                take_step(call(batch(step)).square().mean(), optimizer)

    @property
    def absent(self) -> int:
        """How many weights have no memory on the device."""
        return sum(refusal_of(param.untyped_storage()) is not None for param in self.model.parameters())

    def expected(self) -> dict[str, Tensor]:
        """The weights of the other model."""
        return {name: value.clone() for name, value in self.plain.state_dict().items()}

    def close(self) -> None:
        self.optimizer.close()
        self.other.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A pair after some steps."""
    made = Pair()
    made.train(3)
    assert made.absent >= 3
    assert len(made.optimizer.engine.offloaded) == 3
    yield made
    made.close()


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READERS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "state_dict": lambda model: model.state_dict(),
    "saved state dict": lambda model: saved(model.state_dict()),
    "deepcopy": lambda model: copy.deepcopy(model).state_dict(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).state_dict(),
    "torch.save": lambda model: saved(model).state_dict(),
}


@pytest.mark.parametrize("reader", READERS)
def test_reader_sees_weights_in_host_memory(reader: str, pair: Pair) -> None:
    assert equal(READERS[reader](pair.model), pair.expected())
    pair.train(2, first=3)
    assert equal(pair.model.state_dict(), pair.expected())
    pair.close()
    assert pair.absent == 0
    assert equal(dict(pair.model.state_dict()), pair.expected())


def test_state_dict_takes_no_device_memory(pair: Pair) -> None:
    absent = pair.absent
    assert equal(pair.model.state_dict(), pair.expected())
    assert pair.absent == absent


def test_copies_are_models_of_their_own(pair: Pair) -> None:
    for other in (copy.deepcopy(pair.model), saved(pair.model)):
        other.double()
        assert all(param.dtype is torch.float64 for param in other.parameters())
        assert all(param.dtype is torch.float32 for param in pair.model.parameters())


@pytest.mark.parametrize("assigned", [False, True])
def test_loaded_weights_are_trained_on(assigned: bool, pair: Pair) -> None:
    state = {name: value * 0.5 if value.is_floating_point() else value for name, value in pair.expected().items()}
    if assigned:
        with pair.optimizer.loaded_weights(), torch.no_grad():
            for name, param in pair.model.named_parameters():
                param.copy_(state[name])
        pair.plain.load_state_dict(state)
        for buffers in (pair.model.named_buffers(), pair.plain.named_buffers()):
            for name, buffer in buffers:
                buffer.copy_(state[name])
    else:
        absent = pair.absent
        pair.model.load_state_dict(state)
        assert pair.absent == absent
        pair.plain.load_state_dict(state)
    pair.train(3, first=3)
    assert equal(pair.model.state_dict(), pair.expected())


@pytest.mark.parametrize("way", ["data", "no_grad"])
def test_writes_by_hand_are_trained_on(way: str, pair: Pair) -> None:
    """``param.data = ...`` of a weight that is not on the device, and a write to one that is."""
    new = torch.randn(64, 32, generator=torch.Generator().manual_seed(9)) / 8
    if way == "data":
        for model in (pair.model, pair.plain):
            model.state_dict()  # no update is on its way behind it
            model.up.weight.data = new.clone()  # type: ignore[union-attr]
    else:
        pair.optimizer.synchronize()
        pair.other.synchronize()
        with torch.no_grad():
            pair.model.up.weight.copy_(new)  # type: ignore[operator, union-attr]
            pair.plain.up.weight.copy_(new)  # type: ignore[operator, union-attr]
    pair.train(3, first=3)
    assert pair.absent >= 3
    assert pair.optimizer.engine.weights.loaded_bytes == 0
    assert equal(pair.model.state_dict(), pair.expected())


def test_uncompiled_forward_and_backward_read_weights(pair: Pair) -> None:
    """The backward of the module itself, whose weights autograd saves, and in between one of the compiled module."""
    for model, call, optimizer in ((pair.model, pair.call, pair.optimizer), (pair.plain, pair.plain_call, pair.other)):
        model.eval()  # statistics that the second forward writes would belong to the first one's graph
        loss = model(batch(11)).square().mean()
        call(batch(12)).square().mean().backward()
        take_step(loss, optimizer)
        model.train()
    pair.train(2, first=4)
    assert pair.absent >= 3
    assert equal(pair.model.state_dict(), pair.expected())


def test_parts_of_the_model_are_called_by_themselves(pair: Pair) -> None:
    with torch.no_grad():
        assert torch.equal(pair.model.up(batch(5)), pair.plain.up(batch(5)))  # type: ignore[operator]
    pair.train(2, first=3)
    assert equal(pair.model.state_dict(), pair.expected())


@pytest.mark.parametrize("finish", ["synchronize", "flush", "loaded_weights"])
def test_weights_are_there_on_request(finish: str, pair: Pair) -> None:
    expected = pair.expected()
    if finish == "loaded_weights":
        with pair.optimizer.loaded_weights():
            assert pair.absent == 0
            vector = nn.utils.parameters_to_vector(pair.model.parameters())
        assert pair.absent >= 3
    else:
        getattr(pair.optimizer, finish)()
        assert pair.absent == 0
        vector = nn.utils.parameters_to_vector(pair.model.parameters())
    plain = nn.utils.parameters_to_vector([expected[name] for name, _ in pair.plain.named_parameters()])
    assert torch.equal(vector, plain)
    pair.train(1, first=3)
    assert pair.absent >= 3
    assert equal(pair.model.state_dict(), pair.expected())


def test_flush_reaches_weights_that_are_loaded() -> None:
    pair = Pair(update_interval=4)
    pair.train(2)
    pair.optimizer.synchronize()
    before = nn.utils.parameters_to_vector(pair.model.parameters())
    pair.optimizer.flush()
    pair.other.flush()
    after = nn.utils.parameters_to_vector(pair.model.parameters())
    assert not torch.equal(before, after)
    assert torch.equal(after, nn.utils.parameters_to_vector(pair.plain.parameters()))
    pair.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_model_is_moved_with_its_weights(dtype: torch.dtype, pair: Pair) -> None:
    expected = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in pair.expected().items()
    }
    pair.optimizer.flush()
    pair.optimizer.close()
    pair.model.to(dtype)
    assert equal(pair.model.state_dict(), expected)
    pair.other.close()


def test_cast_in_training_has_the_weights(pair: Pair) -> None:
    expected = {name: value.bfloat16() for name, value in pair.expected().items() if value.is_floating_point()}
    pair.model.to(torch.bfloat16)
    found = {name: param.detach() for name, param in pair.model.named_parameters()}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


class Recurrent(nn.Module):
    """A module that runs in eager code, between others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(32, 32)
        self.memory = nn.LSTM(32, 32, batch_first=True)
        self.down = nn.Linear(32, 32)

    @torch._dynamo.disable
    def remember(self, hidden: Tensor) -> Tensor:
        return self.memory(hidden.unsqueeze(0))[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.remember(self.up(x)))


def test_modules_that_are_not_compiled_keep_weights() -> None:
    pair = Pair(Recurrent)
    with pytest.warns(UserWarning, match=r"stay on the device.*memory.weight_ih_l0"):
        pair.train(4)
    assert pair.absent == 4
    assert equal(pair.model.state_dict(), pair.expected())
    pair.close()


class Writing(nn.Module):
    """Writes a weight in its forward, returns another one, and reads one between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.written = nn.Embedding(16, 32, max_norm=1.0)
        self.returned = nn.Linear(32, 32, bias=False)
        self.between = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.written((x[:, 0] > 0).long() + 2)
        torch._dynamo.graph_break()
        return self.between(self.returned(hidden)), self.returned.weight.t()


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Writing()

    def forward(self, x: Tensor) -> Tensor:
        found, weight = self.inner(x)
        return found + weight.sum()


def test_weights_that_leave_a_graph_stay_on_the_device() -> None:
    pair = Pair(First)
    pair.train(4)
    kept = {pair.optimizer.engine.plan.params[p].name: why for p, why in pair.optimizer.engine.weights.kept.items()}
    assert "writes" in kept["inner.written.weight"]
    assert equal(pair.model.state_dict(), pair.expected())
    pair.close()


def test_forked_process_is_told_that_it_has_no_weights(pair: Pair) -> None:
    for read in (
        pair.model.state_dict,
        lambda: copy.deepcopy(pair.model),
        lambda: pair.model(batch(1)),
        lambda: pair.call(batch(1)),
        lambda: pair.model.double(),
    ):
        assert "was forked from the one that trains" in in_child(read)
    assert equal(pair.model.state_dict(), pair.expected())


def test_threads_read_weights_at_the_same_time(pair: Pair) -> None:
    """What one graph unloads another one may still read."""
    pair.model.eval()
    pair.plain.eval()
    inputs = [torch.randn(256, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    with torch.no_grad():
        pair.call(inputs[0])
        expected = [pair.plain(x) for x in inputs]

    def run(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [pair.call(x) for _ in range(40)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, inputs))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.allclose(each, other, atol=1e-6) for each in one)
    assert pair.absent >= 3


def test_forward_that_fails_leaves_nothing_behind(pair: Pair) -> None:
    with pytest.raises(RuntimeError):
        pair.call(torch.randn(8, 31))
    with torch.no_grad(), pytest.raises(RuntimeError):
        pair.model(torch.randn(8, 31))
    pair.train(2, first=3)
    assert pair.absent >= 3
    assert equal(pair.model.state_dict(), pair.expected())


def test_saved_tensors_hooks_are_refused(pair: Pair) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 1, lambda packed: packed)
    with hooks, pytest.raises(RuntimeError, match="offload_weights=False"):
        pair.call(batch(4))
    pair.train(1, first=3)
    assert equal(pair.model.state_dict(), pair.expected())


def test_state_of_the_optimizer_resumes_bitwise(tmp_path: Path) -> None:
    options = {"update_interval": 4, "select_interval": 4}
    pair = Pair(**options)
    pair.train(6)
    torch.save({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()}, tmp_path / "saved.pt")
    pair.train(5, first=6)
    expected = pair.expected()
    pair.close()
    other = Pair(**options)
    other.train(2)
    state = torch.load(tmp_path / "saved.pt")
    for model, optimizer in ((other.model, other.optimizer), (other.plain, other.other)):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    other.train(5, first=6)
    assert equal(other.model.state_dict(), expected)
    assert equal(other.plain.state_dict(), expected)
    other.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload_weights": 100}, "must be at least"),
        ({"offload_weights": 0}, "integer of bytes >= 1"),
        ({"offload_weights": 1.5}, r"number in \(0, 1\]"),
        ({"offload_weights": 1.0, "policy": "deep_optimizer_states"}, "choose another policy"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ZenFlowAdamW(Net().named_parameters(), lr=1e-3, **options).synchronize()


def test_offloading_is_a_number_or_false() -> None:
    with pytest.raises(TypeError, match="integer of bytes"):
        ZenFlowAdamW(Net().named_parameters(), lr=1e-3, offload_weights=True)


def test_profile_counts_loads_and_write_backs() -> None:
    pair = Pair(policy="resident")
    pair.train(2)
    with zf.profile(pair.optimizer) as profile:
        pair.train(2, first=2)
    copies = {(event.lane, event.kind) for event in profile.recordings()[0].events if event.bytes}
    assert copies == {("H2D", "load"), ("D2H", "write_back")}
    summary = profile.summary()
    assert summary["weight_bytes_per_step"] == (summary["h2d_bytes_per_step"] or 0) + (
        summary["d2h_bytes_per_step"] or 0
    )
    pair.close()


@pytest.mark.tier1
@pytest.mark.parametrize("entered", ["loaded_weights", "synchronize"])
def test_data_write_to_loaded_weights_raises(entered: str) -> None:
    pair = Pair()
    pair.train(3)
    if entered == "loaded_weights":
        with pytest.raises(RuntimeError, match=r"was written through \.data"), pair.optimizer.loaded_weights():
            pair.model.up.weight.data.mul_(0.5)
        torch.autograd.graph.increment_version(pair.model.up.weight)
    else:
        pair.optimizer.synchronize()
        pair.model.up.weight.data.mul_(0.5)
        pair.call(batch(3)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"was written through \.data"):
            pair.optimizer.step()
        torch.autograd.graph.increment_version(pair.model.up.weight)
        pair.optimizer.zero_grad()
    pair.other.synchronize()
    with torch.no_grad():
        pair.plain.up.weight.mul_(0.5)
    pair.train(3, first=3)
    for name, value in pair.model.state_dict().items():
        assert name.startswith("norm.") or torch.equal(value, pair.plain.state_dict()[name]), name
