"""The control groups of this process: how much of the machine its container may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(controller: str, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[tuple[Path, int]]:
    """Yield the groups that limit ``controller``, own first: the directory, and the hierarchy's version, 1 or 2."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = cgroups, 2
        elif controller in controllers.split(","):
            root, version = cgroups / controller, 1
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            yield group, version
            group = group.parent


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """CPU time per second that this process may use, by the tightest of its groups; None without a limit."""
    quotas = []
    for group, version in groups_of("cpu", cgroups, membership):
        with suppress(OSError, ValueError):  # the file is not visible here, or has "max", which is no limit
            if version == 2:
                quota, period = (int(number) for number in (group / "cpu.max").read_text().split())
            else:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)
