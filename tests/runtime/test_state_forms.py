"""State in fewer bytes: what is stored, the same bits from every kernel, and how moments are rounded."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.edge_floats import edge_floats, same_bits
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime import state_forms
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate
from zenflow_compile.runtime.state_forms import State, StateForm, StateRows
from zenflow_compile.runtime.update_rule import StepCoefficients

SLICES = 12
LENGTHS = (128, 200, 333)  # whole quantization blocks, and partial ones
FORMS = [
    StateForm(split, moments, length)
    for split, moments, length in product((False, True), ("fp32", "bf16", "fp8"), LENGTHS)
]
ROUNDED = [form for form in FORMS if form.moments != "fp32"]
COEFFICIENTS = [StepCoefficients.known(1e-3, 0.9, 0.999, 0.1, scale) for scale in (1.0, 0.5)]


def rows_of(form: StateForm) -> StateRows:
    """State of zeros."""
    stored = State(torch.zeros(shape, dtype=dtype) for shape, dtype in form.tensors(SLICES))
    return StateRows(form, stored, torch.zeros(SLICES, form.length, dtype=torch.bfloat16) if form.split else None)


def some_state(length: int, seed: int = 0) -> State:
    """Moments of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg, exp_avg_sq = (torch.randn(SLICES, length, generator=generator) for _ in range(3))
    return State((master, 1e-3 * exp_avg**3, 1e-5 * exp_avg_sq**8))


def edge_state(length: int) -> State:
    """Zeros, infinities, NaN, subnormal numbers and ties."""
    master, exp_avg, exp_avg_sq = (edge_floats(SLICES, length, seed=seed) for seed in range(3))
    exp_avg_sq = exp_avg_sq.abs()
    exp_avg[0], exp_avg_sq[0] = 0.0, 0.0
    exp_avg[1], exp_avg_sq[1] = 1e-3, 1e-40
    return State((master, exp_avg, exp_avg_sq))


def tensors(rows: StateRows) -> list[Tensor]:
    return [*rows.stored, *([] if rows.weights is None else [rows.weights])]


def stored(form: StateForm, state: State, step: int = 3) -> StateRows:
    rows = rows_of(form)
    rows.write([each.clone() for each in state], step=step)
    return rows


def update(rows: StateRows, cuts: tuple[int, ...] = ()) -> Tensor:
    """Apply a window of two bf16 gradients, in parts of whole slices; returns the new weights."""
    form = rows.form
    adam = HostKernel(torch.bfloat16, torch.bfloat16, 2)
    out = torch.zeros(SLICES, form.length, dtype=torch.bfloat16) if rows.weights is None else rows.weights
    generator = torch.Generator().manual_seed(9)
    gradients = [1e-3 * torch.randn(SLICES * form.length, generator=generator).bfloat16() for _ in COEFFICIENTS]
    weights = None if rows.weights is None else rows.weights.view(-1)
    state = [each.view(-1) for each in rows.stored]
    window = WindowUpdate(state, out.view(-1), gradients, COEFFICIENTS, 7, form, weights)
    for first, last in zip((0, *cuts), (*cuts, SLICES), strict=True):
        adam(window, slice(first * form.length, last * form.length))
    return out


@pytest.mark.parametrize("state", [some_state, edge_state])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_native_code_stores_the_same_bits(form: StateForm, state: type[State]) -> None:
    """The fp32 kernel between a read and a write in PyTorch, and the kernel that does it all."""
    native, expected = (stored(form, state(form.length)) for _ in range(2))
    plain = State(each.clone() for each in expected.read())
    new_weights = update(StateRows(StateForm(length=form.length), plain))
    expected.write(plain, step=7)
    assert same_bits(update(native, cuts=(5, 6)), new_weights)
    assert all(same_bits(*pair) for pair in zip(tensors(native), tensors(expected), strict=True))


@pytest.mark.parametrize("state", [some_state, edge_state])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_stored_values_are_stored_again_as_they_are(form: StateForm, state: type[State]) -> None:
    """So a checkpoint in fp32 continues to the bit, and a slice loses nothing by changing sides. Scales may shrink."""
    once = stored(form, state(form.length))
    again = stored(form, State(each.clone() for each in once.read()), step=70)
    assert all(same_bits(*pair) for pair in zip(once.read(), again.read(), strict=True))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_stored_alone(form: StateForm) -> None:
    """In any order, with the bits that they have in one write."""
    state, whole, single = some_state(form.length), stored(form, some_state(form.length)), rows_of(form)
    order = torch.randperm(SLICES, generator=torch.Generator().manual_seed(1))
    for rows in order.split(5):
        single.write([each[rows] for each in state], rows, step=3)
    assert all(same_bits(*pair) for pair in zip(tensors(whole), tensors(single), strict=True))
    for rows in (order, order[:1], slice(3, 4), slice(2, 2)):  # a row of 8-bit moments may begin at any byte
        assert all(same_bits(each, whole_[rows]) for each, whole_ in zip(whole.read(rows), whole.read(), strict=True))


def test_split_master_is_exact_but_for_ties() -> None:
    """Every pattern of the low 16 bits, above bf16 numbers with even and odd bits."""
    low = torch.arange(1 << 16, dtype=torch.int32)
    high = torch.tensor([0x3F80, 0x3F81, 0x0001, 0x7F7E, 0x4049]).int()
    bits = torch.cat([(high.unsqueeze(1) << 16) + low, ((high.unsqueeze(1) << 16) + low) | -(1 << 31)])
    master = bits.view(torch.float32)
    form = StateForm(True, "fp32", master.shape[1])
    rows = StateRows(
        form, State((torch.zeros_like(bits).short(), *(torch.zeros_like(master) for _ in range(2)))), master.bfloat16()
    )
    rows.write_master(master)
    found = rows.read().master
    assert rows.weights is not None
    assert same_bits(rows.weights, master.bfloat16())
    assert same_bits(found.bfloat16(), rows.weights)
    lower = bits - found.view(torch.int32)
    even = (bits >> 16) % 2 == 0
    assert torch.equal(lower, ((low == 0x8000) & even).int())
    assert lower.sum() == 4  # above 0x3F80 and 0x7F7E, with both signs


@pytest.mark.parametrize("form", ROUNDED, ids=str)
def test_mean_of_the_error_is_zero(form: StateForm) -> None:
    """Over steps, for each element; the largest error is one step of the grid."""
    state, steps = some_state(form.length), 400
    total = [torch.zeros(SLICES, form.length, dtype=torch.float64) for _ in range(2)]
    most = 0.0
    for step in range(steps):
        read = stored(form, state, step).read()
        for sum_, found, exact in zip(total, read[1:], state[1:], strict=True):
            error = (found.double() - exact.double()) / exact.abs().double()
            sum_ += error
            if form.moments == "bf16":
                most = max(most, error.abs().max().item())
    for sum_, exact in zip(total, state[1:], strict=True):
        # A relative error of one step of the grid at most: its mean has a standard deviation of half of that / 20.
        grid = 2**-7 if form.moments == "bf16" else 2**-3
        large = exact.abs() > 2**-10 * exact.abs().amax(1, keepdim=True)  # normal numbers, in 8 bits, too
        assert (sum_ / steps)[large].abs().max() < 6 * grid / 2 / math.sqrt(steps)
    assert most < 2**-7


def test_second_moment_does_not_become_zero() -> None:
    """The update would divide the first moment by eps alone."""
    form = StateForm(False, "fp8", 256)
    exp_avg_sq = torch.logspace(-37, 0, SLICES * 256).view(256, SLICES).t().contiguous()
    rows = rows_of(form)
    rows.write([torch.zeros(SLICES, 256), torch.zeros(SLICES, 256), exp_avg_sq])
    assert bool((rows.read()[2] > 0.0).all())
    update(rows)
    assert bool((rows.read()[2] > 0.0).all())


def test_infinite_element_loses_its_block_only() -> None:
    form = StateForm(False, "fp8", 300)
    state = some_state(300)
    state[1][2, 130] = math.inf
    state[2][3, 299] = math.nan
    read = stored(form, state).read()
    lost = torch.zeros(SLICES, 300, dtype=torch.bool)
    lost[2, 128:160] = True
    assert torch.equal(read[1].isnan(), lost)
    lost = torch.zeros(SLICES, 300, dtype=torch.bool)
    lost[3, 288:] = True
    assert torch.equal(read[2].isnan(), lost)


@pytest.mark.parametrize(
    ("split", "moments", "expected"),
    [(False, "fp32", 12), (True, "fp32", 10), (False, "bf16", 8), (True, "bf16", 6), (True, "fp8", 4.0625)],
)
def test_bytes_are_those_of_the_plan(split: bool, moments: str, expected: float) -> None:
    plan = ParamPlan(
        index=0, name="w", shape=(512, 256), dtype=torch.bfloat16, placement=Placement.SPLIT_COLUMNS, dim=0,
        slices=512, length=256, k=52, interval=4, moments=moments, split_master=split,
    )  # fmt: skip
    state = [torch.empty(shape, dtype=dtype) for shape, dtype in StateForm.of_deferred(plan).tensors(plan.deferred)]
    assert sum(each.nbytes for each in state) == plan.host_state_bytes == expected * plan.deferred_numel


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
@pytest.mark.parametrize("piece", [1, 333, 1000])
def test_pieces_change_no_bit(moments: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StateForm(moments=moments, length=333)
    values = torch.randn(7, 333), torch.rand(7, 333)
    stored = form.compress(*values, step=3)
    expanded = form.expand(*stored)
    monkeypatch.setattr(state_forms, "_PIECE_ELEMENTS", piece)
    for whole, part in zip((*stored, *expanded), (*form.compress(*values, step=3), *form.expand(*stored)), strict=True):
        assert torch.equal(whole, part)
