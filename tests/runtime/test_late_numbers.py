"""Factors that stay on the device give the bits of Python's floats, and no thread of the training waits for them."""

from __future__ import annotations

import io
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.support.late_device import LateDevice, served
from tests.support.training import ENTRIES, ENTRY_IDS, Training
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.gradients.factors import Factors, multiply_
from zenflow_compile.runtime.gradients.pending_gradient import Scales, WindowSum
from zenflow_compile.runtime.parameters.device_state import DeviceState, feed_scores
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.run_ahead import STEP_BEFORE_LAST, RunAhead
from zenflow_compile.runtime.update_rule import StepCoefficients

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
Tool = Callable[[Training], None]


def same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """All bits are equal, but for those of NaN."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def late(value: float, ticket: ThreadTicket | None = None) -> Number:
    number = torch.tensor(value, dtype=torch.float64)
    return Number(number, [ticket or ThreadTicket.ended()], [number.clone()])


# Whole runs.


def clip(training: Training) -> None:
    clip_grad_norm_(training.model.parameters(), 0.05)


def unscale(training: Training) -> None:
    grads = [param.grad for param in training.model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(()), torch.tensor(1 / 1000.0))


def unscale_and_clip(training: Training) -> None:
    unscale(training)
    clip(training)


def clip_one(training: Training) -> None:
    """Other parameters have other factors, or none."""
    clip_grad_norm_(training.model[2].parameters(), 0.01)  # type: ignore[index]


def nothing(training: Training) -> None:
    pass


TOOLS: dict[str, Tool] = {
    "clip": clip, "unscale": unscale, "both": unscale_and_clip, "one": clip_one, "none": nothing
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "windows": {"update_interval": 3, "topk_ratio": 0.25},
    "every step": {"update_interval": 1, "topk_ratio": 0.25},
    "maximize": {"update_interval": 2, "maximize": True},
    "summed": {"update_interval": 3, "gradient_transfer": "mean"},
    "summed maximize": {"update_interval": 3, "gradient_transfer": "mean", "maximize": True},
    "int8": {"update_interval": 2, "gradient_transfer": "int8"},
    "auto": {"update_interval": (1, 5)},
    "limit": {"update_interval": 2, "max_grad_norm": 0.03},
    "limit not reached": {"update_interval": 2, "max_grad_norm": 1e6},
    "summed limit": {"update_interval": 3, "gradient_transfer": "mean", "max_grad_norm": 0.03},
    "zero_offload": {"policy": "zero_offload"},
}


def steps(training: Training, tool: Tool, first: int, last: int, infinite: float | None = None) -> None:
    for step in range(first, last):
        loss = training.loss(step)
        (loss * (1000.0 if infinite is None or step != 4 else infinite)).backward()
        tool(training)
        training.optimizer.step()
        training.optimizer.zero_grad()


def saved(training: Training) -> list[Tensor]:
    """All tensors of a checkpoint."""
    state = torch.load(io.BytesIO(training.saved()), weights_only=True)
    entries = [value for entry in state["optimizer"]["state"].values() for _, value in sorted(entry.items())]
    return entries + list(state["model"].values())


def run(
    options: dict[str, Any], tool: Tool, entry: dict[str, Any] | None, dtype: torch.dtype, infinite: float | None = None
) -> list[Tensor]:
    """Train, save in mid-window, go on, and load the state into another optimizer. Returns all that is left."""
    training = Training(entry, options, dtype)
    steps(training, tool, 0, 5, infinite)
    state = training.saved()
    left = saved(training)
    steps(training, tool, 5, 11)
    resumed = Training(entry, options, dtype).load(state)
    steps(resumed, tool, 5, 11)
    same(resumed.weights(), training.weights())
    left += saved(training)
    training.optimizer.close()
    resumed.optimizer.close()
    return left


@pytest.mark.matrix(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("options", OPTIONS)
def test_factors_on_the_device_change_no_bit(options: str, tool: str, dtype: torch.dtype) -> None:
    entry = ENTRIES[len(options) % 2]
    expected = run(OPTIONS[options], TOOLS[tool], entry, dtype)
    with served():
        actual = run(OPTIONS[options], TOOLS[tool], entry, dtype)
    same(actual, expected)


@pytest.mark.parametrize("infinite", [math.inf, math.nan], ids=["inf", "nan"])
@pytest.mark.parametrize("options", ["limit", "summed limit"])
def test_norms_that_are_not_finite_act_as_on_the_cpu(options: str, infinite: float) -> None:
    def weights() -> list[Tensor]:
        training = Training(None, OPTIONS[options])
        steps(training, nothing, 0, 9, infinite)
        return training.weights()

    expected = weights()
    assert any(bool(each.isnan().any()) for each in expected)
    with served():
        same(weights(), expected)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_steady_step_waits_for_no_number(
    options: str, entry: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, reads = threading.current_thread(), []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        read = getattr(Tensor, name)

        def noted(*args: Any, name: str = name, read: Any = read) -> Any:
            if threading.current_thread() is main:
                reads.append(name)
            return read(*args)

        monkeypatch.setattr(Tensor, name, noted)
    with served() as device:
        training = Training(entry, {**OPTIONS[options], "select_interval": 1000})
        for step in range(9):
            (training.loss(step) * 1000.0).backward()
            device.streams.waits.clear()
            device.blocking.clear()
            reads.clear()
            unscale_and_clip(training)
            training.optimizer.step()
            adaptive = options == "auto" and step >= 2  # reads values of the step before last
            # Samples of the weights (``unseen_writes.py``) are read as late, and from the host's memory.
            assert set(reads) <= ({"tolist", "item"} if adaptive else {"tolist"})
            assert step < 4 or not device.blocking
            assert step < 4 or adaptive or main not in device.streams.waits
            training.optimizer.zero_grad()
        training.optimizer.close()


def test_rate_on_the_device_is_read_once_per_step() -> None:
    with served() as device:
        training = Training(None, {"lr": torch.tensor(0.01)})
        device.blocking.clear()
        training.run(0, 5)
        assert device.blocking["lr"] == 5
        training.optimizer.param_groups[0]["lr"] = 0.01
        training.run(5, 7)
        assert device.blocking["lr"] == 5
        training.optimizer.close()


# Numbers.


def test_number_waits_for_its_copy() -> None:
    ticket, reads = ThreadTicket(), []

    class Cell:
        def item(self) -> float:
            reads.append(ticket.is_set)
            return 2.0

    number = Number(torch.tensor(2.0), [ticket], [Cell()])
    negative = -number
    threading.Timer(0.05, ticket.set).start()
    assert (float(negative), float(number)) == (-2.0, 2.0)
    assert reads == [True, True]
    assert negative.on_device.item() == -2.0
    assert number != late(2.0)
    assert len({number, negative, late(2.0), late(2.0)}) == 4


@pytest.mark.parametrize("scaled", [0.3, 1 / 65536.0, 1e-30])
def test_products_have_the_bits_of_floats(scaled: float) -> None:
    by = [torch.tensor(each) for each in (0.7, scaled, 3.0, 7.0, 0.3, 49.0, 1.1)]
    on_device, on_host = Factors(CPU, deferred=True), Factors(CPU, deferred=False)
    one: float | Tensor = 1.0
    other: float | Tensor = 1.0
    for number, tensor in enumerate(by):
        one = on_device.times(one, tensor, divide=number > 1)
        other = on_host.times(other, tensor, divide=number > 1)
    assert isinstance(one, Tensor)
    assert one.item() == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_multiply_rounds_one_time(dtype: torch.dtype) -> None:
    values = torch.randn(3, 7).to(dtype).t()
    factor = torch.tensor(0.7).double()
    expected = (values.double() * factor).to(dtype)
    actual = values.clone()
    multiply_(actual, factor)
    same([actual], [expected])
    multiply_(values, factor.item())
    same([actual], [values])


SCALES: dict[str, list[float]] = {
    "equal": [0.3, 0.3, 0.3],
    "changing": [0.3, 1.0, 0.7],
    "maximize": [-0.3, -1e-5, -0.7],
    "zero first": [0.0, 0.5, 0.25],
    "all unusable": [math.nan, 0.0, math.inf],
    "nan last": [0.5, 0.3, math.nan],
    "inf last": [0.5, 0.3, math.inf],
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_window_sums_have_the_bits_of_floats(scales: str, mixed: bool) -> None:
    """A loaded window has floats, and gets late numbers."""
    gradients = [torch.randn(9, 7).bfloat16() for _ in range(3)]

    def mean(numbers: list[Number]) -> tuple[Tensor, Tensor, list[float]]:
        window, out = WindowSum(torch.full((9, 7), math.nan), Scales()), torch.empty(9, 7, dtype=torch.bfloat16)
        for gradient, number in zip(gradients, numbers, strict=True):
            window.add(gradient, StepCoefficients.known(0.1, 0.9, 0.99, 0.0)._replace(grad_scale=number))
        total = window.total.clone()
        return total, out, [float(each.grad_scale) for each in window.take_mean(out)]

    numbers = SCALES[scales]
    total, out, returned = mean(list(map(Number.known, numbers)))
    some: list[Number] = [(Number.known if mixed and not place else late)(each) for place, each in enumerate(numbers)]
    actual = mean(some)
    same(actual[:2], (total, out))
    assert actual[2] == returned


def test_window_sum_has_the_bits_of_a_scaled_addition() -> None:
    gradients = [torch.randn(64, 33) for _ in range(2)]
    window = WindowSum(torch.empty(64, 33), Scales())
    for gradient, scale in zip(gradients, (1.0, 0.7), strict=True):
        window.add(gradient, StepCoefficients.known(0.1, 0.9, 0.99, 0.0, scale))
    same([window.total], [gradients[0].add(gradients[1], alpha=0.7)])


def test_quotients_are_rounded_as_pythons() -> None:
    """These lie in the middle of two fp32 numbers: the last bit of an fp64 quotient decides."""
    scales, generator = Scales(), random.Random(0)
    for _ in range(100):
        middle = 1.0 + generator.getrandbits(22) * 2.0**-23 + 2.0**-24
        by = float(generator.getrandbits(27) | 1)
        number = middle * by  # exact
        expected = torch.tensor(number / by / 3, dtype=torch.float64).float()
        assert scales.quotient(late(number), late(by), 1) == torch.tensor(number / by, dtype=torch.float64).float()
        assert scales.quotient(Number.known(number), late(by), 3) == expected


def test_parameters_share_numbers_of_window_sums() -> None:
    scales, numbers = Scales(), [late(each) for each in (0.5, 0.25)]
    one, other = (scales.largest(*numbers) for _ in range(2))
    assert one is other
    assert scales.quotient(one, Number.known(0.5), 2) is scales.quotient(other, Number.known(0.5), 2)


PLAN = ParamPlan(
    index=0, name="w", shape=(2, 40), dtype=torch.float32, placement=Placement.SPLIT_COLUMNS, dim=1, slices=40,
    length=2, k=4, interval=2,
)  # fmt: skip


@pytest.mark.parametrize("numbers", [(0.3, 0.3), (0.3, 1e-5), (1.0, 0.7)])
@pytest.mark.parametrize("kinds", [(late, late), (late, Number.known)])
def test_late_unscale_feeds_equal_scores(numbers: tuple[float, float], kinds: tuple[Any, Any]) -> None:
    norms = [torch.rand(40) for _ in numbers]

    def scores(unscale: Sequence[Number]) -> list[Tensor]:
        states = [DeviceState.allocate(PLAN, CPU) for _ in numbers]
        for state, each in zip(states, norms, strict=True):
            state.norms.copy_(each)
        feed_scores(states, unscale)
        return [state.score for state in states]

    some = [kind(each) for kind, each in zip(kinds, numbers, strict=True)]
    shared = numbers[0] == numbers[1] and kinds[1] is late
    same(scores(some[:1] * 2 if shared else some), scores([*map(Number.known, numbers)]))


# The bound on the host's run-ahead.


def test_step_waits_for_the_step_before_last() -> None:
    device = LateDevice()
    device.streams.compute_is_late = True
    ahead = RunAhead(device, device.streams, Recorder())
    ends: list[Any] = []
    for step in range(6):
        ahead.begin_step()
        ahead.begin_step()
        # The end of the step before last has happened, and not that of the last step.
        assert [end.has_happened for end in ends] == [True] * max(0, step - 1) + [False] * min(step, 1)
        assert device.blocking[STEP_BEFORE_LAST] == max(0, step - 1)
        ahead.end_step()
        ends.append(ahead._ends[-1])


def test_no_wait_for_a_step_that_is_done() -> None:
    device = LateDevice()
    ahead = RunAhead(device, device.streams, Recorder())
    for _ in range(4):
        ahead.begin_step()
        ahead.end_step()
    assert not device.blocking
    assert not device.streams.waits


@pytest.mark.parametrize("options", ["windows", "auto"])
def test_engine_waits_once_per_step(options: str) -> None:
    """Adaptive windows read values of the device, and wait for nothing else."""
    with served() as device:
        device.streams.compute_is_late = True
        training = Training(None, OPTIONS[options] if options == "auto" else {})
        counts = []
        for step in range(7):
            device.blocking.clear()
            steps(training, clip, step, step + 1)
            counts.append({reason: count for reason, count in device.blocking.items() if reason == STEP_BEFORE_LAST})
            assert "scheduling inputs" not in device.blocking
        assert counts == [{}, {}, *[{STEP_BEFORE_LAST: 1}] * 5]
        training.optimizer.close()
