"""The limits of control groups are read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zenflow_compile.runtime.host.cgroups import cpu_quota, groups_of


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_all_cgroups_up_to_the_root_count(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    write(membership, "3:cpu,cpuacct:/a/b\n2:memory:/m\n0::/c")
    found = [(str(group.relative_to(tmp_path)), version) for group, version in groups_of("cpu", tmp_path, membership)]
    assert found == [("cpu/a/b", 1), ("cpu/a", 1), ("cpu", 1), ("c", 2), (".", 2)]
    assert list(groups_of("cpu", tmp_path, tmp_path / "missing")) == []


def test_tightest_quota_counts(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    write(membership, "0::/outer/inner")
    assert cpu_quota(tmp_path, membership) is None
    write(tmp_path / "outer/inner/cpu.max", "max 100000")
    assert cpu_quota(tmp_path, membership) is None
    write(tmp_path / "outer/cpu.max", "250000 100000")
    write(tmp_path / "cpu.max", "800000 100000")
    assert cpu_quota(tmp_path, membership) == 2.5


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("150000", 1.5)])
def test_cgroup_v1_quota(tmp_path: Path, quota: str, cores: float | None) -> None:
    membership = tmp_path / "membership"
    write(membership, "4:cpu:/job")
    write(tmp_path / "cpu/job/cpu.cfs_quota_us", quota)
    write(tmp_path / "cpu/job/cpu.cfs_period_us", "100000")
    assert cpu_quota(tmp_path, membership) == cores
