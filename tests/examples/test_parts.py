"""Tests the parts of the examples: text, model and settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.gpt import GPT, GPTConfig
from examples.settings import TrainConfig
from examples.stdlib_text import Text, load_text, training_batch, validation_batches


def test_text_split_depends_on_files_and_paths_only(tmp_path: Path) -> None:
    for root in ("here", "there"):
        for index in range(64):
            folder = tmp_path / root / f"package{index % 4}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"module{index}.py").write_bytes(bytes([index]) * 50_000)
        tests = tmp_path / root / "test"
        tests.mkdir()
        (tests / "test_it.py").write_bytes(bytes([200]) * 1000)
    here, there = load_text(root=tmp_path / "here"), load_text(root=tmp_path / "there")
    assert torch.equal(here.train, there.train)
    assert torch.equal(here.validation, there.validation)
    train_files, validation_files = set(here.train.tolist()), set(here.validation.tolist())
    assert not train_files & validation_files
    assert train_files | validation_files == set(range(64))  # and nothing of the tests
    limited = load_text(2_000_000, root=tmp_path / "here")
    assert len(limited.train) + len(limited.validation) == 2_000_000


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(FileNotFoundError, match=r"of \*\.py text.* install the sources"):
        load_text(root=tmp_path)


def test_batches_depend_on_seed_and_step_only(repeating_text: Text) -> None:
    text = Text(train=torch.arange(5000).remainder(251).to(torch.uint8), validation=repeating_text.validation)

    def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return training_batch(text, seed=seed, step=step, batch=3, context=8)

    first, again = batch(0, 5), batch(0, 5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])  # targets are the next tokens
    assert not torch.equal(first[0], batch(0, 6)[0])
    assert not torch.equal(first[0], batch(1, 5)[0])
    assert not torch.equal(first[0], batch(2**20, 5)[0])


def test_validation_covers_the_held_out_text(repeating_text: Text) -> None:
    batches = validation_batches(repeating_text, count=3, batch=4, context=16)
    assert [tuple(tokens.shape) for tokens, _ in batches] == [(4, 16)] * 3
    assert torch.equal(batches[0][0][0], repeating_text.validation[:16].long())
    assert torch.equal(batches[-1][1][-1], repeating_text.validation[-16:].long())


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_is_causal(tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=16, layers=2, width=32, heads=2, tied=tied))
    assert (model.head.weight is model.token_embedding.weight) == tied
    logits = []
    model.head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.detach()))
    tokens = torch.randint(256, (1, 16))
    targets = torch.randint(256, (1, 16))
    loss = model(tokens, targets)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.2)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    model(changed, targets)
    assert torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert not torch.equal(logits[0][:, 9:], logits[1][:, 9:])


def test_gpt_refuses_heads_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="width=100 must be a multiple of heads=6"):
        GPTConfig(width=100, heads=6)


def test_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(steps=100, warm_up=10)
    rates = [config.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
