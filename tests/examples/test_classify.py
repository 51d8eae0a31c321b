"""The example on movie reviews learns, resumes bitwise, compares, and says what it lacks."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="needs the hf extra")

from examples import classify, train_gpt
from examples.classify import Settings, compare, main, parse, train
from examples.settings import TrainConfig

GPT_SETTINGS = TrainConfig(
    steps=3, batch=1, context=16, layers=1, width=32, warm_up=1, inner="eager", device="cpu", evaluation_batches=1
)


@pytest.fixture
def settings(tiny_model: Path, reviews: Path) -> Settings:
    """Of a run on the tiny model and the sentences of the tests."""
    torch.compiler.reset()
    return Settings(
        model=str(tiny_model), sentences=str(reviews), steps=32, batch=8, lr=1e-2, held_out=24, inner="eager"
    )


def quiet() -> Console:
    return Console(quiet=True)


@pytest.mark.parametrize("policy", classify.POLICIES)
def test_learns(settings: Settings, policy: str) -> None:
    found = train(replace(settings, policy=policy), quiet())
    assert len(found.losses) == 32
    assert found.losses[-1] < 0.5 < found.losses[0]
    assert found.after > max(0.9, found.before)


def test_zero_offload_is_adamw(settings: Settings) -> None:
    losses = []
    for policy in ("resident", "zero_offload"):
        torch.compiler.reset()
        losses.append(train(replace(settings, steps=4, policy=policy), quiet()).losses)
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_resume_is_bitwise(settings: Settings, tmp_path: Path) -> None:
    """From the middle of an update window, too."""
    first = replace(settings, steps=7, save_every=3, out=str(tmp_path))
    whole = train(replace(first, out=None), quiet())
    kept = tmp_path / "kept.pt"

    class StoppedError(Exception):
        pass

    def stop(state: dict[str, object], folder: Path) -> None:
        torch.save(state, kept)
        raise StoppedError

    with mock.patch.object(classify, "_write", stop), pytest.raises(StoppedError):
        train(first, quiet())
    resumed = train(replace(first, resume=str(kept)), quiet())
    assert resumed.losses == whole.losses
    assert resumed.after == whole.after
    assert (tmp_path / "checkpoint.pt").exists()
    assert not (tmp_path / "checkpoint.new").exists()


def test_what_cannot_be_resumed_is_named(settings: Settings, tmp_path: Path) -> None:
    saved = replace(settings, steps=2, out=str(tmp_path / "run"))
    train(saved, quiet())
    path = tmp_path / "run" / "checkpoint.pt"
    with pytest.raises(ValueError, match=r"is the end of a run of 2 steps; nothing is left to do"):
        train(replace(saved, resume=str(path)), quiet())
    with pytest.raises(
        ValueError, match=r"lr=0.1 differs from the checkpoint's 0.01; a resumed run keeps its settings"
    ):
        train(replace(saved, resume=str(path), lr=0.1), quiet())
    with pytest.raises(FileNotFoundError, match="does not exist; give the path that a run printed"):
        train(replace(saved, resume=str(tmp_path / "none.pt")), quiet())
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="is not a checkpoint of this example, or is damaged"):
        train(replace(saved, resume=str(path)), quiet())


def test_compare_prints_one_row_of_each_policy(settings: Settings) -> None:
    said = io.StringIO()
    found = compare(replace(settings, steps=4), Console(file=said, width=100))
    rows = [
        line.split()
        for line in said.getvalue().splitlines()
        if line.split()[:1] in [[each] for each in classify.POLICIES]
    ]
    table = [row for row in rows if "accuracy" not in row and "%" in row[1]]
    assert [row[0] for row in table] == [*classify.POLICIES]
    assert [row[1] for row in table] == [f"{each.after:.1%}" for each in found]
    resident, offloaded, _ = found
    assert offloaded.device_bytes < resident.device_bytes


def test_report_and_accuracy_are_printed(settings: Settings, tmp_path: Path) -> None:
    said = io.StringIO()
    train(replace(settings, steps=3, out=str(tmp_path)), Console(file=said, width=500))
    text = said.getvalue()
    for part in ("accuracy before: ", "of 24 sentences", "host update", "after 3 steps", f"checkpoint: {tmp_path}"):
        assert part in text


@mock.patch.dict(os.environ, ZENFLOW_EXAMPLES="/dev/null/no-folder")
def test_small_gpt_trains_without_the_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    with pytest.raises(
        SystemExit, match=r"error: .*; leave steps, topk_ratio out to train a small GPT instead, or give"
    ):
        main(["--steps", "70", "--topk-ratio", "0.2", "--inner", "eager"])
    with mock.patch.object(train_gpt, "parse", return_value=(GPT_SETTINGS, False)):
        assert main(["--inner", "eager", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot be written: Not a directory: a small GPT trains from random weights instead" in said
    assert "step 3, validation loss" in said


def test_unreadable_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*none does not exist; give a GGUF file, or a folder"):
        main(["--model", str(tmp_path / "none")])


def test_command_line_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    settings, comparing = parse(["--topk-ratio", "0.01", "--steps", "5", "--live"])
    assert settings == Settings(topk_ratio=0.01, steps=5, live=True, out="runs/classify")
    assert not comparing
    with pytest.raises(SystemExit):
        parse(["--compare", "--resume", "a.pt"])
    assert (
        "--compare starts three runs and writes no checkpoint; leave --resume and --out out" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["steps", "batch", "tokens", "held_out", "save_every"])
def test_sizes_are_checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([f"--{name.replace('_', '-')}", "0"])
    assert f"{name}=0 must be at least 1" in capsys.readouterr().err


def test_resumed_settings_are_those_of_the_checkpoint(settings: Settings, tmp_path: Path) -> None:
    train(replace(settings, steps=2, out=str(tmp_path)), quiet())
    given = ["--resume", str(tmp_path / "checkpoint.pt"), "--out", "elsewhere"]
    assert parse(given)[0] == replace(settings, steps=2, out="elsewhere", resume=given[1])
    assert parse(given[:2])[0].out == str(tmp_path)
