"""Tests that the tables have published numbers next to the simulator's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks import reproduce_papers
from benchmarks.published import deep_optimizer_states, weight_streaming, zenflow
from benchmarks.published.claim import Claim
from benchmarks.published.testbeds import (
    H100,
    phases,
    with_cores,
    with_devices,
    with_host_rate,
    with_unpinned_gradients,
)
from zenflow_compile.performance.hardware import hardware

COMMITTED = Path(reproduce_papers.__file__).parent / "results" / "reproduce_papers.json"


@cache
def found() -> tuple[Claim, ...]:
    return tuple(reproduce_papers.claims())


def named(*texts: str) -> Claim:
    (claim,) = (each for each in found() if all(text in f"{each.where} {each.claim}" for text in texts))
    return claim


def claim(published: float, predicted: float, to: float | None = None, sentence: str = "") -> Claim:
    return Claim(
        where="there",
        claim="that",
        unit="s",
        published=published,
        published_to=to,
        predicted=predicted,
        basis="this",
        sentence=sentence,
    )


def test_every_larger_deviation_is_explained() -> None:
    assert [each for each in found() if not each.explained] == []


def test_every_number_has_its_sources() -> None:
    assert all(each.where and each.basis and each.unit and each.published for each in found())
    keys = [(each.where, each.claim) for each in found()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "place",
    [
        *(f"Figure {number}" for number in (7, 8, 10, 11, 14, 16, 17)),
        "abstract",
        "Llama-2-7B on",
        "corebinding",
        "MegaTrain (",
        "MegaTrain at",
        "DGX-2",
    ],
)
def test_every_place_has_rows(place: str) -> None:
    assert [each for each in found() if place in each.where]


@pytest.mark.parametrize(
    ("text", "predicted"),
    [
        ("k, V100", 2.2945),
        ("k, H100", 0.4888),
        ("over CPU and copy", 20.8),
        ("below the link", 22.0),
        ("as fp32", 5.0),
        ("traffic per step", 1.125),
        ("traffic of ZeRO-Offload", 2.0),
        ("what 13B moves", 52.0),
        ("at 32 GB/s", 1.625),
        ("column norms", 5875),
        ("512 V100", 37.5),
        ("host memory per billion", 16.0),
        ("one H200 with 1.5 TB", 93.75),
    ],
)
def test_rows_of_plain_arithmetic(text: str, predicted: float) -> None:
    assert named(text).predicted == pytest.approx(predicted, rel=2e-3)


@pytest.mark.parametrize(
    ("given", "deviation"),
    [
        (claim(2.0, 3.0), 0.5),
        (claim(2.0, 1.0, to=2.5), -0.5),
        (claim(2.0, 2.2, to=2.5), 0.0),
        (claim(2.0, 3.0, to=2.5), 0.2),
    ],
)
def test_deviation_is_from_the_nearest_number(given: Claim, deviation: float) -> None:
    assert given.deviation == pytest.approx(deviation)


def test_explanation_only_for_larger_deviations() -> None:
    assert claim(2.0, 3.0, sentence="because").row()["sentence"] == "because"
    assert claim(2.0, 2.2, sentence="because").row()["sentence"] == ""
    assert not claim(2.0, 3.0).explained


def test_h100_updates_equal_the_logs() -> None:
    updates = [each for each in found() if "Figure 10" in each.where]
    assert len(updates) == 12
    assert all(abs(each.deviation) < 0.2 for each in updates)


def test_unpinned_copy_takes_the_stated_time() -> None:
    """A quarter of the gradient at 2.5 GB/s: 15.33 billion parameters, two bytes, four GPUs."""
    seconds = phases("dos-20b", with_unpinned_gradients(H100), final_at_step=True, policy="zero_offload").backward
    assert seconds == pytest.approx(15.33e9 * 2 / 4 / 2.5e9, rel=0.02)


def test_stated_host_rate_is_reached() -> None:
    """The first block's gradient is the last to arrive, so nearly the whole update comes after the backward."""
    update = phases("dos-7b", H100, final_at_step=True, policy="zero_offload").update
    assert update == pytest.approx(5.95e9 / 4 * (1 / 2e9 + 1 / 15.5e9), rel=0.15)
    faster = with_host_rate(H100, 3e9, "a test")
    assert phases("dos-7b", faster, final_at_step=True, policy="zero_offload").update < 0.8 * update


def test_slower_link_changes_the_predictions() -> None:
    node = replace(H100, link_to_device=H100.link_to_device / 4)
    before = {(each.where, each.claim): each.predicted for each in found()}
    slower = {(each.where, each.claim): each.predicted for each in deep_optimizer_states.claims(node)}
    changed = [key for key, value in slower.items() if value != before[key]]
    for figure in ("Figure 7", "Figure 8", "Figure 10", "Figure 11", "Figure 17"):
        assert any(figure in where for where, _ in changed), figure
    interleaved = [key for key in changed if "Figure 10" in key[0] and "stride 2" in key[1]]
    assert len(interleaved) == 6
    assert all(slower[key] > before[key] for key in interleaved)


def test_faster_disk_brings_zero_infinity_closer() -> None:
    a100 = hardware("4xa100-40g-pcie4")
    faster = replace(a100, disk_read=10 * 6.4e9, disk_write=10 * 4.0e9)
    (infinity,) = (each for each in zenflow.claims(faster) if "ZeRO-Infinity" in each.claim)
    assert infinity.predicted < 0.5 * named("over ZeRO-Infinity").predicted


def test_weight_streaming_follows_the_hardware() -> None:
    """A device with half the speed trains at half the rate, as long as loads and updates are hidden."""
    gh200 = hardware("gh200")
    slower = weight_streaming.claims(replace(gh200, device_flops=gh200.device_flops / 2))
    (before,) = (each for each in found() if each.where.startswith("MegaTrain (") and each.claim == "model FLOP/s")
    (after,) = (each for each in slower if each.where == before.where and each.claim == before.claim)
    assert 0.5 <= after.predicted / before.predicted < 0.55


def test_part_of_a_node_keeps_each_devices_share() -> None:
    single = with_devices(H100, 1)
    assert (single.devices, single.cores, single.host_bandwidth) == (1, 24, H100.host_bandwidth)
    few = with_cores(H100, 4)
    assert few.cores == 16
    assert few.adam_per_core * 24 == pytest.approx(1 / (1 / 2e9 + 1 / 15.5e9))


def test_table_is_printed_and_written(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nafter\n")
    monkeypatch.setattr(reproduce_papers, "PAGE", page)
    monkeypatch.setattr(reproduce_papers, "claims", lambda: list(found()))
    assert reproduce_papers.main(["--page"]) == 0
    rows = json.loads((results / "reproduce_papers.json").read_text())["rows"]
    assert [row["claim"] for row in rows] == [each.claim for each in found()]
    assert {"where", "published", "predicted", "ours", "deviation", "basis", "sentence", "unit"} <= set(rows[0])
    assert "published and predicted" in capsys.readouterr().out
    assert reproduce_papers.page_tables() == reproduce_papers.tables(rows)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


def test_page_has_the_committed_results() -> None:
    rows = json.loads(COMMITTED.read_text())["rows"]
    assert reproduce_papers.page_tables() == reproduce_papers.tables(rows)
