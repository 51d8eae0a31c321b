"""The record of one gradient, the factors on it, and what the gradients of an engine share."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.support.calls import calls_of
from tests.support.loops import (
    EXACT,
    SUMMED,
    ZERO_OFFLOAD,
    Call,
    Loop,
    Numbers,
    both_entries,
    compare,
    gradients,
    loss_of,
    with_tool,
)
from tests.support.training import Training, assert_same
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.thread_lane import ThreadLane
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.factors import Factors
from zenflow_compile.runtime.gradients.gradient_record import GradientLike, GradientRecord, GradientState
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.recorder import Recorder

PARTS, ON_DEVICE, ZERO = GradientState.PARTS, GradientState.ON_DEVICE, GradientState.ZERO
DENSE, CONSUMED, SPOILED = GradientState.DENSE, GradientState.CONSUMED, GradientState.SPOILED
DISCARDED, IN_BACKWARD, LOCAL = GradientState.DISCARDED, GradientState.IN_BACKWARD, GradientState.LOCAL

CPU = torch.device("cpu")
VALUES = torch.tensor([[3.0, 0.0], [0.0, 4.0]])


# States of a record


class Source:
    """Stands for the parameter of a record, and notes what it is asked."""

    averaged = False

    def __init__(self, *, deferred: bool = False) -> None:
        self.norm: Tensor | None = torch.tensor(5.0)
        self.given_up: list[GradientState] = []
        self.added: list[Tensor] = []
        self.dense = 0
        self.factors = Factors(CPU, deferred=deferred)

    def values_of(self, record: GradientRecord) -> Tensor:
        return VALUES.clone()

    def norm_of(self, record: GradientRecord) -> Tensor | None:
        return self.norm

    def norm_of_values(self, values: Tensor) -> Tensor:
        return torch.linalg.vector_norm(values)

    def give_up(self, record: GradientRecord) -> None:
        self.given_up.append(record.state)

    def accumulate(self, record: GradientRecord, grad: Tensor) -> None:
        self.added.append(grad)

    def became_dense(self) -> None:
        self.dense += 1


def record_in(state: GradientState, source: Source) -> GradientRecord:
    like = GradientLike("layer.weight", (2, 2), torch.float32, CPU)
    record = GradientRecord(like, weakref.ref(source))
    if state is DENSE:
        record.overwrite(lambda values: values.copy_(VALUES))
        source.given_up.clear()
        source.dense = 0
    record.state = state
    return record


def every(*states: GradientState) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("state", states, ids=lambda state: state.name.lower())


def test_every_state_is_away_gone_or_readable() -> None:
    assert {state for state in GradientState if state.away} == {PARTS, ON_DEVICE, LOCAL}
    assert {state for state in GradientState if state.gone} == {CONSUMED, SPOILED, DISCARDED, IN_BACKWARD}


@every(PARTS, ON_DEVICE, ZERO, DENSE)
@pytest.mark.parametrize("deferred", [False, True])
def test_record_with_values_can_be_read(state: GradientState, deferred: bool) -> None:
    source = Source(deferred=deferred)
    record = record_in(state, source)
    record.scale(torch.tensor(-0.5))
    record.scale(4.0, divide=True, unscale=True)
    expected = torch.zeros(2, 2) if state is ZERO else -VALUES / 8
    torch.testing.assert_close(record.read(), expected, atol=0, rtol=0)
    torch.testing.assert_close(record.l2_norm(), expected.norm())
    assert record.l2_norm(torch.float64).dtype == torch.float64
    record.check_usable()
    assert (record.state, source.dense, source.given_up) == (state, 0, [])


@every(PARTS, ON_DEVICE, ZERO)
def test_dense_record_owns_its_values(state: GradientState) -> None:
    source = Source()
    record = record_in(state, source)
    record.scale(0.5)
    dense = record.make_dense()
    torch.testing.assert_close(dense, torch.zeros(2, 2) if state is ZERO else VALUES / 2)
    assert (record.state, record.factor, source.dense) == (DENSE, 1.0, 1)
    assert source.given_up == [DENSE]  # the values are the record's own before the engine frees the parts
    assert record.make_dense() is dense
    assert record.read() is dense
    assert source.dense == 1
    record.scale(2.0)
    record.scale(4.0, divide=True)
    assert record.factor == 1.0
    record.zero()
    assert record.state is DENSE
    assert not dense.any()


@every(CONSUMED, SPOILED, DISCARDED, IN_BACKWARD)
def test_gone_values_are_refused(state: GradientState) -> None:
    record = record_in(state, source := Source())
    source.norm = None
    for verb, ask in {
        "read": record.read, "measure": record.l2_norm, "use": record.check_usable, "read it before": record.make_dense,
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=r"the gradient of layer\.weight") as caught:
            ask()
        assert verb.split()[0] in str(caught.value)
    assert (record.state, source.dense, source.given_up) == (state, 0, [])


def test_consumed_norm_takes_later_factors() -> None:
    record = record_in(CONSUMED, source := Source())
    record.scale(-3.0)
    record.scale(2.0, divide=True, unscale=True)
    assert float(record.l2_norm()) == 7.5
    source.norm = None  # overwritten by the next backward
    with pytest.raises(RuntimeError, match="until the next backward"):
        record.l2_norm()


def test_gradient_of_a_backward_that_stepped_refuses() -> None:
    record = record_in(IN_BACKWARD, Source())
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        record.scale(0.5)
    record.zero()
    assert record.state is IN_BACKWARD


@every(PARTS, ON_DEVICE, ZERO, CONSUMED, SPOILED, DISCARDED)
def test_zeroed_record_equals_a_new_one(state: GradientState) -> None:
    record = record_in(state, source := Source())
    record.contributions, record.norm = 2, torch.tensor(5.0)
    record.scale(math.nan)
    record.scale(0.5, unscale=True)
    record.zero()
    assert (record.state, record.clip, record.unscale) == (ZERO, 1.0, 1.0)
    assert (record.contributions, record.norm) == (0, None)
    assert source.given_up == [ZERO]
    record.check_usable()


@every(PARTS, ON_DEVICE, ZERO, CONSUMED, SPOILED)
def test_overwritten_record_is_dense(state: GradientState) -> None:
    record = record_in(state, source := Source())
    record.scale(0.5)
    record.overwrite(lambda values: values.copy_(VALUES))
    assert (record.state, record.factor, source.dense) == (DENSE, 1.0, 1)
    assert source.given_up == [DENSE]
    assert torch.equal(record.read(), VALUES)
    dense = record.read()
    record.overwrite(lambda values: values.fill_(2.0))
    assert source.dense == 1
    assert record.read() is dense
    assert torch.equal(dense, torch.full((2, 2), 2.0))


@every(PARTS, ON_DEVICE, ZERO, CONSUMED, SPOILED)
def test_failed_overwrite_leaves_the_gradient(state: GradientState) -> None:
    record = record_in(state, source := Source())
    with pytest.raises(RuntimeError, match="size of tensor"):
        record.overwrite(lambda values: values.copy_(torch.ones(5)))
    assert (record.state, source.given_up) == (state, [])


def test_written_norm_does_not_reach_the_cache() -> None:
    record = record_in(PARTS, source := Source())
    record.norm = source.norm
    record.l2_norm().mul_(100.0)
    assert float(record.l2_norm()) == 5.0


def test_replaced_record_takes_the_new_dtype() -> None:
    record = record_in(PARTS, Source())
    replaced = record.replaced(VALUES.to(torch.float64))
    assert replaced.like.dtype == torch.float64
    assert replaced.l2_norm().dtype == torch.float64
    assert (record.state, record.like.dtype) == (PARTS, torch.float32)


@every(PARTS, ON_DEVICE)
def test_dropped_record_keeps_referenced_values(state: GradientState) -> None:
    record = record_in(state, source := Source())
    tensor = OffloadedGradient.of(record)
    record.scale(2.0)
    record.dropped(keep=True)
    assert (record.state, source.dense) == (DENSE, 1)
    assert torch.equal(tensor.clone(), 2 * VALUES)


@every(PARTS, ON_DEVICE)
def test_dropped_record_is_discarded_otherwise(state: GradientState) -> None:
    record = record_in(state, source := Source())
    OffloadedGradient.of(record)
    record.dropped(keep=True)
    assert (record.state, source.dense) == (DISCARDED, 0)
    with pytest.raises(RuntimeError, match=r"discarded.*clone\(\)"):
        record.read()


@every(ZERO, DENSE, CONSUMED, SPOILED, DISCARDED, IN_BACKWARD)
def test_dropping_changes_only_engine_memory(state: GradientState) -> None:
    record = record_in(state, source := Source())
    tensor = OffloadedGradient.of(record)
    record.dropped(keep=True)
    assert (record.state, source.dense) == (state, 0)
    del tensor


def test_any_tensor_keeps_its_record_alive() -> None:
    record = record_in(PARTS, Source())
    assert record.first_tensor is None
    first = OffloadedGradient.of(record)
    second = OffloadedGradient.of(record)
    del first
    assert record.first_tensor is not None
    del second
    assert record.first_tensor is None
    third = OffloadedGradient.of(record)
    assert record.first_tensor is not None
    del third


@pytest.mark.parametrize("keep", [False, True])
@every(*GradientState)
def test_close_keeps_unused_values(state: GradientState, keep: bool) -> None:
    record = record_in(state, source := Source())
    left = record.values_at_close(keep=keep)
    kept = state is DENSE or (keep and state in (PARTS, ON_DEVICE, LOCAL, ZERO))
    assert (left is not None) == kept
    assert left is None or torch.equal(left, torch.zeros(2, 2) if state is ZERO else VALUES)
    assert source.dense == int(kept and state is not DENSE)


@every(*GradientState)
def test_source_decides_what_is_added(state: GradientState) -> None:
    record = record_in(state, source := Source())
    grad = torch.ones(2, 2)
    record.accumulate(grad)
    assert source.added == [grad]
    assert record.state is state


def test_record_outlives_its_source() -> None:
    away, dense, zero = (record_in(state, source := Source()) for state in (PARTS, DENSE, ZERO))
    del source
    away.scale(2.0)
    with pytest.raises(RuntimeError, match="its optimizer was closed"):
        away.make_dense()
    assert away.state is DISCARDED
    dense.accumulate(torch.ones(2, 2))
    assert torch.equal(dense.read(), VALUES + 1)
    zero.accumulate(torch.ones(2, 2))
    assert torch.equal(zero.read(), torch.ones(2, 2))
    away.zero()
    assert away.state is ZERO


def test_moved_record_keeps_its_state() -> None:
    record = record_in(CONSUMED, source := Source())
    moved = record.moved(torch.empty(2, 2, dtype=torch.float64))
    assert (moved.state, moved.like.dtype, moved.like.name) == (CONSUMED, torch.float64, "layer.weight")
    assert record.like.dtype == torch.float32
    assert source.dense == 0


# Factors


def test_factors_are_numbers_on_the_cpu() -> None:
    factors = Factors(CPU, deferred=False)
    assert factors.times(2.0, torch.tensor([0.25])) == 0.5
    assert factors.times(2.0, 4, divide=True) == 0.5
    assert factors.times(3.0, torch.tensor(0.0), divide=True) == math.inf
    assert factors.times(3.0, -0.0, divide=True) == -math.inf
    assert math.isnan(factors.times(0.0, 0.0, divide=True))
    assert factors.times(1.0, math.inf) == math.inf
    assert math.isnan(factors.times(1.0, math.nan))


def deferred() -> Factors:
    return Factors(CPU, deferred=True)


def test_gradients_share_the_product_with_a_tensor() -> None:
    factors, by = deferred(), torch.tensor(0.5)
    first, second = (factors.times(1.0, by) for _ in range(2))
    assert isinstance(first, Tensor)
    assert first is second
    assert float(first) == 0.5
    clip = torch.tensor([0.25], dtype=torch.float64)
    again = factors.times(first, clip, divide=True)
    assert isinstance(again, Tensor)
    assert (again.dtype, again.shape, float(again)) == (torch.float64, (), 2.0)
    assert again is factors.times(first, clip, divide=True)
    assert float(factors.times(first, clip)) == 0.125


def test_products_with_numbers_stay_numbers() -> None:
    factors = deferred()
    assert factors.times(2.0, 0.25) == 0.5
    product = factors.times(factors.times(1.0, torch.tensor(3.0)), 2.0)
    assert isinstance(product, Tensor)
    assert float(product) == 6.0


def test_changed_factor_gives_another_product() -> None:
    factors, by = deferred(), torch.tensor(0.5)
    first = factors.times(1.0, by)
    by.fill_(0.125)
    second = factors.times(1.0, by)
    assert (float(first), float(second)) == (0.5, 0.125)
    by.fill_(9.0)
    assert (float(first), float(second)) == (0.5, 0.125)


def test_freed_factor_is_not_mistaken_for_another() -> None:
    factors, by = deferred(), torch.tensor(0.5)
    identity = id(by)
    assert float(factors.times(1.0, by)) == 0.5
    del by
    others = [torch.tensor(2.0) for _ in range(1000)]
    same = [other for other in others if id(other) == identity]
    assert float(factors.times(1.0, (same or others)[0])) == 2.0


def test_equal_factors_before_may_differ() -> None:
    factors, by = deferred(), torch.tensor(0.5)
    assert float(factors.times(1.0, by)) == 0.5
    assert float(factors.times(2.0, by)) == 1.0
    one, two = factors.times(1.0, torch.tensor(1.0)), factors.times(1.0, torch.tensor(2.0))
    assert [float(factors.times(each, by)) for each in (one, two, one)] == [0.5, 1.0, 0.5]


def test_factor_with_a_graph_leaves_none() -> None:
    product = deferred().times(1.0, torch.tensor(0.5, requires_grad=True) * 2)
    assert isinstance(product, Tensor)
    assert not product.requires_grad


class HostReads:
    """Counts the reads of tensors on the host, of each kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.counts[name] = 0

        def counted(*args: Any, **keywords: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **keywords)

        return counted

    def take(self) -> dict[str, int]:
        """Return the kinds that were counted since the last call."""
        counts = {name: count for name, count in self.counts.items() if count}
        self.counts = dict.fromkeys(self.counts, 0)
        return counts


def finish(factors: Factors, records: list[GradientRecord]) -> None:
    factors.finish(records, ThreadLane("D2H", Recorder()), device_of(CPU), step=0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> HostReads:
    found = HostReads()
    for owner, name in (*((Tensor, name) for name in ("item", "tolist", "__float__", "__bool__")), (torch, "stack")):
        monkeypatch.setattr(owner, name, found.counted(name, getattr(owner, name)))
    return found


def test_factors_are_final_without_a_host_read(reads: HostReads) -> None:
    source = Source(deferred=True)
    records = [record_in(PARTS, source) for _ in range(5)]
    clip, unscale, own = torch.tensor(0.5), torch.tensor(0.25), torch.tensor(2.0)
    for record in records[:4]:
        record.scale(unscale, unscale=True)
    for record in records[1:4]:
        record.scale(clip)
    records[3].scale(own)
    reads.take()
    finish(source.factors, records)
    assert reads.take() == {"stack": 1}
    scales, unscales = zip(*(record.final for record in records), strict=True)
    assert len(set(scales)) == 4  # (1, 0.25), (0.5, 0.25) two times, (1, 0.25) with its own clip factor, and 1
    assert scales[1] is scales[2]
    assert scales[0] is unscales[0] is unscales[3]
    assert [float(scale) for scale in scales] == [0.25, 0.125, 0.125, 0.25, 1.0]
    assert [float(unscale) for unscale in unscales] == [0.25] * 4 + [1.0]
    assert scales[4].value == 1.0


# Deferred factors in an engine


def deferring(loop: Loop) -> Loop:
    """``loop`` with factors that stay tensors until ``step()``, as on an accelerator."""

    def run(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.engine.registry.gradients.factors = deferred()
        return loop(model, call, optimizer)

    return run


def clip_twice(model: nn.Module, optimizer: Optimizer) -> list[float | Tensor]:
    params = list(model.parameters())
    return [clip_grad_norm_(params, 0.1), clip_grad_norm_(params, 0.05), clip_grad_norm_(params, 1e3)]


def changing_factor(model: nn.Module, optimizer: Optimizer) -> list[float | Tensor]:
    """One tensor multiplies all gradients, and changes in between and afterwards."""
    by = torch.tensor(0.5)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(by)
        by *= 1.25
        param.grad.div_(by)
    return gradients(model)


def clip_after_each_backward(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    norms: list[float | Tensor] = []
    for step in range(8):
        for part in range(3):
            loss_of(call, 10 * step + part).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def scaled_and_clipped(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    numbers: list[float | Tensor] = []
    for step in range(10):
        factor = math.inf if step == 4 else 1.0
        for part in range(2):
            (scaler.scale(loss_of(call, 10 * step + part)) * factor).backward()
        scaler.unscale_(optimizer)
        numbers.append(clip_grad_norm_(model.parameters(), 0.05))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        numbers.append(scaler.get_scale())
    return numbers


LOOPS: dict[str, Loop] = {
    "clip_twice": with_tool(clip_twice, backwards=2),
    "changing_factor": with_tool(changing_factor, steps=4),
    "clip_after_each_backward": clip_after_each_backward,
    "scaled_and_clipped": scaled_and_clipped,
}


@both_entries
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_deferred_factors_equal_adamw(loop: Loop, entry: dict[str, Any] | None) -> None:
    compare(deferring(loop), entry, effect=with_tool(None))


@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD, SUMMED], ids=["exact", "zero_offload", "summed"])
def test_deferred_factors_under_every_policy(options: dict[str, Any]) -> None:
    compare(deferring(scaled_and_clipped), None, options, effect=with_tool(None))


def test_step_waits_for_no_factor(reads: HostReads) -> None:
    """Unscaling, clipping and the step up to its jobs read no factor on the host."""
    training = Training(None)
    training.optimizer.engine.registry.gradients.factors = deferred()
    offloaded = training.optimizer.engine.offloaded
    for step in range(3):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(training.loss(step)).backward()
        reads.take()
        scaler.unscale_(training.optimizer)
        clip_grad_norm_([each.param for each in offloaded.values()], 1e-3)
        assert reads.take().keys() <= {"stack"}
        training.optimizer.step()
        assert not reads.take().keys() & {"tolist", "__float__", "__bool__"}
        training.optimizer.zero_grad()


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("deferring", [False, True])
def test_overflow_in_one_offloaded_gradient_is_found(value: float, deferring: bool) -> None:
    """No parameter that the device updates whole overflows with it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(12, 10, bias=False))
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    assert len(optimizer.engine.offloaded) == 2
    if deferring:
        optimizer.engine.registry.gradients.factors = deferred()
    before = [param.detach().clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hook = model[0].weight.register_hook(lambda grad: grad * value)
    scaler.scale(model(torch.ones(2, 16)).sum()).backward()
    hook.remove()
    scaler.step(optimizer)
    scaler.update()
    optimizer.synchronize()
    assert scaler.get_scale() == 2.0
    assert_same([param.detach() for param in model.parameters()], before)
    optimizer.close()


# Selection scores


def selections(scales: list[float], clips: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """Scores and selections after each of several steps that leave the weights as they are."""
    options = {"update_interval": 1, "topk_ratio": 0.25, "select_interval": 1}
    training = Training(None, {"lr": 0.0, **options})
    offloaded = training.optimizer.engine.offloaded.values()
    scores, selected = [], []
    for step, (scale, clip) in enumerate(zip(scales, clips, strict=True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(training.loss(step)).backward()
        if clip != 1.0:
            scaler.unscale_(training.optimizer)
            for param in training.model.parameters():
                assert param.grad is not None
                param.grad.mul_(clip)
        scaler.step(training.optimizer)
        training.optimizer.zero_grad()
        training.optimizer.synchronize()
        scores += [each.device.score.clone() for each in offloaded]
        selected += [each.device.selection.selected.clone() for each in offloaded]
    training.optimizer.close()
    return scores, selected


def test_loss_scale_does_not_change_the_selection() -> None:
    """Scales are powers of two, which change no digit, and differ between steps, or selections could not tell."""
    plain = selections([1.0] * 6, [1.0] * 6)
    scaled = selections([1.0, 1.0, 2.0**12, 2.0**-6, 1.0, 2.0**8], [1.0] * 6)
    for actual, expected in zip(scaled, plain, strict=True):
        assert_same(actual, expected)


def test_clipping_does_not_change_the_selection() -> None:
    plain = selections([1.0] * 6, [1.0] * 6)
    clipped = selections([1.0] * 6, [1.0, 1e-3, 1e3, 1.0, 0.3, 1e-6])
    for actual, expected in zip(clipped, plain, strict=True):
        assert_same(actual, expected)
    assert len({tuple(each.tolist()) for each in plain[1]}) > len(plain[1]) / 6, "selections never change"


# Norms in batches


class Many(nn.Module):
    """300 matrices of 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(300))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x @ weight).square().sum() for weight in self.weights), torch.zeros(()))


def test_clip_measures_all_gradients_together() -> None:
    model = Many()
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    assert len(optimizer.engine.offloaded) == 300
    for step in range(3):
        with calls_of(Gradients.measure) as calls:
            model(torch.ones(2, 4) + step).backward()
            grads = torch.stack([param.grad.clone() for param in model.parameters() if param.grad is not None])
            assert not calls
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), grads.norm())
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.05), torch.tensor(0.1))
            optimizer.step()
            assert all(param.grad.norm() > 0 for param in model.parameters() if param.grad is not None)
            optimizer.zero_grad()
        assert len(calls) == 1
    optimizer.close()


@both_entries
def test_consumed_norm_is_known_until_a_backward(entry: dict[str, Any] | None) -> None:
    training = Training(entry).run(0, 2)
    training.backward(2)
    grads = [each.param.grad for each in training.optimizer.engine.offloaded.values()]
    norms = [grad.clone().norm() for grad in grads if grad is not None]
    training.optimizer.step()
    training.loss(3)  # a forward changes nothing
    for grad, norm in zip(grads, norms, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad.norm(), norm)
    training.optimizer.zero_grad()
    training.backward(3)
    for grad in grads:
        assert grad is not None
        with pytest.raises(RuntimeError, match="until the next backward"):
            grad.norm()
