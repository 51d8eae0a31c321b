"""Which ranks are there: where they meet, what those that fail tell the others, and who is gone.

Ranks tell each other by the key-value store of the run. The process that has it may end, and then the store raises, or
it may hang, and then the store never answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from zenflow_compile.torch_internals import torch_private

_T = TypeVar("_T")

_LOOK_SECONDS = 0.2  # between looks for failed ranks
_COME_SECONDS = 2.0  # for which a rank that waits for one that is gone looks which others wait, too
_FAILED, _MISSED, _WAITS = "failed", "missed", "waits "  # keys of the store
_MOST_NAMED = 8  # of ranks whose waits are told
_ANSWER_SECONDS = 5.0  # after which a store is taken for one that never answers
_SILENT = "the store of the run does not answer, which rank 0 has unless the launcher does, as torchrun"

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
    keys, rank = [str(rank) for rank in ranks], dist.get_rank()

    def exchange() -> list[bytes]:
        store.set(str(rank), json.dumps(own))
        wait_for_all(store, rank, keys, timeout)
        return torch_private.store_values(store, keys)

    try:
        values = StoreReads().ask(exchange, timeout.total_seconds() + _ANSWER_SECONDS)
    except TimeoutError as error:
        raise RankError(f"{_SILENT}, while ranks create their optimizers") from error
    return [Member(*json.loads(value)) for value in values]


def wait_for_all(store: torch._C._distributed_c10d.Store, rank: int, keys: list[str], timeout: timedelta) -> None:
    """Have ``rank`` wait for the keys of all ranks; raises RankError if some do not come, or the store goes."""
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        try:
            missing = [key for key in keys if not store.check([key])]
        except RuntimeError:
            raise RankError(f"{_SILENT}, while ranks create their optimizers") from error
        raise RankError(
            f"{ranks_text(missing, 'has', 'have')} not created an optimizer within {timeout.total_seconds():g} s, as "
            f"rank {rank} has: all ranks that train a model do, in the same order"
        ) from error


@contextmanager
def making_groups(rank: int, processes: Sequence[Member]) -> Iterator[None]:
    """Name the ranks whose ``processes`` have ended if a process group of the block cannot be made: RankError."""
    try:
        yield
    except RuntimeError as error:
        gone = [place for place, process in enumerate(processes) if process.has_ended()]
        raise RankError(
            f"{ranks_text(gone, 'is', 'are')} gone, while ranks create their optimizers. Rank {rank} made a process "
            f"group: {error}"
        ) from error


def ranks_text(numbers: Sequence[object], verb: str, plural: str) -> str:
    """``rank 3 has`` or ``ranks 3, 5 have``; of none, of which nothing is known, ``a rank has``."""
    names = ", ".join(map(str, numbers))
    return f"ranks {names} {plural}" if len(numbers) > 1 else f"rank {names} {verb}" if numbers else f"a rank {verb}"


class StoreReads:
    """Asks a store in another thread, which stays if it never gets an answer."""

    def __init__(self) -> None:
        self._asking: threading.Thread | None = None

    def ask(self, call: Callable[[], _T], seconds: float) -> _T:
        """The result of ``call``, or its error; TimeoutError after ``seconds``, and while an earlier call has none."""
        if self._asking is not None and self._asking.is_alive():
            raise TimeoutError("the store of the run has not answered before")
        answers = SimpleQueue[Callable[[], _T]]()

        def run() -> None:
            try:
                result = call()
            except Exception as error:
                answers.put(partial(_raise, error))
            else:
                answers.put(lambda: result)

        self._asking = threading.Thread(target=run, name="zenflow store", daemon=True)
        self._asking.start()
        try:
            answer = answers.get(timeout=seconds)
        except Empty:
            raise TimeoutError("the store of the run does not answer") from None
        return answer()


def _raise(error: Exception) -> NoReturn:
    raise error


class Attendance:
    """What the ranks of one optimizer know of each other.

    Args:
        store: of the optimizer's ranks, for keys of theirs alone.
        rank: of this process, among those that are numbered from 0.
        keeper: the one of them that may have the store; None: none of them.
        members: the process of each of them; empty where they have not met.
        size: their number.
        timeout: of their collectives.
        answer_seconds: after which a store is taken for one that never answers.

    Attributes:
        failed: this rank has raised, or has learned that another one did. Nothing can be sent any more.
    """

    def __init__(
        self,
        store: torch._C._distributed_c10d.Store,
        rank: int,
        size: int,
        keeper: int | None,
        members: Sequence[Member],
        timeout: timedelta,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self.failed = False
        self._answer_seconds = answer_seconds
        self._store, self._rank, self._size, self._keeper = store, rank, size, keeper
        self._members, self._timeout = members, timeout
        self._reads = StoreReads()

    def announce(self, text: str) -> None:
        """Leave the text of an error of this rank for the others, unless one was left already."""
        if not self.failed:
            self.failed = True
            with suppress(Exception):  # the process that has the store may be gone
                self._reads.ask(partial(self._store.set, _FAILED, f"{self._rank}\n{text}"), self._answer_seconds)

    def raise_failure_of_others(self, step: int) -> None:
        """Raise RankError if another rank has left the text of an error."""
        if self.failed or (told := self._told(_FAILED)) is None:
            return
        rank, _, text = told.decode().partition("\n")
        self.failed = True
        raise RankError(f"rank {rank} failed in or after step {step}: {text}")

    def raise_if_missed(self) -> None:
        """Raise RuntimeError if another rank waits for one that is gone, as this one then does before long."""
        if self._told(_MISSED) is not None:
            raise RuntimeError("another rank has missed one")

    def _told(self, key: str) -> bytes | None:
        """What is in the store; None if there is nothing, or it does not answer."""

        def read() -> bytes | None:
            return self._store.get(key) if self._store.check([key]) else None

        try:
            return self._reads.ask(read, self._answer_seconds)
        except (dist.DistError, TimeoutError):
            return None

    def absent(self, what: str) -> str:
        """Say which ranks are gone, of those that do not wait for others as this one does. Nothing is sent any more.

        ``what``: this one waits for, in words.
        """
        self.failed = True
        found = _Absent([rank for rank in range(self._size) if rank != self._rank])
        try:
            self._reads.ask(partial(self._look_for, found, what), _COME_SECONDS + self._answer_seconds)
        except Exception:
            found.ended = found.ended or self._ended(found.missing)
            if not found.answered:
                return self._without_store(found)
        if found.ended:
            whose = "its process has" if len(found.ended) == 1 else "their processes have"
            return f"{ranks_text(found.ended, 'is', 'are')} gone: {whose} ended"
        if not found.missing:
            return (
                f"all ranks wait, in different collectives: {found.waits}. A rank is done with its batches before the "
                "others, or does not use parameters that others use"
            )
        some = "one or more of " if len(found.missing) > 1 else ""
        return f"{some}{ranks_text(found.missing, 'is', 'are')} {self._gone}"

    def _look_for(self, found: _Absent, what: str) -> None:
        """Tell the others that this rank waits, and find out which of them do not."""
        self._store.set(f"{_WAITS}{self._rank}", what)
        self._store.set(_MISSED, "")  # those that wait for others than the one that is gone notice it by this
        others, begin = found.missing, time.monotonic()
        while True:
            ended = self._ended(others)  # first: one that says that it waits may end then
            absent = [rank for rank in others if not self._store.check([f"{_WAITS}{rank}"])]
            found.missing, found.ended, found.answered = absent, [rank for rank in ended if rank in absent], True
            if not absent:
                waits = {rank: self._store.get(f"{_WAITS}{rank}").decode() for rank in others[:_MOST_NAMED]}
                found.waits = "; ".join(f"rank {rank} {doing}" for rank, doing in waits.items())
                return
            if found.ended or time.monotonic() - begin > _COME_SECONDS:
                return
            time.sleep(_LOOK_SECONDS)

    def _without_store(self, found: _Absent) -> str:
        """What is known where the store does not answer: the others may have raised and ended since."""
        if self._keeper is None:
            return f"a rank is gone: {_SILENT}"
        if len(found.ended) > 1 and self._keeper in found.ended:
            names = ", ".join(map(str, found.ended))
            return (
                f"ranks {names} have ended, one of them before the others, and with rank {self._keeper} the run's store"
            )
        if self._keeper in found.ended:
            return f"rank {self._keeper} is gone: its process has ended"
        return f"rank {self._keeper} is {self._gone}, if it has the store of the run, which does not answer"

    @property
    def _gone(self) -> str:
        return f"gone, or not there within {self._timeout.total_seconds():g} s"

    def _ended(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._members and self._members[rank].has_ended()]


@dataclass(slots=True)
class _Absent:
    """What a rank has found out: who does not wait, who of these has ended, whether the store has answered, and what
    others wait for if all do.
    """

    missing: list[int]
    ended: list[int] = field(default_factory=list)
    answered: bool = False
    waits: str = ""
