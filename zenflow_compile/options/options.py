"""The options of ``ZenFlowAdamW``, checked before anything is allocated.

Each is declared once: its default, its check, the policies that read it, and its flag of ``zenflow-compile plan``.
Options that DeepSpeed also has keep its names and their documented meaning; docs/options.md says, option by option,
where the behavior differs and why. Numbers that steer convergence name the study they come from.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

from zenflow_compile.checks.validate import (
    check_choice,
    check_cores,
    check_flag,
    check_integer,
    check_number,
    check_positive,
    check_ratio,
    unknown_option,
    user_stacklevel,
)

POLICIES = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity", "auto")
OFFLOAD_DEVICES = ("cpu", "nvme", "nvme_all")

_ZENFLOW = ("zenflow",)
_ZENFLOW_IN_FILES = 'zenflow with offload_device="nvme"'
_WITH_FILES = ("zero_infinity", _ZENFLOW_IN_FILES)
_OFFLOADING = tuple(policy for policy in POLICIES if policy not in ("resident", "auto"))

INSTEAD: Mapping[str, str] = {
    "accumulate_on_device": 'pass gradient_transfer="mean"',
    "device_memory_bytes": (
        'offload_weights="auto" uses what is free; let PyTorch use less by set_per_process_memory_fraction() first, or '
        "pass offload_weights an integer of bytes"
    ),
    "host_kernel": "leave it out: host updates are native code, which needs a C++ compiler",
    "fill_device": 'pass device_share="fill"',
    "gradient_compression": 'pass gradient_transfer="int8"',
    "max_update_interval": "pass update_interval=(shortest, longest), or (None, longest) to have the shortest measured",
    "min_update_interval": "pass update_interval=(shortest, longest)",
    "offload": 'pass a smaller topk_ratio with device_share=0, or policy="zero_offload"',
    "offload_weights_device": 'pass offload_device="nvme_all" for state and weights in files, "nvme" for state alone',
    "pt_reserved_cores_perc": "pass workers=1.0 - share, the share of the cores that run host updates, as a float",
    "select_strategy": 'pass select_interval alone: a number of steps, or "auto"',
    "shared_buffers": 'leave it out: gradient buffers share host memory unless update_interval is "auto" or bounds',
    "spare_device_bytes": "pass device_share an integer of bytes for the state of all resident parameters",
    "staging_bytes": "leave it out: uploads pass through three buffers of the largest one's size",
    "steps_per_epoch": "pass select_interval in steps: epochs * steps_per_epoch",
    "sub_group_size": "leave it out: update_stride decides the size of subgroups",
    "weight_grad_order": 'pass weight_grad_bytes="auto", or bytes, to reorder the backward, and 0 not to',
    "worker_cores": "pass the list of cores as workers",
}
"""What to do instead of passing an option that earlier versions had."""

AUTO_SELECT_INTERVAL = 16
"""Fewest steps between re-selections under ``select_interval="auto"``, which only drift brings about. From the same
study: with an averaged score, more often than every 16 to 64 steps gains nothing, and selecting only once costs +19%
from scratch (2 seeds)."""

AUTO_UPDATE_INTERVAL = (None, 4)
"""The bounds of ``update_interval="auto"``."""

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
"""Keywords of ``torch.optim.AdamW``; ``runtime.step.param_groups`` says which of their values are supported."""

LONGEST_UPDATE_INTERVAL = 64
"""Each gradient buffer of an update window is an argument of the host kernel: it compiles in 9 s for 64 of them, and in
100 s for 256. The longest window that the convergence study found useful has 8 steps."""


def _option(
    default: Any,
    check: Callable[[str, Any], Any],
    *,
    also: tuple[Any, ...] = (),
    read_by: tuple[str, ...] = POLICIES,
    flag: str | None = None,
) -> Any:
    """Declare an option.

    Args:
        check: ``check(name, value)`` replaces every value but those of ``also``, and a default without a number.
        read_by: the policies that read it. ``"auto"`` may choose any of them.
        flag: the help of its flag of ``zenflow-compile plan``; None: it has none.
    """
    unchecked = (*also, default) if default is None or isinstance(default, str) else also
    return field(default=default, metadata={"check": check, "unchecked": unchecked, "read_by": read_by, "flag": flag})


def _choice(default: str | None, *allowed: str, **declared: Any) -> Any:
    return _option(default, partial(check_choice, allowed=allowed), **declared)


def _integer(default: Any, at_least: int, **declared: Any) -> Any:
    remedy = " or None" if default is None else ""
    if "auto" in (default, *declared.get("also", ())):
        remedy = ' or "auto"'
    return _option(default, partial(check_integer, at_least=at_least, remedy=remedy), **declared)


def _check_path(name: str, value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} must be a path, or None")
    if not os.fspath(value):
        raise ValueError(f"{name}='' must be the path of a directory on a local disk, or None")
    return value


def _check_update_interval(name: str, value: Any) -> int | tuple[int | None, int]:
    """A length, or the bounds of lengths that gradient values decide."""
    if not isinstance(value, (tuple, list)):
        return check_integer(name, value, 1, LONGEST_UPDATE_INTERVAL, remedy=', "auto", or its (shortest, longest)')
    if len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers of steps, (shortest, longest)")
    longest = check_integer(f"{name}[1]", value[1], 1, LONGEST_UPDATE_INTERVAL)
    remedy = ": no more than the longest window; None measures it"
    return None if value[0] is None else check_integer(f"{name}[0]", value[0], 1, longest, remedy=remedy), longest


def _check_workers(name: str, value: Any) -> int | float | tuple[int, ...]:
    """Threads, a share of the cores, or cores."""
    if isinstance(value, Real) and not isinstance(value, Integral):
        return check_number(name, value, 0.0, 1.0, remedy=", a share of the cores; an integer is a number of threads")
    if isinstance(value, (tuple, list, range, set, frozenset)):
        return check_cores(name, value)
    return check_integer(name, value, 1, remedy=", a share of the cores in [0.0, 1.0], a list of cores, or None")


def _check_row_dims(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    """Patterns of names, with numbers of dimensions; as text ``pattern=number``, from a command line."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(each, str) and "=" in each for each in texts):
        pairs = [each.strip().rpartition("=") for each in texts]
        value = {pattern: int(count) if count.isdigit() else count for pattern, _, count in pairs}
    if not isinstance(value, Mapping):
        try:  # as it is stored
            value = dict(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{name}={value!r} must be a dict of patterns of names, such as {{'*.experts.*': 2}}, text such as "
                "'*.experts.*=2', or None"
            ) from None
    for pattern in value:
        if not isinstance(pattern, str):
            raise TypeError(f"{name} has the key {pattern!r}, which must be a pattern of names, such as '*.experts.*'")
    return tuple((pattern, check_integer(f"{name}[{pattern!r}]", count, 1)) for pattern, count in value.items())


def _check_device_share(name: str, value: Any) -> int | float:
    """A share, or bytes."""
    if isinstance(value, Integral) and int(value) > 1:
        return check_integer(name, value, 2)
    return check_number(name, value, 0.0, 1.0, remedy=', an integer of bytes, or "fill"')


def _check_weights(name: str, value: Any) -> float | Literal[False, "auto"]:
    """False, "auto", a byte budget, or a share."""
    if value is False:
        return False
    allowed = (
        f'{name}={value!r} must be False, "auto", an integer of bytes >= 1, or a number in (0, 1]: pass the device '
        "memory that loaded weights may take, or the share of them that leaves the device"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(allowed)
    if value <= 0 or (isinstance(value, float) and not value <= 1.0):
        raise ValueError(allowed)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one optimizer, checked. Planners and the engine read them; nothing changes them.

    Numbers are stored as plain ``int`` and ``float``, so that ``torch.load(weights_only=True)`` reads a dict of them.
    A *step* is a call of ``step()`` that ``GradScaler`` does not skip. The ranges of all options are checked under
    every policy; the optimizer warns of options that its policy does not read (docs/options.md, "read by").

    Attributes:
        policy: Where optimizer state lives. ``"resident"``: on the device, as in plain AdamW.
            ``"zero_offload"``: on the host, every update blocking. ``"twinflow"``: the same with a fixed share on the
            device. ``"deep_optimizer_states"``: on the host, some of it streamed to the device and updated there.
            ``"zero_infinity"``: in files behind a cache in host memory. ``"zenflow"``: state of the selected columns on
            the device, of the deferred ones on the host. ``"auto"``: the policy, or mixture of policies, with the
            shortest predicted step of those that fit this machine when the optimizer is made.
        tokens_per_step: Tokens, or rows of the batch, >= 1, that the device trains on in one step. ``policy="auto"``
            needs it to predict the time of a step and the memory of activations, and ``update_stride="auto"`` reads it:
            without it, the device's own work counts as nothing.
        topk_ratio: Share, in [0, 1], of the columns (or rows) of each large parameter that the device updates
            at every step. 0 defers everything, 1 nothing.
        select_interval: Steps between re-selections, >= 1, and at least ``update_interval``. A parameter re-selects at
            the first flush of its update window at or after that many steps. ``"auto"``: when its selection has
            drifted, after 16 steps at the earliest.
        update_interval: Length S of the update window in steps, in [1, 64]: deferred gradients are collected for S
            steps and applied once. 1 is exact AdamW. Bounds ``(shortest, longest)`` adapt it to gradient values; None
            as the shortest derives it from the host's measured rate and the time of the first step that compiles
            nothing: it may differ between runs, and is saved in the state. ``"auto"``: ``(None, 4)``. Source of that
            4: this project's convergence study (docs/options.md, "Where the defaults come from"): a small GPT
            trained from scratch ends +1.3% above AdamW's validation loss at 4 (3 seeds) and +7.6% or more at 8 (1
            seed).
        full_warm_up_rounds: Steps at the start, >= 0, in which every update window is flushed at once: synchronous,
            exact AdamW. Cover the learning-rate warm-up with it when training from scratch.
        total_steps: Steps, >= 1, after which training ends: the last one flushes every update window, so that a model
            that is saved then has every gradient, for programs without a place to call ``flush()``. A resumed run
            counts the steps before. Training may continue. None: only ``flush()`` and ``close()`` do.
        overlap_step: Run host updates during the device's work. False makes every due update visible when ``step()``
            returns (when ``backward()`` returns, without an optimizer object), for code that reads weights by hand,
            such as an EMA; all policies but ``"zenflow"`` always do so. This changes time, never numbers.
        staleness: Whole steps, 0 or 1, by which a flushed window's update may be applied late. 1 gives the host
            one more step to finish; it costs +9 to +19% validation loss from scratch and +0.3% in low-rate
            fine-tuning.
        auto_ratio: Threshold, in [0, 1], of adaptive update windows: one is flushed when the norm of its deferred
            gradients reaches this share of the average norm of the selected ones.
        workers: Threads that run host updates. An integer: so many, at most one per physical core that this process may
            use. A float: the share, in [0, 1], of these cores that run one each, at least one. A list: the logical
            cores that they are pinned to, one each. None leaves PyTorch two cores, and one for each DataLoader worker
            process that is alive when the optimizer is made. But for a list, workers run on the physical cores with the
            fewest workers of this process's other optimizers, the last ones first.
        max_grad_norm: Bound, > 0, on the global gradient norm over device and host; None does not clip.
        gradient_accumulation_steps: Backwards per step, >= 1, if it is always the same number: gradients are then split
            and copied in the last of them. None: any number, and gradients are final at ``step()``.
        communication_data_type: Dtype in which ranks average gradients, ``"fp32"`` or ``"bf16"``; None: each gradient's
            own. Without ``process_group`` nothing is sent.
        device_share: Parameters that stay resident: first block, embeddings and head, in this order, since late updates
            harm them most. A number in [0, 1]: as far as they fit into this share of all parameters. An integer above
            1: bytes of each device for their state; then come the others in forward order. ``"fill"``, under
            ``policy="auto"``: as many as the device has memory for, so that the host does the least work; other values
            are the least there, and no more stay than a step needs to be as fast.
        min_offload_size: Parameters with fewer elements, and all 1-D ones, are resident, with fp32 state.
        row_dims: Leading dimensions, >= 1, that rows of the 2-D view of a parameter with three or more combine, by
            pattern of its name (``fnmatch``; the first that matches counts): slices are rows or columns of that view.
            None: two for stacks of matrices, such as the experts of a layer in one 3-D parameter, and one for all
            others (docs/options.md, "Stacks of matrices").
        gradient_transfer: What the host gets of an update window. ``"each"``: every gradient, in the model's dtype.
            ``"mean"``: their mean, once; they are summed on the device, which takes 4 bytes per deferred element there.
            Another rule: one step on that mean (docs/options.md). ``"int8"``: every gradient as one byte per element
            with a scale per slice; the rounding error is added to the next step's gradient.
        state_dtype: How both moments are stored, on the host and on the device: ``"fp32"``; ``"bf16"``, rounded at
            random, so that the mean of the error is zero, with bits that depend on the values and the step alone; or
            ``"fp8"``, the same in 8 bits with a scale per block of 32 elements (docs/guide/state.md).
        split_master: The host stores each fp32 master as the bf16 weight, which the upload buffer has anyway, and the
            16 bits that complete it: 2 bytes instead of 4 per element. Masters halfway between two bf16 values are
            stored one fp32 ulp lower. Parameters that are not bf16 keep fp32 masters.
        ratio: Share, in [0, 1], of the optimizer state that policies ``"twinflow"`` and ``"deep_optimizer_states"``
            keep off the device (DeepSpeed's ``offload_optimizer.ratio``).
        update_stride: One of this many subgroups, >= 1, is updated on the device, with state that is streamed there
            and back: 1 updates all of them there, 2 every other one. Subgroups are whole parameters of 100 million
            elements together, or of a ``4 * update_stride``-th of those on the host, if that is less. ``"auto"``: the
            fastest of a few that are simulated, with rates that are measured once, before the first step. None: no
            streaming, and ``"auto"`` under policy ``"deep_optimizer_states"``.
        offload_device: ``"nvme"`` keeps the host's state in files under ``nvme_path``, ``"nvme_all"`` the weights of
            ``offload_weights``, too, ``"cpu"`` both in memory. Policy ``"zero_infinity"`` always keeps state in files.
        nvme_path: Directory for these files, which are as large as the fp32 state; ``close()`` removes them.
        host_window_bytes: Host memory, in bytes, that caches state in files; at least the state of the largest
            parameter's deferred part. None: twice that, and 64 MiB at least. With weights in files, it caches these,
            too: at least the largest one more; None: four times that more, and 64 MiB at least.
        weight_grad_bytes: Device memory, in bytes, for the inputs and output gradients of weight gradients that are
            computed later: those of the first layers last, in the order in which the next forward needs them, which
            gives the host more time for them. 0 computes each as soon as possible. ``"auto"``: a quarter of the memory
            that is free when a graph is compiled. Only without an optimizer object, and without clipping.
        offload_weights: Keep large weights in host memory, too, and load each one around its uses in compiled graphs.
            An integer: bytes of device memory that loaded weights may take, at least the largest weight. A number in
            (0, 1]: the share of these weights' bytes that leaves the device, as far as operators allow. ``"auto"``: as
            many stay as fit besides the peak of a step, which is measured. ``False``: all weights stay.
    """

    policy: str = _choice("zenflow", *POLICIES)
    tokens_per_step: int | None = _integer(None, 1, read_by=("auto", "deep_optimizer_states", "zenflow"))
    topk_ratio: float = _option(0.1, check_ratio, read_by=_ZENFLOW, flag="share of columns that is selected, in [0, 1]")
    select_interval: int | Literal["auto"] = _integer("auto", 1, read_by=_ZENFLOW)
    update_interval: int | tuple[int | None, int] | Literal["auto"] = _option(
        4, _check_update_interval, also=("auto",), read_by=_ZENFLOW, flag="steps per update window: 4, 2,8 or auto"
    )
    full_warm_up_rounds: int = _integer(0, 0, read_by=_ZENFLOW)
    total_steps: int | None = _integer(None, 1, read_by=_ZENFLOW)
    overlap_step: bool = _option(True, check_flag)
    staleness: int = _option(0, partial(check_integer, at_least=0, at_most=1), read_by=_ZENFLOW, flag="0 or 1")
    auto_ratio: float = _option(0.99, check_ratio, read_by=_ZENFLOW)
    workers: int | float | tuple[int, ...] | None = _option(None, _check_workers)
    max_grad_norm: float | None = _option(
        None, partial(check_positive, remedy="; None turns clipping off"), flag="clip gradients: updates wait for all"
    )
    gradient_accumulation_steps: int | None = _integer(None, 1, flag="micro-batches that the tokens of a step come in")
    communication_data_type: str | None = _choice(None, "fp32", "bf16")
    device_share: int | float | Literal["fill"] = _option(
        0.25, _check_device_share, also=("fill",), read_by=_ZENFLOW, flag="resident share, state as 8GB, or fill"
    )
    min_offload_size: int = _integer(4096, 0)
    row_dims: tuple[tuple[str, int], ...] | None = _option(None, _check_row_dims)
    gradient_transfer: str = _choice(
        "each", "each", "mean", "int8", read_by=_ZENFLOW, flag="what the host gets of a window: each, mean or int8"
    )
    state_dtype: str = _choice("fp32", "fp32", "bf16", "fp8", flag="how moments are stored: fp32, bf16 or fp8")
    split_master: bool = _option(False, check_flag, read_by=_OFFLOADING, flag="bf16 weights complete masters")
    ratio: float = _option(
        1.0, check_ratio, read_by=("twinflow", "deep_optimizer_states"), flag="share of state off the device, in [0, 1]"
    )
    update_stride: int | Literal["auto"] | None = _integer(
        None, 1, also=("auto",), read_by=("deep_optimizer_states", "zenflow"), flag="stream one of so many, or auto"
    )
    offload_device: str = _choice(
        "cpu", *OFFLOAD_DEVICES, read_by=("zero_infinity", "zenflow"), flag="where the host's state is: cpu or nvme"
    )
    nvme_path: str | None = _option(
        None, _check_path, read_by=_WITH_FILES, flag="directory of state in files, measured with --hardware measured"
    )
    host_window_bytes: int | None = _integer(
        None, 1, read_by=_WITH_FILES, flag="host memory that caches state in files, as 8GB"
    )
    weight_grad_bytes: int | Literal["auto"] = _integer(0, 0, also=("auto",), read_by=_OFFLOADING)
    offload_weights: float | Literal[False, "auto"] = _option(
        False, _check_weights, also=("auto",), flag="memory of loaded weights, as 8GB, or share that leaves: 0.5"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value not in each.metadata["unchecked"]:
                object.__setattr__(self, each.name, each.metadata["check"](each.name, value))
        self._check_files()
        if self.device_share == "fill" and self.policy == "zenflow":
            raise ValueError(
                'device_share="fill" under policy=\'zenflow\' is not supported: only policy="auto" predicts the memory '
                "that a step takes; choose it, or pass a share in [0, 1], or an integer of bytes"
            )
        if self.offload_weights is not False and self.policy in ("deep_optimizer_states", "auto"):
            raise ValueError(
                f"offload_weights={self.offload_weights!r} under policy={self.policy!r} is not supported in this "
                "version; choose another policy, or offload_weights=False"
            )
        if self.policy == "auto" and self.tokens_per_step is None:
            raise ValueError(
                'tokens_per_step=None under policy="auto" must be an integer >= 1: the time of a step decides what is '
                "fastest; pass the tokens (or rows) that the device trains on per step, as in "
                "tokens_per_step=batch_size * sequence_length"
            )
        # Adaptive windows may be flushed at every step: no select_interval is too short for them.
        if (
            self.policy in ("zenflow", "auto")
            and isinstance(self.select_interval, int)
            and isinstance(self.update_interval, int)
            and self.select_interval < self.update_interval
        ):
            raise ValueError(
                f"select_interval={self.select_interval} must be at least update_interval={self.update_interval}: a "
                "parameter re-selects only when its window is flushed; raise select_interval or lower update_interval"
            )

    def _check_files(self) -> None:
        """State in files needs a policy that reads files, and a directory. Weights in files need state in files."""
        if self.offload_device != "cpu" and self.policy not in ("zenflow", "zero_infinity"):
            raise ValueError(
                f'offload_device="{self.offload_device}" under policy={self.policy!r} is not supported: state in files '
                'goes with "zero_infinity" and "zenflow"; choose one of these, or offload_device="cpu" ("auto" may '
                "choose files wherever nvme_path is given)"
            )
        if self.in_files and self.nvme_path is None:
            raise ValueError(
                "nvme_path=None must be a directory on a local disk for the optimizer state in files; pass "
                "its path, or choose a policy that keeps state in memory"
            )
        if self.weights_in_files and self.offload_weights is False:
            raise ValueError(
                'offload_device="nvme_all" has no effect with offload_weights=False, which keeps all weights on '
                'the device; pass offload_weights=1.0, bytes, or "auto", or offload_device="nvme"'
            )
        if self.weights_in_files and self.split_master:
            raise ValueError(
                'split_master=True with offload_device="nvme_all" is not supported: weights that complete masters '
                'must be in memory; pass split_master=False (state_dtype="bf16" or "fp8" takes less, too), or '
                'offload_device="nvme"'
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Options:
        """``Options(**keywords)``; the error for an unknown name says what to pass instead, or suggests the nearest.

        Raises:
            TypeError: an unknown name, or a value of the wrong type.
            ValueError: a value outside its range, or options that exclude each other.
        """
        for name in keywords:
            if name not in OPTION_NAMES:
                raise no_option(name, (*OPTION_NAMES, *ADAM_KEYWORDS))
        return cls(**keywords)

    @property
    def window_bounds(self) -> tuple[int | None, int]:
        """Shortest and longest update window in steps; None as the shortest: it is measured."""
        if self.policy != "zenflow":
            return 1, 1
        if isinstance(self.update_interval, int):
            return self.update_interval, self.update_interval
        return AUTO_UPDATE_INTERVAL if self.update_interval == "auto" else self.update_interval

    @property
    def longest_window(self) -> int:
        """Longest update window in steps, which sizes host memory."""
        return self.window_bounds[1]

    @property
    def adaptive(self) -> bool:
        """Whether gradient values decide when update windows are flushed."""
        return self.policy == "zenflow" and not isinstance(self.update_interval, int)

    @property
    def in_files(self) -> bool:
        """Whether the host's state lives in files."""
        return self.policy == "zero_infinity" or self.offload_device != "cpu"

    @property
    def weights_in_files(self) -> bool:
        """Whether offloaded weights live in files."""
        return self.offload_device == "nvme_all"

    def check_weights_of_ranks(self, *, several: bool, remedy: str = "") -> None:
        """Raise ValueError if ``several`` ranks train with ``offload_weights``; ``remedy``: another way out."""
        if several and self.offload_weights is not False:
            raise ValueError(
                f"offload_weights={self.offload_weights!r} with several ranks is not supported in this version; pass "
                "offload_weights=False, and shard the model by fully_shard (FSDP2), which divides the weights, too "
                f"(not with Muon, which needs whole matrices){remedy}"
            )

    def threads(self, cores: int) -> int | None:
        """Workers that the option asks for where there are so many physical cores; None leaves them to the machine."""
        if isinstance(self.workers, float):
            # Rounded first: 0.1 * 10 must be one core, whatever the last bit of the product.
            return max(1, math.floor(round(self.workers * cores, 6)))
        return len(self.workers) if isinstance(self.workers, tuple) else self.workers

    @property
    def stride(self) -> int | None:
        """One of this many subgroups is updated on the device; None: no streaming.

        Raises:
            ValueError: it is still ``"auto"``; see ``prediction.forecast.resolve_stride``.
        """
        if self.policy not in ("zenflow", "deep_optimizer_states"):
            return None
        if self.measures_stride:
            raise ValueError('update_stride="auto" has not been resolved')
        assert self.update_stride != "auto"
        return self.update_stride

    @property
    def measures_stride(self) -> bool:
        """Whether ``update_stride`` is to come from the performance model."""
        if self.policy == "deep_optimizer_states":
            return self.update_stride in ("auto", None)
        return self.policy == "zenflow" and self.update_stride == "auto"

    def resolved_select_interval(self, update_interval: int | None = None) -> int:
        """Steps between re-selections of a parameter whose update windows have ``update_interval`` steps.

        Args:
            update_interval: the parameter's own window length; by default ``longest_window``.

        Returns:
            Steps, not yet rounded up to a flush of the parameter's update window.
        """
        if self.select_interval == "auto":
            return max(AUTO_SELECT_INTERVAL, update_interval or self.longest_window)
        return self.select_interval

    @property
    def unread(self) -> list[str]:
        """Names of the options that the policy does not read and that are not at their defaults.

        Empty under ``policy="auto"``, which may choose any policy.
        """
        return [
            each.name
            for each in fields(self)
            if self.policy != "auto" and getattr(self, each.name) != each.default and not self.reads(each.name)
        ]

    def reads(self, name: str) -> bool:
        """Return whether the policy reads an option."""
        reader = _ZENFLOW_IN_FILES if self.policy == "zenflow" and self.in_files else self.policy
        return not {reader, self.policy}.isdisjoint(OPTIONS[name].metadata["read_by"])

    @property
    def unread_note(self) -> str | None:
        """The ``unread`` options with the policies that read them, as a sentence; None if there are none."""
        named = ", ".join(f"{name} (read by {readers(name)})" for name in self.unread)
        remedy = "leave them out, or choose a policy that reads them"
        return f"policy={self.policy!r} does not read {named}: {remedy}" if named else None

    def warn_of_unread(self) -> None:
        """Warn, once, of the ``unread`` options."""
        if (note := self.unread_note) is not None:
            warnings.warn(note, UserWarning, stacklevel=user_stacklevel())


OPTIONS: Mapping[str, Field[Any]] = {each.name: each for each in fields(Options)}
"""The declaration of each option."""

OPTION_NAMES = tuple(OPTIONS)

FLAGS = {name: each.metadata["flag"] for name, each in OPTIONS.items() if each.metadata["flag"] is not None}
"""The help of each option that ``zenflow-compile plan`` has a flag for."""


def readers(name: str) -> str:
    """The policies that read an option, as text: ``"all"``, or their names."""
    read_by = OPTIONS[name].metadata["read_by"]
    return "all" if read_by == POLICIES else ", ".join(read_by)


def no_option(name: object, valid: tuple[str, ...]) -> TypeError:
    """The error for an option that does not exist: says what took the place of one that is gone."""
    if name in INSTEAD:
        return TypeError(f"unknown option {name!r}: {INSTEAD[str(name)]}")
    return unknown_option(name, valid)
