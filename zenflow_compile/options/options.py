"""The knobs, checked before anything is allocated, and the ``options=`` of ``torch.compile`` taken apart.

The knobs that DeepSpeed also has keep its names and the meaning its documentation gives them; docs/options.md
says, option by option, where behaviour differs from DeepSpeed's and why. Nothing here touches a device or
imports the runtime. Numbers that steer convergence name the study they come from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zenflow_compile.checks.validate import (
    check_choice,
    check_cores,
    check_flag,
    check_integer,
    check_positive,
    check_ratio,
    unknown_option,
)
from zenflow_compile.options.deepspeed import read_deepspeed_config

__all__ = [
    "ADAM_KEYWORDS",
    "AUTO_SELECT_INTERVAL",
    "OPTION_NAMES",
    "BackendOptions",
    "Options",
    "read_deepspeed_config",
    "split_backend_options",
]

POLICIES = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity", "auto")
OFFLOAD_DEVICES = ("cpu", "nvme")
SELECT_STRATEGIES = ("auto", "step", "epoch")
HostKernel = Literal["auto", "inductor", "aten"]
HOST_KERNELS = ("auto", "inductor", "aten")
GRADIENT_COMPRESSIONS = ("int8",)
WEIGHT_GRAD_ORDERS = ("asap", "forward")

AUTO_SELECT_INTERVAL = 16
"""Least steps between re-selections under ``select_interval="auto"``, which only drift brings about. Same study: with
an averaged score, more often than every 16 to 64 steps buys nothing, and selecting only once costs +19% from scratch
(2 seeds)."""

ADAM_KEYWORDS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
)
"""Keywords of ``torch.optim.AdamW``; ``runtime.param_groups`` says which of their values are taken."""

LONGEST_UPDATE_INTERVAL = 64
"""The host kernel takes every gradient buffer of an update window as an argument of its own: it compiles in 9 s for 64
of them, and in 100 s for 256. The longest window that the convergence study found useful has 8 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user chose, checked; planners and the engine read it and nothing changes it.

    Numbers are stored as plain ``int`` and ``float``, so that ``torch.load(weights_only=True)`` reads a dict
    of them. A *step* is a call of ``step()``; one that ``GradScaler`` skips is none. Every policy checks the ranges of
    all options and ignores those that it does not read; "read by" in docs/options.md has the policies that read each.
    An optimizer warns of options that its policy does not read.

    Attributes:
        policy: Where optimizer state lives. ``"resident"``: on the device, as in plain AdamW.
            ``"zero_offload"``: on the host, every update blocking. ``"twinflow"``: so, but a fixed share of it on the
            device. ``"deep_optimizer_states"``: on the host, some of it streamed to the device and updated there
            meanwhile. ``"zero_infinity"``: in files behind a window of host memory. ``"zenflow"``: that of the selected
            columns on the device, the rest on the host. ``"auto"``: the one of these, or mixture of them, that is
            predicted to be the fastest of those that fit this machine when the optimizer is made.
        tokens_per_step: Tokens, or rows of the batch, >= 1, that the device trains on in one step: with the parameters
            they say how long a step takes and what activations need. ``policy="auto"`` needs it, and no other
            reads it.
        topk_ratio: Share, in [0, 1], of the columns (or rows) of each large parameter that the device updates
            at every step. 0 defers everything, 1 nothing.
        select_strategy: Unit of ``select_interval``: ``"step"``, ``"epoch"`` (``steps_per_epoch`` is needed
            then), or ``"auto"``, which chooses unit and number.
        select_interval: Steps or epochs between re-selections, >= 1; an integer needs strategy ``"step"`` or
            ``"epoch"``. A parameter re-selects at the first close of its own window at or after that many
            steps. ``"auto"``: when its selection has drifted, after 16 steps at the earliest.
        update_interval: Window length S in steps, in [1, 64]: the gradient of what was not selected is collected
            for S steps and applied once. 1 is exact AdamW. ``"auto"`` adapts to gradient values, from 2 to
            ``max_update_interval``, and not below ``min_update_interval``.
        max_update_interval: Longest window in steps, in [1, 64], that ``update_interval="auto"`` may choose. Source
            of its default: this project's convergence study (docs/options.md, "Where the defaults come from"): a
            small GPT trained from scratch ends +1.3% above AdamW's validation loss at 4 (3 seeds) and +7.6% or more
            at 8 (1 seed).
        min_update_interval: Shortest window in steps, in [1, ``max_update_interval``], that ``update_interval="auto"``
            may choose. None: from the host's measured rate and the time of the first step that compiles nothing, which
            may differ between runs; it is kept in the state.
        full_warm_up_rounds: Steps at the start, >= 0, in which every window closes at once: synchronous,
            exact AdamW. Cover the learning-rate warm-up with it when training from scratch.
        overlap_step: Run host updates beside the device's work. False makes every due update visible when ``step()``
            returns (when ``backward()`` returns, without an optimizer object), for code that reads weights by hand,
            such as an EMA; all policies but ``"zenflow"`` do so always. This changes time, never numbers.
        staleness: Whole steps, 0 or 1, by which a closed window's result may be seen late. 1 gives the host
            one more step to hide in; it costs +9 to +19% validation loss from scratch and +0.3% in low-rate
            fine-tuning.
        offload: Keep the state of the selected columns off the device too. Not in this version.
        auto_ratio: Threshold, in [0, 1], of ``update_interval="auto"``: a window closes when the norm of what
            waits reaches this share of the average norm of what is selected.
        pt_reserved_cores_perc: Share, in [0, 1], of the physical cores left to PyTorch; the others, at least one,
            run host updates. None leaves it two cores, and one for each DataLoader worker process that is alive when
            the optimizer is made. Ignored where ``workers`` or ``worker_cores`` is given.
        workers: Threads that run host updates, >= 1, at most one per physical core that this process may use; None
            derives them from ``pt_reserved_cores_perc``.
        worker_cores: The logical cores that workers are pinned to, one worker each; None takes physical cores that
            this process may use and that have the fewest workers of its other optimizers, the last ones first.
        steps_per_epoch: Steps in one epoch, >= 1, for strategy ``"epoch"``.
        max_grad_norm: Bound, > 0, on the global gradient norm over device and host; None does not clip.
        gradient_accumulation_steps: Backwards per step, >= 1, when the user declares them, so that
            gradients are split and copied in the last of them. None: any number, and they are final at ``step()``.
        device_share: First block, embeddings and head, in this order, stay on the device whole, as far as
            they fit into this share, in [0, 1], of all parameters. 0 never keeps them there.
        spare_device_bytes: Device memory, in bytes of each device, to be filled with the optimizer state of further
            parameters, whole, in the order of the forward: they are then updated at every step, and the host gets less
            to do.
        min_offload_size: Parameters with fewer elements, and all 1-D ones, keep their state on the device.
        accumulate_on_device: Sum the gradients of a window on the device, which takes 4 bytes per deferred element
            there, and copy their mean once per window. Another rule: one step on that mean (docs/options.md).
        gradient_compression: ``"int8"`` sends deferred gradients as one byte per element with a scale per line, and
            keeps what was rounded away for the next step; None sends them in the model's dtype.
        ratio: Share, in [0, 1], of the optimizer state that policies ``"twinflow"`` and ``"deep_optimizer_states"``
            keep off the device (DeepSpeed's ``offload_optimizer.ratio``); the others ignore it.
        sub_group_size: Elements, >= 1, of the groups of whole parameters that updates are interleaved by. None: 100
            million, or what divides the state that is the host's into four strides' worth of groups, if that is less.
        update_stride: Every so many subgroups, >= 1, one is updated on the device, with state that is streamed there
            from host memory and back: 1 updates all of them there, 2 every other one. ``"auto"`` takes it from the
            performance model and rates that are measured once, before the first step. None: no streaming, and
            ``"auto"`` under policy ``"deep_optimizer_states"``.
        offload_device: ``"nvme"`` keeps the host's state in files under ``nvme_path``, ``"cpu"`` in memory. Policy
            ``"zero_infinity"`` always has it in files.
        nvme_path: Directory for the files; they are scratch, as large as the fp32 state, and removed by ``close()``.
        host_window_bytes: Host memory, in bytes, that state in files passes through; at least the state of the largest
            parameter's deferred part. None: twice that, and 64 MiB at least.
        staging_bytes: Device memory, in bytes, through which uploads pass; at least the largest parameter's
            remaining lines. More than all uploads that can be in flight is not allocated. None: three times the least.
        weight_grad_order: Order of the backward: ``"asap"`` computes every weight gradient as soon as it can be;
            ``"forward"`` computes those of the first layers last, in the order in which the next forward needs them,
            which gives the host more time for them.
        weight_grad_bytes: Device memory, in bytes, that inputs and output gradients may take which ``"forward"``
            keeps for longer: it decides for how many layers. None: a quarter of what is free.
        host_kernel: Host Adam: ``"inductor"`` (one fused kernel; needs a C++ compiler), ``"aten"``
            (``torch._fused_adamw_``, slower), or ``"auto"``, the first where it compiles.
    """

    policy: str = "zenflow"
    tokens_per_step: int | None = None
    topk_ratio: float = 0.1
    select_strategy: str = "auto"
    select_interval: int | Literal["auto"] = "auto"
    update_interval: int | Literal["auto"] = 4
    max_update_interval: int = 4
    min_update_interval: int | None = None
    full_warm_up_rounds: int = 0
    overlap_step: bool = True
    staleness: int = 0
    offload: bool = False
    auto_ratio: float = 0.99
    pt_reserved_cores_perc: float | None = None
    workers: int | None = None
    worker_cores: tuple[int, ...] | None = None
    steps_per_epoch: int | None = None
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int | None = None
    device_share: float = 0.25
    spare_device_bytes: int = 0
    min_offload_size: int = 4096
    accumulate_on_device: bool = False
    gradient_compression: str | None = None
    ratio: float = 1.0
    sub_group_size: int | None = None
    update_stride: int | Literal["auto"] | None = None
    offload_device: str = "cpu"
    nvme_path: str | None = None
    host_window_bytes: int | None = None
    staging_bytes: int | None = None
    weight_grad_order: str = "asap"
    weight_grad_bytes: int | None = None
    host_kernel: HostKernel = "auto"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "policy": check_choice("policy", self.policy, POLICIES),
            "select_strategy": check_choice("select_strategy", self.select_strategy, SELECT_STRATEGIES),
            "host_kernel": check_choice("host_kernel", self.host_kernel, HOST_KERNELS),
            "offload_device": check_choice("offload_device", self.offload_device, OFFLOAD_DEVICES),
            "weight_grad_order": check_choice("weight_grad_order", self.weight_grad_order, WEIGHT_GRAD_ORDERS),
            "max_update_interval": check_integer(
                "max_update_interval", self.max_update_interval, 1, LONGEST_UPDATE_INTERVAL
            ),
            "full_warm_up_rounds": check_integer("full_warm_up_rounds", self.full_warm_up_rounds, 0),
            "staleness": check_integer("staleness", self.staleness, 0, 1),
            "spare_device_bytes": check_integer("spare_device_bytes", self.spare_device_bytes, 0),
            "min_offload_size": check_integer("min_offload_size", self.min_offload_size, 0),
        }
        for name in ("topk_ratio", "auto_ratio", "device_share", "ratio"):
            checked[name] = check_ratio(name, getattr(self, name))
        if self.pt_reserved_cores_perc is not None:
            checked["pt_reserved_cores_perc"] = check_ratio("pt_reserved_cores_perc", self.pt_reserved_cores_perc)
        for name, longest in (("select_interval", None), ("update_interval", LONGEST_UPDATE_INTERVAL)):
            if (value := getattr(self, name)) != "auto":
                checked[name] = check_integer(name, value, 1, longest, remedy=' or "auto"')
        if self.update_stride not in ("auto", None):
            checked["update_stride"] = check_integer("update_stride", self.update_stride, 1, remedy=' or "auto"')
        integers = ("steps_per_epoch", "gradient_accumulation_steps", "workers", "staging_bytes", "host_window_bytes")
        for name in ("tokens_per_step", "sub_group_size", *integers):
            if (value := getattr(self, name)) is not None:
                checked[name] = check_integer(name, value, 1, remedy=" or None")
        if self.min_update_interval is not None:
            longest = checked["max_update_interval"]
            remedy = f": no more than max_update_interval={longest}; None measures it"
            checked["min_update_interval"] = check_integer(
                "min_update_interval", self.min_update_interval, 1, longest, remedy=remedy
            )
        if self.max_grad_norm is not None:
            remedy = "; None turns clipping off"
            checked["max_grad_norm"] = check_positive("max_grad_norm", self.max_grad_norm, remedy=remedy)
        if self.weight_grad_bytes is not None:
            checked["weight_grad_bytes"] = check_integer(
                "weight_grad_bytes", self.weight_grad_bytes, 0, remedy=" or None"
            )
        if self.gradient_compression is not None:
            checked["gradient_compression"] = check_choice(
                "gradient_compression", self.gradient_compression, GRADIENT_COMPRESSIONS
            )
        if self.worker_cores is not None:
            checked["worker_cores"] = check_cores("worker_cores", self.worker_cores)
            if self.workers is not None and self.workers != len(checked["worker_cores"]):
                raise ValueError(
                    f"workers={self.workers} and worker_cores={self.worker_cores!r} disagree: one worker runs on each "
                    "core of the list; give one of the two"
                )
        for name in ("overlap_step", "offload", "accumulate_on_device"):
            check_flag(name, getattr(self, name))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_files()
        if self.policy == "auto" and self.tokens_per_step is None:
            raise ValueError(
                'tokens_per_step=None under policy="auto" must be an integer >= 1: how long a step takes decides what '
                "is fastest; pass the tokens (or rows) that the device trains on per step, as in "
                "tokens_per_step=batch_size * sequence_length"
            )
        if self.policy in ("zenflow", "auto"):  # what is chosen may be zenflow
            self._check_zenflow()

    def _check_files(self) -> None:
        """Where state may be in files, and that they have a place."""
        if self.offload_device == "nvme" and self.policy not in ("zenflow", "zero_infinity"):
            raise ValueError(
                f'offload_device="nvme" under policy={self.policy!r} is not supported: state in files goes with '
                '"zero_infinity" and "zenflow"; choose one of these, or offload_device="cpu" ("auto" may choose files '
                "wherever nvme_path is given)"
            )
        if self.in_files and self.nvme_path is None:
            raise ValueError(
                "nvme_path=None must be a directory on a local disk: the optimizer's state is to live in files; pass "
                "its path, or choose a policy that keeps state in memory"
            )
        if self.nvme_path is not None and not isinstance(self.nvme_path, (str, os.PathLike)):
            raise TypeError(f"nvme_path={self.nvme_path!r} must be a path, or None")
        if self.nvme_path is not None and not os.fspath(self.nvme_path):
            raise ValueError("nvme_path='' must be the path of a directory on a local disk, or None")

    def _check_zenflow(self) -> None:
        """Rules between knobs that the other policies ignore."""
        if self.offload:
            raise ValueError(
                "offload=True (state of the selected columns off the device) is not supported in this "
                "version; use offload=False with a smaller topk_ratio and device_share=0, or "
                'policy="zero_offload", which keeps the state of every large parameter on the host'
            )
        if self.accumulate_on_device and self.gradient_compression is not None:
            raise ValueError(
                f"gradient_compression={self.gradient_compression!r} with accumulate_on_device=True would round a sum "
                "of several steps at once; choose one of the two"
            )
        if self.select_strategy == "auto":
            if self.select_interval != "auto":
                raise ValueError(
                    f'select_interval={self.select_interval} has no unit under select_strategy="auto"; pass '
                    'select_strategy="step" or "epoch", or leave select_interval="auto"'
                )
            return
        if self.select_interval == "auto":
            raise ValueError(
                f'select_interval="auto" under select_strategy="{self.select_strategy}" must be an integer '
                '>= 1; pass one, or select_strategy="auto" to have both chosen'
            )
        if self.select_strategy == "epoch" and self.steps_per_epoch is None:
            raise ValueError(
                'steps_per_epoch=None under select_strategy="epoch" must be an integer >= 1; pass it, as in '
                'steps_per_epoch=len(loader), or use select_strategy="step"'
            )
        # update_interval="auto" may close a window at every step: no select_interval is too short for it.
        steps = self.resolved_select_interval()
        if self.update_interval != "auto" and steps < self.update_interval:
            raise ValueError(
                f"select_interval={self.select_interval} ({steps} steps) must be at least update_interval="
                f"{self.update_interval}: a parameter re-selects only when its window closes; raise "
                "select_interval or lower update_interval"
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Options:
        """``Options(**keywords)``, but an unknown name is answered with the nearest valid one.

        Raises:
            TypeError: an unknown name, or a value of the wrong type.
            ValueError: a value outside its range, or a combination that makes no sense.
        """
        for name in keywords:
            if name not in OPTION_NAMES:
                raise unknown_option(name, (*OPTION_NAMES, *ADAM_KEYWORDS))
        return cls(**keywords)

    @property
    def longest_window(self) -> int:
        """Longest window in steps, which sizes host memory: the bound under ``"auto"``, 1 without deferral."""
        if self.policy != "zenflow":
            return 1
        return self.max_update_interval if self.update_interval == "auto" else self.update_interval

    @property
    def adaptive(self) -> bool:
        """Whether gradient values decide when windows close."""
        return self.policy == "zenflow" and self.update_interval == "auto"

    @property
    def in_files(self) -> bool:
        """Whether the host's state lives in files."""
        return self.policy == "zero_infinity" or self.offload_device == "nvme"

    @property
    def stride(self) -> int | None:
        """Every so many subgroups, one is updated on the device; None: no streaming.

        Raises:
            ValueError: it is to be measured, and has not been; see ``planning.auto``.
        """
        if self.policy not in ("zenflow", "deep_optimizer_states"):
            return None
        if self.measures_stride:
            raise ValueError('update_stride="auto" has not been resolved')
        assert self.update_stride != "auto"
        return self.update_stride

    @property
    def measures_stride(self) -> bool:
        """Whether ``update_stride`` is still to come from the performance model."""
        if self.policy == "deep_optimizer_states":
            return self.update_stride in ("auto", None)
        return self.policy == "zenflow" and self.update_stride == "auto"

    def resolved_select_interval(self, update_interval: int | None = None) -> int:
        """Steps between re-selections of a parameter whose windows are ``update_interval`` steps long.

        Args:
            update_interval: the parameter's own window length; by default ``longest_window``.

        Returns:
            Steps, not yet rounded up to a close of the parameter's windows.
        """
        if self.select_interval == "auto":
            return max(AUTO_SELECT_INTERVAL, update_interval or self.longest_window)
        if self.select_strategy == "epoch" and self.steps_per_epoch is not None:
            return self.select_interval * self.steps_per_epoch
        return self.select_interval


OPTION_NAMES: tuple[str, ...] = tuple(each.name for each in fields(Options))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """``mode=`` and ``options=`` of ``torch.compile(backend="zenflow")``, taken apart.

    Attributes:
        optimizer: Keywords for ``ZenFlowAdamW``, already checked against ``Options``, when the backend is to
            make the optimizer itself (optimizer-in-backward form); None when the parameters have an optimizer of their
            own.
        inner: What compiles the rewritten graphs: ``"inductor"``, or ``"eager"`` for no code generation.
        inductor: Inductor's own settings: the mode's, and the explicit ones over them.
    """

    optimizer: dict[str, Any] | None = None
    inner: Literal["inductor", "eager"] = "inductor"
    inductor: dict[str, Any] = field(default_factory=dict)


def split_backend_options(options: Mapping[str, Any] | None = None, mode: str | None = None) -> BackendOptions:
    """Takes the options of ``torch.compile(backend="zenflow")`` apart, before anything is compiled.

    ``torch.compile`` refuses ``mode=`` beside ``options=``, so ``options`` may hold a ``"mode"`` of its own.

    Args:
        options: ``inner``, ``mode``, ``config`` (path or dict for ``read_deepspeed_config``), keywords of
            ``ZenFlowAdamW``, which replace those of ``config``, and Inductor's own settings.
        mode: the ``mode=`` of ``torch.compile``.

    Raises:
        TypeError: an unknown name (with the nearest valid one), or a value of the wrong type.
        ValueError: a value outside its range, CUDA graphs, or Inductor settings under ``inner="eager"``.
        FileNotFoundError: ``config`` names no file.
    """
    from zenflow_compile.torch_internals import (
        torch_private,  # imports torch, which the rest of this file does not need
    )

    rest = dict(options or {})
    inner = check_choice("inner", rest.pop("inner", "inductor"), ("inductor", "eager"))
    mode = rest.pop("mode", mode)
    config = rest.pop("config", None)
    optimizer_names = (*ADAM_KEYWORDS, *OPTION_NAMES)
    optimizer = {name: rest.pop(name) for name in optimizer_names if name in rest}
    if config is not None:
        optimizer = read_deepspeed_config(config, **optimizer)
    Options.from_keywords(**{name: value for name, value in optimizer.items() if name in OPTION_NAMES})

    inductor: dict[str, Any] = {}
    if mode is not None:
        modes = torch_private.inductor_modes()
        inductor.update(modes[check_choice("mode", mode, tuple(modes))])
    inductor_names = torch_private.inductor_option_names() if rest else frozenset()
    for name, value in rest.items():
        setting = str(name).replace("-", "_")  # torch.compile reads names for Inductor like this too
        if setting not in inductor_names:
            known = (*optimizer_names, "config", "inner", "mode", *sorted(inductor_names))
            raise unknown_option(name, known)
        inductor[setting] = value
    if inductor.get("triton.cudagraphs"):
        raise ValueError(
            'CUDA graphs (triton.cudagraphs, and so mode="reduce-overhead" and mode="max-autotune") are not '
            "supported in this version: a replayed graph would repeat the copies it recorded, while the "
            "engine's windows and buffers move on; use "
            'mode="max-autotune-no-cudagraphs", or no mode'
        )
    if inner == "eager" and inductor:
        raise ValueError(
            f'inner="eager" generates no code, so {", ".join(sorted(inductor))} would have no effect; '
            'remove them, or use inner="inductor"'
        )
    return BackendOptions(
        optimizer=optimizer or None, inner="eager" if inner == "eager" else "inductor", inductor=inductor
    )
