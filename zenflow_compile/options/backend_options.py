"""The ``mode=`` and ``options=`` of ``torch.compile(backend="zenflow")``, split by what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zenflow_compile.checks.validate import check_choice, unknown_option
from zenflow_compile.options.deepspeed import read_deepspeed_config
from zenflow_compile.options.options import ADAM_KEYWORDS, OPTION_NAMES, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """``mode=`` and ``options=`` of ``torch.compile(backend="zenflow")``.

    Attributes:
        optimizer: Keywords for ``ZenFlowAdamW``, already checked against ``Options``, if the backend makes the
            optimizer (optimizer in backward); None if the user made one.
        inner: What compiles the rewritten graphs: ``"inductor"``, or ``"eager"`` for no code generation.
        inductor: Inductor's settings: those of the mode, overridden by explicit ones.
    """

    optimizer: dict[str, Any] | None = None
    inner: Literal["inductor", "eager"] = "inductor"
    inductor: dict[str, Any] = field(default_factory=dict)


def split_backend_options(options: Mapping[str, Any] | None = None, mode: str | None = None) -> BackendOptions:
    """Split and check the options of ``torch.compile(backend="zenflow")``, before anything is compiled.

    ``torch.compile`` refuses ``mode=`` together with ``options=``, so ``options`` may have a key ``"mode"``.

    Args:
        options: ``inner``, ``mode``, ``config`` (path or dict for ``read_deepspeed_config``), keywords of
            ``ZenFlowAdamW``, which replace those of ``config``, and Inductor's own settings.
        mode: the ``mode=`` of ``torch.compile``.

    Raises:
        TypeError: an unknown name (with the nearest valid one), or a value of the wrong type.
        ValueError: a value outside its range, CUDA graphs, or Inductor settings under ``inner="eager"``.
        FileNotFoundError: ``config`` names no file.
    """
    from zenflow_compile.torch_internals import torch_private  # imports torch, which takes seconds

    rest = dict(options or {})
    inner = check_choice("inner", rest.pop("inner", "inductor"), ("inductor", "eager"))
    mode = rest.pop("mode", mode)
    config = rest.pop("config", None)
    optimizer_names = (*ADAM_KEYWORDS, *OPTION_NAMES)
    optimizer = {name: rest.pop(name) for name in optimizer_names if name in rest}
    if config is not None:
        optimizer = read_deepspeed_config(config, **optimizer)
    if "process_group" in rest:
        optimizer["process_group"] = rest.pop("process_group")
    Options.from_keywords(**{name: value for name, value in optimizer.items() if name in OPTION_NAMES})

    inductor: dict[str, Any] = {}
    if mode is not None:
        modes = torch_private.inductor_modes()
        inductor.update(modes[check_choice("mode", mode, tuple(modes))])
    inductor_names = torch_private.inductor_option_names() if rest else frozenset()
    for name, value in rest.items():
        setting = str(name).replace("-", "_")  # torch.compile reads names for Inductor like this too
        if setting not in inductor_names:
            known = (*optimizer_names, "process_group", "config", "inner", "mode", *sorted(inductor_names))
            raise unknown_option(name, known)
        inductor[setting] = value
    if inductor.get("triton.cudagraphs"):
        raise ValueError(
            'CUDA graphs (triton.cudagraphs, and so mode="reduce-overhead" and mode="max-autotune") are not '
            "supported in this version: a replayed graph would repeat the copies that it recorded, although the "
            "engine's update windows and buffers have changed since; use "
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
