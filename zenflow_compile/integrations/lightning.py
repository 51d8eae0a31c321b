"""A callback for ``lightning.pytorch``: flushes before the last save."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils.hooks import RemovableHandle

from zenflow_compile.integrations import StateDictHook
from zenflow_compile.optimizer import ZenFlow

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class ZenFlowCallback(Callback):
    """Calls ``optimizer.flush()`` at the end of training.

    It flushes every :class:`~zenflow_compile.optimizer.ZenFlow` of the trainer before a checkpoint that is written
    after the last step, and in any case before ``on_train_end`` of the other callbacks. The flush comes after the last
    step, so it does not change training, and earlier checkpoints contain their update windows for a resume.

    Its position among the callbacks does not matter.

    Raises:
        ValueError: at the setup of ``trainer.fit()``, before anything has changed: the strategy is neither a
            ``SingleDeviceStrategy``, nor a ``DDPStrategy``, nor a ``ModelParallelStrategy``, under which
            ``configure_model()`` calls ``fully_shard``. Other strategies shard parameters in other ways.
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._save: _LastSave | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        # DeepSpeedStrategy is derived from DDPStrategy.
        if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, DeepSpeedStrategy):
            raise ValueError(
                f"the strategy is {type(strategy).__name__}, which replaces parameters or shards them in a way that a "
                "ZenFlowAdamW does not train: use Trainer(devices=1, strategy='auto'), strategy='ddp' with a model "
                "that is not compiled, or ModelParallelStrategy with fully_shard in configure_model()"
            )
        # An averaging callback writes averages into the weights in on_train_end: the flush must come before.
        # Finders train and restore the state in on_fit_start: they run before this callback adds its hooks.
        trainer.callbacks = sorted(
            trainer.callbacks,
            key=lambda each: (not isinstance(each, (BatchSizeFinder, LearningRateFinder)), each is not self),
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        optimizers = [each for each in trainer.optimizers if isinstance(each, ZenFlow)]
        self._save = _LastSave(trainer, optimizers)
        self._hooks.append(pl_module.register_state_dict_pre_hook(StateDictHook(self._save.before_state_dict)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._save is not None:
            self._save.epochs_before = trainer.fit_loop.epoch_progress.current.processed

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._save is not None:
            self._save.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_hooks()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._save = [], None


class _LastSave:
    """Flushes before the model is read for the last time.

    Attributes:
        read_at: the ``global_step`` at which the model was last read by ``state_dict()`` without a flush.
        epochs_before: epochs that had ended when this one began. Lightning's counts of started epochs lag behind after
            a resume, and an epoch counts as processed only after its validation, which may save.
    """

    def __init__(self, trainer: Trainer, optimizers: Sequence[ZenFlow]) -> None:
        self._trainer = trainer
        self._optimizers = optimizers
        self.read_at: int | None = None
        self.epochs_before = 0

    def before_state_dict(self) -> None:
        if self._training_ends:
            self._flush()
        else:
            self.read_at = self._trainer.global_step

    def end(self) -> None:
        """Flush at the end of training. Warns if the model was read at the last step, before it was known as such."""
        late = self.read_at == self._trainer.global_step
        if late and any(each.engine.windows_hold_gradients for each in self._optimizers):
            warnings.warn(
                f"state_dict() of the model was called at step {self.read_at}, before it was known to be the last: a "
                "checkpoint that was saved there is right to resume from, but its weights lack the gradients in open "
                "update windows; call trainer.save_checkpoint() after fit() for a model that contains them",
                stacklevel=2,
            )
        self._flush()

    @property
    def _training_ends(self) -> bool:
        """Whether the trainer takes no further step. Lightning decides the same, but only after hooks that may save."""
        fit, batches = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.batch_progress
        if batches.current.processed < batches.current.ready:  # the step of this batch comes later
            return False
        step, epochs = self._trainer.global_step, self.epochs_before + batches.is_last_batch
        if fit.max_steps != -1 and step >= fit.max_steps:
            return True
        if fit.max_epochs is not None and 0 <= fit.max_epochs <= epochs:
            return True
        if not self._trainer.should_stop:
            return False
        return bool(epochs >= (fit.min_epochs or 0) and step >= (fit.min_steps or 0))

    def _flush(self) -> None:
        for optimizer in self._optimizers:
            optimizer.flush()
