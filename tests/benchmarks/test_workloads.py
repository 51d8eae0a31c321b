"""Models, data and cases of the comparisons."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from benchmarks.systems.case import Case
from benchmarks.systems.workloads import BATCHES, WORKLOADS, CausalLM


def test_gpt_has_a_hundred_million_parameters() -> None:
    with torch.device("meta"):
        assert sum(param.numel() for param in WORKLOADS["gpt"].build().parameters()) >= 100_000_000


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-3b", 3.09), ("llama-3b-32k", 2.91), ("llama-1b", 1.04)])
def test_sizes_of_the_language_models(name: str, billions: float) -> None:
    with torch.device("meta"):
        parameters = {id(param): param.numel() for param in WORKLOADS[name].build().parameters()}
    assert sum(parameters.values()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_batches_depend_on_the_seed_only() -> None:
    def batches(seed: int) -> list[tuple[torch.Tensor, ...]]:
        return WORKLOADS["tiny"].batches(seed, torch.float32, torch.device("cpu"))

    first, again, other = batches(0), batches(0), batches(1)
    assert len(first) == BATCHES
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_tokens_become_sequences() -> None:
    assert WORKLOADS["qwen2.5-3b"].with_tokens(16384).rows == 4
    short = WORKLOADS["llama-tiny"].with_tokens(16)
    assert (short.rows, short.context) == (1, 16)
    with pytest.raises(ValueError, match="tokens=5000 must be a multiple of the 4096"):
        WORKLOADS["qwen2.5-3b"].with_tokens(5000)
    with pytest.raises(ValueError, match="tokens=8 has no meaning"):
        WORKLOADS["tiny"].with_tokens(8)


def test_chunked_loss_equals_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.systems.workloads._HEAD_TOKENS", 24)
    model = WORKLOADS["llama-tiny"].build()
    assert isinstance(model, CausalLM)
    tokens, targets = WORKLOADS["llama-tiny"].batches(0, torch.float32, torch.device("cpu"))[0]
    logits = model.model(input_ids=tokens).logits.flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


def test_case_survives_its_command_line() -> None:
    case = Case(system="zenflow", model="tiny", cores=(0, 1), clip=1.0, options={"device_share": 0.5})
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize(("name", "value"), [("system", "zenflw"), ("model", "gtp"), ("dtype", "fp8")])
def test_unknown_values_of_a_case_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}' must be one of"):
        Case(**{"system": "zenflow", "model": "tiny", name: value})
