"""Reads DeepSpeed's JSON as keywords for ``ZenFlowAdamW``; docs/options.md describes the differences."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from zenflow_compile.checks.validate import (
    check_choice,
    check_flag,
    check_integer,
    check_ratio,
    printable,
    unknown_option,
    user_stacklevel,
)

ZENFLOW_OPTIONS = (
    "topk_ratio",
    "select_strategy",
    "select_interval",
    "update_interval",
    "full_warm_up_rounds",
    "overlap_step",
    "offload",
    "auto_ratio",
    "pt_reserved_cores_perc",
    "steps_per_epoch",
)
"""Keys of DeepSpeed's ``zenflow`` block."""

_TAKES_AUTO = ("select_strategy", "select_interval", "update_interval")
_ADAM_KEYWORDS = ("lr", "betas", "eps", "weight_decay")
_ADAM_SWITCHES = ("adam_w_mode", "bias_correction", "amsgrad", "torch_adam")
_READ_FROM_CONFIG = (
    "zero_optimization", "optimizer", "gradient_clipping", "gradient_accumulation_steps", "communication_data_type",
)  # fmt: skip
_READ_FROM_ZERO = ("zenflow", "offload_optimizer", "offload_param", "cpu_offload", "sub_group_size")
_READ_FROM_OFFLOAD = ("device",)
_PREFETCHING = ("prefetch_optimizer", "prefetch_optimizer_gap")
_BLANK = ("auto", None)
_PRECISIONS = {
    "fp16": "use torch.autocast(dtype=torch.float16) with torch.amp.GradScaler, or model.half()",
    "bf16": "use torch.autocast(dtype=torch.bfloat16), or model.bfloat16()",
}
_WITHOUT_EFFECT = {"ratio": (*_BLANK, 1), "nvme_path": _BLANK, "pin_memory": (*_BLANK, False)}
_WITHOUT_EFFECT |= dict.fromkeys(_PREFETCHING, (*_BLANK, 0))


def read_deepspeed_config(source: str | os.PathLike[str] | Mapping[str, Any], **keywords: Any) -> dict[str, Any]:
    """Read a DeepSpeed configuration as keywords for ``ZenFlowAdamW``.

    It reads ``zero_optimization.zenflow``, ``offload_optimizer``, ``offload_param``, ``optimizer``,
    ``gradient_clipping``, ``gradient_accumulation_steps`` and ``communication_data_type``; one warning names everything
    else. Without a ``zenflow`` block, ``offload_optimizer`` on ``"cpu"`` is policy zero_offload, or twinflow if its
    ``ratio`` is not 1, on ``"nvme"`` zero_infinity, and no ``offload_optimizer`` is resident; with the block,
    ``"nvme"`` is state in files. With ``prefetch_optimizer`` (in the DeepSpeed of that paper's authors) the policy is
    deep_optimizer_states, and ``prefetch_optimizer_gap`` its ``update_stride``. ``offload_param`` on ``"cpu"`` or
    ``"nvme"`` is ``offload_weights=1.0`` there.

    ``"auto"`` is a blank for another program to fill in, except in the three options that have an automatic mode. It is
    refused for ``lr``, ``betas``, ``eps`` and ``weight_decay`` unless ``keywords`` has them, and left out everywhere
    else. Ranges are checked where the keywords are used.

    Args:
        source: path of a JSON file, or its content as a dict.
        keywords: of ``ZenFlowAdamW``; they override those of the file.

    Returns:
        Keywords for ``ZenFlowAdamW``, with ``keywords``.

    Raises:
        FileNotFoundError: the file does not exist.
        TypeError: an unknown name in the ``zenflow`` block (with the nearest valid one), or a block that is not a JSON
            object.
        ValueError: not valid JSON, a duplicate key, an optimizer other than Adam, an unknown device for optimizer
            state or weights, weights in files without the state, two directories for files, a ``select_interval``
            without a unit or in epochs of an unknown length, ``offload`` of selected columns, or ``"auto"`` where a
            number is needed.
    """
    config, where = _load_json(source)
    zero = _block(config, "zero_optimization", where)
    zenflow = _block(zero, "zenflow", where)
    offload = _block(zero, "offload_optimizer", where)
    weights = _block(zero, "offload_param", where)
    found = _read_offload(zero, offload, where)
    found |= _read_offload_param(weights, found, where, keywords)
    found |= _read_zenflow(zenflow, f"the zenflow block of {where}", keywords)
    ignored = [f"zero_optimization.{name}" for name in zero if name not in _READ_FROM_ZERO]
    used = (*_READ_FROM_OFFLOAD, *found, *(_PREFETCHING if found["policy"] == "deep_optimizer_states" else ()))
    ignored += [
        f"zero_optimization.{block}.{name}"
        for block, read in (("offload_optimizer", offload), ("offload_param", weights))
        for name, value in read.items()
        if name not in used and value not in _WITHOUT_EFFECT.get(name, ())
    ]
    if config.get("optimizer") is not None:
        found.update(_read_adam(_block(config, "optimizer", where), where, ignored, keywords))
    # DeepSpeed writes "no clipping" as 0.
    if (clipping := config.get("gradient_clipping")) not in (*_BLANK, 0):
        found["max_grad_norm"] = clipping
    if (backwards := config.get("gradient_accumulation_steps")) not in _BLANK:
        found["gradient_accumulation_steps"] = backwards
    if (dtype := config.get("communication_data_type")) not in _BLANK:
        found["communication_data_type"] = dtype
    sentences = []
    if zero.get("sub_group_size") not in _BLANK:
        sentences.append("sub_group_size is not read: update_stride decides the size of subgroups")
    if clipping == "auto" and "max_grad_norm" not in keywords:
        sentences.append('gradient_clipping is "auto" and nothing filled it in: gradients are not clipped unless '
                         "max_grad_norm is passed")  # fmt: skip
    for name, value in config.items():
        enabled = value.get("enabled") if isinstance(value, Mapping) else None
        if name in _READ_FROM_CONFIG or enabled is False:
            continue
        if name == "scheduler" and value is not None:
            sentences.append(
                "scheduler is not read: the learning rate stays as it is, unless a scheduler of "
                "torch.optim.lr_scheduler changes it"
            )
        elif name in _PRECISIONS and enabled is True:
            sentences.append(f"{name} is not read: weights and activations keep the model's dtype; {_PRECISIONS[name]}")
        else:
            ignored.append(name)
    if ignored:
        named = ", ".join(map(printable, ignored))
        sentences.append(f"ignored, since they have no effect here: {named}")
    if sentences:
        warnings.warn(f"{where}: {'. '.join(sentences)}", stacklevel=user_stacklevel())
    return found | keywords


def _read_offload(zero: Mapping[str, Any], offload: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The policy, and the options of where its state lives."""
    device = offload.get("device", "cpu" if zero.get("cpu_offload") is True else "none")
    if device not in ("cpu", "nvme", "none", None):
        raise ValueError(
            f"offload_optimizer.device={device!r} in {where} is not supported in this version; "
            'use "cpu" (host memory), "nvme" (files) or "none" (state stays on the device)'
        )
    found: dict[str, Any] = {}
    if zero.get("zenflow") is not None:
        found["policy"] = "zenflow"
        if device == "nvme":
            found["offload_device"] = "nvme"
    elif device == "cpu" and offload.get("prefetch_optimizer") not in (*_BLANK, 0):
        found |= {"policy": "deep_optimizer_states", "update_stride": "auto"}
        if (ratio := offload.get("ratio")) not in _BLANK:
            found["ratio"] = ratio
        if (gap := offload.get("prefetch_optimizer_gap")) not in (*_BLANK, 0):
            found["update_stride"] = check_integer(f"{where}: prefetch_optimizer_gap", gap, 1)
    elif device == "cpu" and offload.get("ratio") not in _WITHOUT_EFFECT["ratio"]:
        found |= {"policy": "twinflow", "ratio": offload["ratio"]}
    else:
        found["policy"] = {"cpu": "zero_offload", "nvme": "zero_infinity"}.get(str(device), "resident")
    if device == "nvme" and offload.get("nvme_path") not in _BLANK:
        found["nvme_path"] = offload["nvme_path"]
    return found


def _read_zenflow(zenflow: Mapping[str, Any], where: str, filled_in: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the ``zenflow`` block.

    Args:
        filled_in: keywords that override those of the block.
    """
    for name in zenflow:
        if name not in ZENFLOW_OPTIONS:
            raise unknown_option(name, ZENFLOW_OPTIONS, where=f" in {where}")
    found = {name: value for name, value in zenflow.items() if value != "auto" or name in _TAKES_AUTO}
    if check_flag(f"{where}: offload", found.pop("offload", False)):
        raise ValueError(
            f"offload=True in {where} (state of the selected columns off the device) is not supported in this version; "
            "use offload=false with a smaller topk_ratio and device_share=0, or leave the block out"
        )
    if (reserved := found.pop("pt_reserved_cores_perc", None)) is not None:
        found["workers"] = 1.0 - check_ratio(f"{where}: pt_reserved_cores_perc", reserved)
    allowed = ("auto", "step", "epoch")
    strategy = check_choice(f"{where}: select_strategy", found.pop("select_strategy", "auto"), allowed)
    interval = found.get("select_interval", "auto")
    if (steps := found.pop("steps_per_epoch", None)) is not None:
        steps = check_integer(f"{where}: steps_per_epoch", steps, 1)
    if "select_interval" in filled_in or (strategy == "auto" and interval == "auto"):
        return found
    if strategy == "auto":
        raise ValueError(
            f'select_interval={interval!r} in {where} has no unit under select_strategy="auto"; write "step" or '
            '"epoch" there, or pass select_interval= in steps'
        )
    if interval == "auto":
        raise ValueError(
            f'select_interval="auto" in {where} under select_strategy="{strategy}" must be an integer >= 1; write '
            'one, or select_strategy="auto"'
        )
    if strategy == "epoch":
        if steps is None:
            raise ValueError(
                f'steps_per_epoch is missing in {where} under select_strategy="epoch"; write it, or pass '
                f"select_interval= in steps, as in select_interval={interval} * len(loader)"
            )
        found["select_interval"] = steps * check_integer(f"{where}: select_interval", interval, 1)
    return found


def _read_offload_param(
    weights: Mapping[str, Any], found: Mapping[str, Any], where: str, filled_in: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the weights live.

    Args:
        found: what ``offload_optimizer`` says.
        filled_in: keywords that override those of the file.
    """
    device = weights.get("device", "none")
    if device not in ("cpu", "nvme", "none", None):
        raise ValueError(
            f"offload_param.device={device!r} in {where} is not supported in this version; "
            'use "cpu" (host memory), "nvme" (files) or "none" (weights stay on the device)'
        )
    if device not in ("cpu", "nvme"):
        return {}
    offloaded: dict[str, Any] = {"offload_weights": 1.0}
    if device == "nvme":
        policies = (found["policy"], filled_in.get("policy"))
        if "zero_infinity" not in policies and "offload_device" not in {**found, **filled_in}:
            raise ValueError(
                f'offload_param.device="nvme" in {where} needs offload_optimizer.device="nvme": weights are in files '
                'only where optimizer state is; write "nvme" there, or offload_param.device="cpu" (host memory)'
            )
        offloaded["offload_device"] = "nvme_all"
        if (path := weights.get("nvme_path")) not in _BLANK:
            if found.get("nvme_path", path) != path:
                raise ValueError(
                    f"offload_param.nvme_path={path!r} and offload_optimizer.nvme_path={found['nvme_path']!r} in "
                    f"{where} must be one directory, which has the files of both"
                )
            offloaded["nvme_path"] = path
    return offloaded


def _read_adam(
    optimizer: Mapping[str, Any], where: str, ignored: list[str], filled_in: Mapping[str, Any]
) -> dict[str, Any]:
    """lr, betas, eps and weight_decay of the ``optimizer`` block; refuses settings that AdamW does not have.

    Args:
        ignored: gets the names that have no effect.
        filled_in: keywords that override those of the block.
    """
    kind = optimizer.get("type")
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        raise ValueError(
            f'optimizer.type={kind!r} in {where} must be "Adam" or "AdamW"; train with another optimizer on '
            'backend="inductor", or change the type'
        )
    parameters = _block(optimizer, "params", where)
    # The default of DeepSpeed's Adam is 0; of torch.optim.AdamW, and of ours, 0.01.
    found = {"weight_decay": 0.0, **{name: parameters[name] for name in _ADAM_KEYWORDS if name in parameters}}
    needed = {"bias_correction": True, "amsgrad": False}
    if kind.lower() == "adam" and found["weight_decay"] != 0.0:
        needed["adam_w_mode"] = True  # L2 regularization and decoupled decay differ, unless the decay is 0
    for name, value in needed.items():
        if parameters.get(name, value) not in (value, "auto"):
            raise ValueError(
                f"optimizer.params.{name}={parameters[name]!r} in {where} must be {value}: the update is AdamW's"
            )
    known = (*_ADAM_KEYWORDS, *_ADAM_SWITCHES)
    ignored += [f"optimizer.params.{name}" for name in parameters if name not in known]
    ignored += [f"optimizer.{name}" for name in optimizer if name not in ("type", "params")]
    if isinstance(betas := found.get("betas"), list):
        found["betas"] = tuple(betas)
    for name, value in found.items():
        if isinstance(value, str) and value == "auto" and name not in filled_in:
            raise ValueError(
                f'optimizer.params.{name}="auto" in {where} was not filled in by any program; write a number there, or '
                f"pass {name}= with the file"
            )
    return found


def _block(parent: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The JSON object ``parent[name]``; empty when it is absent or null."""
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r} in {where} must be a JSON object, not {type(value).__name__}")
    return value


def _load_json(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The configuration, and its name in messages."""
    if isinstance(source, Mapping):
        return source, "the DeepSpeed configuration"
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"config={source!r} must be the path of a DeepSpeed JSON file, or a dict")
    path = os.fspath(source)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"config={path!r}: there is no such DeepSpeed configuration file")
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file, object_pairs_hook=_without_duplicates)
        except ValueError as error:  # malformed JSON, bytes that are not UTF-8, or a duplicate key
            raise ValueError(f"config={path!r} is not valid JSON: {error}") from error
        except RecursionError as error:
            raise ValueError(f"config={path!r} is not a DeepSpeed configuration: it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ValueError(f"config={path!r} must hold a JSON object, not {type(config).__name__}")
    return config, printable(os.fsdecode(path))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys: ``json`` would silently keep the last value."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} is there twice; keep one of the two")
        found[name] = value
    return found
