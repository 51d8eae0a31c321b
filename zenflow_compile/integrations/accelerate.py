"""Makes ``"zenflow"`` a backend name of Accelerate, and with it of the Hugging Face Trainer."""

from __future__ import annotations

from accelerate.utils import DynamoBackend

_NAME = "ZENFLOW"


def register_backend() -> None:
    """Let Accelerate take ``"zenflow"`` as the name of a ``torch.compile`` backend.

    Afterwards ``TrainingArguments(torch_compile_backend="zenflow")``, ``Accelerator(dynamo_backend="zenflow")`` and
    ``TorchDynamoPlugin(backend="zenflow")`` work in this process. Accelerate passes any name to ``torch.compile``, but
    checks it against the enum ``accelerate.utils.DynamoBackend`` first; this adds a member to the enum. Idempotent. If
    Accelerate already has the name, this does nothing.

    The launcher is another process: ``accelerate launch --dynamo_backend zenflow`` does not know the name. Pass it to
    ``Accelerator`` or ``TrainingArguments`` in the script instead.
    """
    if _NAME in DynamoBackend:
        return
    member = str.__new__(DynamoBackend, _NAME)
    member._name_ = member._value_ = _NAME
    member.__objclass__ = DynamoBackend
    member._sort_order_ = len(DynamoBackend)
    setattr(DynamoBackend, _NAME, member)  # first: an enum refuses attributes that replace listed members
    DynamoBackend._member_names_.append(_NAME)
    DynamoBackend._member_map_[_NAME] = member
    DynamoBackend._value2member_map_[_NAME] = member
