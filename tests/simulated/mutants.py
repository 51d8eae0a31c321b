"""Deliberate hazards: each removes a wait, or releases memory early, and names a run that shows it.

A mutant replaces pieces of functions' source. If a piece is gone, the mutant fails: then it belongs elsewhere, or has
become another one.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulated.cases import Case, on_cpu, train
from tests.simulated.process import SimulatedCrash, SimulatedProcess
from zenflow_compile.runtime.nvme.state_file import StateFileError

Change = tuple[str, str, str]
"""``module:function`` below ``zenflow_compile.runtime``, a piece of its source, and what stands there instead."""


@dataclass(frozen=True)
class Mutant:
    """Changed functions, and a run that shows it.

    Attributes:
        changes: made together.
        shown_by: differs from the run on the CPU, or fails, in every run: its delays force the order.
    """

    changes: tuple[Change, ...]
    shown_by: Case

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the block with the hazard."""
        with ExitStack() as stack:
            for where in dict.fromkeys(where for where, _, _ in self.changes):
                pieces = [(piece, instead) for place, piece, instead in self.changes if place == where]
                stack.enter_context(_changed(where, pieces))
            yield


@contextmanager
def _changed(where: str, pieces: Sequence[tuple[str, str]]) -> Iterator[None]:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"zenflow_compile.runtime.{module_name}")
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    for piece, instead in pieces:
        if source.count(piece) != 1:
            raise LookupError(f"{where} has {piece!r} {source.count(piece)} times")
        source = source.replace(piece, instead)
    made: dict[str, Any] = {}
    exec(compile(source, f"<mutant of {where}>", "exec"), vars(module), made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, original)


def without(where: str, piece: str, shown_by: Case, instead: str = "pass") -> Mutant:
    """A mutant of one piece."""
    return Mutant(((where, piece, instead),), shown_by)


LANE = "device.stream_lane:StreamLane.submit"
PARAM = "parameters.offloaded_param:"
PARTS = "parameters.gradient_parts:GradientParts."
UPDATES = "parameters.flushed_updates:"
HOST = "parameters.host_state:HostState."
STREAMED = "device_updates.streamed_updates:StreamedUpdates."
EXCHANGE = "parameters.state_exchange:StateExchange."
PENDING = "gradients.pending_gradient:PendingGradient."

MUTANTS = {
    "copy before the gradient is split": without(
        LANE, "self._wait_for(streams.current())", Case("windows", delays="compute last")
    ),
    "upload before its job": without(
        LANE, "after.flag.wait_on(streams, stream)", Case("exact", delays="jobs last")
    ),
    "state in before it is written back": without(
        LANE, "behind.wait_on_device()  # the current", Case("streamed", delays="D2H last"), "pass  #"
    ),
    "flag before its copy": Mutant(
        ((LANE, "with streams.use(stream):", "early = self._raise_flag()\n    with streams.use(stream):"),
         (LANE, "(target, source), self._raise_flag(), free)", "(target, source), early, free)")),
        Case("exact", delays="D2H last"),
    ),
    "flag of the copy before": without(
        "device.stream_lane:StreamLane._raise_flag", "return flag", Case("exact", delays="D2H last"),
        "return Flag(self._flags, 0, self._copies - 1)",
    ),
    "flag of a job before it has run": without(
        HOST + "flush_window", "window = FlushedWindow(job,", Case("exact", delays="jobs last"),
        "window = (job.flag and job.flag.raise_it()) or FlushedWindow(job,",
    ),
    "upload over one that is being merged": without(
        LANE, "self._wait_for(streams.current())", Case("exact", model="gpt", delays="compute last"),
        "self._wait_for(streams.current()) if self._name == 'D2H' else None",
    ),
    "block released while it is copied": Mutant(
        (("device.stream_lane:StreamTicket.__init__", "self._tensors = tensors", "self._tensors = None"),
         (PENDING + "sent", "self._sent = block, ticket", "pass")),
        Case("int8", delays="D2H last"),
    ),
    "sum released while it is copied": Mutant(
        (("device.stream_lane:StreamTicket.__init__", "self._tensors = tensors", "self._tensors = None"),
         (PENDING + "sent", "self._sent = block, ticket", "pass")),
        Case("summed", model="gpt", delays="D2H last"),
    ),
    "split into a buffer that is being copied": without(
        PARTS + "_room_for_deferred", "self.transport.wait_on_device(reader, self.plan.name)",
        Case("exact", delays="D2H last"),
    ),
    "ring buffer without its reader": without(
        PARTS + "copy_to_host", "staged.read_by = copy, None, False, copy[1]",
        Case("exact", delays="D2H last"), "staged.read_by = copy, None, False, None",
    ),
    "read of a gradient before its copy": without(
        PARTS + "assemble", "ticket.wait()", Case("windows", habit="reads", delays="D2H last")
    ),
    "merge before the upload": without(
        UPDATES + "FlushedUpdates.apply_next", "self.transport.wait_on_device(upload.ticket, self.plan.name)",
        Case("exact", delays="H2D last"),
    ),
    "job before its gradients": without(
        HOST + "flush_window", "[copy for copy in copies if not (copy.completed or copy.done())]",
        Case("windows", delays="D2H last"), "[]",
    ),
    "job before the one ahead of it": without(
        HOST + "prepare", "before = self.last_job",
        Case("late every step", delays="jobs last"), "before = None",
    ),
    "gradient over an update that no forward has read": without(
        PARTS + "_send", "update.leave_buffer()",
        Case("windows", "experts", delays="jobs last", values=False),
    ),
    "gradient over an upload that is being copied": without(
        LANE, "copy.wait_on_device()", Case("windows", "experts", delays="H2D last")
    ),
    "one upload buffer for two windows": without(
        HOST + "next_upload", "(self._next_upload + 1) % len(self.uploads)",
        Case("bytes late every step", "wide", delays="H2D last"), "0",
    ),
    "window cleared before its jobs": without(
        HOST + "clear_windows", "job.settle()",
        # Else the lanes wait for these jobs while they settle.
        Case("late every step", habit="reload", delays="jobs last", values=False),
    ),
    "state saved before its job": without(
        HOST + "wait", "window.job for window in self.flushed",
        Case("late every step", habit="reload", delays="jobs last"), "",
    ),
    "streamed update before its state": without(
        STREAMED + "_update", "ticket.wait_on_device()", Case("streamed", model="gpt", delays="H2D last")
    ),
    "state in over one that is written back": without(
        STREAMED + "_load", "behind=_last(buffer.write_back, subgroup.write_back)",
        Case("streamed in parts", delays="D2H last"), "behind=None",
    ),
    "exchanged rows before their job": without(
        EXCHANGE + "_start_upload", "after=chunk.job", Case("reselect often", delays="jobs last"), "after=None"
    ),
    "state before its exchanged rows": without(
        EXCHANGE + "_finish_oldest", "chunk.ticket.wait_on_device()", Case("reselect often", delays="H2D last")
    ),
    "step before the exchange": without(
        "engine_core:EngineCore.arrange", "settle=present(exchange.overlaps and exchange.finish)",
        Case("reselect often", delays="H2D last"), "settle=()"
    ),
    "exchange before the rows are on the host": without(
        EXCHANGE + "_send", "swap, inputs, needs", Case("reselect often", delays="D2H last"), "swap, (), needs",
    ),
    "file read into memory that is used": without(
        "nvme.cache:NvmeCache._transfer", "(*place.unsettled(), *chunk.transfers)", Case("files", delays="jobs last"),
        "chunk.transfers",
    ),
    "job before its state is read": Mutant(
        (("nvme.cache:NvmeCache._bring", "[place.read]", "[]"),
         ("nvme.cache:NvmeCache._bring", "tuple(place.unsettled())", "()")),
        Case("files", delays="jobs last"),
    ),
    "job before its factor": Mutant(
        (("device.number:Number.__float__", "copy.wait()", "pass"),
         (HOST + "flush_window", "inputs += [copy for copy in scale.copies if not copy.done()]", "pass")),
        Case("exact", habit="clip", delays="D2H last"),
    ),
    # Either wait is enough: the copy of the numbers is part of the step before last.
    "numbers read before their copy": Mutant(
        (("device.readback:Reading.values", 'self._device.wait_for(event, "scheduling inputs")', "pass"),
         ("step.run_ahead:RunAhead.begin_step", "self._device.wait_for(end, STEP_BEFORE_LAST)", "pass")),
        Case("auto windows", delays="compute last"),
    ),
    "calls on two streams": without(
        "parameters.transport:StreamOrder.follow", "current.wait_stream(last)",
        Case("exact", model="matrices", habit="side stream", delays="others last"),
    ),
    "weight read before its update": without(
        "step_runner:StepRunner.end_update", "self.uploads.refuse_stale_reads(core.step)",
        Case("exact", habit="weights read", delays="jobs last"),
    ),
}  # fmt: skip

WEIGHT = "parameters.host_weight:HostWeight."
VALUES = "parameters.host_values:HostValues."
CACHE = "nvme.cache:NvmeCache."
WEIGHT_MUTANTS = {
    "load before its copy": without(
        VALUES + "fill", "staged.ticket.wait_on_device()", Case("weights exact", delays="H2D last")
    ),
    "copy of a weight before its job": without(
        VALUES + "stage", "after=job", Case("weights exact", delays="jobs last"), "after=None"
    ),
    "memory freed while it is written back": without(
        WEIGHT + "unload", "values.written_back.wait_on_device()", Case("weights resident", delays="D2H last")
    ),
    "load before the masters of new slices": without(
        VALUES + "fill", "exchange.finish()", Case("weights reselect often", delays="H2D last")
    ),
    "copy of a weight before the rows of an exchange": without(
        UPDATES + "FlushedUpdates._reselect", "self.host.upload_writer = self.host.last_job",
        Case("weights reselect often", delays="jobs last"),
    ),
    "copy of a weight before it is read": without(
        CACHE + "bring", "return place.writer", Case("weights in files", delays="jobs last"), "return None"
    ),
    "read over a weight that is being copied": without(
        CACHE + "read_by", "chunk.place.users.append(copy)", Case("weights in files", delays="H2D last")
    ),
    "weight written to its file before its job": Mutant(
        ((CACHE + "used_by", "place.users.append(job)", "pass"),
         (CACHE + "_write", "(place.read, chunk.changed_by)", "(place.read,)")),
        Case("weights in files", delays="jobs last"),
    ),
    "update over a weight that is being written": without(
        CACHE + "prepare_fresh", "tuple(place.unsettled())", Case("weights in files", delays="jobs last"), "()"
    ),
}  # fmt: skip
"""Hazards of weights in host memory, or in files."""

MEMORY = "parameters.given_back_memory:DeviceMemory."
MEMORY_MUTANTS = {
    "memory given back before it is copied": without(
        MEMORY + "offload", "copy.wait()", Case("windows", habit="offload all", delays="D2H last")
    ),
    "values used before they are back": without(
        MEMORY + "bring_back", "copy.wait_on_device()",
        Case("windows", habit="offload all", delays="H2D last", steps=4),
    ),
    "updates under way": without(
        "engine:Engine.offload_all", "self.access.synchronize()",
        Case("late every step", habit="offload all", delays="jobs last"),
    ),
}  # fmt: skip
"""Hazards of memory that is given back."""

_OF_ONE_RANK = {**MUTANTS, **WEIGHT_MUTANTS, **MEMORY_MUTANTS}


FORCED_ORDERS = tuple(dict.fromkeys(mutant.shown_by for mutant in _OF_ONE_RANK.values()))
"""The runs that show the hazards. Without a hazard, they equal the CPU's."""


def is_found(simulated: SimulatedProcess, name: str) -> bool:
    """Whether the run with the hazard differs from the CPU's, or fails."""
    try:
        return bool(simulated.call(_shows, name, timeout=120))
    except SimulatedCrash:  # by an index that it read too early, which not every kernel checks
        return True


def _shows(name: str) -> bool:
    """Whether the run with the hazard differs from the CPU, or fails by what it has read too early."""
    mutant = _OF_ONE_RANK[name]
    try:
        return not train(mutant.shown_by, hazard=mutant.active).equals(on_cpu(mutant.shown_by))
    except (RuntimeError, IndexError, AssertionError) as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, (IndexError, StateFileError, AssertionError)):
            if "simulated device error" in str(reason):  # of an index
                return True
            reason = reason.__cause__ or reason.__context__
        if reason is None:
            raise
        return True


RANK_MUTANTS = {
    "weights before the other ranks' slices": without(
        PARAM + "OffloadedParam.receive_weights", "streams.current().wait_event(event)",
        Case("exact", delays="collectives last", ranks=2),
    ),
    "slices sent before the step": without(
        "step.weight_gather:OwnStream.run", "stream.wait_stream(self._streams.current())",
        Case("exact", "matrices", delays="compute last", ranks=2),
    ),
    "collective read before it is done": without(
        "ranks.rank_group:RankGroup._wait", "work.wait()", Case("exact", "matrices", delays="collectives last", ranks=2)
    ),
    "flush before the weights of the step": without(
        "step.rank_calls:RankCalls.ending", "self.weight_gather.stream.wait()",
        Case("windows", "gpt", habit="flush", delays="collectives last", ranks=2),
    ),
    "selection reused while it is read": without(
        UPDATES + "FlushedUpdates._reselect", "self._kept = wanted, before",
        Case("reselect often", "matrices", delays="others last", ranks=2), "self._kept = None",
    ),
}  # fmt: skip
"""Hazards that runs of two ranks show."""

FORCED_ORDERS_OF_RANKS = tuple(dict.fromkeys(mutant.shown_by for mutant in RANK_MUTANTS.values()))
