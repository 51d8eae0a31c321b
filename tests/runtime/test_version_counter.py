"""Own bumps are counted per version counter, and the bumps that are left show external writes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zenflow_compile.runtime.device_updates.resident_updates import ResidentUpdates
from zenflow_compile.runtime.device_updates.version_counter import bump_versions, counters_of
from zenflow_compile.runtime.update_rule import StepCoefficients
from zenflow_compile.torch_internals import torch_private

COEFFICIENTS = StepCoefficients.known(lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=0.01)


def halves(dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, nn.Parameter]:
    flat = torch.arange(12, dtype=dtype)
    return nn.Parameter(flat[:6]), nn.Parameter(flat[6:])


def test_views_of_a_tensor_share_a_counter() -> None:
    one, other = halves()
    own = nn.Parameter(torch.zeros(3))
    first, second, third = counters_of([one, own, other])
    assert first is third
    assert second is not first


def test_counter_is_shared_after_a_dtype_change() -> None:
    params = nn.ParameterList(halves()).double()
    assert params[0].untyped_storage().data_ptr() != params[1].untyped_storage().data_ptr()
    first, second = counters_of(list(params))
    assert first is second


def test_shared_storage_alone_shares_no_counter() -> None:
    flat = torch.zeros(12)
    first, second = counters_of([nn.Parameter(flat.data[:6]), nn.Parameter(flat.data[6:])])
    assert first is not second


def test_known_counters_are_kept() -> None:
    one, other = halves()
    known = counters_of([one])
    assert counters_of([one, other], known) == [known[0], known[0]]


def test_finding_sharers_keeps_versions() -> None:
    one, other = halves()
    with torch.no_grad():
        one.add_(1.0)
    alive = (one * one).sum()  # saves the weights, and checks their version in its backward
    with torch.inference_mode():
        inference = torch.zeros(2)
    before = one._version
    assert torch_private.version_counter_labels([one, inference, other])[1] == 1
    assert one._version == other._version == before
    alive.backward()


def test_own_bumps_move_the_version_and_are_counted() -> None:
    params = halves()
    counters = counters_of(params)
    before = params[0]._version
    bump_versions(params, counters)
    assert params[0]._version == before + 2
    assert [counter.external_bumps(param) for counter, param in zip(counters, params, strict=True)] == [before] * 2


def test_external_write_is_seen_by_every_sharer() -> None:
    one, other = halves()
    counter, _ = counters_of([one, other])
    before = counter.external_bumps(other)
    bump_versions([other], [counter])
    with torch.no_grad():
        one.add_(1.0)
    assert counter.external_bumps(other) == before + 1


def test_resident_update_counts_its_bumps() -> None:
    flat = torch.ones(2, 6)
    with_holes = nn.Parameter(flat[:, :2]), nn.Parameter(flat[:, 3:])  # not updated by the fused kernel
    for params in (halves(torch.float32), halves(torch.bfloat16), with_holes):
        counters = counters_of(params)
        optimizer = ResidentUpdates()
        optimizer.counters.update(zip(params, counters, strict=True))
        before: list[int] = [counters[0].external_bumps(param) for param in params]
        grads: list[Tensor] = [torch.ones_like(param) for param in params]
        optimizer.update(params, grads, COEFFICIENTS)
        assert params[0]._version == before[0] + 2
        assert [counters[0].external_bumps(param) for param in params] == before
