"""What takes part in a step's moments: parts that are there, and nothing for those that are not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from torch import nn

import zenflow_compile as zf
from zenflow_compile.runtime import engine_core
from zenflow_compile.runtime.features.feature import EngineParts, Feature, FeatureCalls
from zenflow_compile.runtime.moments import Moments, present, weakly


def engine_of(**options: Any) -> Any:
    optimizer = zf.ZenFlowAdamW(nn.Linear(64, 64).named_parameters(), lr=1e-3, min_offload_size=1, **options)
    return optimizer, optimizer.engine


def empty(moments: Moments) -> set[str]:
    return {field.name for field in fields(moments) if not getattr(moments, field.name)}


# On the CPU: one stream, one rank, no profiler.
ABSENT = {
    "allocated", "enter", "enter_ahead", "use_memory", "begin_backward", "gradients", "contributed", "end_backward",
    "forward", "final", "settle", "abandon", "close", "enter_step", "discard",
}  # fmt: skip


@pytest.mark.parametrize("policy", ["zenflow", "zero_offload", "resident"])
def test_absent_parts_cost_nothing(policy: str) -> None:
    with engine_of(policy=policy)[0] as optimizer:
        assert empty(optimizer.engine.core.moments) == ABSENT | {"end_step"}


def test_profiler_comes_and_goes() -> None:
    optimizer, engine = engine_of()
    before = engine.core.moments
    with zf.profile(optimizer):
        assert empty(engine.core.moments) - {"final"} == ABSENT - {"begin_backward", "end_backward", "forward", "final"}
    assert engine.core.moments == before
    optimizer.close()


def test_gradients_prefetch_streamed_state() -> None:
    optimizer, engine = engine_of(policy="deep_optimizer_states", update_stride=1)
    assert engine.core.streamed.params
    assert engine.core.moments.gradients == (engine.core.streamed.prefetch,)
    optimizer.close()


def test_given_back_memory_comes_back_once() -> None:
    optimizer, engine = engine_of()
    optimizer.offload_all()
    assert len(engine.core.moments.use_memory) == 1
    engine.core.moments.use_memory[0]()
    assert not engine.device_memory.given_back
    assert engine.core.moments.use_memory == ()
    optimizer.close()


def test_lost_moments_are_made_again() -> None:
    """As by an interrupt between the move and the list of those that bring it back."""
    optimizer, engine = engine_of()
    before = engine.core.moments
    optimizer.offload_all()
    engine.core.moments = before
    optimizer.offload_all()
    assert len(engine.core.moments.use_memory) == 1
    engine.core.moments = before
    optimizer.reload_all()
    assert not engine.device_memory.given_back
    optimizer.close()


def test_calls_keep_no_engine_alive() -> None:
    class Owner:
        calls = 0

        def call(self) -> None:
            Owner.calls += 1

    owner = Owner()
    (call,) = present(None, False, {}, weakly(owner.call))
    call()
    del owner
    call()
    assert Owner.calls == 1


def test_order_at_the_beginning_of_a_backward() -> None:
    """Memory is brought back before parameters are compared, which reads the weights."""
    optimizer, engine = engine_of()
    optimizer.offload_all()
    names = [getattr(call, "__name__", "") for call in engine.core.moments.enter_backward]
    assert names[0] == "call"
    assert names[1:] == ["check_unchanged", "enter_thread"]
    optimizer.close()


def test_unknown_moment_of_a_feature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Feature):
        @classmethod
        def of(cls, engine: EngineParts) -> Late:
            del engine
            return cls()

        def calls(self) -> FeatureCalls:
            return {"final": list, "end_of_step": list}

    monkeypatch.setattr(engine_core, "FEATURES", (Late,))
    with pytest.raises(ValueError, match=r"'final'.*not at \['end_of_step'\]"):
        engine_of()
