"""Tests the pairs of the convergence study, its resumption after a cut, and its conclusions."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import convergence
from benchmarks.common import fill
from benchmarks.convergence_study.claims import LIMIT, Paired, judge
from benchmarks.convergence_study.outcomes import Outcomes, checkpoint
from benchmarks.convergence_study.plan import (
    CONTROL,
    OTHERS,
    PHASES,
    REFERENCE,
    STUDIES,
    Phase,
    Run,
    Study,
    plan,
    sweep,
)
from benchmarks.convergence_study.tables import markdown, report, summary
from examples.settings import TrainConfig
from examples.stdlib_text import Text

ROOT = Path(__file__).parents[2]
ROUNDED = "zero_offload, bf16 moments", "zero_offload, 8-bit moments"
S2, S4, S8, AUTO = "zenflow, S = 2", "zenflow, S = 4", "zenflow, S = 8", 'zenflow, S = "auto"'
TEXTS = {
    phase: Text(train=text, validation=text[7:].clone())
    for phase, text in (
        (
            "scratch",
            torch.frombuffer(bytearray(b"def forward(self, x): return self.norm(x)\n" * 50), dtype=torch.uint8),
        ),
        (
            "finetune",
            torch.frombuffer(bytearray(b"Tensor forward(Tensor x) { return norm(x); }\n" * 50), dtype=torch.uint8),
        ),
    )
}


@pytest.fixture
def study() -> Study:
    scratch = TrainConfig(
        steps=6,
        batch=2,
        context=16,
        layers=2,
        width=64,
        warm_up=2,
        lr=1e-3,
        inner="eager",
        device="cpu",
        evaluation_batches=2,
    )
    return Study(
        model="test",
        configs=MappingProxyType({"scratch": scratch, "finetune": replace(scratch, lr=1e-4, steps=3)}),
        rates=MappingProxyType({"scratch": (1e-3, 3e-3), "finetune": (1e-4, 3e-4)}),
    )


def some_text(phase: Phase, limit_bytes: int) -> Text:
    return TEXTS[phase]


def only(runs: list[Run], *names: str) -> list[Run]:
    return [run for run in runs if run.rule.name in names]


def quiet() -> Console:
    return Console(quiet=True)


def losses(values: Mapping[str, list[float]]) -> dict[str, dict[int, float]]:
    return {name: dict(enumerate(row)) for name, row in values.items()}


def test_runs_of_one_seed_differ_in_the_rule_only(study: Study) -> None:
    runs = list(plan(study, PHASES, range(2)))
    for phase, own in (("scratch", set()), ("finetune", {S8})):
        for seed in range(2):
            mine = [run for run in runs if (run.phase, run.config.seed) == (phase, seed)]
            expected = {REFERENCE.name, S2, S4, AUTO, *ROUNDED} | own
            assert {run.rule.name for run in mine} == expected | (
                {CONTROL.name, "zero_offload", *(rule.name for rule in OTHERS)} if seed == 0 else set()
            )
            same: dict[str, Any] = {"policy": "zenflow", "update_interval": 4, "staleness": 0, "state_dtype": "fp32"}
            same |= {"optimizer": "AdamW", "lr": 1.0}
            neutral = {replace(run.config, **same) for run in mine}
            assert len(neutral) == 1
            assert len({repr(run.start) for run in mine}) == 1
    assert [run.config.seed for run in runs] == sorted(run.config.seed for run in runs)
    starts = {run.start for run in runs if run.start}
    assert starts == {run for run in runs if run.phase == "scratch" and run.rule is REFERENCE}
    assert len({run.folder() for run in runs}) == len(runs)


def test_fine_tuning_alone_trains_its_reference(study: Study) -> None:
    first, second, *_ = plan(study, ("finetune",), range(1))
    assert (first.phase, first.rule) == ("scratch", REFERENCE)
    assert second.start == first


def test_model_sizes_are_as_named() -> None:
    for name, millions in (("10m", 10), ("tiny", 1)):
        gpt = STUDIES[name].configs["scratch"].gpt()
        parameters = gpt.layers * (12 * gpt.width**2 + 4 * gpt.width) + (512 + gpt.context + 2) * gpt.width
        assert millions <= parameters / 1e6 < 1.5 * millions
    for study in STUDIES.values():
        assert all(study.configs[phase].lr in study.rates[phase] for phase in PHASES)


def test_cut_off_runs_are_not_lost(study: Study, results: Path, tmp_path: Path) -> None:
    runs = list(sweep(study, PHASES, 0))
    convergence.measure(runs[:3], Outcomes.read(), tmp_path, quiet(), texts=some_text)
    before = json.loads((results / "convergence.json").read_text())["rows"]
    assert [(row["phase"], row["config"]["lr"]) for row in before] == [
        ("scratch", 1e-3),
        ("scratch", 3e-3),
        ("finetune", 1e-4),
    ]

    def only_fine_tuning(phase: Phase, limit_bytes: int) -> Text:
        assert phase == "finetune"
        return some_text(phase, limit_bytes)

    convergence.measure(runs, Outcomes.read(), tmp_path, quiet(), texts=only_fine_tuning)
    after = json.loads((results / "convergence.json").read_text())["rows"]
    assert after[:3] == before  # times and all: not run again
    assert (after[3]["phase"], after[3]["config"]["lr"]) == ("finetune", 3e-4)
    assert after[3]["loss_before"] == after[2]["loss_before"]

    # Without the checkpoint that fine-tuning needs its run is due again, and gives the same numbers.
    kept = checkpoint(runs[0], tmp_path)
    assert kept is not None
    kept.unlink()
    convergence.measure(runs, Outcomes.read(), tmp_path, quiet(), texts=some_text)
    again = Outcomes.read().find(runs[0])
    assert again is not None
    assert again["validation_loss"] == before[0]["validation_loss"]
    assert checkpoint(runs[0], tmp_path) is not None


def test_fine_tuning_continues_on_other_text(study: Study, tmp_path: Path) -> None:
    runs = only(list(plan(study, PHASES, range(1))), REFERENCE.name)
    read: list[Phase] = []

    def same_text(phase: Phase, limit_bytes: int) -> Text:
        read.append(phase)
        return TEXTS["scratch"]

    outcomes = Outcomes()
    convergence.measure(runs, outcomes, tmp_path, quiet(), texts=same_text)
    scratch, finetune = (outcomes.find(run) for run in runs)
    assert read == ["scratch", "finetune"]
    assert scratch is not None
    assert finetune is not None
    # On the same text it starts where the other ended: on its weights. And then it moves.
    assert finetune["loss_before"] == pytest.approx(scratch["validation_loss"], abs=1e-6)
    assert finetune["validation_loss"] != finetune["loss_before"]


def test_other_settings_are_other_runs(study: Study, tmp_path: Path) -> None:
    runs = only(list(plan(study, ("scratch",), range(1))), REFERENCE.name)
    outcomes = Outcomes()
    convergence.measure(runs, outcomes, tmp_path, quiet(), texts=some_text)
    (run,) = runs
    for changed in (
        replace(run, config=replace(run.config, lr=2e-3)),
        replace(run, config=replace(run.config, seed=1)),
        replace(run, phase="finetune", start=run),
        replace(run, model="other"),
    ):
        assert outcomes.find(changed) is None
    assert outcomes.find(replace(run, config=replace(run.config, evaluate_every=1))) is not None
    outcomes.forget("other", [REFERENCE.name])
    outcomes.forget("test", [S4])
    assert outcomes.find(run) is not None
    outcomes.forget("test", [REFERENCE.name])
    assert outcomes.find(run) is None


def test_repeated_reference_repeats_what_continues_it(study: Study) -> None:
    outcomes = Outcomes()
    runs = list(plan(study, PHASES, range(2)))
    for run in runs:
        outcomes.add(run, {"validation_loss": 2.0})
    outcomes.forget("test", [S8])
    assert [run for run in runs if outcomes.find(run) is None] == only(runs, S8)
    outcomes.forget("test", [REFERENCE.name])
    kept = [run for run in runs if outcomes.find(run) is not None]
    assert kept == [run for run in runs if run.phase == "scratch" and run.rule is not REFERENCE]


def test_outcomes_are_written_where_asked(study: Study, results: Path, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.json"
    run = next(iter(plan(study, PHASES, range(1))))
    Outcomes.read(path).add(run, {"validation_loss": 2.0})
    assert Outcomes.read(path).find(run) is not None
    assert not results.exists()


def test_rows_of_other_versions_are_read_and_kept(study: Study, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    older, newer = list(plan(study, ("scratch",), range(1)))[:2]
    for run in (older, newer):
        Outcomes.read(path).add(run, {"validation_loss": 2.0})
    rows = json.loads(path.read_text())
    del rows["rows"][0]["start"], rows["rows"][0]["config"]["fsdp"]
    rows["rows"][1]["config"]["dropout"] = 0.5
    path.write_text(json.dumps(rows))
    outcomes = Outcomes.read(path)
    assert outcomes.find(older) is not None
    assert outcomes.find(newer) is None  # it ran with a setting that no run has here
    outcomes.add(newer, {"validation_loss": 3.0})
    saved = json.loads(path.read_text())["rows"]
    assert [(row["validation_loss"], row["config"].get("dropout")) for row in saved] == [
        (2.0, None),
        (2.0, 0.5),
        (3.0, None),
    ]


def test_sweep_runs_the_reference_at_every_rate(study: Study) -> None:
    runs = list(sweep(study, PHASES, 0))
    assert [(run.phase, run.config.lr) for run in runs] == [
        ("scratch", 1e-3),
        ("scratch", 3e-3),
        ("finetune", 1e-4),
        ("finetune", 3e-4),
    ]
    assert {run.rule for run in runs} == {REFERENCE}
    assert runs[2] in plan(study, PHASES, range(1))  # at the chosen rate: not run twice


def test_paired_difference() -> None:
    paired = Paired.of({0: 2.2, 1: 1.0, 2: 7.0}, {0: 2.0, 1: 1.0})
    assert paired.absolute == pytest.approx({0: 0.2, 1: 0.0})
    assert paired.mean == pytest.approx(0.05)
    assert paired.sd == pytest.approx(0.1 / 2**0.5)
    assert paired.upper == pytest.approx(0.05 + 2 * 0.05)


GOOD = [2.01, 2.11, 2.21]


@pytest.mark.parametrize(
    ("s4", "control", "holds", "sentence"),
    [
        (GOOD, [2.2], True, "the measurement sees a bad rule"),
        ([2.06, 2.16, 2.26], [2.2], False, f"{S4} ends +2.86%"),
        (GOOD, [2.015], False, "NOT RESOLVED"),  # below the limit
        ([1.90, 2.11, 2.32], [2.1], False, "NOT RESOLVED"),  # +5%, within the spread of the claimed rule
        (GOOD[:2], [2.2], None, f"{S4}: NOT MEASURED on every seed"),
        (GOOD, [], None, f"{CONTROL.name}: NOT MEASURED"),
    ],
)
def test_verdicts(s4: list[float], control: list[float], holds: bool | None, sentence: str) -> None:
    measured = losses(
        {
            REFERENCE.name: [2.0, 2.1, 2.2],
            S2: GOOD,
            S4: s4,
            AUTO: GOOD,
            "zero_offload": [2.0],
            **{name: [2.0, 2.1, 2.2] for name in ROUNDED},
            CONTROL.name: control,
        }
    )
    verdicts = judge("scratch", measured, range(3))
    assert len(verdicts) == 7
    (said,) = [verdict for verdict in verdicts if sentence in verdict.sentence]
    assert said.holds is holds
    others = [verdict.holds for verdict in verdicts if verdict is not said and S4 not in verdict.sentence]
    assert all(others)
    assert LIMIT == 0.01


def test_fine_tuning_claims_eight_steps_too() -> None:
    rows = {name: [2.0, 2.0] for name in (REFERENCE.name, S2, S4, AUTO, *ROUNDED)}
    measured = losses({**rows, S8: [2.0, 2.08], "zero_offload": [2.0], CONTROL.name: [2.5]})
    verdicts = judge("finetune", measured, range(2))
    assert [verdict.holds for verdict in verdicts] == [True, True, False, True, True, True, True]
    assert S8 in verdicts[2].sentence


@pytest.mark.parametrize(("name", "limit"), [(ROUNDED[0], 0.003), (ROUNDED[1], 0.005)])
def test_rounded_moments_have_limits_of_their_own(name: str, limit: float) -> None:
    for excess, holds in ((0.9 * limit, True), (1.1 * limit, False)):
        rows = {each: [2.0] for each in (REFERENCE.name, S2, S4, S8, AUTO, "zero_offload", *ROUNDED)}
        verdicts = judge("finetune", losses({**rows, CONTROL.name: [2.5], name: [2.0 * (1 + excess)]}), range(1))
        (said,) = [verdict for verdict in verdicts if name in verdict.sentence]
        assert said.holds is holds


def test_tables_show_the_measurements(study: Study, tmp_path: Path) -> None:
    runs = list(plan(study, PHASES, range(1)))
    outcomes = Outcomes()
    for index, run in enumerate([*runs, *sweep(study, PHASES, 0)]):
        loss = 2.5 if run.rule is CONTROL else 2.0 + index / 1e4
        outcomes.add(run, {"validation_loss": loss, "parameters": 1_000_000, "loss_before": 3.0})
    output = io.StringIO()
    assert report(study, outcomes, PHASES, range(1), Console(file=output, width=120))
    assert not report(study, outcomes, PHASES, range(2), quiet())  # the second seed has not run
    first, second = (2.0 + (len(runs) + place) / 1e4 for place in range(2))
    assert f"resident AdamW of seed 0 at other rates: {first:.4f} at 0.001, {second:.4f} at 0.003" in " ".join(
        output.getvalue().split()
    )

    full = markdown(study, outcomes, range(1))
    # Against the sweep's repetition of the reference.
    assert f"| {S2} | 2.0001 | {2.0001 / first - 1.0:+.2%} (1 seed) |" in full
    assert f"| {CONTROL.name} | 2.5000 |" in full
    assert "Loss before fine-tuning: 3.0000." in full
    assert f"| {S8} |  | " in summary(study, outcomes, range(1))

    document = tmp_path / "page.md"
    document.write_text("above\n<!-- convergence: begin -->\nold\n<!-- convergence: end -->\nbelow\n")
    fill(document, "convergence", full)
    fill(document, "convergence", full)
    assert document.read_text() == (f"above\n<!-- convergence: begin -->\n{full}\n<!-- convergence: end -->\nbelow\n")
    document.write_text("no marks")
    with pytest.raises(ValueError, match="needs the lines"):
        fill(document, "convergence", full)


@pytest.mark.parametrize(("page", "render"), [("docs/guide/benchmarks.md", summary), ("docs/convergence.md", markdown)])
def test_documents_agree_with_the_results_file(
    page: str, render: Callable[[Study, Outcomes, Sequence[int]], str], tmp_path: Path
) -> None:
    study = convergence.on_device(STUDIES["10m"], "cpu", "eager")
    copy = tmp_path / "page.md"
    copy.write_text((ROOT / page).read_text())
    fill(copy, "convergence", render(study, Outcomes.read(ROOT / "benchmarks/results/convergence.json"), range(3)))
    assert copy.read_text() == (ROOT / page).read_text(), "run python -m benchmarks convergence --tables"


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--model", "100m"], "invalid choice"),
        (["--phase", "pretraining"], "invalid choice"),
        (["--again", "zenflow"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            convergence.main(arguments)
        assert message in capsys.readouterr().err
