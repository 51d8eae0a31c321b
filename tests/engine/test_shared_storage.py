"""Parameters that are views of one tensor share a version counter; they train as if each had memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.training import ADAM, EAGER_BACKEND, ENTRIES, ENTRY_IDS, assert_same, take_step
from zenflow_compile import ZenFlowAdamW, optimizer_of

pytestmark = pytest.mark.timeout(120)

ALL: dict[str, Any] = {"min_offload_size": 1, "device_share": 0.0}
STALE: dict[str, Any] = {"update_interval": 1, "staleness": 1}
POLICIES: dict[str, dict[str, Any]] = {
    "zenflow": {"policy": "zenflow", "update_interval": 1, "topk_ratio": 0.25},
    "zero_offload": {"policy": "zero_offload"},
    "deep_optimizer_states": {"policy": "deep_optimizer_states", "update_stride": 2},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
}
STEPS = 16


class Chunks(nn.Module):
    """Two matrices and their biases in one flat tensor, or each in memory of its own.

    Args:
        broken: the graph breaks between the two layers.
    """

    def __init__(self, *, shared: bool, broken: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        flat = (torch.randn(480 + 240 + 24 + 10, generator=torch.Generator().manual_seed(1)) * 0.2).to(dtype)
        parts = [flat[:480].view(24, 20), flat[480:720].view(10, 24), flat[720:744], flat[744:]]
        self.first, self.second, self.first_bias, self.second_bias = (
            nn.Parameter(part if shared else part.clone()) for part in parts
        )
        self.broken = broken

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()  # or no backward reads the first matrix
        hidden = F.gelu(F.linear(inputs, self.first, self.first_bias))
        if self.broken:
            torch._dynamo.graph_break()
        return F.linear(hidden, self.second, self.second_bias)


class Run:
    """A model in a plain loop.

    Args:
        entry: arguments for ``torch.compile``; None to train without it.
        options: of the optimizer; None for ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        options: dict[str, Any] | None,
        entry: dict[str, Any] | None = None,
        *,
        shared: bool = True,
        broken: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = Chunks(shared=shared, broken=broken, dtype=dtype)
        self.optimizer: Any
        if options is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAM)
        else:
            self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **ADAM, **ALL, **options)
        self.call = torch.compile(self.model, **entry) if entry else self.model

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 20, generator=generator).to(self.model.first.dtype)
        targets = torch.randint(0, 10, (8,), generator=generator)
        F.cross_entropy(self.call(inputs).float(), targets).backward()

    def run(self, steps: int = STEPS, *, between: Callable[[Run, int], None] | None = None) -> list[Tensor]:
        """Return the weights after this many steps, with all due updates.

        Args:
            between: called behind each step.
        """
        for step in range(steps):
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if between is not None:
                between(self, step)
        return self.weights()

    def weights(self) -> list[Tensor]:
        if isinstance(self.optimizer, ZenFlowAdamW):
            self.optimizer.synchronize()
        return [param.detach().clone() for param in self.model.parameters()]


def synchronize(run: Run, _: int) -> None:
    run.optimizer.synchronize()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("between", [None, synchronize], ids=["", "synchronized"])
def test_views_train_like_adamw(
    policy: dict[str, Any], entry: dict[str, Any] | None, between: Callable[[Run, int], None] | None
) -> None:
    run = Run(policy, entry)
    engine = run.optimizer.engine
    assert engine.offloaded
    assert ("update_stride" in policy) == bool(engine.registry.streamed.params)
    weights = run.run(between=between)
    torch.testing.assert_close(weights, Run(None).run(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_own_writes_are_not_external(policy: dict[str, Any], dtype: torch.dtype, entry: dict[str, Any] | None) -> None:
    """Every bump of the version by the engine is counted; else weights would be compared at every step."""
    run = Run(policy, entry, dtype=dtype)
    engine = run.optimizer.engine
    before = run.model.first._version
    run.run(4)
    counter = engine.registry.counters[0]
    assert all(each is counter for each in engine.registry.counters)
    assert counter.own_bumps > 0
    assert run.model.first._version - counter.own_bumps == before
    assert not any(each.weights.written_by_others for each in engine.offloaded.values())


@pytest.mark.parametrize("options", [POLICIES["zenflow"], STALE], ids=["S=1", "stale"])
def test_views_train_under_inductor(options: dict[str, Any]) -> None:
    entry = {"backend": "zenflow"}
    weights = Run(options, entry).run()
    if "staleness" in options:
        assert_same(weights, Run(options, entry, shared=False).run())
    else:
        torch.testing.assert_close(weights, Run(None).run(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{**STALE, "topk_ratio": 0.25}, {"update_interval": 4}], ids=["stale", "S=4"])
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("between", [None, synchronize], ids=["", "synchronized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_views_train_like_own_memory(
    options: dict[str, Any],
    entry: dict[str, Any] | None,
    between: Callable[[Run, int], None] | None,
    dtype: torch.dtype,
) -> None:
    """The weights are equal bit for bit: no update in flight is dropped, however many there are."""
    expected = Run(options, entry, shared=False, dtype=dtype).run(between=between)
    assert_same(Run(options, entry, dtype=dtype).run(between=between), expected)


@pytest.mark.parametrize("options", [POLICIES["zenflow"], STALE], ids=["S=1", "stale"])
def test_views_in_two_graphs_train_like_own_memory(options: dict[str, Any]) -> None:
    """An update of the second layer must not come between a forward that saved the first layer and its backward."""
    expected = Run(options, EAGER_BACKEND, shared=False, broken=True).run()
    assert_same(Run(options, EAGER_BACKEND, broken=True).run(), expected)


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "two graphs"])
def test_optimizer_in_backward_trains_views(broken: bool) -> None:
    model, reference = Chunks(shared=True, broken=broken), Chunks(shared=False)
    adamw = torch.optim.AdamW(reference.parameters(), **ADAM)
    options = {"inner": "eager", **ADAM, **ALL, **POLICIES["zenflow"]}
    call = torch.compile(model, backend="zenflow", options=options)
    for step in range(STEPS):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        call(inputs).square().mean().backward()
        take_step(reference(inputs).square().mean(), adamw)
    optimizer_of(call).synchronize()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), atol=1e-5, rtol=0)


def rewrite_bias(run: Run, _: int) -> None:
    """Write a parameter's own values into it: only the version moves."""
    with torch.no_grad():
        run.model.first_bias.mul_(1.0)


def shift_bias(run: Run, step: int) -> None:
    with torch.no_grad():
        run.model.first_bias.add_(0.01 * (step % 3))


@pytest.mark.parametrize("options", [POLICIES["zenflow"], STALE], ids=["S=1", "stale"])
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("between", [rewrite_bias, shift_bias])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_write_to_a_sharer_drops_no_update(
    options: dict[str, Any], entry: dict[str, Any] | None, between: Callable[[Run, int], None], dtype: torch.dtype
) -> None:
    """The bias is resident: a write to it moves the version of the matrices too, whose updates are in flight."""
    expected = Run(options, entry, shared=False, dtype=dtype).run(between=between)
    assert_same(Run(options, entry, dtype=dtype).run(between=between), expected)


@pytest.mark.parametrize("ours", [1, 2])
def test_optimizer_over_a_sharer_drops_no_update(ours: int) -> None:
    """A ``torch.optim`` optimizer has the other parameters: the engine cannot count its bumps."""
    weights = []
    for shared in (False, True):
        run = Run({**STALE, "policy": "zenflow"}, EAGER_BACKEND, shared=shared)
        run.optimizer.close()
        model = run.model
        params = list(model.parameters())
        optimizer = ZenFlowAdamW(params[:ours], **ADAM, **ALL, **STALE)
        adamw = torch.optim.AdamW(params[ours:], **ADAM)
        for step in range(STEPS):
            run.backward(step)
            for each in (optimizer, adamw):
                each.step()
                each.zero_grad()
        optimizer.synchronize()
        weights.append([param.detach().clone() for param in model.parameters()])
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_external_write_counts_for_its_parameter(entry: dict[str, Any] | None) -> None:
    """It is noticed among our own bumps, and its sharer, whose weights were not written, loses nothing."""

    def write(run: Run, step: int) -> None:
        if step % 4 == 1:
            run.optimizer.synchronize()
            with torch.no_grad():
                run.model.first.mul_(0.9)

    options = {**POLICIES["zenflow"], "update_interval": 2}
    for dtype in (torch.float32, torch.bfloat16):
        expected = Run(options, entry, shared=False, dtype=dtype).run(between=write)
        assert_same(Run(options, entry, dtype=dtype).run(between=write), expected)


def test_updates_of_views_are_applied_in_the_step() -> None:
    """Accesses to one of them alone cannot be refused, so no update is in flight behind ``step()``."""
    runs = [Run(POLICIES["zenflow"], EAGER_BACKEND) for _ in range(2)]
    for run, synchronizes in zip(runs, (False, True), strict=True):
        run.run(3)
        run.backward(3)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if synchronizes:
            run.optimizer.synchronize()
    assert_same(*(list(run.model.parameters()) for run in runs))
    for run in runs:
        with torch.no_grad():
            run.model.second.add_(1.0)
    assert_same(runs[0].run(3), runs[1].run(3))


@pytest.mark.parametrize("weights_first", [False, True])
def test_views_resume_bitwise(weights_first: bool) -> None:
    """The state is saved with an update in flight; loading the weights moves the version of all sharers."""
    whole = Run(STALE, EAGER_BACKEND)
    whole.run(5)
    optimizer, model = whole.optimizer.state_dict(), {k: v.clone() for k, v in whole.model.state_dict().items()}
    resumed = Run(STALE, EAGER_BACKEND)
    resumed.run(2)
    if weights_first:
        resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    if not weights_first:
        resumed.model.load_state_dict(model)
    assert_same(resumed.run(7), whole.run(7))


def test_added_group_shares_the_counter() -> None:
    weights = []
    for shared in (False, True):
        run = Run({**STALE, "policy": "zenflow"}, EAGER_BACKEND, shared=shared)
        run.optimizer.close()
        model = run.model
        run.optimizer = ZenFlowAdamW([model.first, model.first_bias], **ADAM, **ALL, **STALE)
        run.run(3)
        run.optimizer.add_param_group({"params": [model.second, model.second_bias]})
        run.call = torch.compile(model, **EAGER_BACKEND)
        weights.append(run.run(8))
    assert_same(weights[1], weights[0])


def test_overlap_is_refused_at_construction() -> None:
    flat = torch.zeros(960)
    pairs = [("a", nn.Parameter(flat[:480].view(24, 20))), ("b", nn.Parameter(flat[470:950].view(24, 20)))]
    with pytest.raises(ValueError, match=r"memory of a and b overlaps.*memory of its own"):
        ZenFlowAdamW(pairs, **ADAM, **ALL)
    ZenFlowAdamW(pairs[:1], **ADAM, **ALL).close()  # neither is owned by what was refused


def test_overlap_is_refused_in_an_added_group() -> None:
    run = Run(POLICIES["zenflow"])
    run.run(2)
    versions = [param._version for param in run.model.parameters()]
    overlapping = nn.Parameter(run.model.first.detach()[1:3])
    with pytest.raises(ValueError, match=r"memory of first and late overlaps.*memory of its own"):
        run.optimizer.add_param_group({"params": [("late", overlapping)]})
    assert len(run.optimizer.param_groups) == 1
    assert [param._version for param in run.model.parameters()] == versions
    torch.testing.assert_close(run.run(), reference_after_two(), atol=1e-5, rtol=0)


def reference_after_two() -> list[Tensor]:
    reference = Run(None)
    reference.run(2)
    return reference.run()
