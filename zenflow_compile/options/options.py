"""The options of ``ZenFlowAdamW``, checked before anything is allocated.

Options that DeepSpeed also has keep its names and their documented meaning; docs/options.md says, option by option,
where the behavior differs and why. Numbers that steer convergence name the study they come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
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

POLICIES = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity", "auto")
OFFLOAD_DEVICES = ("cpu", "nvme")

AUTO_SELECT_INTERVAL = 16
"""Fewest steps between re-selections under ``select_interval="auto"``, which only drift brings about. From the same
study: with an averaged score, more often than every 16 to 64 steps gains nothing, and selecting only once costs +19%
from scratch (2 seeds)."""

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


def _option(default: Any, check: Callable[[str, Any], Any], *, unless: tuple[Any, ...] = ()) -> Any:
    """A field whose value is replaced by ``check(name, value)``, except for the values ``unless``."""
    return field(default=default, metadata={"check": check, "unless": unless})


def _choice(default: str | None, *allowed: str, unless: tuple[Any, ...] = ()) -> Any:
    return _option(default, partial(check_choice, allowed=allowed), unless=unless)


def _integer(default: Any, at_least: int, at_most: int | None = None, *, unless: tuple[Any, ...] = ()) -> Any:
    remedy = "" if not unless else ' or "auto"' if "auto" in unless else " or None"
    return _option(default, partial(check_integer, at_least=at_least, at_most=at_most, remedy=remedy), unless=unless)


def _check_path(name: str, value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} must be a path, or None")
    if not os.fspath(value):
        raise ValueError(f"{name}='' must be the path of a directory on a local disk, or None")
    return value


def _check_weights(name: str, value: Any) -> float | Literal[False, "auto"]:
    """False, "auto", a byte budget, or a share."""
    if value is False:
        return False
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f'{name}={value!r} must be False, "auto", an integer of bytes, or a number in (0, 1]: pass the device '
            "memory that loaded weights may take, or the share of them that leaves the device"
        )
    if value <= 0 or (isinstance(value, float) and not value <= 1.0):
        raise ValueError(
            f'{name}={value!r} must be False, "auto", an integer of bytes >= 1, or a number in (0, 1]: pass the device '
            "memory that loaded weights may take, or the share of them that leaves the device"
        )
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
        tokens_per_step: Tokens, or rows of the batch, >= 1, that the device trains on in one step. Only
            ``policy="auto"`` reads it, and needs it to predict the time of a step and the memory of activations.
        fill_device: Under ``policy="auto"``, keep as many parameters resident as the device has memory for, so that the
            host does the least work. False: no more of them than a step needs to be as fast.
        topk_ratio: Share, in [0, 1], of the columns (or rows) of each large parameter that the device updates
            at every step. 0 defers everything, 1 nothing.
        select_strategy: Unit of ``select_interval``: ``"step"``, ``"epoch"`` (needs ``steps_per_epoch``), or
            ``"auto"``, which chooses unit and number.
        select_interval: Steps or epochs between re-selections, >= 1; an integer needs strategy ``"step"`` or
            ``"epoch"``. A parameter re-selects at the first flush of its update window at or after that many steps.
            ``"auto"``: when its selection has drifted, after 16 steps at the earliest.
        update_interval: Length S of the update window in steps, in [1, 64]: deferred gradients are collected for S
            steps and applied once. 1 is exact AdamW. ``"auto"`` adapts to gradient values, from 2 to
            ``max_update_interval``, and not below ``min_update_interval``.
        max_update_interval: Longest update window in steps, in [1, 64], under ``update_interval="auto"``. Source of its
            default: this project's convergence study (docs/options.md, "Where the defaults come from"): a small GPT
            trained from scratch ends +1.3% above AdamW's validation loss at 4 (3 seeds) and +7.6% or more at 8 (1
            seed).
        min_update_interval: Shortest update window in steps, in [1, ``max_update_interval``], under
            ``update_interval="auto"``. None: from the host's measured rate and the time of the first step that compiles
            nothing. It may differ between runs, and is saved in the state.
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
        offload: Keep the state of the selected columns off the device too. Not in this version.
        auto_ratio: Threshold, in [0, 1], of ``update_interval="auto"``: a window is flushed when the norm of its
            deferred gradients reaches this share of the average norm of the selected ones.
        pt_reserved_cores_perc: Share, in [0, 1], of the physical cores left to PyTorch; the others, at least one,
            run host updates. None leaves it two cores, and one for each DataLoader worker process that is alive when
            the optimizer is made. Ignored where ``workers`` or ``worker_cores`` is given.
        workers: Threads that run host updates, >= 1, at most one per physical core that this process may use; None
            derives them from ``pt_reserved_cores_perc``.
        worker_cores: Logical cores that workers are pinned to, one worker each. None takes physical cores that this
            process may use and that have the fewest workers of its other optimizers, the last ones first.
        steps_per_epoch: Steps in one epoch, >= 1, for strategy ``"epoch"``.
        max_grad_norm: Bound, > 0, on the global gradient norm over device and host; None does not clip.
        gradient_accumulation_steps: Backwards per step, >= 1, if it is always the same number: gradients are then split
            and copied in the last of them. None: any number, and gradients are final at ``step()``.
        communication_data_type: Dtype in which ranks average gradients, ``"fp32"`` or ``"bf16"``; None: each gradient's
            own. Without ``process_group`` nothing is sent.
        device_share: Share, in [0, 1], of all parameters that stay resident: first block, embeddings and head, in this
            order, as far as they fit. 0 keeps none of them.
        spare_device_bytes: Memory of each device, in bytes, for the optimizer state of further resident parameters, in
            forward order: they are updated at every step, and the host has less to do.
        min_offload_size: Parameters with fewer elements, and all 1-D ones, are resident, with fp32 state.
        accumulate_on_device: Sum the gradients of an update window on the device, which takes 4 bytes per deferred
            element there, and copy their mean once per window. Another rule: one step on that mean (docs/options.md).
        gradient_compression: ``"int8"`` sends deferred gradients as one byte per element with a scale per slice, and
            adds the rounding error to the next step's gradient; None sends them in the model's dtype.
        state_dtype: How both moments are stored, on the host and on the device: ``"fp32"``; ``"bf16"``, rounded at
            random, so that the mean of the error is zero, with bits that depend on the values and the step alone; or
            ``"fp8"``, the same in 8 bits with a scale per block of 32 elements (docs/guide/state.md).
        split_master: The host stores each fp32 master as the bf16 weight, which the upload buffer has anyway, and the
            16 bits that complete it: 2 bytes instead of 4 per element. Masters halfway between two bf16 values are
            stored one fp32 ulp lower. Parameters that are not bf16 keep fp32 masters.
        ratio: Share, in [0, 1], of the optimizer state that policies ``"twinflow"`` and ``"deep_optimizer_states"``
            keep off the device (DeepSpeed's ``offload_optimizer.ratio``).
        sub_group_size: Elements, >= 1, of the groups of whole parameters that ``update_stride`` counts. None: 100
            million, or a ``4 * update_stride``-th of the elements on the host, if that is less.
        update_stride: One of this many subgroups, >= 1, is updated on the device, with state that is streamed there
            and back: 1 updates all of them there, 2 every other one. ``"auto"``: from the performance model, with rates
            that are measured once, before the first step. None: no streaming, and ``"auto"`` under policy
            ``"deep_optimizer_states"``.
        offload_device: ``"nvme"`` keeps the host's state in files under ``nvme_path``, ``"cpu"`` in memory. Policy
            ``"zero_infinity"`` always keeps it in files.
        nvme_path: Directory for these files, which are as large as the fp32 state; ``close()`` removes them.
        host_window_bytes: Host memory, in bytes, that caches state in files; at least the state of the largest
            parameter's deferred part. None: twice that, and 64 MiB at least. With weights in files, it caches these,
            too: at least the largest one more; None: four times that more, and 64 MiB at least.
        staging_bytes: Device memory, in bytes, that uploads pass through; at least the largest parameter's deferred
            slices. More than all uploads that can be in flight is not allocated. None: three times that minimum.
        weight_grad_order: Order of the backward. ``"asap"`` computes every weight gradient as soon as possible;
            ``"forward"`` computes those of the first layers last, in the order in which the next forward needs them,
            which gives the host more time for them.
        weight_grad_bytes: Device memory, in bytes, for inputs and output gradients that ``"forward"`` keeps longer; it
            limits the number of layers. None: a quarter of the free memory.
        shared_buffers: Gradient buffers that are in use in different steps share host memory, and the host writes new
            weights over gradients that it has used: 17 instead of 22 bytes of host memory per deferred element in bf16,
            and the same numbers. Not with ``update_interval="auto"``, whose steps are not known beforehand.
        offload_weights: Keep large weights in host memory, too, and load each one around its uses in compiled graphs.
            An integer: bytes of device memory that loaded weights may take, at least the largest weight. A number in
            (0, 1]: the share of these weights' bytes that leaves the device, as far as operators allow. ``"auto"``: as
            many stay as fit besides the peak of a step, which is measured. ``False``: all weights stay.
        offload_weights_device: Where ``offload_weights`` keeps weights: ``"cpu"`` in host memory; ``"nvme"`` in files
            under ``nvme_path``, behind a part of ``host_window_bytes``, if their state is in files, too.
        device_memory_bytes: Device memory, in bytes, that this process may use. Only ``offload_weights="auto"`` reads
            it. None: what is free when the engine is built, plus what PyTorch has reserved.
    """

    policy: str = _choice("zenflow", *POLICIES)
    tokens_per_step: int | None = _integer(None, 1, unless=(None,))
    fill_device: bool = _option(False, check_flag)
    topk_ratio: float = _option(0.1, check_ratio)
    select_strategy: str = _choice("auto", "auto", "step", "epoch")
    select_interval: int | Literal["auto"] = _integer("auto", 1, unless=("auto",))
    update_interval: int | Literal["auto"] = _integer(4, 1, LONGEST_UPDATE_INTERVAL, unless=("auto",))
    max_update_interval: int = _integer(4, 1, LONGEST_UPDATE_INTERVAL)
    min_update_interval: int | None = None  # its range depends on ``max_update_interval``
    full_warm_up_rounds: int = _integer(0, 0)
    total_steps: int | None = _integer(None, 1, unless=(None,))
    overlap_step: bool = _option(True, check_flag)
    staleness: int = _integer(0, 0, 1)
    offload: bool = _option(False, check_flag)
    auto_ratio: float = _option(0.99, check_ratio)
    pt_reserved_cores_perc: float | None = _option(None, check_ratio, unless=(None,))
    workers: int | None = _integer(None, 1, unless=(None,))
    worker_cores: tuple[int, ...] | None = _option(None, check_cores, unless=(None,))
    steps_per_epoch: int | None = _integer(None, 1, unless=(None,))
    max_grad_norm: float | None = _option(
        None, partial(check_positive, remedy="; None turns clipping off"), unless=(None,)
    )
    gradient_accumulation_steps: int | None = _integer(None, 1, unless=(None,))
    communication_data_type: str | None = _choice(None, "fp32", "bf16", unless=(None,))
    device_share: float = _option(0.25, check_ratio)
    spare_device_bytes: int = _integer(0, 0)
    min_offload_size: int = _integer(4096, 0)
    accumulate_on_device: bool = _option(False, check_flag)
    gradient_compression: str | None = _choice(None, "int8", unless=(None,))
    state_dtype: str = _choice("fp32", "fp32", "bf16", "fp8")
    split_master: bool = _option(False, check_flag)
    ratio: float = _option(1.0, check_ratio)
    sub_group_size: int | None = _integer(None, 1, unless=(None,))
    update_stride: int | Literal["auto"] | None = _integer(None, 1, unless=("auto", None))
    offload_device: str = _choice("cpu", *OFFLOAD_DEVICES)
    nvme_path: str | None = _option(None, _check_path, unless=(None,))
    host_window_bytes: int | None = _integer(None, 1, unless=(None,))
    staging_bytes: int | None = _integer(None, 1, unless=(None,))
    weight_grad_order: str = _choice("asap", "asap", "forward")
    weight_grad_bytes: int | None = _integer(None, 0, unless=(None,))
    shared_buffers: bool = _option(False, check_flag)
    offload_weights: float | Literal[False, "auto"] = _option(False, _check_weights)
    offload_weights_device: str = _choice("cpu", *OFFLOAD_DEVICES)
    device_memory_bytes: int | None = _integer(None, 1, unless=(None,))

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if "check" in each.metadata and value not in each.metadata["unless"]:
                object.__setattr__(self, each.name, each.metadata["check"](each.name, value))
        if self.min_update_interval is not None:
            longest = self.max_update_interval
            remedy = f": no more than max_update_interval={longest}; None measures it"
            shortest = check_integer("min_update_interval", self.min_update_interval, 1, longest, remedy=remedy)
            object.__setattr__(self, "min_update_interval", shortest)
        if self.workers is not None and self.worker_cores is not None and self.workers != len(self.worker_cores):
            raise ValueError(
                f"workers={self.workers} and worker_cores={list(self.worker_cores)} disagree: one worker runs on each "
                "core of the list; give one of the two"
            )
        self._check_files()
        if self.offload_weights is not False and self.policy in ("deep_optimizer_states", "auto"):
            raise ValueError(
                f"offload_weights={self.offload_weights!r} under policy={self.policy!r} is not supported in this "
                "version; choose another policy, or offload_weights=False"
            )
        if self.device_memory_bytes is not None and self.offload_weights != "auto":
            raise ValueError(
                f"device_memory_bytes={self.device_memory_bytes} has no effect with offload_weights="
                f'{self.offload_weights!r}; pass offload_weights="auto", or leave device_memory_bytes at None'
            )
        if self.policy == "auto" and self.tokens_per_step is None:
            raise ValueError(
                'tokens_per_step=None under policy="auto" must be an integer >= 1: the time of a step decides what is '
                "fastest; pass the tokens (or rows) that the device trains on per step, as in "
                "tokens_per_step=batch_size * sequence_length"
            )
        if self.policy in ("zenflow", "auto"):  # "auto" may choose zenflow
            self._check_zenflow()

    def _check_files(self) -> None:
        """State in files needs a policy that reads files, and a directory. Weights in files need state in files."""
        if self.offload_device == "nvme" and self.policy not in ("zenflow", "zero_infinity"):
            raise ValueError(
                f'offload_device="nvme" under policy={self.policy!r} is not supported: state in files goes with '
                '"zero_infinity" and "zenflow"; choose one of these, or offload_device="cpu" ("auto" may choose files '
                "wherever nvme_path is given)"
            )
        if self.in_files and self.nvme_path is None:
            raise ValueError(
                "nvme_path=None must be a directory on a local disk for the optimizer state in files; pass "
                "its path, or choose a policy that keeps state in memory"
            )
        if self.offload_weights_device == "nvme" and self.offload_weights is False:
            raise ValueError(
                'offload_weights_device="nvme" has no effect with offload_weights=False, which keeps all weights on '
                'the device; pass offload_weights=1.0, bytes, or "auto", or leave offload_weights_device at "cpu"'
            )
        if self.offload_weights_device == "nvme" and not self.in_files:
            raise ValueError(
                f'offload_weights_device="nvme" under policy={self.policy!r} with state in memory is not supported: '
                'weights are in files where their state is, which is larger; choose policy="zero_infinity", or '
                'offload_device="nvme" with "zenflow", or offload_weights_device="cpu"'
            )
        if self.offload_weights_device == "nvme" and self.split_master:
            raise ValueError(
                'split_master=True with offload_weights_device="nvme" is not supported: weights that complete masters '
                'must be in memory; pass split_master=False (state_dtype="bf16" or "fp8" takes less, too), or '
                'offload_weights_device="cpu"'
            )

    def _check_zenflow(self) -> None:
        """Rules between options that the other policies ignore."""
        if self.offload:
            raise ValueError(
                "offload=True (state of the selected columns off the device) is not supported in this "
                "version; use offload=False with a smaller topk_ratio and device_share=0, or "
                'policy="zero_offload", which keeps the state of every large parameter on the host'
            )
        if self.shared_buffers and self.update_interval == "auto":
            raise ValueError(
                'shared_buffers=True with update_interval="auto" is not supported: gradients decide there in which '
                "steps a buffer is in use; pass an integer as update_interval, or shared_buffers=False"
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
        # update_interval="auto" may flush an update window at every step: no select_interval is too short for it.
        steps = self.resolved_select_interval()
        if self.update_interval != "auto" and steps < self.update_interval:
            raise ValueError(
                f"select_interval={self.select_interval} ({steps} steps) must be at least update_interval="
                f"{self.update_interval}: a parameter re-selects only when its window is flushed; raise "
                "select_interval or lower update_interval"
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Options:
        """``Options(**keywords)``; the error for an unknown name suggests the nearest valid one.

        Raises:
            TypeError: an unknown name, or a value of the wrong type.
            ValueError: a value outside its range, or options that exclude each other.
        """
        for name in keywords:
            if name not in OPTION_NAMES:
                raise unknown_option(name, (*OPTION_NAMES, *ADAM_KEYWORDS))
        return cls(**keywords)

    @property
    def longest_window(self) -> int:
        """Longest update window in steps, which sizes host memory: the bound under ``"auto"``, 1 without deferral."""
        if self.policy != "zenflow":
            return 1
        return self.max_update_interval if self.update_interval == "auto" else self.update_interval

    @property
    def adaptive(self) -> bool:
        """Whether gradient values decide when update windows are flushed."""
        return self.policy == "zenflow" and self.update_interval == "auto"

    @property
    def in_files(self) -> bool:
        """Whether the host's state lives in files."""
        return self.policy == "zero_infinity" or self.offload_device == "nvme"

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
        if self.select_strategy == "epoch" and self.steps_per_epoch is not None:
            return self.select_interval * self.steps_per_epoch
        return self.select_interval


OPTION_NAMES: tuple[str, ...] = tuple(each.name for each in fields(Options))
