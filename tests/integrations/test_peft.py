"""PEFT: adapters over a frozen model, in a PyTorch loop with the optimizer unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    WINDOWED,
    Tokens,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    offloaded,
    open_gradients,
    tiny_llama,
    weights,
)

BATCHES = list(DataLoader(Tokens(), batch_size=4))
RESIDENT = {**EXACT, "min_offload_size": 1000}
"""Under these options the factors of rank 8 stay on the device."""

CONFIGS: dict[str, dict[str, Any]] = {
    "r64": {"r": 64},
    "r8": {"r": 8},
    "dora": {"r": 64, "use_dora": True},
    "modules_to_save": {"r": 64, "modules_to_save": ["lm_head"]},
    "checkpointing": {"r": 64},
    "reentrant_checkpointing": {"r": 64},
}
LIMIT = 0.05  # below each norm of these adapters, so that clipping scales


@dataclass
class Run:
    """The compared results of a run."""

    norms: list[float] = field(default_factory=list)
    adapter: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Any = None


Make = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]


def adapted(name: str, model: nn.Module | None = None) -> Any:
    """A tiny Llama with the adapters of a configuration, the same weights at every call."""
    model = model or tiny_llama(tie_word_embeddings=False)
    torch.manual_seed(1)
    config = LoraConfig(
        lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **CONFIGS[name]
    )
    found = get_peft_model(model, config)
    if "checkpointing" in name:
        found.gradient_checkpointing_enable({"use_reentrant": name.startswith("reentrant")})
        found.enable_input_require_grads()
    return found.train()


def adam(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in named], **ADAM)


def zenflow(named: list[tuple[str, Tensor]]) -> zf.ZenFlowAdamW:
    return zf.ZenFlowAdamW(named, **EXACT)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    norms = []
    for batch in batches:
        model(**batch).loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def train(make: Make, name: str, *, compiled: bool = False, everything: bool = False) -> Run:
    """Train adapters, evaluate the model without them in mid-training, train on, and merge.

    Args:
        everything: frozen parameters are given to the optimizer, too.
    """
    model, run = adapted(name), Run()
    frozen = {key: param.detach().clone() for key, param in model.named_parameters() if not param.requires_grad}
    run.before = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    run.optimizer = make(list(model.named_parameters()) if everything else trainable(model))
    if compiled:
        model.compile(**EAGER_BACKEND)
    run.norms += step(model, run.optimizer, BATCHES[:3])
    with torch.no_grad():
        model.eval()
        run.values["evaluated"] = model(**BATCHES[7]).loss
        with model.disable_adapter():
            run.values["disabled"] = model(**BATCHES[7]).loss
        model.train()
    run.norms += step(model, run.optimizer, BATCHES[3:6])
    run.adapter = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    for key, param in model.named_parameters():
        assert key not in frozen or torch.equal(param, frozen[key]), f"{key} is frozen, and changed"
    if isinstance(run.optimizer, zf.ZenFlowAdamW):
        run.optimizer.flush()  # merging reads the factors without calling their modules
    run.values.update(weights(model.merge_and_unload()))
    return run


@cache
def reference(name: str) -> Run:
    return train(adam, name)


def check(name: str, *, compiled: bool, everything: bool) -> None:
    options = RESIDENT if name == "r8" else EXACT
    with zf.profile() as profile:
        run = train(lambda named: zf.ZenFlowAdamW(named, **options), name, compiled=compiled, everything=everything)
    expected = reference(name)
    assert_trained(run.before, run.adapter)
    assert difference(run.adapter, expected.adapter) < 1e-5
    assert difference(run.values, expected.values) < 1e-5
    torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(expected.norms), rtol=1e-6, atol=0)
    assert min(expected.norms) > LIMIT
    assert run.values["disabled"] != run.values["evaluated"]
    assert dense_gradients(profile) == {}  # clipping by the norm scales gradients by one number
    # Rank 64: two factors of each of six linear layers, and lm_head. Vectors stay on the device.
    assert offloaded(run.optimizer) == {"r8": 0, "modules_to_save": 13}.get(name, 12)
    assert bool(run.optimizer.engine.graphs) == compiled


@pytest.mark.parametrize("everything", [False, True], ids=["trainable", "everything"])
@pytest.mark.parametrize("name", ["r64", "r8"])
def test_lora(name: str, everything: bool) -> None:
    check(name, compiled=False, everything=everything)


@pytest.mark.parametrize("name", ["dora", "modules_to_save", "checkpointing", "reentrant_checkpointing"])
def test_kinds_of_adapters(name: str) -> None:
    check(name, compiled=False, everything=False)


def test_compiled_lora() -> None:
    check("r64", compiled=True, everything=True)


@pytest.mark.long
@pytest.mark.parametrize("everything", [False, True], ids=["trainable", "everything"])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_matrix(name: str, everything: bool) -> None:
    check(name, compiled=True, everything=everything)


@mock.patch.dict(EAGER_BACKEND, options={})
@pytest.mark.long
def test_inductor_lora() -> None:
    check("r64", compiled=True, everything=False)


def switching(make: Make, compiled: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Two adapters train in turns; the other one is frozen meanwhile."""
    model = adapted("r64")
    model.add_adapter("second", LoraConfig(r=32, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    optimizer = make([(name, param) for name, param in model.named_parameters() if "lora" in name])
    if compiled:
        model.compile(**EAGER_BACKEND)
    norms = step(model, optimizer, BATCHES[:2])
    for first, adapter in enumerate(("second", "default"), start=1):
        model.set_adapter(adapter)
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
        before = weights(model)  # a state dict: parameters that are read without one may lack the last update
        norms += step(model, optimizer, BATCHES[2 * first : 2 * first + 2])
        after = weights(model)
        assert_bitwise({name: before[name] for name in frozen}, {name: after[name] for name in frozen})
    if isinstance(optimizer, zf.ZenFlowAdamW):
        assert offloaded(optimizer) == 12  # the second adapter was frozen at the first use: its state stays resident
    return weights(model), norms


def growing(make: Make, compiled: bool) -> tuple[dict[str, Tensor], list[float]]:
    """A second adapter is added in mid-training, and then both are trained."""
    model = adapted("r64")
    optimizer = make(trainable(model))
    if compiled:
        model.compile(**EAGER_BACKEND)
    norms = step(model, optimizer, BATCHES[:2])
    torch.manual_seed(3)
    model.add_adapter("second", LoraConfig(r=32, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "second"])
    new = [(name, param) for name, param in model.named_parameters() if ".second." in name]
    named = isinstance(optimizer, zf.ZenFlowAdamW)  # all groups have names, or none
    optimizer.add_param_group({"params": new if named else [param for _, param in new], "lr": 2e-2})
    norms += step(model, optimizer, BATCHES[2:6])
    if isinstance(optimizer, zf.ZenFlowAdamW):
        assert offloaded(optimizer) == 16
    return weights(model), norms


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"])
@pytest.mark.parametrize("several", [switching, growing])
def test_two_adapters(several: Callable[..., tuple[dict[str, Tensor], list[float]]], compiled: bool) -> None:
    mine, my_norms = several(zenflow, compiled)
    theirs, their_norms = several(adam, False)
    assert difference(mine, theirs) < 1e-5
    torch.testing.assert_close(torch.tensor(my_norms), torch.tensor(their_norms), rtol=1e-6, atol=0)
    trained = [name for name in mine if "lora_B" in name]
    assert all(bool(mine[name].any()) for name in trained)  # these factors start as zeros


def check_resume(options: dict[str, Any], compiled: bool, folder: Path) -> None:
    """Resume from the adapters' weights, saved by ``save_pretrained``, and the optimizer's state."""
    model = adapted("r64")
    optimizer = zf.ZenFlowAdamW(trainable(model), **options)
    if compiled:
        model.compile(**EAGER_BACKEND)
    step(model, optimizer, BATCHES[:5])
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    norms = step(model, optimizer, BATCHES[5:])
    expected = weights(model)

    torch._dynamo.reset()
    resumed = PeftModel.from_pretrained(tiny_llama(tie_word_embeddings=False), folder, is_trainable=True).train()
    second = zf.ZenFlowAdamW(trainable(resumed), **options)
    if compiled:
        resumed.compile(**EAGER_BACKEND)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    if options["update_interval"] > 1:
        assert open_gradients(state) > 0
    second.load_state_dict(state)
    assert step(resumed, second, BATCHES[5:]) == norms
    assert_bitwise(weights(resumed), expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [EXACT, WINDOWED], ids=["S1", "S4"])
def test_resume_in_a_window(options: dict[str, Any], compiled: bool, tmp_path: Path) -> None:
    check_resume(options, compiled, tmp_path)


def test_loaded_adapter_is_trained_on() -> None:
    """``set_peft_model_state_dict`` writes into parameters that the optimizer has updated."""

    def run(make: Make, compiled: bool) -> dict[str, Tensor]:
        model = adapted("r64")
        optimizer = make(trainable(model))
        if compiled:
            model.compile(**EAGER_BACKEND)
        step(model, optimizer, BATCHES[:1])
        state = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
        step(model, optimizer, BATCHES[1:3])
        set_peft_model_state_dict(model, state)
        step(model, optimizer, BATCHES[3:5])
        return weights(model)

    assert difference(run(zenflow, True), run(adam, False)) < 1e-5


def test_merged_weights_are_those_of_the_flush(tmp_path: Path) -> None:
    """At S = 4, merging after ``flush()`` includes every gradient; a compiled model, directly after ``step()``."""
    model = adapted("r64")
    optimizer = zf.ZenFlowAdamW(trainable(model), **WINDOWED)
    model.compile(**EAGER_BACKEND)
    step(model, optimizer, BATCHES[:6])
    before = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    step(model, optimizer, BATCHES[6:7])
    optimizer.flush()
    model.save_pretrained(tmp_path)
    saved = PeftModel.from_pretrained(tiny_llama(tie_word_embeddings=False), tmp_path)
    assert_trained(before, get_peft_model_state_dict(saved))
    assert_bitwise(weights(model.merge_and_unload()), weights(saved.merge_and_unload()))
