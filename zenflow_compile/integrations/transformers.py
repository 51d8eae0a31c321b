"""A callback for the Hugging Face Trainer: flushes before the last save."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zenflow_compile.integrations.state_dict_hook import StateDictHook
from zenflow_compile.optimizer import ZenFlowAdamW


class ZenFlowCallback(TrainerCallback):
    """Calls ``optimizer.flush()`` at the end of training, before the last checkpoint is written.

    With ``update_interval`` above 1, the gradients of the last steps are in open update windows when training ends, and
    the Trainer neither flushes nor closes its optimizer. This callback applies them before the last checkpoint is
    written, whether ``max_steps`` ends training or another callback, such as ``EarlyStoppingCallback``. Its position
    among the callbacks does not matter. It changes neither training nor earlier checkpoints. A checkpoint that the
    Trainer writes on SIGTERM (``enable_jit_checkpoint``) is meant for resuming and keeps its update windows.

    A run that resumes from the last checkpoint starts with empty update windows, like one that called ``flush()``.

    Example:
        >>> Trainer(..., optimizer_cls_and_kwargs=(ZenFlowAdamW, {"lr": 2e-5}), callbacks=[ZenFlowCallback()])
    """

    def __init__(self) -> None:
        self._optimizer: ZenFlowAdamW | None = None
        self._control: TrainerControl | None = None
        self._hook: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """
        Raises:
            TypeError: the Trainer's optimizer is not a ``ZenFlowAdamW``.
        """
        self._end()  # drops the optimizer of a training that failed
        self._optimizer = _unwrapped(kwargs["optimizer"])
        self._control = control
        # The Trainer writes a checkpoint after on_evaluate, in which a callback after this one may have ended training.
        self._hook = kwargs["model"].register_state_dict_pre_hook(StateDictHook(self.before_state_dict))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._flush_at_end(control)  # before an evaluation, so that it evaluates the saved model

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._flush_at_end(control)  # before the Trainer loads the best model over this one

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._control = control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._optimizer is not None:
            self._optimizer.flush()
        self._end()

    def before_state_dict(self) -> None:
        """Flush if the model is about to be saved as the last checkpoint.

        ``JITCheckpointCallback`` ends training, too, but saves without ``should_save``.
        """
        if self._control is not None and self._control.should_save:
            self._flush_at_end(self._control)

    def _flush_at_end(self, control: TrainerControl) -> None:
        self._control = control
        if self._optimizer is not None and control.should_training_stop:
            self._optimizer.flush()

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._optimizer = self._control = self._hook = None


def _unwrapped(optimizer: Any) -> ZenFlowAdamW:
    """The optimizer inside Accelerate's wrapper."""
    found = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(found, ZenFlowAdamW):
        raise TypeError(
            f"ZenFlowCallback: the Trainer's optimizer is a {type(found).__name__}; pass "
            "optimizer_cls_and_kwargs=(ZenFlowAdamW, {...}) or optimizers=(ZenFlowAdamW(...), None), or leave the "
            "callback out"
        )
    return found
