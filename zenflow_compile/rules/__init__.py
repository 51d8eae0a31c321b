"""Update rules, each a few lines, which host and device compute with: see ``rule.Rule``."""

from __future__ import annotations

from zenflow_compile.rules.adagrad import Adagrad
from zenflow_compile.rules.adam import Adam, AMSGrad
from zenflow_compile.rules.adamax import Adamax
from zenflow_compile.rules.adamw import AdamW, AdamWAMSGrad
from zenflow_compile.rules.hidden_matrices import muon_groups
from zenflow_compile.rules.lion import Lion
from zenflow_compile.rules.muon import Muon
from zenflow_compile.rules.nadam import NAdam
from zenflow_compile.rules.radam import RAdam
from zenflow_compile.rules.rmsprop import CenteredRMSprop, MomentumRMSprop, RMSprop
from zenflow_compile.rules.rule import Array, Rule
from zenflow_compile.rules.sgd import SGD, NesterovSGD, PlainSGD

_KINDS = (
    *(AdamW, AdamWAMSGrad, Adam, AMSGrad, NAdam, RAdam, Adamax, Adagrad),
    *(RMSprop, MomentumRMSprop, CenteredRMSprop, SGD, NesterovSGD, PlainSGD, Lion),
)
KINDS: dict[str, type[Rule]] = {kind.__name__: kind for kind in _KINDS}
"""The rules of elements, by name."""

__all__ = [
    "KINDS",
    "SGD",
    "AMSGrad",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWAMSGrad",
    "Adamax",
    "Array",
    "CenteredRMSprop",
    "Lion",
    "MomentumRMSprop",
    "Muon",
    "NAdam",
    "NesterovSGD",
    "PlainSGD",
    "RAdam",
    "RMSprop",
    "Rule",
    "muon_groups",
]
