"""Tests the output of ``zenflow-compile plan`` and its public functions, and the arguments that they refuse."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import zenflow_compile as zf
from tests.support.calls import calls_of
from tests.support.machines import SLOW_HOST, llama, machine
from zenflow_compile.cli import main, plan
from zenflow_compile.cli.doctor import quick_findings
from zenflow_compile.options.options import Options
from zenflow_compile.performance import hardware, models
from zenflow_compile.prediction.device import SimulatedDevice
from zenflow_compile.prediction.forecast import explain
from zenflow_compile.prediction.predict import predict, scenario_of
from zenflow_compile.profiling.summary import summarize
from zenflow_compile.rules import Lion, Muon

SMALL = ["plan", "--params", "3e8", "--hardware", "rtx-4090", "--tokens", "1024"]
POLICIES = {"resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity"}
STREAMED = ("deep_optimizer_states", "--update-stride", "1")
FINDINGS: dict[str, Any] = {
    "machine": {"nodes": {"0": [0, 1]}, "workers": 1, "memory_bytes": 10**10, "device": "cpu"},
    "kernel": "native",
    "host": [{"threads": 1, "copy": 9e9, "add": 1e10, "adam": 2.8e9, "parameters": 1e8}],
    "link": [{"memory": "memmove", "to_host": 5e9, "to_device": 4e9}],
    "device": {"parameters": 1e8, "bytes": 2.8e9},
    "resident": {"parameters": 1e9, "bytes": 2.8e10},
    "matmul_flops": 1e11,
    "disk": None,
}


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_policy_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*SMALL, "--epoch-tokens", "1e9"]) == 0
    text = capsys.readouterr().out
    parts = ("zenflow, files", "hours", "Memory, GB", "activations", "Fastest that fits", '"policy": ')
    for part in (*POLICIES, *parts):
        assert part in text, part
    assert "…" not in text  # nothing is cut off at 80 columns
    assert max(map(len, text.splitlines())) <= 80


def test_bytes_of_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that the guide has per deferred element, for a plan without any resident elements to speak of."""
    asked = ["plan", "--model", "llama3-8b", "--hardware", "rtx-4090", "--policy", "zenflow", "--device-share", "0"]
    found = answer([*asked, "--topk-ratio", "0", "--offload-weights", "1.0", "--bytes"], capsys)["bytes_per_parameter"]
    assert len(found) == 18
    of = {tuple(each["options"].values()): each for each in found}
    for options, expected in {
        ("fp32", False, "each"): 19,
        ("fp8", True, "each"): 11.06,
        ("bf16", False, "mean"): 12,
    }.items():
        assert of[options]["host"] == pytest.approx(expected, abs=0.2)
        assert of[options]["disk"] == 0.0
    assert main.main([*asked, "--bytes"]) == 0
    assert "fp8, split" in capsys.readouterr().out


def test_bytes_without_host_state(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-8b", "--hardware", "rtx-4090", "--policy", "resident", "--bytes"]
    found = answer(asked, capsys)["bytes_per_parameter"]
    assert [each["options"]["state_dtype"] for each in found] == ["fp32", "bf16", "fp8"]
    assert [round(found[0]["device"] - each["device"], 1) for each in found] == [0.0, 4.0, 5.9]


def test_json_has_the_numbers_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(SMALL, capsys)
    assert {each["policy"] for each in found["policies"]} == POLICIES
    for each in found["policies"]:
        assert each["fits"] == (not each["shortages"])
        assert 0 <= each["stall_s"] < each["step_s"]
        assert each["tokens_per_s"] == pytest.approx(1024 / each["step_s"])
        assert sum(each["needs"]["device"].values()) > 0
    model = models.of_size(300_000_000)
    assert json.loads(json.dumps(zf.plan(model, "rtx-4090", tokens=1024))) == found
    assert json.loads(json.dumps(zf.plan(3e8, "rtx-4090", tokens=1024))) == found


def test_optimizer_in_backward_hides_more(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama2-7b", "--hardware", "h200", "--recompute", "--policy", "zenflow"]
    (explicit,), (implicit,), (clipped,) = (
        answer([*arguments, *more], capsys)["policies"]
        for more in ([], ["--implicit"], ["--implicit", "--max-grad-norm", "1"])
    )
    assert implicit["step_s"] < explicit["step_s"] == clipped["step_s"]
    names = {False: "with an optimizer object", True: "without an optimizer object"}
    for flag, name in names.items():
        assert main.main([*SMALL, "--policy", "zenflow", *(["--implicit"] if flag else [])]) == 0
        assert name in " ".join(capsys.readouterr().out.split())
    hidden, waited = (
        summarize(zf.simulate(llama(), SLOW_HOST, tokens=1, implicit=flag))["step_ms"] for flag in (True, False)
    )
    assert hidden is not None
    assert waited is not None
    assert hidden < waited


def test_attention_work_follows_the_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds of FLOPs at the device's speed, and of AdamW's bytes at its memory's; the published 28 layers of 1536."""
    arguments = ["plan", "--model", "qwen2.5-1.5b", "--hardware", "h200", "--tokens", "2048", "--policy", "resident"]
    whole, short = answer(arguments, capsys), answer([*arguments, "--sequence", "512"], capsys)
    assert (whole["sequence"], short["sequence"]) == (2048, 512)
    for found in (whole, short):
        flops = 2048 * (6 * found["parameters"] + 12 * 28 * 1536 * found["sequence"])
        seconds = flops / (0.4 * 989e12) + 28 * found["parameters"] / 4800e9
        assert found["policies"][0]["step_s"] == pytest.approx(seconds, rel=0.01)
    assert answer([*SMALL, "--policy", "resident"], capsys)["sequence"] == 1024
    assert zf.plan("llama2-7b", "h200", tokens=8192, policy="resident")["sequence"] == 2048
    assert zf.plan("llama2-7b", "h200", tokens=8192, policy="resident", sequence=4096)["sequence"] == 4096
    assert main.main([*arguments, "--sequence", "512"]) == 0
    assert "in sequences of 512" in " ".join(capsys.readouterr().out.split())


def test_dtype_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        found = answer([*SMALL, "--policy", "resident", "--dtype", dtype], capsys)
        assert found["dtype"] == dtype
        assert found["policies"][0]["needs"]["device"]["weights"] == size * found["parameters"]
        assert zf.plan(llama(), machine(), tokens=1, dtype=dtype)["dtype"] == dtype
    assert zf.plan(llama(), machine(), tokens=1)["dtype"] == "bf16"
    assert main.main([*SMALL, "--policy", "resident", "--dtype", "fp32"]) == 0
    assert "parameters in fp32" in capsys.readouterr().out


def test_update_rule_moves_its_own_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """The master and the arrays of the rule both ways, a gradient and a weight of 2 bytes each."""

    def found(rule: str, policy: str, *options: str) -> dict[str, Any]:
        given = answer([*SMALL, "--no-recompute", "--policy", policy, "--rule", rule, *options], capsys)
        assert given["rule"] == rule
        numbers: dict[str, Any] = given["policies"][0]
        return numbers

    adamw = found("AdamW", "zero_offload")
    for rule, arrays in (("Lion", 1), ("PlainSGD", 0), ("AdamWAMSGrad", 3)):
        offloaded, streamed = found(rule, "zero_offload"), found(rule, *STREAMED)
        shares = (8 + 8 * arrays) / 24, (8 + 8 * arrays + 4) / 28
        state = offloaded["needs"]["host"]["optimizer state"] / adamw["needs"]["host"]["optimizer state"]
        assert state == pytest.approx(shares[0], rel=1e-3)
        assert offloaded["host_update_s"] / adamw["host_update_s"] == pytest.approx(
            shares[1], rel=0.03
        )  # copies share the host's memory
        assert streamed["state"] / found("AdamW", *STREAMED)["state"] == pytest.approx(shares[0], rel=0.01)
    assert found("Lion", "resident")["step_s"] < found("AdamW", "resident")["step_s"]
    assert main.main([*SMALL, "--policy", "resident", "--rule", "Lion"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "updated by Lion" in said
    assert "Options to pass to ZenFlow with the rule Lion:" in said
    own = zf.plan(llama(), machine(), tokens=1, policy="resident", rule=Lion())
    assert own["rule"] == "Lion"
    with pytest.raises(ValueError, match=r'rule=.Lyon. is not one of .*did you mean "Lion"'):
        zf.plan(llama(), machine(), tokens=1, rule="Lyon")


def test_muon_orthogonalizes_hidden_matrices() -> None:
    """State of 8 bytes an element is streamed; what Newton-Schulz computes takes the device's time."""

    def found(rule: str, policy: str, model: str = "qwen2.5-1.5b") -> dict[str, Any]:
        answered = zf.plan(model, "rtx-4090", tokens=4096, policy=policy, recompute=False, rule=rule)
        assert answered["rule"] == rule
        numbers: dict[str, Any] = answered["policies"][0]
        return numbers

    shape, machine = models.model("qwen2.5-1.5b"), hardware.hardware("rtx-4090")
    hidden = [spec.shape for spec in shape.params if len(spec.shape) == 2 and "embed" not in spec.name]
    flops = sum(Muon().matrix_flops(*each) for each in hidden)
    muon, adamw = found("Muon", "resident"), found("AdamW", "resident")
    longer = muon["step_s"] - adamw["step_s"]
    moved = 8 * sum(rows * columns for rows, columns in hidden) / machine.device_bandwidth
    assert longer == pytest.approx(flops / machine.device_flops / machine.utilization - moved, rel=0.01)
    streamed = found("Muon", "zero_offload")
    assert streamed["state"] > 0
    assert (
        streamed["needs"]["host"]["optimizer state"]
        < found("AdamW", "zero_offload")["needs"]["host"]["optimizer state"]
    )
    assert Muon().matrix_flops(10, 20) == Muon().matrix_flops(20, 10) == 5 * (4 * 100 * 20 + 2 * 1000)


def test_devices_share_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    """Each updates a fourth of them, and the step is shorter by that; models of ``fully_shard`` are refused."""

    @cache
    def found(devices: int, rule: str) -> dict[str, Any]:
        answered = zf.plan(
            "llama3.2-1b", "4xh100-80g", tokens=4096, policy="zero_offload", rule=rule, devices=devices, recompute=False
        )
        numbers: dict[str, Any] = answered["policies"][0]
        return numbers

    hidden = [spec.shape for spec in models.model("llama3.2-1b").params if len(spec.shape) == 2][1:]
    machine = hardware.hardware("4xh100-80g")
    iterations = sum(Muon().matrix_flops(*each) for each in hidden) / machine.device_flops / machine.utilization
    longer = [found(devices, "Muon")["step_s"] - found(devices, "AdamW")["step_s"] for devices in (1, 4)]
    assert longer[0] - longer[1] > 0.5 * iterations
    scratch = {devices: found(devices, "Muon")["needs"]["device"]["scratch of matrices"] for devices in (1, 4)}
    assert scratch[1] == scratch[4] == 20 * max(rows * columns for rows, columns in hidden)
    command = ["plan", "--model", "llama3.2-1b", "--hardware", "4xh100-80g", "--policy", "zero_offload"]
    for rule, expected in (("Muon", False), ("AdamW", True)):
        assert main.main([*command, "--rule", rule]) == 0
        assert ("fully_shard" in capsys.readouterr().out) is expected


def test_streamed_state_crosses_the_link_of_each_device() -> None:
    """That of matrices, both ways: with bf16 weights a momentum and a master of 4 bytes an element."""

    def sent(rule: str) -> dict[str, Any]:
        answered = zf.plan("llama3.2-1b", "4xh100-80g", tokens=4096, policy="zero_offload", rule=rule, recompute=False)
        ways: dict[str, Any] = answered["exchanges"]
        return ways

    hidden = sum(math.prod(spec.shape) for spec in models.model("llama3.2-1b").params if len(spec.shape) == 2)
    hidden -= math.prod(models.model("llama3.2-1b").params[0].shape)  # the embedding is AdamW's
    muon, adamw = sent("Muon"), sent("AdamW")
    for way, devices in (("all_reduce", 1), ("whole_weights", 4)):
        for direction in ("to_host", "to_device"):  # instead of gradients down and weights up, of 2 bytes
            more = muon[way][direction] - adamw[way][direction]
            assert more == pytest.approx((8 - 2) * hidden / devices, rel=1e-3)
    assert muon["changed_slices"]["to_host"] == pytest.approx(muon["whole_weights"]["to_host"], rel=0.1)


def test_files_have_no_state_of_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    said = "Muon keeps its state in host memory, also where that of others is in files."
    for policy, expected in (("zero_infinity", True), ("zero_offload", False)):
        assert main.main([*SMALL, "--rule", "Muon", "--policy", policy]) == 0
        assert (said in " ".join(capsys.readouterr().out.split())) is expected
        assert (said in answer([*SMALL, "--rule", "Muon", "--policy", policy], capsys)["notes"]) is expected
    assert said not in zf.plan("llama3.2-1b", "h200", tokens=1024, rule="Muon", recompute=True)["notes"]
    windows = zf.plan("llama3.2-1b", "h200", tokens=1024, rule="Muon", policy="zenflow", recompute=True)["notes"]
    assert [note.partition(":")[0] for note in windows] == ["Not exactly AdamW"]  # which has the rest, and its windows


def test_several_devices_are_predicted_only(capsys: pytest.CaptureFixture[str]) -> None:
    node = ["plan", "--params", "3e8", "--hardware", "4xh100-80g", "--tokens", "1024", "--policy", "resident"]
    (note,) = answer(node, capsys)["notes"]
    assert note.startswith("One of the 4 devices is simulated, with resident state, and an equal share of the other")
    assert main.main(node) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert answer([*node, "--devices", "1"], capsys)["notes"] == []


def test_nodes_share_the_work_over_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--params", "3e8", "--hardware", "8xh100-80g", "--tokens", "1024", "--policy", "zero_offload"]
    one, four = answer(plan, capsys), answer([*plan, "--nodes", "4"], capsys)
    assert (one["nodes"], one["devices"], four["nodes"], four["devices"]) == (1, 8, 4, 32)
    sent = {name: each["sent"] for name, each in one["exchanges"].items()}
    assert sent["sharded"] > sent["all_reduce"] == sent["whole_weights"]
    weights = 2 * one["parameters"]
    assert sent["all_reduce"] == pytest.approx(2 * weights * 7 / 8)
    assert four["exchanges"]["all_reduce"]["sent"] == pytest.approx(2 * weights * 31 / 32)
    assert four["exchanges"]["sharded"]["to_host"] == pytest.approx(one["exchanges"]["sharded"]["to_host"] / 4)
    assert main.main([*plan, "--nodes", "4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "32 devices on 4 nodes" in printed
    assert "GB/s to other nodes" in printed
    assert f"fully_shard {four['exchanges']['sharded']['sent'] / 1e9:.1f}" in printed
    assert answer([*plan, "--devices", "1"], capsys)["exchanges"] == {}


def test_nodes_must_be_connected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["plan", "--params", "3e8", "--hardware", "gh200", "--nodes", "2"])
    assert "network_bandwidth=None of hardware 'gh200'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="nodes=0"):
        zf.plan("llama2-7b", "8xh100-80g", nodes=0)


def test_flags_read_bounds_and_large_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    bounds = ["--policy", "zenflow", "--update-interval", "2,8", "--device-share", "1e9"]
    assert answer([*SMALL, *bounds], capsys)["policies"][0]["options"].items() >= {
        "update_interval": [2, 8], "device_share": 10**9,
    }.items()  # fmt: skip
    filled = answer([*SMALL, "--device-share", "fill"], capsys)["policies"]
    assert all(each["options"]["device_share"] > 1 for each in filled if each["policy"] == "zenflow")


def test_rows_name_the_chosen_options(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ratio", "0.35", "--update-stride", "12345", "--epoch-tokens", "1e9"]
    assert main.main([*SMALL, *given, "--device-memory", "1e12"]) == 0
    text = capsys.readouterr().out
    assert "twinflow 0.35" in text
    assert re.search(r"deep_optimizer_states\s+0\.35, none", text)
    assert re.search(r"zenflow\s+none\b", text)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.matrix(3)
@pytest.mark.parametrize("text", ["0.5", "1.0", "2GB", "1 GiB", "1.5e9B", "1800000000"])
def test_weights_cross_once_per_micro_batch(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    params = ["plan", "--params", "1.2e9", "--hardware", "rtx-4090", "--tokens", "1024", "--recompute"]
    arguments = [*params, "--device-share", "0", "--offload-weights", text]
    accumulating = [*arguments, "--gradient-accumulation-steps", "2"]
    one, two = answer(arguments, capsys), answer(accumulating, capsys)
    assert not any("micro-batch: fewer" in note for note in one["notes"])
    assert any("Weights cross once per micro-batch: fewer and larger ones move less." in note for note in two["notes"])
    for each, twice in zip(one["policies"], two["policies"], strict=True):
        weights = each["weights"]
        if each["options"] | {"gradient_accumulation_steps": 2} != twice["options"]:
            continue  # another share of the state fits
        assert twice["weights"]["micro_batch_bytes"] == weights["micro_batch_bytes"] > 0
        assert twice["weights"]["to_device"] - weights["to_device"] == weights["micro_batch_bytes"]
        assert each["options"]["offload_weights"] == _bytes_or_share(text)
    assert main.main(accumulating) == 0
    printed = capsys.readouterr().out
    chosen = next(each for each in two["policies"] if each["options"] == two["recommended"])["weights"]
    flat = " ".join(printed.split())
    assert f"{chosen['offloaded']} weights of {chosen['offloaded_bytes'] / 1e9:.1f} GB are loaded in each" in flat
    assert f"{chosen['micro_batch_bytes'] / 1e9:.1f} GB cross to the device per micro-batch" in flat
    assert f"{chosen['kept']}/{chosen['kept'] + chosen['offloaded']}" in flat
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80


def _bytes_or_share(text: str) -> float:
    known = {"0.5": 0.5, "1.0": 1.0, "2GB": 2 * 10**9, "1 GiB": 2**30, "1.5e9B": 1_500_000_000}
    return known.get(text, 1_800_000_000)


def test_weights_that_fit_are_said_to_stay(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--policy", "zenflow", "--offload-weights", "8GB"]
    said = "All weights fit the budget of offload_weights, and stay on the device."
    assert said in answer(arguments, capsys)["notes"]
    assert answer([*SMALL, "--policy", "zenflow"], capsys)["policies"][0]["weights"] is None


RECOMMENDED = {"policy": "zero_infinity", "gradient_accumulation_steps": 1}


def test_placeholder_directory_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*SMALL, "--policy", "zero_infinity"], capsys)
    assert found["recommended"] == found["policies"][0]["options"] == RECOMMENDED
    assert any("Add nvme_path to the recommended options" in note for note in found["notes"])
    assert main.main([*SMALL, "--policy", "zero_infinity"]) == 0
    assert "nvme_path stands for a directory on a local disk." in capsys.readouterr().out
    given = zf.plan(3e8, "rtx-4090", tokens=1024, policy="zero_infinity", nvme_path="some/disk")
    assert given["recommended"] == RECOMMENDED | {"nvme_path": "some/disk"}
    assert given["notes"] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "once per update window of 4 steps. Exact with update_interval=1."),
        ({"update_interval": "auto"}, "once per update window of up to 4 steps. Exact with update_interval=1."),
        (
            {"staleness": 1, "gradient_transfer": "int8", "update_interval": 1},
            'a step late, by rounded gradients. Exact with staleness=0 and gradient_transfer="each".',
        ),
        ({"update_interval": 1}, None),
        ({"device_share": 10**12}, None),  # nothing is deferred
        ({"policy": "zero_offload", "update_interval": 4}, None),
    ],
)
def test_recommendation_says_whether_it_is_adamw(options: dict[str, Any], said: str | None) -> None:
    notes = zf.plan(llama(), machine(), tokens=1, **{"policy": "zenflow"} | options)["notes"]
    assert notes == ([] if said is None else [f"Not exactly AdamW: deferred columns are updated {said}"])


def test_note_on_exactness_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*SMALL, "--policy", "zenflow"]) == 0
    assert "Not exactly AdamW: " in capsys.readouterr().out


def test_recommended_block_holds_valid_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(SMALL, capsys)
    recommended = Options.from_keywords(**found["recommended"])
    row = next(each for each in found["policies"] if each["options"] == found["recommended"])
    assert (row["fits"], row["policy"]) == (True, recommended.policy)


def test_one_policy_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--policy", "zenflow", "--topk-ratio", "0.2", "--update-interval", "2", "--max-grad-norm", "1"]
    (each,) = answer(arguments, capsys)["policies"]
    assert each["options"].pop("gradient_accumulation_steps") == each["micro_batches"]
    assert each["options"] == {"policy": "zenflow", "topk_ratio": 0.2, "update_interval": 2, "max_grad_norm": 1.0}


def test_every_option_of_a_plan_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--policy", "zenflow", "--offload-device", "nvme", "--host-window-bytes", "1GB"]
    (each,) = answer([*SMALL, *given, "--gradient-transfer", "int8"], capsys)["policies"]
    assert each["options"].items() >= {"offload_device": "nvme", "host_window_bytes": 10**9}.items()
    assert each["options"]["gradient_transfer"] == "int8"


def test_unread_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*SMALL, "--policy", "resident", "--topk-ratio", "0.3"]) == 0
    assert "warning: policy='resident' does not read topk_ratio (read by zenflow)" in capsys.readouterr().err
    assert main.main([*SMALL, "--topk-ratio", "0.3"]) == 0
    assert capsys.readouterr().err == ""


def test_other_options_are_named_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A few GB too little for the policies with their defaults; enough for state in fewer bytes."""
    assert main.main([*SMALL, "--device-memory", "1.2GB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Nothing fits\. .* With other options a step takes .* \(--frontier .*\{\"policy\"", text)
    assert main.main([*SMALL, "--device-memory", "0.1GB"]) == 0
    assert "With other options nothing fits either: the nearest" in " ".join(capsys.readouterr().out.split())


def test_hours_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    for each in answer([*SMALL, "--epoch-tokens", "7.2e9"], capsys)["policies"]:
        assert each["hours"] == pytest.approx(2e6 / each["tokens_per_s"])


def test_given_memory_decides_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*SMALL, "--device-memory", "1e6"], capsys)
    assert found["recommended"] is None
    assert not any(each["fits"] for each in found["policies"])
    assert main.main([*SMALL, "--device-memory", "1e6"]) == 0
    assert "Nothing fits." in capsys.readouterr().out


@pytest.mark.parametrize(("policy", "memory", "state"), [("resident", "device", 4), ("zero_offload", "host", 1)])
def test_devices_share_what_is_offloaded(
    policy: str, memory: str, state: int, capsys: pytest.CaptureFixture[str]
) -> None:
    node = ["plan", "--params", "3e8", "--hardware", "4xh100-80g", "--tokens", "1024", "--policy", policy]
    one, four = (answer([*node, "--devices", count], capsys)["policies"][0] for count in ("1", "4"))
    devices = 4 if memory == "device" else 1  # host memory is counted for the node
    found = [each["needs"][memory]["optimizer state"] for each in (one, four)]
    assert devices * found[1] == state * found[0]


def test_trace_is_the_recommended_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main.main([*SMALL, "--policy", "zero_offload", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {"forward", "backward", "host_update", "copy", "step"} <= {event["name"] for event in events}


def test_explain_prints_equations_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*SMALL, "--policy", "zenflow", "--explain"]) == 0
    assert "traffic" in capsys.readouterr().out
    assert answer([*SMALL, "--explain"], capsys)["explained"]


@pytest.mark.parametrize("link", [25e9, 25.0])
def test_explain_has_the_smallest_interval(
    link: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no such interval if the link is so slow that a step's gradients take longer than any step."""
    changed = replace(hardware.HARDWARE["rtx-4090"], link_to_host=link, link_to_device=link)
    monkeypatch.setitem(hardware.HARDWARE, "rtx-4090", changed)
    arguments = ["plan", "--params", "3e8", "--hardware", "rtx-4090", "--tokens", "8192", "--explain", "--policy"]
    smallest = answer([*arguments, "zenflow"], capsys)["smallest_interval"]
    assert (smallest is None) == (link < 1e9)
    for steps in () if smallest is None else (smallest, smallest - 1):
        (row,) = answer([*arguments, "zenflow", "--update-interval", str(steps)], capsys)["policies"]
        assert (row["stall_s"] <= 0.01 * row["step_s"]) == (steps == smallest)
    assert main.main([*arguments, "zenflow"]) == 0
    said = f"smallest update_interval with a stall of at most 1%, by simulation: {smallest or 'none'}"
    assert said in " ".join(capsys.readouterr().out.split())
    assert "smallest_interval" not in answer([*arguments, "zero_offload"], capsys)


def test_explain_compares_the_stride_with_the_equation(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL, "--policy", "deep_optimizer_states", "--explain"]
    said = answer(asked, capsys)["stride"]
    assert re.match(
        r"update_stride: (\d+|none \(nothing is streamed\)); with Equation 1's .* a step takes [\d.]+ s", said
    )
    assert main.main(asked) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_tokens_of_a_step_are_divided(capsys: pytest.CaptureFixture[str]) -> None:
    """Without recomputation, or with a given number of micro-batches, as it is said."""
    tight = ["plan", "--params", "3e8", "--hardware", "rtx-4090", "--policy", "resident", "--device-memory", "9GB"]
    found = answer(tight, capsys)
    assert (found["micro_batches"], found["recompute"]) == (2, False)
    assert answer([*tight, "--recompute"], capsys)["recompute"] is True
    assert answer([*tight, "--gradient-accumulation-steps", "4"], capsys)["micro_batches"] == 4
    assert main.main(tight) == 0
    assert "with 2 micro-batches of 4096 tokens" in " ".join(capsys.readouterr().out.split())


def test_explain_has_no_interval_if_blocking() -> None:
    asked = scenario_of(1e7, "rtx-4090", tokens=64, policy="zenflow", overlap_step=False)
    assert set(explain(predict(asked).shown, asked)) == {"explained"}


def test_nearest_policy_is_explained_and_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has its state on the host, and is not the first in the table."""
    path = tmp_path / "trace.json"
    tight = [*SMALL, "--device-memory", "1e6", "--explain"]
    found = answer([*tight, "--trace", str(path)], capsys)
    assert found["recommended"] is None
    assert found["explained"] == answer([*tight, "--policy", "zero_offload"], capsys)["explained"]
    assert "host_update" in {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert main.main(tight) == 0
    text = capsys.readouterr().out
    assert "Memory of zero_offload, GB" in text
    assert "Nothing fits. zero_offload comes nearest" in text


def test_model_name_wins_over_a_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "llama2-7b").mkdir()
    with chdir(tmp_path):
        assert zf.plan("llama2-7b", "h200", policy="resident")["parameters"] == 6_738_415_616


def test_configuration_as_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    keys = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 128} | keys))
    by_option = answer(["plan", "--config", str(path), "--hardware", "h200"], capsys)
    assert answer(["plan", "--model", str(path), "--hardware", "h200"], capsys) == by_option
    assert by_option["parameters"] > 1000 * 256
    assert answer(["plan", "--config", str(path), "--hardware", "h200", "--dtype", "fp32"], capsys)["dtype"] == "fp32"
    assert json.loads(json.dumps(zf.plan(path, "h200"))) == by_option


def test_saved_measurement_is_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setattr(plan, "_measure", lambda nvme_path: FINDINGS | {"disk": nvme_path and disk})
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
        (["--hardware", "h200"], "one of the arguments --model --params --config --models is required"),
        (["--params", "1e8"], "one of the arguments --hardware --doctor-json is required"),
        (["--params", "-1", "--hardware", "h200"], "--params=-1.0 must be a finite number > 0"),
        (["--params", "1e8", "--hardware", "measured", "--flops", "0"], r"--flops=0\.0 must be a finite"),
        (["--params", "1e8", "--doctor-json", "nowhere.json", "--flops", "1e12"], "nowhere.json"),
        (["--params", "1e8", "--hardware", "h200", "--flops", "1e12"], "goes with --hardware measured or --doctor"),
        (["--model", "7e9", "--hardware", "h200"], r"number of parameters \(--params on the command line\)"),
        (["--params", "1e8", "--hardware", "h200", "--sequence", "9000"], r"sequence=9000 must be .* in \[1, 8192\]"),
        (["--params", "1e8", "--hardware", "h200", "--dtype", "int8"], "dtype='int8' is not one of \"bf16\""),
        (["--params", "1e8", "--hardware", "h200", "--update-stride", "x"], "update_stride='x' must be an integer"),
        (
            ["--params", "1e8", "--hardware", "h200", "--offload-weights", "8XB"],
            r"offload_weights=.8XB. must be False, .auto., an integer of bytes >= 1",
        ),
        (["--params", "1e8", "--hardware", "h200", "--offload-weights", "1.5"], r"offload_weights=1\.5 must be False"),
        (
            ["--params", "1e8", "--hardware", "h200", "--offload-weights", "1MB"],
            r"offload_weights=1000000 bytes must",
        ),
        (["--params", "1e8", "--hardware", "4xh100-80g", "--offload-weights", "0.5"], "shard the model by fully_shard"),
        (["--params", "1e8", "--hardware", "h200", "--device-share", "1.5"], r"device_share=1\.5 must be a number in"),
        (
            ["--params", "1e8", "--hardware", "h200", "--fill-device", "--sub-group-size=8"],
            'unrecognized .*; fill_device: pass device_share="fill"; sub_group_size: leave it out',
        ),
        (["--params", "1e8", "--hardware", "h200", "--update-interval", "8,2"], r"update_interval\[0\]=8 must be"),
        (["--params", "1e8", "--hardware", "h200", "--tokens", "0"], "tokens=0 must be an integer >= 1"),
        (["--params", "1e8", "--hardware", "h200", "--devices", "2"], r"devices=2 must be an integer in \[1, 1\]"),
        (["--params", "1e8", "--hardware", "h200", "--ratio", "1.5"], r"ratio=1\.5 must be a number in \[0, 1\]"),
        (["--params", "1e8", "--hardware", "h200", "--topk-ratio", "-1"], r"topk_ratio=-1 must be a number in"),
        (["--params", "1e8", "--hardware", "h200", "--update-stride", "0"], "update_stride=0 must be an integer >= 1"),
        (["--params", "1e8", "--hardware", "h200", "--staleness", "2"], r"staleness=2 must be an integer in \[0, 1\]"),
        (["--params", "1e8", "--hardware", "h200", "--policy", "zenflo"], 'did you mean "zenflow"'),
        (["--params", "1e8", "--hardware", "h200", "--epoch-tokens", "0"], r"epoch_tokens=0\.0 must be a finite"),
        (["--params", "1e8", "--hardware", "h200", "--device-memory", "0"], r"--device-memory=0\.0 must be a finite"),
        (["--params", "1e8", "--hardware", "h200", "--topk-ratio", "nan"], r"topk_ratio=nan must be a number in"),
        (["--params", "1e8", "--hardware", "h200", "--recompute", "--no-recompute"], "not allowed with argument"),
    ],
)
def test_bad_arguments_exit_with_2_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with calls_of(SimulatedDevice.__init__, quick_findings) as made, pytest.raises(SystemExit) as caught:
        main.main(["plan", *arguments])
    assert made == []
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


@pytest.mark.parametrize("content", ["not json", "[]", "{}", json.dumps(FINDINGS | {"link": []})])
def test_invalid_doctor_file_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        main.main(["plan", "--params", "1e8", "--doctor-json", str(path), "--flops", "1e11"])
    assert caught.value.code == 2
    assert "doctor --json" in capsys.readouterr().err


def test_trace_without_a_path_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main([*SMALL, "--policy", "resident", "--trace", str(tmp_path / "missing" / "trace.json")])
    assert "cannot be written" in capsys.readouterr().err


def test_missing_hardware_number_is_named() -> None:
    model = llama()
    with pytest.raises(ValueError, match="peer_bandwidth=None of hardware 'round' must be bytes per second"):
        zf.plan(model, machine(devices=2), tokens=1)
    with pytest.raises(ValueError, match="hardware='round' has no disk_read and disk_write"):
        zf.plan(model, machine(disk_read=None), tokens=1, policy="zero_infinity")
    with pytest.raises(TypeError, match="unknown option 'topk'; did you mean \"topk_ratio\""):
        zf.plan(model, machine(), tokens=1, topk=0.1)


@pytest.mark.parametrize(
    ("model", "hardware", "options", "message"),
    [
        (None, "h200", {}, "model=None must be a name, the path of a config.json, a number of parameters, or"),
        (True, "h200", {}, "model=True must be a finite number > 0; it is of type bool"),
        ("llama2-7b", 4, {}, "hardware=4 must be a name or a Hardware; it is of type int"),
        ("llama2-7b", "h200", {"lr": 0.1}, "lr=0.1 is the optimizer's and changes no prediction; leave it out"),
        ("llama2-7b", "h200", {"implicit": 1}, "implicit=1 must be True or False"),
        ("llama2-7b", "h200", {"sequence": 1.5}, r"sequence=1\.5 must be an integer in \[1, 8192\]"),
    ],
)
def test_values_of_the_wrong_type_are_refused(model: Any, hardware: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        zf.plan(model, hardware, **options)


def test_only_the_command_line_measures() -> None:
    message = r"pass zenflow_compile\.performance\.hardware\.hardware_of\(findings\) with what"
    with pytest.raises(ValueError, match=message):
        zf.plan("llama2-7b", "measured")
    with pytest.raises(ValueError, match=r"model=-1\.0 must be a finite number > 0"):
        zf.plan(-1.0, "h200")


def test_timeline_of_a_named_model_and_machine() -> None:
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


def test_every_public_name_exists() -> None:
    for name in zf.__all__:
        assert callable(getattr(zf, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        zf.plans  # noqa: B018
