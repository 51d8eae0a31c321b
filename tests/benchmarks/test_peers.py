"""Rows, targets and tables of the comparison, and a run from end to end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.systems.case import Case
from benchmarks.systems.comparison import Outcome

FACTS = {"resident_share": 0.5, "device_peak_mib": None, "threads": 1}


def outcome(system: str, rounds_ms: list[float], model: str = "optimizer-bound", **changes: object) -> Outcome:
    made = Outcome(
        case=Case(system=system, model=model),
        tried_ms={1: rounds_ms[0] if rounds_ms else 0.0},
        rounds_ms=rounds_ms,
        steps_ms=[[ms, ms] for ms in rounds_ms],
        rounds_over_reference=[ms / 10 for ms in rounds_ms] if system != "adamw" else [],
        losses=[2.0, 1.0],
        facts=dict(FACTS),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def measured() -> dict[str, Outcome]:
    everyone = {"adamw": [10.0, 10.0], "zenflow": [11.0, 11.0], "deepspeed_zenflow": [22.0, 11.0]}
    return {name: outcome(name, ms, turns_with=tuple(set(everyone) - {name})) for name, ms in everyone.items()}


def printed(table: Table) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_targets_are_ratios_within_rounds() -> None:
    found = peers.targets("optimizer-bound", measured())
    assert [(target.measured, target.met) for target in found] == [(1.5, True), (1.1, True)]
    # Peers that took turns with the reference alone are compared through it.
    apart = {name: outcome(name, each.rounds_ms, turns_with=()) for name, each in measured().items()}
    assert [target.measured for target in peers.targets("optimizer-bound", apart)] == [1.5, 1.1]
    assert peers.targets("gpt", measured()) == []


def test_target_without_its_baseline_is_left_out() -> None:
    alone = {"zenflow": outcome("zenflow", [11.0], turns_with=("adamw",)), "adamw": outcome("adamw", [10.0])}
    assert len(peers.targets("optimizer-bound", alone)) == 1
    assert peers.targets("optimizer-bound", {"adamw": alone["adamw"]}) == []


def test_skipped_system_says_why() -> None:
    skipped = outcome("deepspeed_zenflow", [], skipped="make it with scripts/setup_deepspeed.sh")
    outcomes = [*[*measured().values()][:2], skipped]
    adamw, zenflow, missing = peers.rows(outcomes, "free")
    assert adamw["step_over_adamw"] is None
    assert zenflow["step_over_adamw"]["median"] == 1.1
    assert zenflow["loss"] == {"first": 2.0, "last": 1.0, "steps": 2}
    assert missing["skipped"] == skipped.skipped
    assert "step_ms" not in missing
    text = printed(peers.table("title", outcomes, None))
    assert "setup_deepspeed.sh" in text
    assert "1.1 (1.1 to 1.1)" in text


def test_capped_run_is_compared_with_free_reference() -> None:
    capped = outcome("zenflow", [15.0], rounds_over_reference=[])
    assert "1.5 of uncapped" in printed(peers.table("title", [capped], free_reference_ms=10.0))
    assert peers._capped_bytes("tiny") == round(0.8 * 16 * 3 * (128 * 128 + 128))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cores", "10000"], "--cores 10000 must be from 1 to"),
        (["--memory", "capped", "--device", "cpu"], "on the CPU leave it out"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.long
def test_end_to_end(results: Path, tmp_path: Path) -> None:
    sizes = ["--model", "tiny", "--inner", "eager", "--rounds", "2", "--steps", "4", "--pilot", "4", "--threads", "1"]
    systems = ["--system", "adamw", "zenflow", "deepspeed_zenflow", "--deepspeed-python", str(tmp_path / "python")]
    option = ["--option", "device_share=0.0", "--out", str(tmp_path / "trial.json"), "--device", "cpu"]
    assert peers.main([*sizes, *systems, *option]) == 0
    written = json.loads((tmp_path / "trial.json").read_text())
    adamw, zenflow, deepspeed = written["rows"]
    assert written["benchmark"] == "peers"
    assert adamw["turns_beside"] == ["zenflow"]
    assert zenflow["step_over_adamw"]["n"] == 2
    assert zenflow["options"] == {"device_share": 0.0}
    assert zenflow["loss"]["steps"] == adamw["loss"]["steps"] > 12
    assert zenflow["breakdown"]["host_update_ms_per_step"] > 0
    assert "setup_deepspeed.sh" in deepspeed["skipped"]
