"""For the Hugging Face Trainer: ``optim="zenflow"``, and a callback that flushes before the last save."""

from __future__ import annotations

import ast
import functools
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import OptimizerNames

from zenflow_compile.integrations import StateDictHook, add_member
from zenflow_compile.optimizer import ZenFlow, ZenFlowAdamW, was_given

_NAME = "zenflow"


class ZenFlowCallback(TrainerCallback):
    """Calls ``optimizer.flush()`` at the end of training, before the last checkpoint is written.

    When training begins, it refuses hyperparameters that would silently not be those of ``TrainingArguments``: the
    Trainer gives its own only to optimizers that it knows by name, and its param groups carry ``args.weight_decay``.

    With ``update_interval`` above 1, the gradients of the last steps are in open update windows when training ends, and
    the Trainer neither flushes nor closes its optimizer. This callback applies them before the last checkpoint is
    written, whether ``max_steps`` ends training or another callback, such as ``EarlyStoppingCallback``. Its position
    among the callbacks does not matter. It changes neither training nor earlier checkpoints. A checkpoint that the
    Trainer writes on SIGTERM (``enable_jit_checkpoint``) is meant for resuming and keeps its update windows.

    A run that resumes from the last checkpoint starts with empty update windows, like one that called ``flush()``.

    Example:
        >>> args = TrainingArguments("out", learning_rate=2e-5, weight_decay=0.1)
        >>> optimizer = (ZenFlowAdamW, {"lr": args.learning_rate})
        >>> Trainer(..., args=args, optimizer_cls_and_kwargs=optimizer, callbacks=[ZenFlowCallback()])
    """

    def __init__(self) -> None:
        self._optimizer: ZenFlow | None = None
        self._control: TrainerControl | None = None
        self._hook: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """
        Raises:
            TypeError: the Trainer's optimizer is not a ``ZenFlow``.
            ValueError: it was given a weight decay that no param group has, since the Trainer's groups carry their own;
                or ``lr``, ``betas`` or ``eps`` were not given, and differ from those in ``args``.
        """
        self._end()  # drops the optimizer of a training that failed
        optimizer = _unwrapped(kwargs["optimizer"])
        self._check(optimizer, args)
        self._optimizer, self._control = optimizer, control
        # The Trainer writes a checkpoint after on_evaluate, in which a callback after this one may have ended training.
        self._hook = kwargs["model"].register_state_dict_pre_hook(StateDictHook(self.before_state_dict))

    def _check(self, optimizer: ZenFlow, args: TrainingArguments) -> None:
        if isinstance(optimizer, ZenFlowAdamW):
            _check_weight_decay(optimizer, args)
            _check_left_out(optimizer, args)

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


def _check_weight_decay(optimizer: ZenFlowAdamW, args: TrainingArguments) -> None:
    """
    Raises:
        ValueError: the optimizer was given a weight decay, and has the Trainer's groups, which have another one.
    """
    given = optimizer.defaults["weight_decay"]
    used = {group["weight_decay"] for group in optimizer.param_groups}
    of_trainer = args.weight_decay in used and used <= {args.weight_decay, 0.0}
    if was_given("weight_decay", given) and of_trainer and given != args.weight_decay:
        raise ValueError(
            f"weight_decay={given} of the optimizer has no effect: the Trainer's param groups carry "
            f"args.weight_decay={args.weight_decay}, and 0 for biases and norms: pass "
            f"TrainingArguments(weight_decay={given}), and leave it out of the optimizer's keywords"
        )


def _check_left_out(optimizer: ZenFlowAdamW, args: TrainingArguments) -> None:
    """
    Raises:
        ValueError: a hyperparameter was not given, and its default, which a group uses, is not that of ``args``.
    """
    expected = {
        "lr": ("learning_rate", args.learning_rate),
        "betas": ("(adam_beta1, adam_beta2)", (args.adam_beta1, args.adam_beta2)),
        "eps": ("adam_epsilon", args.adam_epsilon),
    }
    for name, (argument, value) in expected.items():
        default = optimizer.defaults[name]
        first = "initial_lr" if name == "lr" else name  # a scheduler has changed the rate by now
        is_used = any(group.get(first, group[name]) == default for group in optimizer.param_groups)
        if is_used and default != value and not was_given(name, default):
            raise ValueError(
                f"the optimizer was given no {name} and would train with its default, {default}, while "
                f"TrainingArguments has {argument}={value}, which the Trainer passes only to optimizers that it knows "
                f'by name: pass optimizer_cls_and_kwargs=(ZenFlowAdamW, {{"{name}": {value}, ...}}), or the value that '
                "you want"
            )


def _unwrapped(optimizer: Any) -> ZenFlow:
    """The optimizer inside Accelerate's wrapper."""
    found = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(found, ZenFlow):
        raise TypeError(
            f"ZenFlowCallback: the Trainer's optimizer is a {type(found).__name__}; pass "
            "optimizer_cls_and_kwargs=(ZenFlowAdamW, {...}) or optimizers=(ZenFlowAdamW(...), None), or leave the "
            "callback out"
        )
    return found


def register_optimizer() -> None:
    """Let ``TrainingArguments`` take ``optim="zenflow"``: a ``ZenFlowAdamW`` with their hyperparameters.

    Learning rate, betas, eps and weight decay are those of the arguments, and options of ``ZenFlowAdamW`` those of
    ``optim_args``, as in ``optim_args="update_interval=1,topk_ratio=0.05"``. The Trainer gets a ``ZenFlowCallback``,
    unless it has one, and its Accelerator leaves the optimizer's state where it is. Idempotent. The Trainer has a
    closed list of names; this adds one to it, in this process.

    Raises (when training begins):
        TypeError, ValueError: an option that does not exist, or a value that is out of its range.

    Example:
        >>> register_optimizer()
        >>> args = TrainingArguments("out", optim="zenflow", optim_args="update_interval=1", learning_rate=2e-5)
        >>> Trainer(model=model, args=args, train_dataset=dataset).train()
    """
    from transformers import trainer_optimizer  # earlier versions have a function instead

    if _NAME in OptimizerNames._value2member_map_:
        return
    trainer_optimizer._OPTIMIZER_HANDLERS[add_member(OptimizerNames, _NAME.upper(), _NAME)] = _class_and_keywords
    create = Trainer.create_optimizer

    @functools.wraps(create)
    def create_optimizer(self: Trainer, *args: Any, **keywords: Any) -> Any:
        if self.args.optim == _NAME:
            self.accelerator.device_placement = False
            if not any(isinstance(each, ZenFlowCallback) for each in self.callback_handler.callbacks):
                self.add_callback(ZenFlowCallback())
        return create(self, *args, **keywords)

    Trainer.create_optimizer = create_optimizer


def _class_and_keywords(context: Any) -> tuple[type[ZenFlowAdamW], dict[str, Any]]:
    options = {name: _value(text) for name, text in context.optim_args.items()}
    return ZenFlowAdamW, {**context.optimizer_kwargs, **context.adam_kwargs, **options}


def _value(text: str) -> Any:
    """A number, True, False or None; else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
