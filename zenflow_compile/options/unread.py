"""Which policies read an option, and the options that have no effect under the policy in use.

Nothing here imports torch.
"""

from __future__ import annotations

import warnings
from dataclasses import fields

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.options.options import POLICIES, Options

_OFFLOADING = tuple(policy for policy in POLICIES if policy not in ("resident", "auto"))
_STREAMING = ("deep_optimizer_states", "zenflow")
_OF_FILES = ("nvme_path", "host_window_bytes")

_READERS: dict[str, tuple[str, ...]] = {
    "tokens_per_step": ("auto",),
    "offload_device": ("zero_infinity", "zenflow"),
    "ratio": ("twinflow", "deep_optimizer_states"),
    "sub_group_size": _STREAMING,
    "update_stride": _STREAMING,
    **dict.fromkeys(_OF_FILES, ("zero_infinity", "zenflow")),
    **dict.fromkeys(("min_offload_size", "staging_bytes", "weight_grad_order", "weight_grad_bytes"), _OFFLOADING),
    **dict.fromkeys(
        (
            "topk_ratio",
            "select_strategy",
            "select_interval",
            "update_interval",
            "max_update_interval",
            "min_update_interval",
            "full_warm_up_rounds",
            "staleness",
            "offload",
            "auto_ratio",
            "steps_per_epoch",
            "device_share",
            "spare_device_bytes",
            "accumulate_on_device",
            "gradient_compression",
        ),
        ("zenflow",),
    ),
}
"""Which policies read an option. Those that are not here say how the machine is used, or hold under every policy.
``"auto"`` may choose any policy, and is named where no other reads the option."""


def readers(name: str) -> str:
    """The policies that read an option, as text: ``"all"``, or their names."""
    if name in _OF_FILES:
        return 'zero_infinity, zenflow with offload_device="nvme"'
    return ", ".join(_READERS[name]) if name in _READERS else "all"


def unread(options: Options) -> list[str]:
    """Names of the options at other values than their defaults that the policy does not read.

    None under ``policy="auto"``, which may choose any policy.
    """
    if options.policy == "auto":
        return []
    default = {each.name: each.default for each in fields(Options)}
    return [name for name in _READERS if getattr(options, name) != default[name] and not _reads(options, name)]


def warn_of_unread(options: Options) -> None:
    """One ``UserWarning`` that names ``unread`` options and who reads them."""
    if named := [f"{name} (read by {readers(name)})" for name in unread(options)]:
        warnings.warn(
            f"policy={options.policy!r} does not read {', '.join(named)}: leave out what has no effect, or choose a "
            "policy that reads it",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def _reads(options: Options, name: str) -> bool:
    return options.policy in _READERS[name] and (name not in _OF_FILES or options.in_files)
