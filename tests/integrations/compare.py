"""Shared by the tests of frameworks: options, data, and comparisons of weights with AdamW's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zenflow_compile as zf

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}
"""With this eps the scale of a gradient counts: plain Adam would hide a lost or doubled factor."""

PLACEMENT: dict[str, Any] = {"topk_ratio": 0.25, "min_offload_size": 100, "device_share": 0.0}
EXACT: dict[str, Any] = {**ADAM, **PLACEMENT, "update_interval": 1}
WINDOWED: dict[str, Any] = {**ADAM, **PLACEMENT, "update_interval": 4}
INTERVALS = {1: EXACT, 4: WINDOWED}
"""Options by ``update_interval``."""

TOLERANCE = 1e-5
"""Of weights, absolute."""
RELATIVE = 1e-6
"""Of losses and gradient norms."""

EAGER_BACKEND: dict[str, Any] = {"backend": "zenflow", "options": {"inner": "eager"}}
ENTRIES = [None, EAGER_BACKEND]
"""Gradient hooks, and compiled without Inductor."""
ENTRY_IDS = ["eager", "compiled"]

VOCABULARY = 64


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token sequences for a causal language model; equal for every dataset of one size.

    Args:
        count: sequences.
        length: tokens of each.
    """

    def __init__(self, count: int = 48, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_llama(**config: Any) -> nn.Module:
    """A Llama of two blocks with the same random weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))


class Layers(nn.Module):
    """Two offloaded matrices, one that is too small, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.middle = nn.Linear(48, 48)
        self.last = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _reload(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


FIRST_USES: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": _reload,
    "engine": lambda optimizer: optimizer.engine,
    "options": lambda optimizer: optimizer.options,
    "state": lambda optimizer: optimizer.state,
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "flush": lambda optimizer: optimizer.flush(),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "device_bytes": lambda optimizer: optimizer.device_bytes + optimizer.host_bytes,
}
"""First uses of an optimizer, which tests make through a framework's wrapper."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference of two state dicts with the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def assert_bitwise(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Two state dicts have the same names and bits."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{different[:3]} differ by up to {difference(one, other):.1e}"


def assert_trained(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Every weight of ``after`` changed: two runs that train nothing would agree as well."""
    assert before.keys() == after.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still, f"{still[:3]} did not change"


def dense_gradients(profile: Any) -> dict[str, int]:
    """Count the gradients that became dense during ``zf.profile()``, by the line of code that caused it."""
    counted: dict[str, int] = profile.summary()["dense_gradients"]
    return counted


def offloaded(optimizer: zf.ZenFlowAdamW) -> int:
    """Count the parameters that have host state: 0 means that a test compares AdamW with AdamW."""
    return len(optimizer.engine.offloaded)


def open_gradients(state: Mapping[str, Any]) -> int:
    """Count the gradients in the fullest open window of a state dict: 0 means that a resume starts between windows."""
    return max((int(entry["open"]) for entry in state["state"].values() if "open" in entry), default=0)


def forget_accelerate() -> None:
    """Accelerate keeps its settings for the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def spread(variants: Iterable[Mapping[str, Tensor]]) -> float:
    """Return the largest difference between runs of AdamW's own variants (foreach, fused)."""
    runs = list(variants)
    return max(difference(one, other) for one in runs for other in runs)


def nudge(model: nn.Module, towards: float) -> None:
    """Change every weight in its last digit: a forward in half precision may round it differently."""
    with torch.no_grad():
        for param in model.parameters():
            param.nextafter_(torch.full_like(param, towards))


class Numbers(NamedTuple):
    """What a run ends with, and the series of numbers that it logs, by name."""

    weights: Mapping[str, Tensor]
    logged: Mapping[str, Sequence[float]]


def assert_as_adamw(run: Numbers, *variants: Numbers) -> None:
    """Equal to the first of AdamW's ``variants`` within TOLERANCE and RELATIVE, or within twice their spread.

    Twice, since the few variants are only a sample of the effects of rounding in half precision.
    """
    bound = max(TOLERANCE, 2 * spread(each.weights for each in variants))
    assert difference(run.weights, variants[0].weights) <= bound
    assert run.logged.keys() == variants[0].logged.keys()
    for name in run.logged:
        mine, theirs, *others = (torch.tensor(each.logged[name]).double() for each in (run, *variants))
        finite = theirs.isfinite()
        assert all(torch.equal(each.isfinite(), finite) for each in (mine, *others))
        known = finite & (theirs != 0)
        relative = (torch.stack([theirs, *others]) / theirs)[:, known]
        allowed = max(RELATIVE, 2 * float((relative.amax(0) - relative.amin(0)).max()) if known.any() else 0.0)
        assert allowed < 1e-2, "AdamW's variants differ too much to tell anything"
        assert bool((mine - theirs)[finite].abs().le(allowed * theirs[finite].abs()).all()), (
            name,
            mine,
            theirs,
            allowed,
        )
