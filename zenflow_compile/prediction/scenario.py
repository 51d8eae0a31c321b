"""The scenario of a prediction, checked: which model trains with which options on which hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow_compile.checks.validate import check_choice, check_flag, check_integer, check_positive
from zenflow_compile.options.options import ADAM_KEYWORDS, POLICIES, Options
from zenflow_compile.performance import hardware_catalog, model_catalog, model_config
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shapes import ModelShape
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32

if TYPE_CHECKING:
    import torch

DTYPES: Mapping[str, torch.dtype] = {"bf16": BFLOAT16, "fp16": FLOAT16, "fp32": FLOAT32}
"""Dtypes of weights by the names that ``dtype=`` has for them."""

SOME_DISK = "/path/on/a/local/disk"
"""The ``nvme_path`` of a prediction, which writes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training run of ``model`` on ``hardware``.

    Attributes:
        model: with weights of the training dtype, and the sequence length as its context.
        hardware: with the devices and the memory in use.
        tokens: per device and step.
        options: of the run; under policy ``"auto"`` those that all policies share.
        policy: one, or ``"auto"`` for all.
        in_backward: optimizer in backward: updates run in the backward, without an optimizer object.
        recompute: activations are computed again in the backward.
        epoch_tokens: tokens of an epoch, over all devices; None: not given.
    """

    model: ModelShape
    hardware: Hardware
    tokens: int
    options: Options = field(default_factory=Options)
    policy: str = "auto"
    in_backward: bool = False
    recompute: bool = False
    epoch_tokens: float | None = None

    @property
    def dtype(self) -> str:
        """Names of the weights' dtypes, as in ``DTYPES`` where they are there; several are joined: ``bf16+fp32``."""
        names = {str(dtype): name for name, dtype in DTYPES.items()}
        found = dict.fromkeys(str(spec.dtype) for spec in self.model.params)
        return "+".join(names.get(each, each) for each in found)

    def final_at_step(self, options: Options) -> bool:
        """Whether gradients are final only after the whole backward: with an optimizer object, or a global norm."""
        return not self.in_backward or options.max_grad_norm is not None

    @property
    def note(self) -> str | None:
        """What the prediction leaves out, as a sentence; None if it is complete."""
        if self.hardware.devices == 1:
            return None
        return (
            f"One of the {self.hardware.devices} devices is simulated, with an equal share of the optimizer state and "
            "of the host; it sends gradients and gets changed weights in rings, as with process_group=."
        )


def scenario_of(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int,
    sequence: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    nodes: int = 1,
    policy: str = "zenflow",
    implicit: bool = False,
    recompute: bool = False,
    epoch_tokens: float | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    **options: Any,
) -> Scenario:
    """Check the arguments of ``predict.plan`` and ``predict.simulate``; errors as there."""
    check_choice("policy", policy, POLICIES)
    if epoch_tokens is not None:
        check_positive("epoch_tokens", epoch_tokens)
    count = check_integer("tokens", tokens, 1)
    shape = _model(model, None if dtype is None else DTYPES[check_choice("dtype", dtype, tuple(DTYPES))])
    machine = _machine(hardware)
    chosen = _options(policy, machine, options)
    in_use = _in_use(machine, devices, device_bytes, host_bytes).across(nodes)
    _check_offloaded_weights(chosen, in_use)
    return Scenario(
        model=replace(shape, context=_sequence(sequence, _of_micro_batch(count, chosen), shape)),
        hardware=in_use,
        policy=policy,
        options=chosen,
        tokens=count,
        in_backward=check_flag("implicit", implicit),
        recompute=check_flag("recompute", recompute),
        epoch_tokens=epoch_tokens,
    )


def _model(model: object, dtype: torch.dtype | None) -> ModelShape:
    """A named model, even if a file has its name; else a model in a file if the argument looks like a path."""
    if isinstance(model, ModelShape):
        if dtype is None:
            return model
        return replace(model, params=tuple(replace(spec, dtype=dtype) for spec in model.params))
    if isinstance(model, Path):
        return model_config.from_config(model, dtype=dtype)
    if isinstance(model, str):
        is_path = model not in model_catalog.MODELS and (Path(model).suffix == ".json" or Path(model).exists())
        if is_path:
            return model_config.from_config(model, dtype=dtype)
        return model_catalog.model(model, dtype=dtype or BFLOAT16)
    if isinstance(model, Real):
        return model_catalog.of_size(int(check_positive("model", model)), dtype=dtype or BFLOAT16)
    raise TypeError(
        f"model={model!r} must be a name, the path of a config.json, a number of parameters, or a ModelShape; it is of "
        f"type {type(model).__name__}"
    )


def _check_offloaded_weights(options: Options, hardware: Hardware) -> None:
    if options.offload_weights == "auto":
        raise ValueError(
            'offload_weights="auto" depends on the memory that a run measures, and cannot be predicted; pass the bytes '
            "that loaded weights may take, or the share of them that leaves the device, such as 0.5"
        )
    if options.offload_weights_device == "nvme":
        raise ValueError(
            'offload_weights_device="nvme" cannot be predicted in this version: simulations do not read weights from '
            'files. A prediction with "cpu" has the device memory of both; weights in files take the bytes of their '
            "upload buffers from the host's memory to the disk, and host_window_bytes bounds what caches them"
        )
    if options.offload_weights is not False and hardware.devices > 1:
        raise ValueError(
            f"offload_weights={options.offload_weights!r} with several ranks is not supported in this version; pass "
            "offload_weights=False, and shard the model by fully_shard (FSDP2), which divides the weights, too; "
            "devices=1 plans a single one"
        )


def _of_micro_batch(tokens: int, options: Options) -> int:
    """Tokens of one of the step's micro-batches."""
    count = options.gradient_accumulation_steps
    if count is None:
        return tokens
    remedy = f": each of gradient_accumulation_steps={count} backwards has one token at least"
    return check_integer("tokens", tokens, count, remedy=remedy) // count


def _sequence(sequence: int | None, tokens: int, model: ModelShape) -> int:
    if sequence is None:
        return min(model.context, tokens)
    remedy = f": a forward has {tokens} tokens of a device; None takes the model's context, or all if it is longer"
    return check_integer("sequence", sequence, 1, tokens, remedy=remedy)


def _machine(hardware: object) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware == "measured":
        raise ValueError(
            'hardware="measured" must be a Hardware here, where nothing is measured; pass '
            "zenflow_compile.cli.doctor_hardware.hardware_of(findings) with what "
            "zenflow-compile doctor --json printed, or ask zenflow-compile plan --hardware measured, which measures"
        )
    if isinstance(hardware, str):
        return hardware_catalog.hardware(hardware)
    raise TypeError(f"hardware={hardware!r} must be a name or a Hardware; it is of type {type(hardware).__name__}")


def _in_use(machine: Hardware, devices: int | None, device_bytes: float | None, host_bytes: float | None) -> Hardware:
    remedy = f": {machine.name!r} has no more; leave it at None to use all" if devices else ""
    count = machine.devices if devices is None else check_integer("devices", devices, 1, machine.devices, remedy=remedy)
    return replace(
        machine,
        devices=count,
        device_bytes=machine.device_bytes if device_bytes is None else check_positive("device_bytes", device_bytes),
        host_bytes=machine.host_bytes if host_bytes is None else check_positive("host_bytes", host_bytes),
    )


def _options(policy: str, machine: Hardware, options: dict[str, Any]) -> Options:
    for name in ADAM_KEYWORDS:
        if name in options:
            raise TypeError(f"{name}={options[name]!r} is the optimizer's and changes no prediction; leave it out")
    named = dict(options)
    if policy != "auto":
        named["policy"] = policy
    in_files = policy in ("auto", "zero_infinity") or named.get("offload_device") == "nvme"
    if in_files and machine.disk_read is not None:
        named.setdefault("nvme_path", SOME_DISK)
    elif in_files and policy != "auto" and "nvme_path" not in named:
        what = f"policy={policy!r}" if policy == "zero_infinity" else "offload_device='nvme'"
        raise ValueError(
            f"hardware={machine.name!r} has no disk_read and disk_write, and {what} keeps state in files; choose "
            "hardware with a disk, or keep state in memory"
        )
    return Options.from_keywords(**named)
