"""``zenflow-compile plan`` and its public functions: what they say, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zenflow_compile as zf
from tests.planning.machines import llama, machine
from zenflow_compile import cli, cli_plan
from zenflow_compile.options import Options
from zenflow_compile.planning import simulate as simulation
from zenflow_compile.profiling.summary import summarize

SMALL = ["plan", "--params", "3e8", "--hardware", "rtx-4090", "--tokens", "1024"]
POLICIES = {"resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity"}
FINDINGS: dict[str, Any] = {
    "machine": {"nodes": {"0": [0, 1]}, "workers": 1, "memory_bytes": 10**10, "device": "cpu"},
    "kernel": "inductor",
    "host": [{"threads": 1, "copy": 9e9, "add": 1e10, "adam": 2.8e9, "parameters": 1e8}],
    "link": [{"memory": "memmove", "to_host": 5e9, "to_device": 4e9}],
    "device": {"parameters": 1e8, "bytes": 2.8e9},
    "resident": {"parameters": 1e9, "bytes": 2.8e10},
    "matmul_flops": 1e11,
    "disk": None,
}


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_policy_has_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*SMALL, "--epoch-tokens", "1e9"]) == 0
    text = capsys.readouterr().out
    parts = ("zenflow, streamed", "hours", "Memory, GB", "activations", "Fastest that fits", '"policy": ')
    for part in (*POLICIES, *parts):
        assert part in text, part
    assert "…" not in text  # nothing is cut off at 80 columns
    assert max(map(len, text.splitlines())) <= 80


def test_json_has_the_same_numbers_as_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(SMALL, capsys)
    assert {each["policy"] for each in found["policies"]} == POLICIES
    for each in found["policies"]:
        assert each["fits"] == (not each["shortages"])
        assert 0 <= each["stall_s"] < each["step_s"]
        assert each["tokens_per_s"] == pytest.approx(1024 / each["step_s"])
        assert sum(each["needs"]["device"].values()) > 0
    model = cli_plan.models.of_size(300_000_000)
    assert json.loads(json.dumps(zf.plan(model, "rtx-4090", tokens=1024))) == found


def test_the_recommended_block_is_made_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(SMALL, capsys)
    recommended = Options.from_keywords(**found["recommended"])
    row = next(each for each in found["policies"] if each["options"] == found["recommended"])
    assert (row["fits"], row["policy"]) == (True, recommended.policy)


def test_one_policy_with_its_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--policy", "zenflow", "--topk-ratio", "0.2", "--update-interval", "2", "--max-grad-norm", "1"]
    (each,) = answer(arguments, capsys)["policies"]
    assert each["options"] == {"policy": "zenflow", "topk_ratio": 0.2, "update_interval": 2, "max_grad_norm": 1.0}


def test_hours_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    for each in answer([*SMALL, "--epoch-tokens", "7.2e9"], capsys)["policies"]:
        assert each["hours"] == pytest.approx(2e6 / each["tokens_per_s"])


def test_memory_that_is_given_decides_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*SMALL, "--device-bytes", "1e6"], capsys)
    assert found["recommended"] is None
    assert not any(each["fits"] for each in found["policies"])
    assert cli.main([*SMALL, "--device-bytes", "1e6"]) == 0
    assert "Nothing fits." in capsys.readouterr().out


def test_devices_share_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    node = ["plan", "--params", "3e8", "--hardware", "4xh100-80g", "--tokens", "1024", "--policy", "resident"]
    one, four = (answer([*node, "--devices", count], capsys)["policies"][0] for count in ("1", "4"))
    state = [each["needs"]["device"]["optimizer state"] for each in (one, four)]
    assert state[1] == state[0] // 4


def test_the_trace_is_the_recommended_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert cli.main([*SMALL, "--policy", "zero_offload", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {"forward", "backward", "host_update", "copy", "step"} <= {event["name"] for event in events}


def test_explain_prints_equations_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--policy", "zenflow", "--explain"]) == 0
    assert "traffic" in capsys.readouterr().out
    assert answer([*SMALL, "--explain"], capsys)["explained"]


def test_a_configuration_as_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    keys = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 128} | keys))
    by_option = answer(["plan", "--config", str(path), "--hardware", "h200"], capsys)
    assert answer(["plan", "--model", str(path), "--hardware", "h200"], capsys) == by_option
    assert by_option["parameters"] > 1000 * 256


def test_a_saved_measurement_is_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(FINDINGS))
    arguments = ["plan", "--params", "1e8", "--doctor-json", str(path)]
    found = answer(arguments, capsys)
    assert found["hardware"] == "measured"
    assert "zero_infinity" not in {each["policy"] for each in found["policies"]}  # no disk was measured
    assert answer([*arguments, "--flops", "1e11"], capsys) == found
    assert answer([*arguments, "--flops", "1e10"], capsys)["policies"][0]["step_s"] > found["policies"][0]["step_s"]


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = {"read": 1e9, "write": 5e8, "free_bytes": 10**12}
    monkeypatch.setattr(cli_plan, "_measure", lambda nvme_path: FINDINGS | {"disk": nvme_path and disk})
    arguments = ["plan", "--params", "1e8", "--hardware", "measured"]
    assert answer(arguments, capsys)["devices"] == 1
    found = answer([*arguments, "--policy", "zero_infinity", "--nvme-path", "some/disk"], capsys)
    assert found["recommended"]["nvme_path"] == "some/disk"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama2-7", "--hardware", "h200"], 'did you mean "llama2-7b"'),
        (["--model", "llama2-7b", "--hardware", "h20"], 'did you mean "h200"'),
        (["--model", "missing/config.json", "--hardware", "h200"], "missing/config.json"),
        (["--config", "nowhere.json", "--hardware", "h200"], "nowhere.json"),
        (["--hardware", "h200"], "one of the arguments --model --params --config is required"),
        (["--params", "1e8"], "one of the arguments --hardware --doctor-json is required"),
        (["--params", "-1", "--hardware", "h200"], "--params=-1.0 must be a finite number > 0"),
        (["--params", "1e8", "--hardware", "measured", "--flops", "0"], r"--flops=0\.0 must be a finite"),
        (["--params", "1e8", "--doctor-json", "nowhere.json", "--flops", "1e12"], "nowhere.json"),
        (["--params", "1e8", "--hardware", "h200", "--tokens", "0"], "tokens=0 must be an integer >= 1"),
        (["--params", "1e8", "--hardware", "h200", "--devices", "2"], r"devices=2 must be an integer in \[1, 1\]"),
        (["--params", "1e8", "--hardware", "h200", "--ratio", "1.5"], r"ratio=1\.5 must be a number in \[0, 1\]"),
        (["--params", "1e8", "--hardware", "h200", "--topk-ratio", "-1"], r"topk_ratio=-1\.0 must be a number in"),
        (["--params", "1e8", "--hardware", "h200", "--update-stride", "0"], "update_stride=0 must be an integer >= 1"),
        (["--params", "1e8", "--hardware", "h200", "--staleness", "2"], r"staleness=2 must be an integer in \[0, 1\]"),
        (["--params", "1e8", "--hardware", "h200", "--policy", "zenflo"], 'did you mean "zenflow"'),
        (["--params", "1e8", "--hardware", "h200", "--epoch-tokens", "0"], r"epoch_tokens=0\.0 must be a finite"),
        (["--params", "1e8", "--hardware", "h200", "--device-bytes", "0"], r"device_bytes=0\.0 must be a finite"),
    ],
)
def test_bad_arguments_exit_with_2_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "Device", None)
    monkeypatch.setattr(cli_plan, "_measure", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *arguments])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


@pytest.mark.parametrize("content", ["not json", "[]", "{}", json.dumps(FINDINGS | {"link": []})])
def test_a_file_that_doctor_did_not_write(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--params", "1e8", "--doctor-json", str(path), "--flops", "1e11"])
    assert caught.value.code == 2
    assert "doctor --json" in capsys.readouterr().err


def test_a_trace_without_a_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*SMALL, "--policy", "resident", "--trace", str(tmp_path / "missing" / "trace.json")])
    assert "cannot be written" in capsys.readouterr().err


def test_hardware_without_a_needed_number() -> None:
    model = llama()
    with pytest.raises(ValueError, match="peer_bandwidth=None of hardware 'round' must be bytes per second"):
        zf.plan(model, machine(devices=2), tokens=1)
    with pytest.raises(ValueError, match="hardware='round' has no disk_read and disk_write"):
        zf.plan(model, machine(disk_read=None), tokens=1, policy="zero_infinity")
    with pytest.raises(TypeError, match='unknown option \'topk\'; did you mean "topk_ratio"'):
        zf.plan(model, machine(), tokens=1, topk=0.1)


def test_the_timeline_of_named_things() -> None:
    recording = zf.simulate(llama(), machine(), tokens=1, policy="zero_offload", steps=3)
    assert summarize(recording)["steps"] == 3
    assert recording.blocking
    with pytest.raises(ValueError, match='policy="auto" is not one policy to simulate'):
        zf.simulate(llama(), machine(), tokens=1, policy="auto")


def test_planning_imports_no_torch() -> None:
    """It is what makes the command answer at once: importing torch alone takes seconds."""
    script = "import sys, zenflow_compile as zf; zf.plan('llama2-7b', 'h200'); sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=120, check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in zf.__all__:
        assert callable(getattr(zf, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        zf.plans  # noqa: B018
