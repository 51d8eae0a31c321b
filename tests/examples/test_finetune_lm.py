"""The example on text files trains with every policy, and names what it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="needs the hf extra")

from examples.finetune_lm import POLICIES, evaluate, finetune, main, parse
from examples.language_model import load
from tests.support.small_texts import REVIEWS


@pytest.fixture
def arguments(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Of a run on the tiny model."""
    torch.compiler.reset()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(sentence for _, sentence in REVIEWS))
    sizes = ["--steps", "12", "--batch", "4", "--context", "16", "--lr", "3e-3", "--inner", "eager"]
    return ["--model", str(tiny_model), "--text", str(text), *sizes]


def losses(arguments: list[str]) -> list[float]:
    return finetune(parse(arguments), Console(quiet=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_falls(arguments: list[str], policy: str, tmp_path: Path) -> None:
    files = ["--nvme-path", str(tmp_path)] if policy == "zero_infinity" else []
    found = losses([*arguments, "--policy", policy, *files])
    assert len(found) == 12
    assert found[-1] < found[0] - 1.0


def test_recomputed_activations_change_no_loss(arguments: list[str]) -> None:
    plain = losses(arguments)
    torch.compiler.reset()
    assert losses([*arguments, "--checkpoint-activations"]) == pytest.approx(plain, abs=1e-5)


def test_options_come_from_a_deepspeed_configuration(arguments: list[str], tmp_path: Path) -> None:
    config = tmp_path / "deepspeed.json"
    config.write_text(
        json.dumps(
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            }
        )
    )
    at = arguments.index("--lr")
    without = [*arguments[:at], *arguments[at + 2 :]]
    configured = losses([*without, "--config", str(config)])
    torch.compiler.reset()
    assert configured == losses([*arguments, "--policy", "zero_offload"])


def test_saved_model_is_loaded(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tuned"
    assert main([*arguments, "--save", str(folder)]) == 0
    assert f"saved: {folder}" in capsys.readouterr().out.replace("\n", "")
    tuned, tokenizer = load(folder, torch.float32)
    tokens = torch.tensor([tokenizer(REVIEWS[0][1])["input_ids"]])
    first, _ = load(arguments[1], torch.float32)
    with torch.no_grad():
        assert tuned(input_ids=tokens, labels=tokens).loss < first(input_ids=tokens, labels=tokens).loss - 1.0


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "has no text"),
        (b"\n \n", "has no text"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"too short", r"the text has \d+ tokens, 0 sequences of 16, and a batch has 4; give more --text"),
    ],
)
def test_unusable_text_is_one_sentence(arguments: list[str], content: bytes, error: str) -> None:
    Path(arguments[3]).write_bytes(content)
    with pytest.raises(SystemExit, match=f"error: .*{error}"):
        main(arguments)


def test_missing_files_are_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(SystemExit, match=r"error: .*No such file"):
        main([*arguments, "--text", str(missing)])
    with pytest.raises(SystemExit, match=r"error: .*none does not exist; give a GGUF file"):
        main([*arguments, "--model", str(missing)])


def test_sizes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--context", "1"])
    assert "--context=1 must be at least 2" in capsys.readouterr().err


def test_context_beyond_the_positions_is_one_sentence(arguments: list[str]) -> None:
    with pytest.raises(
        SystemExit, match="error: --context=4096 must be at most 2048, which the model has positions for"
    ):
        main([*arguments, "--context", "4096"])


def test_folder_to_save_is_made_before_training(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"error: .*File exists"):
        main([*arguments, "--save", arguments[3]])


def test_every_sequence_weighs_as_much(tiny_model: Path) -> None:
    model, _ = load(tiny_model, torch.float32)
    tokens = torch.randint(100, (5, 8))
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=tokens).loss.item()
    assert evaluate(model, tokens, torch.device("cpu")) == pytest.approx(expected)


def test_text_that_comes_with_pytorch_is_the_default(arguments: list[str]) -> None:
    assert len(losses([*arguments[:2], *arguments[4:], "--steps", "2"])) == 2
