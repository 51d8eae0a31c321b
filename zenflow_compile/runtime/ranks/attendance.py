"""Which ranks are there: where they meet, what those that fail tell the others, and who is gone.

Ranks tell each other by the key-value store of the run, which may go with the process that has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zenflow_compile.torch_internals import torch_private

_LOOK_SECONDS = 0.2  # between looks for failed ranks
_COME_SECONDS = 2.0  # for which a rank that waits for one that is gone looks which others wait, too
_FAILED, _MISSED, _WAITS = "failed", "missed", "waits "  # keys of the store
_STORE_IS_GONE = "the store of the run is gone, which rank 0 has unless the launcher does, as torchrun"

_MEETINGS = Counter[str]()


class RankError(RuntimeError):
    """Another rank failed, is gone, or does something else. Training cannot go on in this process group."""


class Member(NamedTuple):
    """The process of a rank.

    Attributes:
        host: its machine; two of one name differ by the number of their start.
        pid: among those of ``pids``, a namespace of Linux; empty where there is none.
    """

    host: str
    pid: int = 0
    pids: str = ""

    @classmethod
    def own(cls) -> Member:
        """This process."""
        host, pids = socket.gethostname(), ""
        with suppress(OSError):
            host += f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            pids = os.readlink("/proc/self/ns/pid")
        return cls(host, os.getpid(), pids)

    def has_ended(self) -> bool:
        """Whether it is known to have ended: a process of this machine, which another one may not have waited for."""
        own = Member.own()
        if not self.pids or (self.host, self.pids) != (own.host, own.pids):
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return state.split()[0] in "ZX"


def meet(ranks: Sequence[int], own: Member, timeout: timedelta) -> list[Member]:
    """Exchange with all ``ranks`` who they are, where they create their optimizers.

    Raises RankError if some do not come within ``timeout``.
    """
    name = hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()
    store = torch_private.shared_store(f"zenflow/meeting/{name}/{_MEETINGS[name]}")
    _MEETINGS[name] += 1
    store.set(str(dist.get_rank()), json.dumps(own))
    keys = [str(rank) for rank in ranks]
    wait_for_all(store, dist.get_rank(), keys, timeout)
    return [Member(*json.loads(value)) for value in torch_private.store_values(store, keys)]


def wait_for_all(store: torch._C._distributed_c10d.Store, rank: int, keys: list[str], timeout: timedelta) -> None:
    """Have ``rank`` wait for the keys of all ranks; raises RankError if some do not come, or the store goes."""
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        try:
            missing = [key for key in keys if not store.check([key])]
        except RuntimeError:
            raise RankError(f"{_STORE_IS_GONE}, while ranks created their optimizers") from error
        raise RankError(
            f"{ranks_text(missing, 'has', 'have')} not created an optimizer within {timeout.total_seconds():g} s, as "
            f"rank {rank} has: all ranks that train a model do, in the same order"
        ) from error


def ranks_text(numbers: Sequence[object], verb: str, plural: str) -> str:
    """``rank 3 has`` or ``ranks 3, 5 have``; of none, of which nothing is known, ``a rank has``."""
    names = ", ".join(map(str, numbers))
    return f"ranks {names} {plural}" if len(numbers) > 1 else f"rank {names} {verb}" if numbers else f"a rank {verb}"


class Attendance:
    """What the ranks of one optimizer know of each other.

    Args:
        store: of the optimizer's ranks, for keys of theirs alone.
        rank: of this process, among those that are numbered from 0.
        members: the process of each of them; empty where they have not met.
        size: their number.
        timeout: of their collectives.

    Attributes:
        failed: this rank has raised, or has learned that another one did. Nothing can be sent any more.
    """

    def __init__(
        self,
        store: torch._C._distributed_c10d.Store,
        rank: int,
        size: int,
        members: Sequence[Member],
        timeout: timedelta,
    ) -> None:
        self.failed = False
        self._store, self._rank, self._size, self._members, self._timeout = store, rank, size, members, timeout

    def announce(self, text: str) -> None:
        """Leave the text of an error of this rank for the others, unless one was left already."""
        if not self.failed:
            self.failed = True
            with suppress(Exception):  # the process that has the store may be gone
                self._store.set(_FAILED, f"{self._rank}\n{text}")

    def raise_failure_of_others(self, step: int) -> None:
        """Raise RankError if another rank has left the text of an error."""
        with suppress(dist.DistError):
            if not self.failed and torch_private.store_has(self._store, [_FAILED]):
                rank, _, text = self._store.get(_FAILED).decode().partition("\n")
                self.failed = True
                raise RankError(f"rank {rank} failed in or after step {step}: {text}")

    def raise_if_missed(self) -> None:
        """Raise RuntimeError if another rank waits for one that is gone, as this one then does before long."""
        if torch_private.store_has(self._store, [_MISSED]):
            raise RuntimeError("another rank has missed one")

    def absent(self) -> str:
        """Say which ranks are gone, of those that do not wait for others as this one does. Nothing is sent any more."""
        self.failed = True
        absent = [rank for rank in range(self._size) if rank != self._rank]
        store_is_gone, begin = False, time.monotonic()
        try:
            self._store.set(f"{_WAITS}{self._rank}", "")
            self._store.set(_MISSED, "")  # those that wait for others than the one that is gone notice it by this
            while True:
                absent = [rank for rank in absent if not self._store.check([f"{_WAITS}{rank}"])]
                if not absent or self._ended(absent) or time.monotonic() - begin > _COME_SECONDS:
                    break
                time.sleep(_LOOK_SECONDS)
        except Exception:  # whoever has the store may be gone, and the others may come no more
            store_is_gone = True
        if ended := self._ended(absent):
            return f"{ranks_text(ended, 'is', 'are')} gone: {'its' if len(ended) == 1 else 'their'} process has ended"
        if store_is_gone:
            return f"a rank is gone: {_STORE_IS_GONE}"
        return f"{ranks_text(absent, 'is', 'are')} gone, or not there within {self._timeout.total_seconds():g} s"

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._members and self._members[rank].has_ended()]
