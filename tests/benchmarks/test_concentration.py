"""Shares and overlaps of slices, from norms that are known, and from a tiny model's run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from benchmarks import concentration, quality
from benchmarks.common import RESULTS, fill
from benchmarks.concentration import FIRST, LAGS, Matrix, averages, held, jaccard, main, top, update_norms
from tests.support.small_texts import REVIEWS, save_tiny_model

STEPS = FIRST + max(LAGS) + 6


def test_top_is_a_share_of_the_slices_and_at_least_one() -> None:
    values = torch.arange(20.0).repeat(2, 1)
    values[1] = values[1].flip(0)
    assert top(values, 0.1).nonzero().tolist() == [[0, 18], [0, 19], [1, 0], [1, 1]]
    assert top(values, 0.01).sum(1).tolist() == [1, 1]


def test_averages_are_of_earlier_steps_alone() -> None:
    norms = torch.tensor([[1.0, 0.0], [0.0, 2.0], [5.0, 5.0]])
    assert torch.allclose(averages(norms), torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.09, 0.2]]))


def test_jaccard_compares_steps_so_far_apart() -> None:
    chosen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    assert jaccard(chosen, 1) == pytest.approx(1 / 3)
    assert jaccard(chosen, 2) == 1.0


def test_shares_of_a_norm_that_moves_to_other_slices() -> None:
    rows = torch.zeros(STEPS, 100)
    rows[:, 0] = 3.0
    rows[range(STEPS), [1 + step % 8 for step in range(STEPS)]] = 1.0  # back after eight steps
    columns = torch.ones(STEPS, 4)
    updates = {step: torch.ones(100) for step in range(0, STEPS, 10)}
    found = Matrix("a.layers.0.q_proj.weight", (100, 4), columns, rows, updates).result(rows.sum(1) + 4.0)
    assert found["norm"] == 0.5
    assert found["rows, 1%"] == found["longer side, 1%"] == found["by the average, 1%"] == 0.375
    assert found["rows, 5%"] == 0.5
    assert found["columns, 10%"] == 0.125
    assert found["16 steps old, 1%"] == 0.375
    assert found["Jaccard, 4 steps, 1%"] == 1.0
    assert found["update, by itself, 10%"] == 10.0
    assert held([found], "rows, 1%") == 0.75
    assert held([found, found], "update, by the average, 5%", "update") == 0.05


def test_update_norms_are_those_of_adamw() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        before = weight.detach().clone()
        optimizer.step()
    moved = (weight.detach() - before).square().sum(0)
    assert torch.allclose(update_norms(optimizer.state[weight]), moved, rtol=1e-4)


def test_run_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "model")
    numbered = enumerate(REVIEWS * 10)
    rows = "\n".join(f"{number}\t{rating or 1.0}\t{text}, {number}" for number, (rating, text) in numbered)
    (tmp_path / "reviews.tsv").write_text(rows)
    out = tmp_path / "concentration.json"
    given = ["--task", "reviews", "--steps", str(STEPS), "--inner", "eager", "--model", str(tmp_path / "model")]
    given += ["--data", str(tmp_path / "reviews.tsv"), "--out", str(out)]
    assert main(given) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert len(row["losses"]) == STEPS
    assert sum(each["norm"] for each in row["matrices"]) == pytest.approx(1.0, rel=1e-3)
    for each in row["matrices"]:
        for side in ("columns", "rows", "longer side"):
            ordered = [each[f"{side}, {ratio}"] for ratio in ("1%", "5%", "10%")]
            assert 0 <= ordered[0] <= ordered[1] <= ordered[2] <= each["norm"]
    said = capsys.readouterr().out
    assert main([*given, "--table"]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("study", [concentration, quality], ids=["concentration", "quality"])
def test_page_agrees_with_the_results_file(study: Any, tmp_path: Path) -> None:
    name = study.__name__.rpartition(".")[2]
    copy = tmp_path / "quality.md"
    copy.write_text(study.PAGE.read_text())
    fill(copy, name, study.page(study.known(RESULTS / f"{name}.json")))
    assert copy.read_text() == study.PAGE.read_text(), f"run python -m benchmarks {name} --table --page"


def test_results_of_other_settings_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are neither shown nor replaced."""
    out = tmp_path / "concentration.json"
    out.write_text((RESULTS / "concentration.json").read_text())
    assert main(["--table", "--steps", "100", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["--table", "--out", str(out)]) == 0
    assert "reviews, AMD EPYC: squared gradient norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--data", "a.tsv"], "--data=a.tsv is of one task: give --task reviews or --task headers"),
        (["--steps", "84"], "--steps=84 must be more than 84"),
    ],
)
def test_bad_options_are_refused(given: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert error in capsys.readouterr().err
