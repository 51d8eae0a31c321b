"""What the engines of several ranks do together: gradients, weights, and the calls that all of them make."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device_updates.streamed_updates import StreamedParam
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup, bytes_by_rank, first_difference
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction
from zenflow_compile.runtime.step.one_rank import Gather, OneRank, total_norm
from zenflow_compile.runtime.step.weight_gather import Changed, WeightGather
from zenflow_compile.torch_internals import torch_private


class SeveralRanks(OneRank):
    """The calls that all ranks make, whether they divide parameters or have shards of them."""

    group: RankGroup
    alike = "with a process_group all ranks set and clear gradients alike"
    """Why ranks have gradients of the same parameters, and how."""

    def __init__(self, group: RankGroup, registry: ParamRegistry, recorder: Recorder) -> None:
        self.group = group
        self.rank = group.message_rank
        group.recorder = recorder
        self._registry = registry
        self.messages = StepMessages(group, registry, self.alike)

    @property
    def failed(self) -> bool:
        return self.group.failed

    def announcing(self) -> AbstractContextManager[None]:
        return self.group.announcing()

    def close(self) -> None:
        self.group.close()

    def shortest_window(self, measured: int | None) -> int | None:
        """Keep what is measured for the next step's message: rank 0's counts."""
        self.messages.measured_window = measured or self.messages.measured_window
        return None

    def agree_on_load(self, refusal: str) -> None:
        """Tell the other ranks why this one cannot load its state, or that it can, with an empty text.

        Raises ValueError if this rank can, and another one cannot.
        """
        refusals = self.group.gather_texts(Call.LOAD, refusal)
        for rank, text in enumerate(refusals):
            if text and not refusal:
                raise ValueError(f"rank {rank} cannot load its state dict, so no rank has loaded one: {text}")


_TOLD = struct.Struct("<I4s4s4sI")


class _Told(NamedTuple):
    """What a rank tells the others in each step."""

    window: int  # the shortest that its host keeps up with; 0 until it is measured
    groups: bytes  # checksum of rates and the like
    gradients: bytes  # checksum of which parameters have one
    reductions: bytes  # checksum of what FSDP2 has averaged
    undeclared: int  # see OneRank.step


class StepMessages:
    """The messages of the optimizer steps of one engine, by which ranks see whether they do the same step.

    Attributes:
        measured_window: the shortest update window that this rank's host keeps up with; None until it is measured.
    """

    def __init__(self, group: RankGroup, registry: ParamRegistry, alike: str) -> None:
        self.group = group
        self._registry, self._alike = registry, alike
        self._reductions = ""
        self.measured_window: int | None = None

    def own(self, undeclared: int) -> bytes:
        """What this rank tells the others in a step, see ``_Told``."""
        reductions, self._reductions = self.group.shard_reductions.take()
        digests = self._digest_of_groups(), self._digest_of_gradients(), reductions
        return _TOLD.pack(*_Told(self.measured_window or 0, *digests, undeclared))

    def check(self, rows: Sequence[bytes], *, gradients: bool) -> int | None:
        """Raise RankError if ranks are not about to do the same step. Returns the shortest window of rank 0's host.

        Args:
            rows: what the ranks have sent, which begins with ``own``.
            gradients: all gradients have been sent, so that ranks have those of the same parameters.
        """
        told = [_Told(*_TOLD.unpack_from(row)) for row in rows]
        if (rank := first_difference([each.groups for each in told])) is not None:
            raise self.group.failure(
                f"rank 0 and rank {rank} have different values in param_groups in step {self.group.step}: all ranks "
                "set and schedule them alike"
            )
        if (rank := first_difference([each.reductions for each in told])) is not None:
            self._refuse_other_reductions(rank)
        if (rank := first_difference([each.undeclared for each in told])) is not None:
            self._refuse_other_backwards(told[0].undeclared, rank, told[rank].undeclared)
        if gradients and (rank := first_difference([each.gradients for each in told])) is not None:
            self._refuse_other_gradients(rank)
        return told[0].window or None

    def _refuse_other_reductions(self, rank: int) -> None:
        """Raise on all ranks, which have seen that FSDP2 averaged gradients of other parameters on ``rank``."""
        texts = self.group.gather_texts(Call.STEP, self._reductions)
        name, of_first = self.group.shard_reductions.first_difference(texts[0], texts[rank])
        having, lacking = (0, rank) if of_first else (rank, 0)
        raise self.group.failure(
            f"in step {self.group.step} FSDP2 has averaged a gradient of {name} on rank {having}, where rank {lacking} "
            f"has none or another one: {self._alike}"
        )

    def _refuse_other_backwards(self, first: int, rank: int, other: int) -> None:
        """Raise on all ranks: gradients of undeclared backwards are sent in the step, and no message tells of them."""
        raise self.group.failure(
            f"in step {self.group.step} rank 0 has run {first} backward() calls beyond the declared ones, and rank "
            f"{rank} {other} (gradient_accumulation_steps): all ranks make the same calls, and skip a step alike"
        )

    def _refuse_other_gradients(self, rank: int) -> None:
        """Raise on all ranks, which have seen the same difference between rank 0 and ``rank``."""
        own = "".join("-" if param.grad is None else "g" for param in self._registry.params)
        texts = self.group.gather_texts(Call.STEP, own)
        pairs = enumerate(zip(texts[0], texts[rank], strict=True))
        place, *others = [place for place, (first, other) in pairs if first != other]
        names, given = torch_private.names_of_shards(), self._registry.given[place]
        having, lacking = (0, rank) if texts[0][place] == "g" else (rank, 0)
        raise self.group.failure(
            f"in step {self.group.step} rank {having} has a gradient of "
            f"{names.get(id(given), self._registry.plan.params[place].name)}, and rank {lacking} has none; "
            f"{len(others)} others differ: {self._alike}"
        )

    def _digest_of_gradients(self) -> bytes:
        """Return a checksum of which parameters have a gradient: a step on other ones would send other slices."""
        return _digest(bytes(param.grad is not None for param in self._registry.params))

    def _digest_of_groups(self) -> bytes:
        """Return a checksum of learning rates and the like, without tensors: a read of them may wait for the device."""
        groups = zip(self._registry.groups, self._registry.rules, strict=True)
        values = [group[name] for group, rule in groups for name in (*rule.defaults, "maximize")]
        return _digest(repr([value for value in values if not isinstance(value, Tensor)]).encode())


def _digest(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


class RankCalls(SeveralRanks):
    """The calls of one engine that all ranks make, in the same order: they divide its parameters."""

    divides = True

    def __init__(
        self, group: RankGroup, registry: ParamRegistry, device: torch.device, options: Options, recorder: Recorder
    ) -> None:
        super().__init__(group, registry, recorder)
        self.reduction = GradientReduction(group, registry, device, _DTYPES[options.communication_data_type])
        self.weight_gather = WeightGather(group, device_of(device))

    def contribute(self, offloaded: OffloadedParam, grad: Tensor, *, send: bool) -> None:
        with self.group.announcing():
            self.reduction.contribute(offloaded, grad, send=send)

    def note_on_device(self, p: int) -> None:
        self.reduction.on_device.add(p)

    def refuse_gradient_of_user(self, name: str) -> None:
        errors.refuse_gradient_of_user(name)

    def refuse_nested_backward(self) -> None:
        raise RuntimeError(
            "a backward inside another one (torch.utils.checkpoint with use_reentrant=True) is not supported "
            "with a process_group: ranks send gradients until the whole backward is over; use "
            "use_reentrant=False"
        )

    def drop_gradients(self) -> None:
        self.reduction.reset()

    def begin_backward(self) -> None:
        # The last update may have brought the selection by which a gradient is split, and this rank may not have
        # fetched the parameter.
        self.weight_gather.stream.wait()
        self.reduction.begin_backward()

    def end_backward(self) -> None:
        """Receive the gradients of the last backward before an optimizer step, which is over."""
        with self.group.announcing():
            self.reduction.finish()

    @contextmanager
    def step(self, number: int, undeclared: int) -> Iterator[int | None]:
        """Run an optimizer step inside of the block, with what ``StepMessages.check`` returns.

        Gradients that wait for declared backwards are sent first. Raises RankError if not all ranks call it, one has
        failed, or they have other gradients, rates, or numbers of backwards.
        """
        self.group.step = number
        with self.group.announcing():
            head = self.messages.own(undeclared) + bytes([self.reduction.has_unsent()])
            writes = self._notice_writes(number)
            for offloaded in self._registry.offloaded.values():
                offloaded.receive_weights()
            rows = self.group.exchange(Call.STEP, head + writes)
            self._follow_writes([row[len(head) :] for row in rows])
            unsent = any(row[len(head) - 1] for row in rows)
            yielded = self.messages.check(rows, gradients=not unsent)
            if unsent:
                self.reduction.finish()
            yield yielded
        self.group.step = number + 1

    @contextmanager
    def ending(self, call: Call, number: int) -> Iterator[Collection[int]]:
        """Apply all update windows inside of the block, in ``flush`` or ``close``; ranks exchange the slices behind it.

        Yields the parameters whose weights were written on any rank. Raises RankError if not all ranks call it.
        """
        with self.group.announcing():
            written = self._follow_writes(self.group.exchange(call, self._notice_writes(number)))
            # Hazard: uploads that start inside of the block take buffers that the last gather may still read.
            self.weight_gather.stream.wait()
            yield written
            merged = [each for each in self._registry.offloaded.values() if each.updates.merged]
            self.weight_gather.gather([Changed(each, whole=True) for each in merged])
            for offloaded in merged:
                offloaded.receive_weights()
                if (sample := offloaded.weights.sample) is not None:
                    sample.follow()  # no step ends here, which would keep it

    def _notice_writes(self, now: int) -> bytes:
        """Look which parameters were written in this rank's share. Returns a byte for each, for all ranks.

        A rank compares its own slices with their masters. A write to another rank's slices drops updates there, and the
        ranks would gather different slices.
        """
        written = bytearray(len(self._registry.params))
        for index, offloaded in self._registry.offloaded.items():
            if offloaded.weights.written_by_others:
                offloaded.notice_external_write(now)
            written[index] = offloaded.written
            offloaded.written = False
        return bytes(written)

    def _follow_writes(self, rows: Sequence[bytes]) -> set[int]:
        """Drop the updates in flight that another rank has dropped. Returns what any rank has written."""
        found: set[int] = set(bytes_by_rank(rows).amax(0).nonzero().flatten().tolist())
        for index in found:
            offloaded = self._registry.offloaded[index]
            offloaded.drop_updates()
            offloaded.written = False
        return found

    def gather_streamed(self, updated: Iterable[StreamedParam]) -> None:
        self.weight_gather.gather_flat([each for each in updated if each.has_gradient and each.plan.flat is not None])

    def gather_of(self, now: int, offloaded: Iterable[OffloadedParam]) -> Gather:
        return partial(self.gather_weights, now, [each for each in offloaded if each.shown.record is not None])

    def begin_save(self) -> None:
        self.group.exchange(Call.STATE)

    def end(self) -> None:
        if not self.group.failed:  # the gather may wait for a failed rank forever
            with suppress(Exception):  # of a device that has died: the groups are given back all the same
                self.weight_gather.stream.close()

    def gather_weights(
        self, now: int, updated: Sequence[OffloadedParam], apply: Callable[[OffloadedParam], None]
    ) -> None:
        """Bring what step ``now`` has changed to all ranks. Where the device has streams, it goes on behind the step.

        Args:
            updated: parameters that had a gradient.
            apply: applies the due updates of a parameter.
        """
        have_slices = {each.plan.index for each in updated if each.plan.whole.k}
        changed = []
        for index, offloaded in self._registry.offloaded.items():
            whole = offloaded.updates.merged or bool(offloaded.updates.due(now))
            if whole or index in have_slices:
                changed.append(Changed(offloaded, whole=whole))
        changed.sort(key=lambda each: self.reduction.first_use(each.offloaded.plan.index))
        self.weight_gather.gather(changed, apply)

    def list_memory(self, found: MemoryList) -> None:
        self.reduction.list_memory(found)
        self.weight_gather.list_memory(found)

    def forget(self) -> None:
        """Forget gradients and selections that were sent: a state is about to be loaded."""
        self.reduction.reset()
        self.weight_gather.forget()


_ROUNDING = 1e-5
"""Relative difference of f32 norms that are of the same values, on processors that add them up in another order."""


class ShardCalls(SeveralRanks):
    """The calls of one engine that all ranks of a sharded model make, in the same order."""

    alike = (
        "all ranks use the same parameters in the same order, and clear gradients alike: FSDP2 mixes up others without "
        "an error; use an expert without tokens on an empty batch, in its turn: loss + expert(tokens[:0]).sum()"
    )

    @contextmanager
    def step(self, number: int, undeclared: int) -> Iterator[int | None]:
        """Run an optimizer step inside of the block, with what ``StepMessages.check`` returns.

        Raises RankError if not all ranks call it, one has failed, or they have other gradients or rates.
        """
        self.group.step = number
        with self.group.announcing():
            rows = self.group.exchange(Call.STEP, self.messages.own(undeclared))
            yield self.messages.check(rows, gradients=True)
        self.group.step = number + 1

    @contextmanager
    def ending(self, call: Call, number: int) -> Iterator[Collection[int]]:
        """Apply all update windows inside of the block, in ``flush`` or ``close``: all ranks do, or RankError.

        Yields what other ranks have written: nothing, each has all of its shards.
        """
        with self.group.announcing():
            self.group.exchange(call)
            yield ()
            self.group.exchange(call)  # a rank that fails until here has parts of the model that lack updates

    def sum_norms(self, params: Sequence[OffloadedParam]) -> None:
        """Add up the squared norms of slices over the ranks that have a part of each, by which these are selected.

        All ranks give the same ``params``, which have a gradient.
        """
        divided: dict[tuple[int, ...], list[OffloadedParam]] = {}
        for each in params:
            if (shard := each.plan.shard) is not None and not shard.divides_slices and each.plan.selects:
                divided.setdefault(shard.members, []).append(each)
        if not divided:
            return
        self._registry.gradients.measure()  # norms of this rank's parts, which ``.grad`` shows
        for members, of_members in divided.items():
            norms = torch.cat([each.device.norms for each in of_members])
            sums = self.group.sum_of_shards(norms, members).wait("the norms of slices")
            parts = torch.split(sums, [each.plan.slices for each in of_members])
            for each, part in zip(of_members, parts, strict=True):
                each.device.norms = part

    def norm_of(self, norms: Sequence[Tensor], params: Sequence[Parameter], device: torch.device) -> Tensor:
        """The L2 norm f32[] of all gradients, the same bits on all ranks; those that are not sharded count once."""
        pairs = list(zip(norms, params, strict=True))
        parts = [norm for norm, param in pairs if isinstance(param, LocalShard) and not param.by.repeated]
        whole = [norm for norm, param in pairs if not isinstance(param, LocalShard)]
        squares = self.group.all_reduce(total_norm(parts, device).square()).wait("the norm of the gradients")
        if whole:
            squares.add_(self._agreed_norm(total_norm(whole, device)) ** 2)
        return squares.sqrt_()

    def _agreed_norm(self, own: Tensor) -> float:
        """Return rank 0's norm of gradients that the loop averages. With other gradients, ranks would clip differently.

        The host waits for it; models that are sharded as a whole have no such gradients.
        """
        rows = self.group.exchange(Call.STEP, struct.pack("<d", float(own)))
        norms: list[float] = [struct.unpack("<d", row)[0] for row in rows]
        for rank, norm in enumerate(norms):
            if not (math.isclose(norms[0], norm, rel_tol=_ROUNDING) or (math.isnan(norms[0]) and math.isnan(norm))):
                raise self.group.failure(
                    f"rank 0 and rank {rank} have different gradients of the parameters that are not sharded in step "
                    f"{self.group.step}, with norms of {norms[0]:.6g} and {norm:.6g}: the loop averages them over all "
                    "ranks between backward() and step(), as by torch.distributed.all_reduce(p.grad)"
                )
        return norms[0]
