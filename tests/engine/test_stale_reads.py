"""Code that accesses a weight whose update is in flight gets the right weight, or an error; nothing is stale."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.calls import interrupted
from tests.support.gated_jobs import UPDATES, failed_jobs
from tests.support.processes import in_child
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, IN_FLIGHT, Training, assert_same, take_step
from tests.support.weight_readers import READERS, VIEWS, check_metadata, read_all, use_readers
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler
from zenflow_compile.torch_internals.torch_private import refusal_of

pytestmark = pytest.mark.timeout(240)

ADAM: dict[str, Any] = {
    "lr": 1e-2, "eps": 1e-4, "update_interval": 1, "topk_ratio": 0.25, "device_share": 0.0, "min_offload_size": 1,
}  # fmt: skip


def batch(step: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


class Trained:
    """A compiled model after some steps, and the weights that it has then."""

    def __init__(
        self, options: dict[str, Any] | None = None, build: Callable[[], nn.Module] = two_layers, *, steps: int = 3
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.model: Any = build()
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **{**ADAM, **(options or {})})
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model, **EAGER_BACKEND)
        self.train(0, steps)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            take_step(self.call(batch(step)).square().mean(), self.optimizer)

    @property
    def weight(self) -> Parameter:
        found: Parameter = self.model[0].weight
        return found

    def guarded(self) -> list[str]:
        """Names of the parameters whose reads raise."""
        return [name for name, param in self.model.named_parameters() if refusal_of(param.untyped_storage())]

    def values(self) -> dict[str, Tensor]:
        """Copy the weights as direct reads find them."""
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


@pytest.fixture
def trained() -> Trained:
    return Trained()


def current(options: dict[str, Any] | None = None, build: Callable[[], nn.Module] = two_layers) -> dict[str, Tensor]:
    """The weights of a ``Trained`` whose updates are applied inside the steps."""
    return Trained({**(options or {}), "overlap_step": False}, build).values()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_accesses_raise_while_an_update_is_in_flight(trained: Trained) -> None:
    assert len(READERS) >= 50
    assert in_child(use_readers, trained.weight, f"RuntimeError: {IN_FLIGHT}") == f"returned {len(READERS)}"


def test_refused_accesses_change_nothing(trained: Trained) -> None:
    assert trained.guarded() == ["0.weight", "2.weight"]
    for name in ("norm", "deepcopy", "data.mul_", "share_memory_", "torch.save", "t", "AdamW", "foreach"):
        with pytest.raises(RuntimeError, match=IN_FLIGHT):
            READERS[name](trained.weight)
        trained.weight.grad = None
    twin = Trained()
    for each in (trained, twin):
        each.train(3, 6)
        each.optimizer.synchronize()
    assert_equal(trained.values(), twin.values())


@pytest.mark.parametrize("name", VIEWS)
def test_views_made_before_are_refused(trained: Trained, name: str) -> None:
    trained.optimizer.synchronize()
    view = VIEWS[name](trained.weight)
    trained.train(3, 4)
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        view.sum()
    with torch.no_grad(), pytest.raises(RuntimeError, match=IN_FLIGHT):
        view.zero_()
    trained.optimizer.synchronize()
    assert torch.equal(view, VIEWS[name](trained.weight.clone()))


def test_graphs_read_weights_as_arguments(trained: Trained) -> None:
    """A function that is compiled by our backend, and reads the weight without its module, fetches it."""
    weight = trained.weight
    assert torch.equal(torch.compile(lambda: weight * 1.0, **EAGER_BACKEND)(), current()["0.weight"])


def test_metadata_is_read_while_an_update_is_in_flight(trained: Trained) -> None:
    check_metadata(trained.weight)
    assert "0.weight" in trained.guarded()


# What ends the refusals.


def collected(trained: Trained) -> None:
    del trained.optimizer, trained.call
    torch._dynamo.reset()
    gc.collect()


def load_model(trained: Trained) -> None:
    trained.model.load_state_dict(current())


def load_optimizer(trained: Trained) -> None:
    other = Trained()
    state = other.optimizer.state_dict()
    trained.model.load_state_dict(other.model.state_dict())
    trained.optimizer.load_state_dict(state)


def without_gradients(call: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad():
        return call(batch(99))


ENDS: dict[str, Callable[[Trained], Any]] = {
    "compiled_call": lambda trained: without_gradients(trained.call),
    "uncompiled_call": lambda trained: without_gradients(trained.model),
    "graph_of_another_backend": lambda trained: without_gradients(torch.compile(trained.model, backend="eager")),
    "deepcopy": lambda trained: copy.deepcopy(trained.model),
    "synchronize": lambda trained: trained.optimizer.synchronize(),
    "flush": lambda trained: trained.optimizer.flush(),
    "close": lambda trained: trained.optimizer.close(),
    "with_block": lambda trained: trained.optimizer.__exit__(None, None, None),
    "optimizer_state_dict": lambda trained: trained.optimizer.state_dict(),
    "model_state_dict": lambda trained: trained.model.state_dict(),
    "load_model": load_model,
    "load_optimizer": load_optimizer,
    "collected": collected,
    "to": lambda trained: trained.model.to("cpu"),
}


@pytest.mark.parametrize("end", ENDS)
def test_reads_pass_after(trained: Trained, end: str) -> None:
    assert trained.guarded() == ["0.weight", "2.weight"]
    ENDS[end](trained)
    assert trained.guarded() == []
    assert_equal(trained.values(), current())
    assert not trained.weight.untyped_storage().__dict__
    trained.weight.share_memory_()
    assert trained.weight.is_shared()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_in_the_middle_take_current_weights(trained: Trained, dtype: torch.dtype) -> None:
    trained.model.to(dtype)
    assert_equal(trained.values(), {name: value.to(dtype) for name, value in current().items()})


def test_submodule_call_allows_its_weights(trained: Trained) -> None:
    x = batch(99)
    expected = current()
    with torch.no_grad():
        found = trained.model[0](x)
    assert torch.equal(found, F.linear(x, expected["0.weight"], expected["0.bias"]))
    assert torch.equal(trained.weight, expected["0.weight"])


class Tied(nn.Module):
    """Its own code reads the weight of a child; it has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x), self.inner.weight) + self.inner(x)


class Untraced(Tied):
    forward = torch._dynamo.disable(Tied.forward)


@pytest.mark.tier1
@pytest.mark.parametrize("disabled", [False, True])
def test_modules_read_weights_of_their_children(disabled: bool) -> None:
    """Also where Dynamo calls the module's code instead of tracing it."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), Untraced() if disabled else Tied())

    expected = current(build=build)
    found = Trained(build=build)
    with torch.no_grad():
        y = found.model[1](batch(99))
    weight = expected["1.inner.weight"]
    assert torch.equal(y, F.linear(torch.tanh(batch(99)), weight) + F.linear(batch(99), weight))
    found.train(3, 6)
    found.optimizer.synchronize()
    twin = Trained({"overlap_step": False}, build)
    twin.train(3, 6)
    assert_equal(found.values(), twin.values())


def with_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 64)), nn.ReLU(), nn.Linear(64, 32))  # type: ignore[no-untyped-call]


def with_spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(32, 64)), nn.ReLU(), nn.Linear(64, 32))


def with_parametrization() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 64)), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("build", [with_weight_norm, with_spectral_norm, with_parametrization])
def test_pre_hooks_that_compute_weights_are_served(build: Callable[[], nn.Module]) -> None:
    found, twin = Trained(build=build), Trained({"overlap_step": False}, build)
    for each in (found, twin):
        each.model.eval()
    assert found.guarded()
    assert torch.equal(without_gradients(found.model), without_gradients(twin.model))
    for each in (found, twin):
        each.model.train()
        each.train(3, 6)
        each.optimizer.synchronize()
    assert_equal(found.values(), twin.values())


@pytest.mark.parametrize("prepend", [False, True])
def test_pre_hooks_of_users_read_current_weights(prepend: bool) -> None:
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            seen.append(module.weight.detach().clone())  # type: ignore[operator]

    def build() -> nn.Module:
        model: Any = two_layers()
        model[0].register_forward_pre_hook(look, prepend=prepend)
        return model  # type: ignore[no-any-return]

    expected = current(build=build)
    found = Trained(build=build)
    seen.clear()
    without_gradients(found.model[0])  # a call of the whole model would apply all updates before this hook
    assert torch.equal(seen[-1], expected["0.weight"])


def test_pre_hooks_ahead_of_ours_raise(trained: Trained) -> None:
    def look(module: nn.Module, args: Any) -> None:
        module.weight.norm()  # type: ignore[operator]

    trained.model[0].register_forward_pre_hook(look, prepend=True)
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        trained.model[0](batch(99))
    trained.optimizer.synchronize()
    without_gradients(trained.model[0])


def test_failed_update_leaves_readable_weights() -> None:
    trained = Trained()
    with failed_jobs(MemoryError("on purpose"), UPDATES):
        with pytest.raises(RuntimeError):
            trained.train(3, 6)
        with pytest.raises(RuntimeError):
            trained.optimizer.close()
    assert trained.guarded() == []
    assert all(torch.isfinite(value).all() for value in trained.values().values())


def test_interrupted_step_leaves_readable_weights() -> None:
    """The interrupt comes while accesses are being refused, after those of all weights."""
    trained = Trained()
    with interrupted(UploadScheduler.refuse_stale_reads, returned=True), pytest.raises(KeyboardInterrupt):
        trained.train(3, 4)
    with pytest.raises(RuntimeError):  # the step is half made
        trained.train(4, 5)
    trained.optimizer.close()
    assert trained.guarded() == []
    trained.values()


def test_interrupted_wait_keeps_accesses_refused() -> None:
    """The forward waits for an update that has not come. A handler that saves weights then must not read old ones."""
    trained, uninterrupted = Trained(), current()
    never = property(lambda ticket: False, vars(ThreadTicket)["completed"].__set__)
    late = mock.patch.object(ThreadTicket, "completed", never)
    with late, interrupted(Transport.wait_on_device), pytest.raises(KeyboardInterrupt):
        trained.call(batch(3))
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        trained.weight.detach().clone()
    trained.optimizer.synchronize()
    assert_equal(trained.values(), uninterrupted)


# Which weights are refused, and when.


def test_steps_without_overlap_refuse_nothing() -> None:
    assert Trained({"overlap_step": False}).guarded() == []


def test_resident_parameters_are_not_refused() -> None:
    assert Trained({"policy": "resident"}).guarded() == []
    assert all("bias" not in name for name in Trained().guarded())


def test_updates_that_may_be_late_are_not_waited_for() -> None:
    """With ``staleness=1`` the update of a step is due one step later: until then the old weight is the right one."""
    late, twin = (
        Trained({"staleness": 1, "update_interval": 2, "topk_ratio": 0.0, **options}, steps=0)
        for options in ({}, {"overlap_step": False})
    )
    seen = []
    for step in range(8):
        for each in (late, twin):
            each.train(step, step + 1)
        seen.append(len(late.guarded()))
        if late.guarded():
            without_gradients(late.call)
        assert_equal(late.values(), twin.values())
    assert 0 in seen
    assert any(seen)


def test_only_flushed_windows_are_refused() -> None:
    trained = Trained({"update_interval": 4}, steps=0)
    refused = set()
    for step in range(9):
        trained.train(step, step + 1)
        offloaded = trained.optimizer.engine.offloaded.values()
        assert trained.guarded() == [each.plan.name for each in offloaded if each.host.flushed]
        refused |= set(trained.guarded())
    assert refused == {"0.weight", "2.weight"}


def test_parameters_moved_into_one_tensor_are_read() -> None:
    """Accesses to a part of a storage cannot be refused: from then on updates are applied in the step."""
    found, twin = Trained(), Trained({"overlap_step": False})
    for each in (found, twin):
        each.optimizer.synchronize()
        vector_to_parameters(parameters_to_vector(each.model.parameters()).detach() * 0.5, each.model.parameters())
        each.train(3, 6)
    assert found.guarded() == []
    assert_equal(found.values(), twin.values())


class Experts(nn.Module):
    """Each forward uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts[self.chosen](torch.tanh(self.up(x)))
        return y


@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"update_interval": 2}], ids=str)
def test_updates_that_no_forward_fetches_are_applied(options: dict[str, Any]) -> None:
    """A step follows whose forward did not use the weight, and which reads it to find unseen writes."""
    found, twin = (Trained({**options, **others}, Experts, steps=0) for others in ({}, {"overlap_step": False}))
    for step in range(12):
        for each in (found, twin):
            each.model.chosen = step // 3 % 2
            each.train(step, step + 1)
        values, _ = read_all(found.model, found.optimizer) if step % 2 else (list(twin.values().values()), 0)
        assert_same(values, list(twin.values().values()))
    found.optimizer.synchronize()
    assert_equal(found.values(), twin.values())


def test_memory_replaced_in_flight_is_readable(trained: Trained) -> None:
    old, new = trained.weight.data, torch.ones(64, 32)
    trained.weight.data = new
    assert trained.weight.norm() == new.norm()
    with pytest.raises(RuntimeError, match=IN_FLIGHT):
        old.norm()
    with pytest.raises(RuntimeError, match="which is lost now"):
        trained.optimizer.synchronize()
    assert torch.equal(trained.weight, new)
    old.norm()


# A loop that reads every parameter after every step.

POLICIES: dict[str, dict[str, Any]] = {
    "zenflow": {"update_interval": 1},
    "windows": {"update_interval": 4},
    "auto": {"update_interval": (1, 4)},
    "warm_up": {"update_interval": 4, "full_warm_up_rounds": 8},
    "summed": {"update_interval": 4, "gradient_transfer": "mean"},
    "streamed": {"update_interval": 1, "update_stride": 2},
    "files": {"update_interval": 1, "offload_device": "nvme"},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.7},
    "deep_optimizer_states": {"policy": "deep_optimizer_states", "ratio": 1.0, "update_stride": 2},
    "zero_infinity": {"policy": "zero_infinity"},
    "resident": {"policy": "resident"},
}


def of_policy(name: str, folder: Path) -> dict[str, Any]:
    options = dict(POLICIES[name])
    if options.get("offload_device") or options.get("policy") == "zero_infinity":
        folder.mkdir()
        options["nvme_path"] = folder
    return options


def stale_reads(entry: dict[str, Any] | None, policy: str, folder: Path, steps: int) -> tuple[int, int]:
    """Train, and read every parameter after every step: how many values were stale, and how many reads raised."""
    torch._dynamo.reset()
    ours = Training(entry, of_policy(policy, folder / "ours"))
    torch._dynamo.reset()
    twin = Training(entry, {**of_policy(policy, folder / "twin"), "overlap_step": False})
    stale = refused = 0
    for step in range(steps):
        for each in (ours, twin):
            each.step(step)
        values, raised = read_all(ours.model, ours.optimizer)
        expected, never = read_all(twin.model, twin.optimizer)
        assert never == 0
        refused += raised
        stale += sum(not torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    for each in (ours, twin):
        each.optimizer.close()
    assert_same(*(list(each.model.parameters()) for each in (ours, twin)))
    return stale, refused


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [48, pytest.param(200, marks=pytest.mark.long)])
def test_no_read_between_steps_is_stale(policy: str, entry: dict[str, Any] | None, steps: int, tmp_path: Path) -> None:
    stale, refused = stale_reads(entry, policy, tmp_path, steps)
    assert stale == 0
    overlaps = entry is not None and policy in {"zenflow", "windows", "auto", "warm_up", "summed", "streamed", "files"}
    assert (refused > 0) == overlaps


@pytest.mark.parametrize("policy", ["zenflow", "windows", "auto"])
@pytest.mark.parametrize("steps", [24, pytest.param(200, marks=pytest.mark.long)])
def test_no_read_is_stale_under_inductor(policy: str, steps: int, tmp_path: Path) -> None:
    stale, refused = stale_reads({"backend": "zenflow"}, policy, tmp_path, steps)
    assert stale == 0
    assert refused > 0


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UploadScheduler, "refuse_stale_reads", lambda *args: None)


@pytest.mark.usefixtures("unguarded")
def test_loop_finds_stale_reads_without_the_guard(tmp_path: Path) -> None:
    """This is the control of the tests above."""
    stale, refused = stale_reads(EAGER_BACKEND, "zenflow", tmp_path, 8)
    assert stale > 16
    assert refused == 0


@pytest.mark.usefixtures("unguarded")
def test_accesses_are_silent_without_the_guard() -> None:
    trained = Trained()
    told = in_child(use_readers, trained.weight, "returned")
    assert int(told.removeprefix("returned ")) > len(READERS) - 5


# ``torch.profiler``, which asks for addresses of parameters and inputs.

PROFILES: dict[str, dict[str, bool]] = {
    "plain": {},
    "shapes": {"record_shapes": True},
    "memory": {"profile_memory": True},
    "stacks": {"with_stack": True},
    "all": {"record_shapes": True, "profile_memory": True, "with_stack": True},
}


@pytest.mark.parametrize("name", PROFILES)
def test_no_read_under_the_profiler_is_stale(name: str) -> None:
    """It starts in the middle of training, behind ``synchronize()``."""
    ours, twin = Trained(steps=2), Trained({"overlap_step": False}, steps=2)
    ours.optimizer.synchronize()
    with torch.profiler.profile(**PROFILES[name]):
        for step in range(2, 5):
            for each in (ours, twin):
                each.train(step, step + 1)
            assert_equal(ours.values(), twin.values())
    assert_equal(ours.values(), twin.values())
    for each in (ours, twin):
        each.train(5, 6)
    assert ours.guarded() == ["0.weight", "2.weight"]
    ours.optimizer.synchronize()
    assert_equal(ours.values(), twin.values())


def test_profiler_that_starts_in_flight_keeps_the_guard() -> None:
    trained = Trained()
    with torch.profiler.profile():
        with pytest.raises(RuntimeError, match=IN_FLIGHT):
            trained.weight.norm()
        trained.train(3, 5)
        found = trained.values()
    twin = Trained({"overlap_step": False}, steps=5)
    assert_equal(found, twin.values())
