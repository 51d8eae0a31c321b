"""Which policies read an option, and the warning about options without effect."""

from __future__ import annotations

import warnings
from dataclasses import fields

from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.options.options import POLICIES, Options

_OFFLOADING = tuple(policy for policy in POLICIES if policy not in ("resident", "auto"))
_STREAMING = ("deep_optimizer_states", "zenflow")
_OF_FILES = ("nvme_path", "host_window_bytes")

_READERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tokens_per_step", "fill_device"), ("auto",)),
    **dict.fromkeys(("offload_device", "offload_weights_device"), ("zero_infinity", "zenflow")),
    "ratio": ("twinflow", "deep_optimizer_states"),
    "sub_group_size": _STREAMING,
    "update_stride": _STREAMING,
    **dict.fromkeys(_OF_FILES, ("zero_infinity", "zenflow")),
    **dict.fromkeys(
        ("split_master", "staging_bytes", "shared_buffers", "weight_grad_order", "weight_grad_bytes"), _OFFLOADING
    ),
    **dict.fromkeys(
        (
            "topk_ratio",
            "select_strategy",
            "select_interval",
            "update_interval",
            "max_update_interval",
            "min_update_interval",
            "full_warm_up_rounds",
            "total_steps",
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
"""The policies that read an option. Every policy reads the options that are not listed. ``"auto"`` may choose any
policy, and is listed only where no other reads the option."""


def reads(policy: str, name: str) -> bool:
    """Whether ``policy`` reads an option, with state in files where it can have it there."""
    return name not in _READERS or policy in _READERS[name]


def readers(name: str) -> str:
    """The policies that read an option, as text: ``"all"``, or their names."""
    if name in _OF_FILES:
        return 'zero_infinity, zenflow with offload_device="nvme"'
    return ", ".join(_READERS[name]) if name in _READERS else "all"


def unread(options: Options) -> list[str]:
    """Names of the options that the policy does not read and that are not at their defaults.

    Empty under ``policy="auto"``, which may choose any policy.
    """
    if options.policy == "auto":
        return []
    default = {each.name: each.default for each in fields(Options)}
    return [name for name in _READERS if getattr(options, name) != default[name] and not _reads(options, name)]


def warn_of_unread(options: Options) -> None:
    """Warn, once, of the ``unread`` options, with the policies that read them."""
    if named := [f"{name} (read by {readers(name)})" for name in unread(options)]:
        warnings.warn(
            f"policy={options.policy!r} does not read {', '.join(named)}: leave them out, or choose a policy "
            "that reads them",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def _reads(options: Options, name: str) -> bool:
    return reads(options.policy, name) and (name not in _OF_FILES or options.in_files)
