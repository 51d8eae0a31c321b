"""Copies weights ahead of their loads, in the order in which compiled graphs load them.

Each graph declares its loads, so the next ones are known. Their copies start as long as the upload ring has a buffer
besides the one that is kept for the load that comes next. The first loads of a graph are copied while the graph before
it runs, or, after a backward, at the end of the optimizer step: which graph follows is what followed the last time. A
copy that no load takes, because another graph came or the values changed, is dropped.

Weights in files are read into their cache in the same order, as many of the loads to come as it has memory for.

The weights that a backward loads first are those that its forward has used last. They stay on the device in between, as
far as the ring of loaded weights has room for them besides what the forward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from zenflow_compile.planning.weight_memory import GraphLoads
from zenflow_compile.runtime.nvme.chunk import Chunk
from zenflow_compile.runtime.parameters.host_values import Staged
from zenflow_compile.runtime.parameters.host_weight import HostWeight
from zenflow_compile.runtime.parameters.transport import Transport

_READS_AHEAD = 32
"""Most loads to come that are looked through for weights to read, at each load: more do not fit into memory by far."""


@dataclass(eq=False)
class WeightPrefetch:
    """Starts copies ahead of loads. ``weights``: by index of the parameter.

    Attributes:
        ring_bytes: of loaded weights.
        carried: weights that stay on the device for the backward that follows.
    """

    _transport: Transport
    _weights: Mapping[int, HostWeight]
    _apply_due: Callable[[int], None]
    _graphs: dict[int, GraphLoads] = field(default_factory=dict)
    _followed_by: dict[int, int] = field(default_factory=dict)
    _running: int | None = None
    _next: int = 0  # load of the running graph
    _stepped: bool = False  # since the running graph began
    _ahead: Sequence[tuple[int, bool]] = ()
    """The loads to come: those that the running graph has left, if no step has ended since, and those of the graph that
    followed it the last time; with each, whether updates that are due are applied before."""
    _carriable: frozenset[int] = frozenset()
    """Weights that the running forward may leave on the device for the backward that followed it the last time."""
    _staged: dict[int, Staged] = field(default_factory=dict)
    ring_bytes: int = 0
    carried: set[int] = field(default_factory=set)

    def resize(self, ring_bytes: int) -> None:
        """The ring of loaded weights has another size from now on."""
        self.ring_bytes = ring_bytes
        self._look_ahead()

    def declare(self, graph: int, loads: GraphLoads) -> None:
        self._graphs[graph] = loads
        self._look_ahead()

    def begin(self, graph: int) -> set[int]:
        """A graph begins to run: start the copies of its first loads. Returns the carried weights that it lacks."""
        if self._running is not None:
            self._followed_by[self._running] = graph
        lacks = self.carried - self._first_loads(graph)
        self.carried = set()
        # An interrupt below finds no loads of another graph.
        self._running, self._next, self._stepped, self._ahead, self._carriable = graph, 0, False, (), frozenset()
        loads = set(self._graphs[graph].order) if graph in self._graphs else set()
        for p in self._staged.keys() - loads:
            self._drop(p)
        self._look_ahead()
        self.go_on()
        return lacks

    def carries(self, p: int) -> bool:
        """Whether a weight that the running forward does not need any more stays for its backward."""
        return (
            p in self._carriable
            and self._running is not None
            and p not in self._graphs[self._running].order[self._next :]
        )

    def _is_carried(self, p: int) -> bool:
        return p in self.carried or self.carries(p)

    def _first_loads(self, graph: int, needed_bytes: int = 0) -> set[int]:
        """The first weights that a graph loads, as many as fit into the ring beside ``needed_bytes``."""
        first: set[int] = set()
        room = self.ring_bytes - needed_bytes
        for p in self._graphs[graph].order if graph in self._graphs else ():
            if p not in first and p in self._weights:
                room -= self._weights[p].nbytes
                if room < 0:
                    break
                first.add(p)
        return first

    def end_step(self) -> None:
        """An optimizer step has ended: start the copies of the first loads of the next forward."""
        self._stepped, self._ahead = True, ()
        self._look_ahead()
        self.go_on()

    def take(self, p: int) -> Staged | None:
        """The copy of a weight that is loaded now; None if none was started, or the values have changed since."""
        if self._running is not None and (running := self._graphs.get(self._running)) is not None:
            order = running.order
            # Not the next one if several threads run graphs: then this one's loads go on after it.
            taken = next((i + 1 for i in range(self._next, len(order)) if order[i] == p), self._next)
            left = self._ahead if self._stepped else self._ahead[taken - self._next :]
            self._next, self._ahead = taken, left
        if p in self._staged and not self._weights[p].values.is_current(self._staged[p]):
            self._drop(p)
        return self._staged.pop(p, None)

    def drop(self) -> None:
        """Forget all copies, once they have ended."""
        for p in list(self._staged):
            self._drop(p)

    def _drop(self, p: int) -> None:
        self._staged[p].drop()
        del self._staged[p]

    def go_on(self) -> None:
        """Start copies of the loads to come, as far as the ring has buffers: a load gives its own back."""
        self._copy_ahead()
        if (files := self._transport.weight_files) is not None:
            files.read_ahead(self._chunks_ahead())

    def _chunks_ahead(self) -> Iterator[Chunk]:
        """What the loads to come read from files, whose copies have not been started."""
        copied = set(self._staged)
        for p, _ in islice(self._ahead, _READS_AHEAD):
            weight = self._weights.get(p)
            if weight is None or p in copied or (weight.loaded and self._is_carried(p)):
                copied.discard(p)  # a later load reads it again
                continue
            if (chunk := weight.values.chunk) is not None:
                yield chunk

    def _copy_ahead(self) -> None:
        ring = self._transport.up_ring
        free = ring.free
        for p, reads_updates in self._ahead:
            if free < 2:  # the last buffer is for the weight, or the update, that is needed now
                return
            weight = self._weights.get(p)
            # One that the device has now is unloaded before this load, unless it is carried.
            if weight is None or weight.held or p in self._staged or (weight.loaded and self._is_carried(p)):
                continue
            if reads_updates:
                self._apply_due(p)
            values = weight.values
            if values.has_update_on_its_way or (staged := values.stage(waits=False)) is None:
                return
            self._staged[p], staged.buffer.in_use = staged, True  # see [Note: one assignment] in ``staging_ring``
            free = ring.free  # updates, and other threads, take some, too

    def _look_ahead(self) -> None:
        """Find out which loads come: at most those until the graph ends that follows the running one."""
        if self._running is None or (running := self._graphs.get(self._running)) is None:
            return
        ahead: list[tuple[int, bool]] = []
        carriable: set[int] = set()
        if not self._stepped:
            ahead += ((p, running.reads_updates) for p in running.order[self._next :])
        follower = self._graphs.get(after := self._followed_by.get(self._running, -1))
        if follower is not None and running.reads_updates and not follower.reads_updates:
            carriable = self._first_loads(after, running.peak_bytes)
        # After a backward there may come a step, whose updates are due in the forward after it.
        if follower is not None and (running.reads_updates or self._stepped):
            ahead += ((p, follower.reads_updates) for p in follower.order)
        self._ahead, self._carriable = ahead, frozenset(carriable)
