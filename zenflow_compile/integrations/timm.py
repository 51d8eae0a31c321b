"""For timm: ``opt="zenflow"`` in ``create_optimizer_v2``, its training script and programs that use its registry."""

from __future__ import annotations

from zenflow_compile.optimizer import ZenFlowAdamW


def register_optimizer() -> None:
    """Let timm make a ``ZenFlowAdamW`` for ``opt="zenflow"``, in open_clip for ``--opt timm/zenflow``. Idempotent.

    Options of ``ZenFlowAdamW`` are keywords of ``create_optimizer_v2``, and ``--opt-kwargs update_interval=1`` of
    timm's script. timm makes the groups without weight decay for biases and norms, as for AdamW.
    """
    from timm.optim._optim_factory import OptimInfo, default_registry

    info = OptimInfo("zenflow", ZenFlowAdamW, "AdamW with its state on the host (zenflow-compile)", has_betas=True)
    default_registry.register(info)
