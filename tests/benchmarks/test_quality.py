"""Runs of the study of quality are kept, compared in pairs, and not performed twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("transformers", reason="needs the hf extra")

from benchmarks.quality import (
    EXACT,
    ON_ALL_SEEDS,
    OTHERS,
    REFERENCE,
    RULES,
    SEEDS,
    Difference,
    Run,
    main,
    runs,
    table,
    tables,
)
from benchmarks.systems.deepspeed_system import refuse_changed, samples
from tests.support.small_texts import REVIEWS, save_tiny_model


def test_each_run_is_listed_one_time() -> None:
    found, others = runs(), len(RULES) + len(OTHERS) + 1 - len(ON_ALL_SEEDS)
    assert len(found) == len(set(found)) == 2 * (len(ON_ALL_SEEDS) * SEEDS + others)
    assert {run.rule for run in found[: 2 * len(ON_ALL_SEEDS)]} == set(ON_ALL_SEEDS)


def test_interval_of_paired_differences() -> None:
    ours, theirs = [1.0, 2.0, 3.0, 6.0], [0.0, 2.0, 2.0, 4.0]
    one = Difference.of([(ours, theirs)])
    assert one.mean == 1.0
    assert one.over_items == pytest.approx(1.96 * (2 / 3) ** 0.5 / 2)
    assert one.over_seeds is None
    two = Difference.of([(ours, theirs), (theirs, ours)])
    assert two == Difference(0.0, 0.0, pytest.approx(12.706 * 2**0.5 / 2**0.5))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and as many sentences as the study holds out and more."""
    folder = tmp_path_factory.mktemp("quality")
    save_tiny_model(folder / "model")
    numbered = enumerate(REVIEWS * 10)
    rows = "\n".join(f"{number}\t{rating or 1.0}\t{text}, {number}" for number, (rating, text) in numbered)
    (folder / "reviews.tsv").write_text(rows)
    return folder / "model", folder / "reviews.tsv"


def test_runs_are_kept_and_compared(
    small: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, (model, data) = tmp_path / "quality.json", small
    given = ["--out", str(out), "--steps", "3", "--inner", "eager", "--task", "reviews"]
    given += ["--model", str(model), "--data", str(data), "--device", "cpu"]
    rules = ["--rule", REFERENCE, "--rule", "zenflow, S = 4"]
    assert main([*given, "--minutes", "0"]) == 0
    assert not out.exists() or len(json.loads(out.read_text())["rows"]) <= 1
    assert main([*given, *rules]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["rule"], row["seed"]) for row in rows].count((REFERENCE, 0)) == 1
    assert {(row["rule"], row["seed"]) for row in rows} >= {
        (rule, seed) for rule in (REFERENCE, "zenflow, S = 4") for seed in range(SEEDS)
    }
    assert all(len(row["scores"]["accuracy"]) == 1024 for row in rows)
    before = out.read_text()
    assert main([*given, *rules]) == 0
    assert main([*given, "--rule", EXACT, "--seed", "1"]) == 0  # it has one run, with seed 0
    assert out.read_text() == before
    said = capsys.readouterr().out
    assert "reviews: accuracy" in said
    assert "reviews: loss" in said
    assert main([*given, *rules, "--steps", "2", "--minutes", "0", "--table"]) == 0
    assert "reviews" not in capsys.readouterr().out  # rows of another number of steps are not compared


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--data", "a.tsv"], "--data=a.tsv is of one task: give --task reviews or --task headers"),
        (["--steps", "0"], "--steps=0 must be at least 1"),
        (["--minutes", "nan"], "--minutes=nan at least 0"),
    ],
)
def test_bad_options_are_refused(given: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert error in " ".join(capsys.readouterr().err.split())


def test_rules_are_compared_on_seeds_of_both() -> None:
    def row(rule: str, seed: int, score: float) -> dict[str, Any]:
        return {"task": "headers", "rule": rule, "seed": seed, "scores": {"loss": [score, score + 1]}}

    rows = [row(REFERENCE, 0, 1.0), row("zenflow, S = 4", 0, 1.5), row("zenflow, S = 4", 1, 9.0)]
    cells = [[*column.cells] for column in table(rows, "headers", "loss", "here").columns]
    assert [column[1] for column in cells] == ["zenflow, S = 4", "1", "2.0000", "+0.5000", "± 0.0000", "-"]


def test_exact_rule_has_the_scores_of_adamw(small: tuple[Path, Path]) -> None:
    """A rule whose host updates come in every step learns the same."""
    model, data = small
    exact, reference = (
        Run("reviews", rule, 0, steps=4, inner="eager", model=str(model), data=str(data)).perform()
        for rule in (EXACT, REFERENCE)
    )
    assert exact["scores"]["loss"] == pytest.approx(reference["scores"]["loss"], abs=2e-5)


def test_devices_have_tables_of_their_own() -> None:
    def row(device: str, score: float) -> dict[str, Any]:
        names = {"machine": {"cpu": "a processor", "device": "a GPU"}, "scores": {"loss": [score]}}
        return {"task": "headers", "rule": REFERENCE, "seed": 0, "device": device} | names

    found = tables([row("cpu", 1.0), row("cuda", 2.0)])
    assert [each.title for each in found] == ["headers: loss, a processor", "headers: loss, a GPU"]
    assert [[*each.columns[2].cells] for each in found] == [["1.0000"], ["2.0000"]]


def test_deepspeed_that_scrambles_weights_is_refused() -> None:
    """Its matrices are laid out transposed, and viewed as if they were not."""
    model = nn.Linear(3, 5)
    before = samples(model)
    refuse_changed(before, samples(model), "0.19.6")
    model.weight.data = model.weight.data.t().reshape(5, 3)
    with pytest.raises(RuntimeError, match=r"DeepSpeed 0\.19\.7 has changed the weights"):
        refuse_changed(before, samples(model), "0.19.7")
