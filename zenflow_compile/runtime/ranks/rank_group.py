"""This process among the ranks that train one model, and all that it sends to them.

Every rank makes the same calls in the same order, with tensors of the same shape. Gradients and weights travel through
one process group of the engine's own, messages through another one, so that they have no common order with each other
or with the user's collectives.

A wait on the host looks for ranks that have failed: a rank that raises leaves the text of its error first.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan, Plan
from zenflow_compile.runtime.ranks.attendance import Attendance, Member, RankError, making_groups
from zenflow_compile.runtime.ranks.shard_reductions import ShardReductions
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.torch_internals import torch_private

_T = TypeVar("_T")


class RowLayout(NamedTuple):
    """Where the blocks of parameters are in a row of ``elements`` elements; the same in each row."""

    offsets: tuple[int, ...]
    elements: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> RowLayout:
        """Put blocks of these sizes, in elements, behind each other."""
        offsets = [0, *itertools.accumulate(sizes)]
        return cls(tuple(offsets[:-1]), offsets[-1])


def block(row: Tensor, offset: int, plan: ParamPlan, slices: int) -> Tensor:
    """View ``slices`` slices of a parameter in a row: [slices, length]."""
    return row[offset : offset + slices * plan.length].view(slices, plan.length)


def rows_of_parts(packed: Tensor, offset: int, plan: ParamPlan) -> Tensor:
    """View a parameter in ``packed`` [ranks, n]: [holders of a part, parts, slices of the largest part, length]."""
    share = plan.share
    assert share is not None
    blocks = packed[:, offset : offset + share.most_slices * plan.length]
    return blocks.view(-1, share.parts, share.most_slices, plan.length)


def bytes_by_rank(rows: Sequence[bytes]) -> Tensor:
    """The bytes of messages of one length: u8[ranks, bytes]."""
    return torch.frombuffer(bytearray().join(rows), dtype=torch.uint8).view(len(rows), -1)


def cut(items: Sequence[_T], bytes_of: Sequence[int], dtypes: Sequence[torch.dtype], limit: int) -> list[list[_T]]:
    """Cut ``items`` into consecutive pieces of one dtype and at most ``limit`` bytes; a larger item is alone."""
    pieces: list[list[_T]] = []
    left, last = 0, None
    for item, size, dtype in zip(items, bytes_of, dtypes, strict=True):
        if dtype != last or size > left:
            pieces.append([])
            left = limit
        pieces[-1].append(item)
        left, last = left - size, dtype
    return pieces


_SPIN_SECONDS = 1e-3  # a message of a machine's own ranks comes in less
_SLEEP_SECONDS = 2e-4
_LOOK_SECONDS = 0.2  # between looks for failed ranks
_HEADER = 9  # bytes of a message in front of its content: the call, and the step
_ROOM = 1024

_numbers = itertools.count()


class Call(Enum):
    """The call that a message belongs to. Ranks that are in different calls would wait for each other forever."""

    BUILD = "uses its optimizer for the first time"
    BACKWARD = "ends a backward"
    STEP = "calls step()"
    DENSE = "reads the values of a gradient (its norm would be known)"
    STATE = "calls state_dict()"
    FLUSH = "calls flush()"
    CLOSE = "calls close()"
    REPORT = "reports on all ranks"
    LOAD = "calls load_state_dict()"


_CALLS = list(Call)


class Levels(NamedTuple):
    """Global ranks that train one model together, the same on all of them.

    Attributes:
        copies: the ranks that divide a copy of the model's state, in this order, for each copy that takes part in means
            of shares. Of a sharded model, whose means are FSDP2's, all ranks.
        everyone: ranks that agree on all that they do, by messages.
        shards: of a sharded model, FSDP2's groups that shard its parameters and have this rank.
    """

    copies: Sequence[Sequence[int]]
    everyone: Sequence[int]
    shards: Sequence[dist.ProcessGroup] = ()


class Pending(NamedTuple):
    """A collective under way. ``result`` is valid after ``wait``, behind which ``finish`` is called once."""

    work: dist.Work
    result: Tensor
    group: RankGroup
    kept: tuple[Tensor, ...] = ()
    finish: Callable[[], object] | None = None

    @property
    def ready(self) -> bool:
        """Whether ``wait`` does not block the host."""
        return self.result.device.type != "cpu" or self.work.is_completed()

    def wait(self, what: str) -> Tensor:
        """The result. The host waits only where operators are complete when they return.

        Raises:
            RankError: another rank failed or is gone.
        """
        self.group._wait(self.work, what, polls=self.result.device.type == "cpu")
        if self.finish is not None:
            self.finish()
        return self.result


class RankGroup:
    """The ranks of one optimizer.

    Args:
        group: of the user's; every rank of it makes this object at the same point of its program.
        device: of the parameters.
        levels: which of its ranks, or of further replicas of a sharded model, do what.
        processes: of each rank of ``levels.everyone``; of one machine, if it is not given.
        params: of a sharded model.

    Attributes:
        rank: of this process; size: number of ranks; both among those of its copy, which divide parameters.
        replica, replicas: the same among those that have its share.
        message_rank, message_size: the same among all.
        on_machine: the place of this process among those of all that are on its machine, and their number.
        attendance: what is known of the other ranks.
        shard_reductions: of which parameters FSDP2 has averaged gradients.
        number: of this object among those of the process; the same order on all ranks that make the same ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        levels: Levels,
        processes: Sequence[Member] = (),
        params: Sequence[Tensor] = (),
    ) -> None:
        self.number = next(_numbers)
        self.step = 0
        self.recorder = Recorder()
        own, (copies, everyone, shards) = dist.get_rank(), levels
        self.replica, self.replicas = next(place for place, copy in enumerate(copies) if own in copy), len(copies)
        members, self._first_copy = copies[self.replica], copies[0]
        self.rank, self.size = members.index(own), len(members)
        self.message_rank, self.message_size = everyone.index(own), len(everyone)
        hosts = [process.host for process in processes]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.message_rank]] or range(len(everyone))
        self.on_machine = here.index(self.message_rank), len(here)
        self._rows = [everyone.index(member) for member in members]  # of this group, in what messages gather
        self._timeout = torch_private.group_timeout(group, device)
        self._to_close: list[dist.ProcessGroup] = []
        backend = "gloo" if device.type == "cpu" else dist.get_backend(group)
        with making_groups(self.message_rank, processes):
            self._messages = self._new_group([everyone], "gloo")
            self._data = self._across = self._sums = self._new_group(copies, backend)
            if self.replicas > 1:
                self._across = self._new_group(list(zip(*copies, strict=True)), backend)
                self._sums = self._new_group([everyone], backend)
        # What FSDP2 sends through its groups has the same order on all their ranks, and so has what is added up.
        self._shards = {torch_private.ranks_of(group): group for group in shards}
        store = torch_private.shared_store(f"zenflow/{self._messages.group_name}/{self.number}")
        keeper = everyone.index(0) if 0 in everyone else None
        self.attendance = Attendance(store, self.message_rank, self.message_size, keeper, processes, self._timeout)
        self.shard_reductions = ShardReductions(params, self._shards, WeakMethod(self._refuse_failed_collective))
        self._room = _ROOM
        self._together = "creates its optimizer"  # the last call that all ranks were in

    def _new_group(self, groups: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup:
        """Make that of ``groups``, which have no rank in common, that has this rank.

        Hazard: a group that is made by its own ranks alone is named after these and the number of groups that each of
        them is in: ranks with other groups of the user's would never meet. So all ranks make all groups, if they are
        here. One that its own ranks have made is not given back, since a second one of the same name would find the
        dead addresses of the first in the store.
        """
        by_all = sum(map(len, groups)) == dist.get_world_size()
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            is_own = dist.get_rank() in ranks
            if by_all or is_own:
                made = dist.new_group(
                    sorted(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=not by_all
                )
                own = made if is_own else own
        assert own is not None
        if by_all:
            self._to_close.append(own)
        return own

    @property
    def failed(self) -> bool:
        """Whether this rank has raised, or has learned that another one did. Nothing can be sent any more."""
        return self.attendance.failed

    @property
    def measures_collectives(self) -> bool:
        """Whether all collectives are recorded: of several groups of shards, those between them are not."""
        return all(len(members) == self.message_size for members in self._shards)

    def divided(self, plan: Plan) -> Plan:
        """``plan``, which has no parameters yet, for this rank."""
        return replace(plan, rank=self.rank, ranks=self.size, replica=self.replica, replicas=self.replicas)

    # Collectives of tensors on the parameters' device, among the ranks that divide parameters.

    def reduce_scatter(self, packed: Tensor) -> Pending:
        """Start the mean over ranks of ``packed`` [ranks, n], of which each rank gets its row: [n].

        Ranks add up in their order on the CPU, and in fp32.
        """
        self.recorder.sent("reduce_scatter", packed.nbytes)
        if packed.device.type != "cpu":
            out = torch.empty_like(packed[0])
            return Pending(torch_private.start_reduce_scatter(out, packed, self._data), out, self, (packed,))
        # gloo's own sends everything two times, and its wait would not see a rank that has failed.
        wide = torch.promote_types(packed.dtype, torch.float32)
        # What is averaged over replicas, too, is rounded after that.
        dtype = wide if self.replicas > 1 else packed.dtype
        rows, out = torch.empty_like(packed), torch.empty_like(packed[0], dtype=dtype)
        work = dist.all_to_all_single(rows, packed, group=self._data, async_op=True)
        assert work is not None

        def finish() -> None:
            if dtype == rows.dtype == wide:
                torch.mean(rows, 0, out=out)
            else:
                out.copy_(rows.mean(0, dtype=wide))

        return Pending(work, out, self, (packed, rows), finish)

    def all_gather(self, block: Tensor) -> Pending:
        """Start to gather ``block`` [n] of each rank: [ranks, n]."""
        self.recorder.sent("all_gather", block.nbytes)
        out = torch.empty((self.size, *block.shape), dtype=block.dtype, device=block.device)
        if block.device.type == "cpu":
            # gloo's own takes more than twice the time of the same bytes sent directly.
            copies = block.expand(self.size, *block.shape).contiguous()
            direct = dist.all_to_all_single(out, copies, group=self._data, async_op=True)
            assert direct is not None
            return Pending(direct, out, self, (copies,))
        work = torch_private.start_all_gather(out.view(-1), block.view(-1), self._data)
        return Pending(work, out, self, (block,))

    def mean_across(self, share: Tensor) -> Pending:
        """Start the mean of a share over the ranks that have it, in place."""
        return self._all_reduce(share, dist.ReduceOp.AVG, self._across)

    def sum_of_shards(self, values: Tensor, members: tuple[int, ...]) -> Pending:
        """Start the sum of ``values`` over the ranks that shard a parameter, in place."""
        return self._all_reduce(values, dist.ReduceOp.SUM, self._shards[members])

    # Of all ranks: of copies, replicas and pieces, too.

    def all_reduce(self, values: Tensor, *, mean: bool = False) -> Pending:
        """Start the sum of ``values`` over all ranks, or their mean, in place."""
        return self._all_reduce(values, dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, self._sums)

    def _all_reduce(self, values: Tensor, op: Any, group: dist.ProcessGroup) -> Pending:
        self.recorder.sent("all_reduce", values.nbytes)
        work = dist.all_reduce(values, op=op, group=group, async_op=True)
        assert work is not None
        return Pending(work, values, self)

    def gather_on_host(self, values: Tensor, what: str) -> list[Tensor]:
        """Gather tensors of one shape in host memory, by rank; the host waits for it."""
        sent = values.contiguous().reshape(-1).view(torch.uint8)
        self.recorder.sent("state", sent.nbytes)
        out = torch.empty((self.message_size, len(sent)), dtype=torch.uint8, device="cpu")
        if len(sent):
            self._wait(torch_private.start_all_gather(out.view(-1), sent, self._messages), what, polls=True)
        return [out[row].view(values.dtype).view(values.shape) for row in self._rows]

    def broadcast_on_host(self, values: Tensor, rank: int, what: str) -> None:
        """Broadcast a tensor in host memory from ``rank`` of the first copy to all ranks; the host waits for it."""
        self.recorder.sent("state", values.nbytes)
        work = dist.broadcast(values, src=self._first_copy[rank], group=self._messages, async_op=True)
        assert work is not None
        self._wait(work, what, polls=True)

    # Messages.

    def make_room(self, content_bytes: int) -> None:
        """Let messages have at least so many bytes of content: all have one length, whatever call they belong to."""
        self._room = max(self._room, content_bytes)

    def exchange(self, call: Call, content: bytes = b"") -> list[bytes]:
        """Send ``content`` to all ranks, and return what each of them has sent, by rank.

        Raises:
            RankError: ranks are in different calls or steps, or one failed or is gone.
        """
        assert len(content) <= self._room, "the messages of ranks have one length"
        if self.failed:
            raise RankError("a rank of this process group has failed before; start all ranks again")
        header = bytes([_CALLS.index(call)]) + self.step.to_bytes(8, "little")
        message = torch.frombuffer(bytearray((header + content).ljust(self._room + _HEADER, b"\0")), dtype=torch.uint8)
        out = torch.empty((self.message_size, len(message)), dtype=torch.uint8, device="cpu")
        self.recorder.sent("message", message.nbytes)
        work = torch_private.start_all_gather(out.view(-1), message, self._messages)
        self._wait(work, f"a message of the others, while it {call.value}", polls=True)
        received = ctypes.string_at(out.data_ptr(), out.numel())
        rows = [received[first : first + len(message)] for first in range(0, len(received), len(message))]
        for rank, row in enumerate(rows):
            if row[:_HEADER] != header:
                self._refuse_other_call(call, rank, row)
        self._together = f"{call.value} in step {self.step}"
        return [row[_HEADER : _HEADER + len(content)] for row in rows]

    def gather_texts(self, call: Call, text: str) -> list[str]:
        """The texts of all ranks, of any lengths."""
        own = text.encode()
        lengths = self.exchange(call, len(own).to_bytes(8, "little"))
        longest = max(int.from_bytes(each, "little") for each in lengths)
        parts = [
            self.exchange(call, own[first : first + self._room].ljust(self._room, b"\0"))
            for first in range(0, longest, self._room)
        ]
        if not parts:
            return [""] * self.message_size
        return [b"".join(each).rstrip(b"\0").decode() for each in zip(*parts, strict=True)]

    def gather_at_first(self, call: Call, content: bytes) -> list[bytes]:
        """What all ranks have, of any lengths, on the first rank; nothing on the others."""
        lengths = [int.from_bytes(each, "little") for each in self.exchange(call, len(content).to_bytes(8, "little"))]
        own = torch.frombuffer(bytearray(content.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        self.recorder.sent("message", own.nbytes)
        rows = [torch.empty_like(own) for _ in lengths] if self.message_rank == 0 else None
        work = dist.gather(own, rows, group=self._messages, group_dst=0, async_op=True)
        assert work is not None
        self._wait(work, f"what the others have, while it {call.value}", polls=True)
        return [row[:length].numpy().tobytes() for row, length in zip(rows or (), lengths, strict=False)]

    def _refuse_other_call(self, call: Call, rank: int, other: bytes) -> None:
        step = int.from_bytes(other[1:9], "little")
        theirs = _CALLS[other[0]].value if other[0] < len(_CALLS) else "does something else"
        raise self.failure(
            f"rank {self.message_rank} {call.value} in step {self.step}, and rank {rank} {theirs} in step {step}; with "
            "a process_group every rank makes the same calls: backward(), step(), state_dict(), and reads of a "
            "gradient's values"
        )

    # Failures.

    def failure(self, text: str) -> RankError:
        """An error of this rank that the others are told of."""
        self.announce(text)
        return RankError(text)

    def announce(self, text: str) -> None:
        """Leave the text of an error of this rank for the others, unless one was left already."""
        self.attendance.announce(text)

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Leave the text of an error inside of the block for the others."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.announce(f"{type(error).__name__}: {error}")
            raise

    def _wait(self, work: dist.Work, what: str, *, polls: bool) -> None:
        try:
            if polls:
                with self.recorder.rank_wait(on_host=True):
                    self._poll(work)
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            self._refuse(f"waited for {what}", error)

    def _refuse(self, what: str, error: RuntimeError) -> NoReturn:
        """Raise RankError for a collective that has failed: with the failure of another rank, or with who is gone."""
        self.attendance.raise_failure_of_others(self.step)
        raise RankError(
            f"step {self.step}: {self.attendance.absent(what)}; all ranks were last together where each "
            f"{self._together}. Rank {self.message_rank} {what}: {error}"
        ) from error

    def _refuse_failed_collective(self, what: str, error: RuntimeError) -> None:
        """Likewise for one of FSDP2's."""
        self._refuse(f"{what} under FSDP2", error)

    def _poll(self, work: dist.Work) -> None:
        begin = looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                self.attendance.raise_failure_of_others(self.step)
                self.attendance.raise_if_missed()
            if now - begin > _SPIN_SECONDS:
                time.sleep(_SLEEP_SECONDS)

    def close(self) -> None:
        """Give the process groups back. Idempotent."""
        self.shard_reductions.end()
        groups, self._to_close = self._to_close, []
        for group in groups:
            with suppress(Exception):  # the user may have destroyed all groups
                dist.destroy_process_group(group)


def first_difference(values: Sequence[object]) -> int | None:
    """The first rank whose value differs from rank 0's; None if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
