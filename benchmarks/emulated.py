"""Emulates a device by sleeping: its work takes a known time and no core, so that any machine can test schedules."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.common import interleaved, option_parser
from tests.support.aten_updates import aten_update
from zenflow_compile.runtime.device.thread_lane import ThreadLane, ThreadTicket
from zenflow_compile.runtime.host.host_kernel import WindowUpdate
from zenflow_compile.runtime.host.workers import Job, Work, bounds_of
from zenflow_compile.runtime.parameters.host_state import UpdateWork


@torch.library.custom_op("emulated::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """``x @ weight.T``, which takes ``seconds``, as does each of its two gradients."""
    time.sleep(seconds)
    return x @ weight.t()


@torch.library.custom_op("emulated::input_grad", mutates_args=())
def input_grad(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return grad @ weight


@torch.library.custom_op("emulated::weight_grad", mutates_args=())
def weight_grad(grad: Tensor, x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return grad.t() @ x


@linear.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@input_grad.register_fake
def _(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@weight_grad.register_fake
def _(grad: Tensor, x: Tensor, seconds: float) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def _save(ctx: object, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.seconds = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(x, weight)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    seconds = ctx.seconds  # type: ignore[attr-defined]
    return input_grad(grad, weight, seconds), weight_grad(grad, x, seconds), None


linear.register_autograd(_backward, setup_context=_save)


class EmulatedModel(nn.Module):
    """Square layers whose forward, input gradient and weight gradient take ``seconds`` each."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            x = torch.tanh(linear(x, weight, self.seconds))
        return x


class Link:
    """A link of a given bandwidth, which makes one copy at a time.

    Attributes:
        seconds_per_byte: 0 for a link that takes no time.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._free_at = 0.0

    def send(self, size: int, ready: float) -> None:
        """Sleep until the link has copied ``size`` bytes, which were there at ``ready``."""
        # Not from now on: sleeps last too long, and a real link would have begun this copy before.
        self._free_at = max(ready, self._free_at) + size * self.seconds_per_byte
        time.sleep(max(0.0, self._free_at - time.perf_counter()))

    def serve(self, lane: ThreadLane) -> None:
        """Have a lane's copies go over this link: in front of its methods, so that no other engine sees them."""
        hand_over, make = lane._hand_over, lane._make
        ready: dict[int, float] = {}  # when each copy was queued

        def noted(copy: Any) -> ThreadTicket:
            ready[id(copy)] = time.perf_counter()
            return hand_over(copy)

        def copy_over_link(copy: Any) -> None:
            begin = ready.pop(id(copy), time.perf_counter())
            for work in copy.first:
                if not work.done():
                    work.wait()
                    begin = time.perf_counter()
            self.send(copy.source.nbytes, begin)
            make(copy)

        vars(lane).update(_hand_over=noted, _make=copy_over_link)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a comparison: ``seconds`` per operation of the device, ``steps`` per turn."""

    layers: int
    seconds: float
    steps: int
    rounds: int


def link_settings(
    name: str, doc: str | None, arguments: Sequence[str] | None, *, milliseconds: float
) -> tuple[Settings, Path]:
    """Parse the arguments of benchmark ``name``, which emulates a link; and the path of its results."""
    parser = option_parser(name, doc or "", rounds=3)
    parser.add_argument("--steps", type=int, default=4, help="measured per turn (%(default)s)")
    parser.add_argument("--milliseconds", type=float, default=milliseconds, help="of each operation (%(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="(%(default)s)")
    given = parser.parse_args(arguments)
    return Settings(given.layers, given.milliseconds / 1e3, given.steps, given.rounds), given.out


class _Turn(Protocol):
    @property
    def step_ms(self) -> float: ...


_T = TypeVar("_T", bound=_Turn, covariant=True)


class Trainer(Protocol[_T]):
    """Trains some steps in a turn, and returns the means of its times."""

    def turn(self, steps: int) -> _T: ...

    def weights(self) -> list[Tensor]: ...


def take_turns(
    trainers: Mapping[str, Trainer[_T]], given: Settings
) -> tuple[dict[str, list[_T]], dict[str, list[float]], dict[str, bool]]:
    """Let trainers take turns. Returns the turns of each, their step times, and whether weights are those of the first.

    No round warms up: the trainers leave the first step of each turn out.
    """
    turns: dict[str, list[_T]] = {name: [] for name in trainers}

    def take(name: str) -> float:
        turns[name].append(trainers[name].turn(given.steps))
        return turns[name][-1].step_ms

    steps = interleaved(given.rounds, {name: partial(take, name) for name in trainers}, warm_up=0)
    weights = {name: trainer.weights() for name, trainer in trainers.items()}
    first = next(iter(weights.values()))
    return turns, steps, {name: all(map(torch.equal, each, first)) for name, each in weights.items()}


class SlowHost:
    """While entered, a thread makes host updates in the device's arithmetic: so an update is the same wherever it runs.

    It takes a given time per element, most of it asleep: it is slow without using a core. Jobs of the optimizer's
    workers wait for it, and have nothing left to do.

    Attributes:
        seconds_per_element: of updates.
        busy_seconds: that it has taken for updates so far.
    """

    def __init__(self) -> None:
        self.seconds_per_element = 0.0
        self.busy_seconds = 0.0
        self._queue: list[tuple[int, int, int, Sequence[Any], WindowUpdate, ThreadTicket]] = []
        self._wake = threading.Condition()
        self._count = itertools.count()
        self._ends = False
        self._init = Job.__init__
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SlowHost:
        host, init = self, self._init

        def with_slow_input(job: Job, work: Work, inputs: Sequence[Any], *rest: Any, **place: Any) -> None:
            if isinstance(work, UpdateWork):
                update = replace(work.addresses.owner, coefficients=work.coefficients, step=work.taken)
                work.bounds = bounds_of([slice(0, 0)])
                ticket = ThreadTicket()
                with host._wake:
                    entry = (place["step"], place["deadline"], next(host._count), inputs, update, ticket)
                    host._queue = sorted([*host._queue, entry], key=lambda each: each[:3])
                    host._wake.notify()
                inputs = [*inputs, ticket]
            init(job, work, inputs, *rest, **place)

        Job.__init__ = with_slow_input  # type: ignore[method-assign, assignment]
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        Job.__init__ = self._init  # type: ignore[method-assign]
        with self._wake:
            self._ends = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                arrived = (entry for entry in self._queue if all(each.done() for each in entry[3]))
                if (entry := next(arrived, None)) is None:
                    if self._ends:
                        return
                    self._wake.wait(1e-3)
                    continue
                self._queue.remove(entry)
            begin = time.perf_counter()
            update, ticket = entry[4:]
            aten_update(update)
            end = begin + self.seconds_per_element * update.out.numel()
            time.sleep(max(0.0, end - time.perf_counter()))
            self.busy_seconds += time.perf_counter() - begin
            ticket.set()
