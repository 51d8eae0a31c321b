"""Trains small models on the simulated accelerator and on the CPU: the runs that the tests compare."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.gpt import GPT, GPTConfig
from tests.simulated import inductor
from tests.simulated.accelerator import serve
from tests.simulated.collectives import group_of_all, streams_of_groups
from tests.simulated.simulator import PATTERNS, Delays, Simulator, load_simulator
from tests.simulated.streams import Stream
from tests.simulated.waits_at_rest import WaitsAtRest, known_waits
from tests.support.training import ADAM, EAGER_BACKEND, batch, mlp
from tests.support.weight_readers import read_all
from zenflow_compile import ZenFlow, ZenFlowAdamW, rules
from zenflow_compile.native.library import COUNTER
from zenflow_compile.runtime.device.copy_lanes import Gate
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.nvme.state_file import whole_pages
from zenflow_compile.runtime.parameters import host_weights

SELECTING: dict[str, Any] = {"topk_ratio": 0.25, "workers": 2}
OPTION_SETS: dict[str, dict[str, Any]] = {
    "exact": {**SELECTING, "update_interval": 1},
    "windows": SELECTING,
    "staleness": {**SELECTING, "update_interval": 2, "staleness": 1},
    "late every step": {**SELECTING, "update_interval": 1, "staleness": 1},
    "no overlap": {**SELECTING, "update_interval": 2, "overlap_step": False},
    "summed": {**SELECTING, "update_interval": 3, "gradient_transfer": "mean"},
    "int8": {**SELECTING, "update_interval": 2, "gradient_transfer": "int8"},
    "auto windows": {**SELECTING, "update_interval": (1, 6)},
    "reselect often": {**SELECTING, "update_interval": 1, "select_interval": 1},
    "reselect stale": {
        **SELECTING, "update_interval": 2, "select_interval": 2, "staleness": 1,
    },
    "warm-up": {**SELECTING, "update_interval": 4, "full_warm_up_rounds": 3},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
    "streamed in parts": {"policy": "deep_optimizer_states", "update_stride": 1},
    "zenflow streamed": {**SELECTING, "update_stride": 2},
    "files": {"policy": "zero_infinity"},
    "zenflow files": {
        **SELECTING, "update_interval": 2, "select_interval": 2, "offload_device": "nvme",
    },
    "max_grad_norm": {**SELECTING, "update_interval": 2, "max_grad_norm": 0.05},
}  # fmt: skip
"""Options of the optimizer, by name: each takes other ways through the runtime."""

WEIGHT_SETS = {
    f"weights {name}": {**OPTION_SETS[name], "offload_weights": 1.0}
    for name in (
        "exact", "windows", "staleness", "late every step", "no overlap", "summed", "int8", "reselect often",
        "reselect stale", "zero_offload", "twinflow", "files", "zenflow files", "max_grad_norm",
    )
} | {
    "weights resident": {"policy": "resident", "offload_weights": 1.0},
    **{
        f"weights in {name}": {**OPTION_SETS[name], "offload_weights": 1.0, "offload_device": "nvme_all"}
        for name in ("files", "zenflow files")
    },
    "weights in stale files": {
        **SELECTING, "update_interval": 2, "staleness": 1, "offload_device": "nvme_all", "offload_weights": 1.0,
    },
}  # fmt: skip
"""With weights in host memory or in files, which graphs load around their uses."""

_ROUNDED = {"min_offload_size": 10_000, "state_dtype": "fp8", "split_master": True}
STATE_SETS = {
    f"bytes {name}": {**OPTION_SETS[name], **_ROUNDED}
    for name in (
        "exact", "windows", "late every step", "int8", "reselect often", "reselect stale", "zero_offload", "twinflow",
        "zenflow files",
    )
} | {
    "bytes in place": {**OPTION_SETS["windows"], **_ROUNDED, "split_master": False, "state_dtype": "bf16"},
    "bytes bf16": {**OPTION_SETS["reselect often"], **_ROUNDED, "state_dtype": "bf16"},
    "bytes of weights": {**OPTION_SETS["reselect stale"], **_ROUNDED, "offload_weights": 1.0},
    "bytes resident": {"policy": "resident", "state_dtype": "fp8"},
    "bytes streamed": {**OPTION_SETS["streamed"], **_ROUNDED, "split_master": False},
}  # fmt: skip
"""With state in fewer bytes, which only the model "wide" can have."""

MUON_SETS: dict[str, dict[str, Any]] = {
    "muon": {"policy": "zero_offload"},
    "muon selecting": SELECTING,
    "muon weights": {"policy": "zero_offload", "offload_weights": 1.0},
    "muon bytes": {"policy": "zero_offload", "state_dtype": "bf16"},
}
"""Hidden matrices by Muon, and the others by AdamW."""

HABITS = (
    "plain", "clip", "accumulate", "side stream", "optimizer in backward", "reads", "reload", "scaled", "offload all",
)  # fmt: skip
"""What a training loop does besides forward, backward and step."""

LATE = ("D2H late", "H2D late", "jobs late")
"""Delay patterns in addition to those of the simulator: one lane, or the workers."""

LATE_COLLECTIVES = "collectives late"
"""A delay pattern of several ranks: of the streams of their groups."""

LAST = {
    "compute last": Delays(default=1.0),
    "others last": Delays(others=1.0),
    **dict.fromkeys(("D2H last", "H2D last", "jobs last", "collectives last"), Delays()),
}
"""The same delay patterns without chance: what is late runs only if the host waits for it, see ``WaitsAtRest``."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        options: a key of ``OPTION_SETS``, ``WEIGHT_SETS``, ``STATE_SETS`` or ``MUON_SETS``.
        model: a key of ``MODELS``, or "wide".
        entry: "hooks"; "graph", run operator by operator; or "inductor", graphs in generated code.
        habit: one of ``HABITS``, "flush", or "weights read": all of them directly, after each step.
        delays: a key of the simulator's ``PATTERNS``, or of ``LAST``, or one of ``LATE``.
        values: whether the device has stream values.
        limit: of the launch queue; 0: any length.
        in_order: the device runs everything at once, in the order of the launches.
        ranks: that train together, each in a process that runs the case.
    """

    options: str = "windows"
    model: str = "mlp"
    entry: str = "graph"
    habit: str = "plain"
    delays: str = "none"
    seed: int = 0
    values: bool = True
    limit: int = 0
    in_order: bool = False
    steps: int = 9
    ranks: int = 1


@dataclass
class Outcome:
    """What a run leaves.

    Attributes:
        losses: of every step.
        weights: at the end, on the host, and gradients that the loop has read.
        syncs: how often the host waited for the device during the steps, by reason and step.
        copies: blocking copies that the package made during the steps, by reason and step.
    """

    losses: list[float]
    weights: list[Tensor]
    syncs: list[dict[str, int]] = field(default_factory=list)
    copies: list[dict[str, int]] = field(default_factory=list)

    def equals(self, other: Outcome) -> bool:
        """Whether losses and weights have the same bits."""
        same = len(self.weights) == len(other.weights) and torch.equal(
            torch.tensor(self.losses), torch.tensor(other.losses)
        )
        return same and all(map(torch.equal, self.weights, other.weights))


def gpt() -> nn.Module:
    """Two blocks of width 32: the same weights at every call."""
    torch.manual_seed(1)
    return GPT(GPTConfig(vocabulary=61, context=16, layers=2, heads=2, width=32))


def data(model: str, step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, on the CPU."""
    if model == "wide":
        inputs, targets = batch(step)
        return inputs.bfloat16(), targets
    if model != "gpt":
        return batch(step)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (2, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def matrices() -> nn.Module:
    """Without a bias: no gradient gets to autograd's accumulation, which would join streams."""
    torch.manual_seed(1)
    linears = [nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Tanh()]
    return nn.Sequential(*linears, nn.Linear(32, 10, bias=False))


class Experts(nn.Module):
    """Two layers of which each forward uses one.

    Attributes:
        second: which one the next forward uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 10, bias=False) for _ in range(2))
        self.second = False

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.experts[1 if self.second else 0](torch.tanh(self.up(x)))
        return chosen


def experts() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(1)
    return Experts()


def wide() -> nn.Module:
    """bf16, with two matrices whose slices have a quantization block or more."""
    torch.manual_seed(1)
    linears = [nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 160), nn.Tanh(), nn.Linear(160, 128), nn.Tanh()]
    return nn.Sequential(*linears, nn.Linear(128, 10)).to(torch.bfloat16)


MODELS = {"mlp": mlp, "gpt": gpt, "matrices": matrices}
RANK_MODELS = {**MODELS, "experts": experts}
"""Those of several ranks: each may use other experts."""
_ALL_MODELS = {**RANK_MODELS, "wide": wide}
_ALL_SETS = {**OPTION_SETS, **WEIGHT_SETS, **STATE_SETS, **MUON_SETS}


def make_optimizer(model: nn.Module, name: str, options: dict[str, Any]) -> ZenFlow:
    if name in MUON_SETS:
        return ZenFlow(rules.muon_groups(model, rules.Muon(lr=0.02)), rules.AdamW(**ADAM), **options)
    return ZenFlowAdamW(model.named_parameters(), **{**ADAM, **options})


class Loop:
    """A training loop on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch._dynamo.reset()
        self.case = case
        self.device = device
        self.model = _ALL_MODELS[case.model]().to(device)
        self.rank = dist.get_rank() if case.ranks > 1 else 0
        options = {"min_offload_size": 100, **_ALL_SETS[case.options]}
        if "offload_weights" in options:
            host_weights.SMALLEST_WEIGHT_BYTES = 1
        if options.get("policy", "zenflow") == "zenflow":
            options["device_share"] = 0.0
        self._folder = tempfile.TemporaryDirectory()
        if options.get("policy") == "zero_infinity" or "offload_device" in options:
            options["nvme_path"] = self._folder.name
            largest = max(each.numel() for each in self.model.parameters())
            weights = whole_pages(4 * largest) if options.get("offload_device") == "nvme_all" else 0
            options["host_window_bytes"] = 12 * largest + weights
        if case.ranks > 1:
            options["process_group"] = dist.group.WORLD if device.type == "cpu" else group_of_all()
            options["workers"] = 1  # they divide the machine
        compiled = torch.compile(self.model, **EAGER_BACKEND)
        self.in_backward = case.habit == "optimizer in backward"
        if self.in_backward:
            settings = {**EAGER_BACKEND["options"], **ADAM, **options}
            self.call = torch.compile(self.model, backend="zenflow", options=settings)
            self.optimizer: Any = None
        else:
            self.optimizer = make_optimizer(self.model, case.options, options)
            generated = torch.compile(self.model, backend="zenflow")  # compiles at the first call, if there is one
            self.call = {"graph": compiled, "hooks": self.model, "inductor": generated}[case.entry]
        self.scale = torch.tensor(1024.0, device=device)
        self.saved: dict[str, Any] = {}
        self.reads: list[Tensor] = []
        # Made before training, as real loops load data: a copy of pageable memory would count as a wait of the step.
        self.batches = [
            tuple(each.to(device) for each in data(case.model, case.ranks * step + self.rank))
            for step in range(case.steps)
        ]

    def loss(self, step: int) -> Tensor:
        inputs, targets = self.batches[step]
        if self.case.model == "gpt":
            loss: Tensor = self.call(inputs, targets)
            return loss
        if isinstance(self.model, Experts):
            self.model.second = bool((step // 2 + self.rank) % 2)
        return F.cross_entropy(self.call(inputs), targets)

    def step(self, step: int) -> Tensor:
        habit, loss = self.case.habit, self._backward(step)
        if habit == "clip":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        if habit == "scaled":
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            found = torch.zeros((), device=self.device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, self.scale.reciprocal())
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        if habit == "offload all":
            if step == 1:
                self.offload_all()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            if step == 2:
                self.offload_all()
        if habit == "reads":
            for param in self.model.parameters():
                if param.grad is not None and param.dim() > 1:
                    self.reads.append(param.grad.detach().clone())
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if habit == "offload all" and step in (3, 7):
            self.offload_all()
        if habit == "weights read":
            self.reads += read_all(self.model, self.optimizer)[0]
        if habit == "flush" and step % 4 == 1:
            self.optimizer.flush()
        if habit == "reload" and step % 4 == 1:
            self.saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            self.saved["model"] = {name: value.clone() for name, value in self.saved["model"].items()}
        if habit == "reload" and step % 4 == 3:
            self.model.load_state_dict(self.saved["model"])
            self.optimizer.load_state_dict(self.saved["optimizer"])
        return loss.detach()

    def _backward(self, step: int) -> Tensor:
        habit = self.case.habit
        if habit == "side stream" and self.device.type != "cpu":
            side = Stream()
            side.wait_stream(torch.sim.current_stream())  # type: ignore[attr-defined]
            with side:
                loss = self.loss(step)
            # Called from another stream than the forward's: PyTorch joins the two where it accumulates gradients.
            loss.backward()
            return loss
        loss = self.loss(step)
        if habit == "accumulate" or (habit == "offload all" and step == 5):
            (loss / 2).backward()
            if habit == "offload all":
                self.offload_all()
            (self.loss((step + 1) % self.case.steps) / 2).backward()
        elif habit == "scaled":
            (loss * self.scale).backward()
        else:
            loss.backward()
        return loss

    def offload_all(self) -> None:
        """Give the optimizer's device memory back, on the first rank. Not on the CPU: the run there is without."""
        if self.device.type != "cpu" and self.rank == 0:
            self.optimizer.offload_all()
            assert self.optimizer.device_bytes == 0

    def weights(self) -> list[Tensor]:
        if self.optimizer is not None:
            self.optimizer.synchronize()
        else:
            self.call.zero_grad()
            from zenflow_compile.runtime import ops

            for engine in ops.live_engines():
                engine.access.synchronize()  # type: ignore[attr-defined]
                engine.access.hold_weights()  # type: ignore[attr-defined]
        weights = [param.detach() for param in self.model.parameters()]
        return [each.cpu().clone() for each in (*weights, *self.reads)]

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()
        self._folder.cleanup()


class LateInput:
    """A ticket of one more input of a job: a value that a late stream writes."""

    error = None

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def gate(self) -> Gate:
        return Gate(self._flag.address, self._flag.value, COUNTER, self)

    def done(self) -> bool:
        return self._flag.reached()

    def wait(self) -> None:
        self._flag.wait()

    wait_on_device = settle = wait


def lateness(case: Case) -> float:
    """Probability with which what is late is passed over."""
    return 1.0 if case.delays in LAST else 0.997


@contextmanager
def late_jobs(simulator: Simulator, case: Case) -> Iterator[None]:
    """Make every job late, by one more input."""
    device = device_of(simulator.device)
    streams = device.streams
    assert streams is not None
    late = [streams.acquire(urgent=False) for _ in range(4)]  # so that a job may be ready before an earlier one
    for stream in late:
        simulator.delay(stream, lateness(case))
    chance = random.Random(case.seed)
    flags, values = HostFlags(len(late), device), [itertools.count(1) for _ in late]
    init = Job.__init__

    def with_late_input(job: Job, parts: Any, inputs: Any, *arguments: Any, **keywords: Any) -> None:
        number = chance.randrange(len(late))
        flag = Flag(flags, number, next(values[number]))
        flag.write_from(streams, late[number])
        init(job, parts, [*inputs, LateInput(flag)], *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "__init__", with_late_input)
        yield


def train(case: Case, on: str = "sim", hazard: Callable[[], Any] = nullcontext) -> Outcome:
    """Train from the same weights with the same data.

    Args:
        on: "sim" or "cpu".
        hazard: a context in which the run happens, such as a mutant.
    """
    simulator = load_simulator()
    serve()
    if on == "sim":
        pattern = {**PATTERNS, **LAST}.get(case.delays, PATTERNS["none"])
        simulator.configure(
            seed=case.seed, delays=pattern, stream_values=case.values, limit=case.limit, in_order=case.in_order
        )
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the CPU's fused attention has no counterpart on the device
        if case.entry == "inductor":
            inductor.register_backend()
            stack.enter_context(torch._inductor.config.patch(inductor.OPTIONS))
        stack.enter_context(hazard())
        if on == "sim":
            stack.enter_context(WaitsAtRest(simulator).in_force() if case.delays in LAST else known_waits())
        if case.delays in ("jobs late", "jobs last") and on == "sim":
            stack.enter_context(late_jobs(simulator, case))
        return _run(case, torch.device("cpu") if on == "cpu" else simulator.device, simulator)


def _run(case: Case, device: torch.device, simulator: Simulator) -> Outcome:
    loop = Loop(case, device)
    losses, syncs, copies = [], [], []
    try:
        for step in range(case.steps):
            if step == 1 and device.type != "cpu" and loop.optimizer is not None and case.delays[:3] in ("D2H", "H2D"):
                transport = loop.optimizer.engine.registry.transport
                lane = transport.to_host if case.delays[:3] == "D2H" else transport.to_device
                simulator.delay(lane.stream, lateness(case))
            if step == 1 and case.delays in (LATE_COLLECTIVES, "collectives last"):
                for stream in streams_of_groups():
                    simulator.delay(stream, lateness(case))
            simulator.reset_counts()
            blocking = device_of(device).blocking
            blocking.clear()
            losses.append(loop.step(step))
            syncs.append(simulator.counts())
            copies.append(dict(blocking))
        weights = loop.weights()
        device_of(device).synchronize()  # losses of a side stream are read from this one
        return Outcome([float(each) for each in losses], weights, syncs, copies)
    finally:
        loop.close()


def on_cpu(case: Case) -> Outcome:
    """The same training on the CPU, where nothing is late; run at the first call, where possible by hooks."""
    entry = "graph" if case.habit == "optimizer in backward" else "hooks"
    return _on_cpu(replace(case, delays="none", seed=0, values=True, entry=entry))


@cache
def _on_cpu(case: Case) -> Outcome:
    return train(case, "cpu")


def differing(cases: list[Case]) -> list[Case]:
    """Those of ``cases`` whose outcome is not that of the CPU."""
    return [case for case in cases if not train(case).equals(on_cpu(case))]


def stacks() -> str:
    """Names of the threads that run, for the message of a hang."""
    return ", ".join(thread.name for thread in threading.enumerate())
