"""What the convergence study runs: models, phases, update rules, and the order of the runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from examples.settings import TrainConfig

Phase = Literal["scratch", "finetune"]
PHASES: tuple[Phase, ...] = ("scratch", "finetune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One update rule.

    Attributes:
        name: as it stands in tables.
        policy: as in ``ZenFlowAdamW``.
        update_interval: as in ``ZenFlowAdamW``.
        staleness: as in ``ZenFlowAdamW``.
        state_dtype: as in ``ZenFlowAdamW``.
        optimizer: a rule of ``zenflow_compile.rules``.
        rate: its highest learning rate, as a share of the study's.
        limit: claimed mean distance of its validation loss above the reference's, as a share.
        claimed: whether it has to end near the reference. The others are shown for comparison.
        one_seed: whether the first seed is enough.
    """

    name: str
    policy: str = "zenflow"
    update_interval: int | Literal["auto"] = 4
    staleness: int = 0
    state_dtype: str = "fp32"
    optimizer: str = "AdamW"
    rate: float = 1.0
    limit: float = 0.01
    claimed: bool = True
    one_seed: bool = False

    def apply(self, config: TrainConfig) -> TrainConfig:
        """``config`` under this rule."""
        return replace(
            config,
            optimizer=self.optimizer,
            lr=config.lr * self.rate,
            policy=self.policy,
            update_interval=self.update_interval,
            staleness=self.staleness,
            state_dtype=self.state_dtype,
        )


REFERENCE = Rule(name="resident AdamW", policy="resident", claimed=False)
CONTROL = Rule(name="zenflow, S = 4, staleness 1", staleness=1, claimed=False, one_seed=True)
"""Known to be bad from scratch: a measurement that does not see it has no resolution."""

_ZERO_OFFLOAD = Rule(name="zero_offload", policy="zero_offload", one_seed=True)  # exact at any seed
_S2 = Rule(name="zenflow, S = 2", update_interval=2)
_S4 = Rule(name="zenflow, S = 4", update_interval=4)
_S8 = Rule(name="zenflow, S = 8", update_interval=8)
_AUTO = Rule(name='zenflow, S = "auto"', update_interval="auto")
_BF16 = Rule(name="zero_offload, bf16 moments", policy="zero_offload", state_dtype="bf16", limit=0.003)
_INT8 = Rule(name="zero_offload, 8-bit moments", policy="zero_offload", state_dtype="fp8", limit=0.005)
_RESIDENT: dict[str, dict[str, Any]] = {"": {"policy": "resident"}}
_WINDOWS: dict[str, dict[str, Any]] = {", zenflow, S = 4": {"policy": "zenflow"}}
_STREAMED: dict[str, dict[str, Any]] = {
    f", zero_offload{form}": {"policy": "zero_offload", "state_dtype": state_dtype}
    for form, state_dtype in (("", "fp32"), (", bf16 state", "bf16"), (", 8-bit state", "fp8"))
}
OTHERS = [
    Rule(name=f"{name}{form}", optimizer=name, rate=rate, claimed=False, one_seed=True, **options)
    for name, rate, forms in (
        ("Lion", 0.2, _RESIDENT | _WINDOWS),
        ("SGD", 300.0, _RESIDENT | _WINDOWS),
        ("Muon", 1.0, _RESIDENT | _STREAMED),
    )
    for form, options in forms.items()
]
"""Other optimizers, each next to itself in update windows, or with its state in host memory."""
RULES: MappingProxyType[Phase, tuple[Rule, ...]] = MappingProxyType(
    {
        "scratch": (REFERENCE, _S2, _S4, _AUTO, _ZERO_OFFLOAD, _BF16, _INT8, CONTROL, *OTHERS),
        "finetune": (REFERENCE, _S2, _S4, _S8, _AUTO, _ZERO_OFFLOAD, _BF16, _INT8, CONTROL, *OTHERS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Both phases on one model.

    Attributes:
        model: its name.
        configs: settings of each phase; those of ``finetune`` train the model of ``scratch`` on other text.
        rates: highest learning rates of each phase at which the reference is tried on the first seed.
    """

    model: str
    configs: MappingProxyType[Phase, TrainConfig]
    rates: MappingProxyType[Phase, tuple[float, ...]]


def _study(
    model: str,
    scratch: TrainConfig,
    *,
    finetune_lr: float,
    rates: tuple[float, ...],
    finetune_rates: tuple[float, ...],
) -> Study:
    finetune = replace(scratch, lr=finetune_lr, steps=100, warm_up=10)
    return Study(
        model=model,
        configs=MappingProxyType({"scratch": scratch, "finetune": finetune}),
        rates=MappingProxyType({"scratch": rates, "finetune": finetune_rates}),
    )


STUDIES = MappingProxyType(
    {
        "10m": _study(
            "10m",
            TrainConfig(layers=8, width=320, batch=8, context=64, steps=300, warm_up=45, lr=1e-3),
            finetune_lr=2e-4,
            rates=(5e-4, 1e-3, 2e-3),
            finetune_rates=(1e-4, 2e-4, 5e-4, 1e-3),
        ),
        "tiny": _study(
            "tiny", TrainConfig(), finetune_lr=2e-4, rates=(1e-3, 2e-3, 3e-3), finetune_rates=(1e-4, 2e-4, 4e-4)
        ),
    }
)
"""From scratch the rate is the best of ``rates`` for the reference; the one of fine-tuning is low on purpose, a fifth
of it or less. Losses at all of them are in docs/convergence.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        model: name of the study.
        phase: which text and schedule.
        rule: the update rule.
        config: settings, with seed and rule in them and without paths.
        start: the run whose weights this one continues; None from scratch.
    """

    model: str
    phase: Phase
    rule: Rule
    config: TrainConfig
    start: Run | None = None

    def identity(self) -> dict[str, Any]:
        """What the numbers depend on, in values that survive JSON: equal identities, equal numbers."""
        return {
            "model": self.model,
            "phase": self.phase,
            "rule": self.rule.name,
            "seed": self.config.seed,
            "config": self.config.trajectory(),
            "start": self.start.config.trajectory() if self.start else None,
        }

    def folder(self) -> str:
        """Name for this run's files, different for different identities."""
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()
        return f"{self.model}-{self.phase}-seed{self.config.seed}-{digest[:8]}"


def plan(study: Study, phases: Sequence[Phase], seeds: Sequence[int]) -> Iterator[Run]:
    """All runs, one seed after the other; the run from which others continue precedes them."""
    for seed in seeds:
        scratch = reference_run(study, "scratch", seed)
        if "scratch" not in phases:
            yield scratch
        for phase in PHASES:
            if phase not in phases:
                continue
            for rule in RULES[phase]:
                if seed == seeds[0] or not rule.one_seed:
                    yield replace(
                        reference_run(study, phase, seed), rule=rule, config=_config(study, phase, rule, seed)
                    )


def sweep(study: Study, phases: Sequence[Phase], seed: int) -> Iterator[Run]:
    """Runs of the reference at every rate that is tried."""
    for phase in phases:
        run = reference_run(study, phase, seed)
        for rate in study.rates[phase]:
            yield replace(run, config=replace(run.config, lr=rate))


def reference_run(study: Study, phase: Phase, seed: int) -> Run:
    """The run that the others of its phase and seed are compared with."""
    return Run(
        model=study.model,
        phase=phase,
        rule=REFERENCE,
        config=_config(study, phase, REFERENCE, seed),
        start=None if phase == "scratch" else reference_run(study, "scratch", seed),
    )


def _config(study: Study, phase: Phase, rule: Rule, seed: int) -> TrainConfig:
    return rule.apply(replace(study.configs[phase], seed=seed))
