"""The Hugging Face example trains with every policy."""

from __future__ import annotations

import pytest
import torch

from examples.stdlib_text import Text

pytest.importorskip("transformers", reason="needs the hf extra")

from examples.finetune_llama import FineTuneConfig, finetune


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "zenflow"])
def test_loss_falls(policy: str, repeating_text: Text) -> None:
    torch.compiler.reset()
    config = FineTuneConfig(steps=20, batch=2, context=32, width=64, layers=2, lr=3e-3, policy=policy, inner="eager")
    losses = finetune(config, text=repeating_text)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0


def test_zero_offload_is_adamw(repeating_text: Text) -> None:
    runs = []
    for policy in ("resident", "zero_offload"):
        torch.compiler.reset()
        config = FineTuneConfig(steps=5, batch=2, context=32, width=64, layers=1, policy=policy, inner="eager")
        runs.append(finetune(config, text=repeating_text))
    assert runs[1] == pytest.approx(runs[0], abs=1e-5)
