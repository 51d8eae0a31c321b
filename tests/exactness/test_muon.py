"""Muon is PyTorch's to the noise of its bf16 iterations, and the same to the bit wherever its state is."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile as zf
from tests.exactness.test_rules import EPS, OFFLOAD, POLICIES, WINDOWS
from tests.support.new_memory import NewMemory
from zenflow_compile import rules
from zenflow_compile.planning.planners import ParamSpec, ShardedBy, check_matrices
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState, update_on_device
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_

STREAMED = {name: options for name, options in POLICIES.items() if name not in ("resident", "twinflow")}
STREAMED |= {"windows": WINDOWS}
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
FORMS: dict[str, dict[str, Any]] = {
    "original": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "others": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "momentum": 0.8, "eps": 1e-5},
}
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def model_of(dtype: torch.dtype = torch.float32, nudge: float = 0.0) -> nn.Module:
    """Square, wide and tall matrices, two of one shape, and vectors."""
    torch.manual_seed(0)
    sizes = (48, 64, 64, 64, 96, 40)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers[:-1]).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + nudge * torch.randn(param.shape))
    return model


def ours(form: str = "original", **options: Any) -> Make:
    rule = rules.Muon(**MUON | FORMS[form])
    return lambda model: [zf.ZenFlow(rules.muon_groups(model, rule), rules.AdamW(**EPS), **OFFLOAD, **options)]


def theirs(form: str) -> Make:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [param for param in model.parameters() if param.dim() == 2]
        vectors = [param for param in model.parameters() if param.dim() != 2]
        return [torch.optim.Muon(matrices, **MUON | FORMS[form]), torch.optim.AdamW(vectors, **EPS)]

    return make


def step(optimizers: list[torch.optim.Optimizer], run: Any, batches: Tensor, clip: float | None = None) -> None:
    for batch in batches:
        for part in batch.split(8):  # accumulates gradients
            run(part).float().square().mean().backward()
        if clip is not None:
            params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, clip)
        for each in optimizers:
            each.step()
            each.zero_grad()


def batches(dtype: torch.dtype) -> Tensor:
    return torch.randn(12, 16, 48, generator=torch.Generator().manual_seed(1)).to(dtype)


def train(
    make: Make,
    *,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    clip: float | None = None,
    nudge: float = 0.0,
    between: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> Tensor:
    model = model_of(dtype, nudge)
    optimizers = make(model)
    run = torch.compile(model, backend="zenflow", options={"inner": "eager"}) if compiled else model
    step(optimizers, run, batches(dtype)[:6], clip)
    between(optimizers[0])
    step(optimizers, run, batches(dtype)[6:], clip)
    for each in optimizers:
        if isinstance(each, zf.ZenFlow):
            each.close()
    return weights_of(model)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


@pytest.mark.parametrize(
    "clip", [pytest.param(None, marks=pytest.mark.tier1, id="unclipped"), pytest.param(0.1, id="clipped")]
)
@pytest.mark.parametrize("form", FORMS)
def test_muon_is_pytorch_to_its_noise(form: str, clip: float | None) -> None:
    """The reference itself moves by so much if its weights are nudged in the last bit."""
    expected = train(theirs(form), clip=clip)
    noise = max(float((train(theirs(form), clip=clip, nudge=n) - expected).abs().max()) for n in (1e-7, 2e-7, -1e-7))
    found = train(ours(form, policy="resident"), clip=clip)
    assert float((found - expected).abs().max()) <= 3 * noise
    assert float((weights_of(model_of()) - expected).abs().max()) > 5 * noise


@pytest.mark.parametrize("shape", [(64, 48), (32, 96), (40, 40)])
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_pytorch(form: str, shape: tuple[int, int]) -> None:
    """Of gradients without small singular values, which the iterations would multiply with their noise."""
    torch.manual_seed(0)
    start, keywords = 10.0 * torch.randn(shape), MUON | FORMS[form]
    mine, reference = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers: list[Any] = [
        zf.ZenFlow([mine], rules.Muon(**keywords), policy="zero_offload", **OFFLOAD),
        torch.optim.Muon([reference], **keywords),
    ]
    for _ in range(3):
        gradient = nn.init.orthogonal_(torch.empty(shape)) + 0.01 * torch.randn(shape)
        for param, optimizer in zip((mine, reference), optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
    optimizers[0].close()
    step_size = float((reference - start).abs().max()) / 3
    assert float((mine - reference).abs().max()) < 0.02 * step_size


@pytest.mark.parametrize("shape", [(96, 192), (160, 160), (192, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_take_the_scratch_that_is_planned(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    params = [torch.randn(shape).to(dtype) for _ in range(4)]
    for together in (1, 4):
        rule, found = rules.Muon(), params[:together]
        form = StateForm(moments="fp32", length=shape[1], arrays=rule.arrays)
        updates = [(param, torch.randn_like(param), ResidentState.zeros_like(param, form=form)) for param in found]
        with NewMemory() as memory:
            update_on_device(updates, StepCoefficients(rule.initial, Number.known(1.0), rule))
        assert all(bool(state.arrays[0].any()) for _, _, state in updates)
        assert memory.most_bytes <= (rule.matrix_scratch if together == 1 else 16) * together * params[0].numel() + 64


def test_gradients_of_zero_decay_alone() -> None:
    weight = torch.randn(32, 32)
    param = nn.Parameter(weight.clone())
    with zf.ZenFlow([param], rules.Muon(lr=0.5, weight_decay=0.1), policy="zero_offload", **OFFLOAD) as optimizer:
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert torch.equal(param, weight * (1.0 - 0.05))


@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", STREAMED)
def test_streamed_muon_is_resident_muon(policy: str, dtype: torch.dtype, compiled: bool) -> None:
    """Matrices to the bit, whatever is done with vectors."""
    expected = train(ours(policy="resident"), dtype=dtype)
    made: list[Any] = []

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        made.extend(ours(**STREAMED[policy])(model))
        return made

    found = train(make, dtype=dtype, compiled=compiled, between=lambda _: check_streamed(made[0]))
    assert torch.equal(found, expected)


def check_streamed(optimizer: zf.ZenFlow) -> None:
    plans = optimizer.engine.plan.params
    assert all(plan.streamed for plan in plans if len(plan.shape) == 2)
    assert optimizer.engine.plan.host_bytes >= 4 * sum(plan.numel for plan in plans if len(plan.shape) == 2)


@pytest.mark.parametrize("state_dtype", ["bf16", "fp8"])
def test_momentum_in_fewer_bytes(state_dtype: str) -> None:
    resident = train(ours(policy="resident", state_dtype=state_dtype))
    assert torch.equal(train(ours(policy="zero_offload", state_dtype=state_dtype)), resident)
    exact = train(ours(policy="resident"))
    assert 0 < float((resident - exact).abs().max()) < 0.2


@pytest.mark.parametrize("options", [{"offload_weights": 1.0}, {"overlap_step": False}], ids=["weights", "in_step"])
def test_muon_with_weights_on_the_host(options: dict[str, Any]) -> None:
    expected = train(ours(policy="resident"))
    assert torch.equal(train(ours(policy="zero_offload", **options), compiled=True), expected)


def test_muon_is_offloaded_between_steps() -> None:
    def move(optimizer: Any) -> None:
        optimizer.offload_all()
        optimizer.reload_all()

    assert torch.equal(train(ours(policy="zero_offload"), between=move), train(ours(policy="resident")))


@pytest.mark.parametrize(
    "options", [{"policy": "resident"}, {"policy": "zero_offload", "state_dtype": "bf16"}, WINDOWS]
)
def test_muon_resumes(options: dict[str, Any]) -> None:
    expected = train(ours(**options))
    model = model_of()
    optimizers = ours(**options)(model)
    step(optimizers, model, batches(torch.float32)[:6])
    file = io.BytesIO()
    optimizers[0].synchronize()  # type: ignore[attr-defined]
    torch.save((model.state_dict(), optimizers[0].state_dict()), file)
    optimizers[0].close()  # type: ignore[attr-defined]
    file.seek(0)
    weights, state = torch.load(file)
    again = model_of(nudge=0.5)
    again.load_state_dict(weights)
    optimizers = ours(**options)(again)
    optimizers[0].load_state_dict(state)
    step(optimizers, again, batches(torch.float32)[6:])
    optimizers[0].close()  # type: ignore[attr-defined]
    assert torch.equal(weights_of(again), expected)


def test_state_of_pytorch_loads() -> None:
    """Training goes on as PyTorch's does, to its noise."""
    model, other = model_of(), model_of(nudge=0.5)
    params = [param for param in model.parameters() if param.dim() == 2]
    muon = torch.optim.Muon(params, **MUON)
    step([muon], model, batches(torch.float32)[:6])
    other.load_state_dict(model.state_dict())
    mine = zf.ZenFlow([param for param in other.parameters() if param.dim() == 2], rules.Muon(**MUON), **OFFLOAD)
    mine.load_state_dict(muon.state_dict())
    for each, optimizer in ((model, muon), (other, mine)):
        step([optimizer], each, batches(torch.float32)[6:8])
    mine.close()
    moved = float((weights_of(model) - weights_of(other)).abs().max())
    assert moved < 0.002  # two steps without the momentum differ by 0.03


def test_muon_follows_its_definition() -> None:
    """One step of a matrix alone, as ``update_window_`` computes it, is that of one in a stack."""
    rule = rules.Muon(**MUON)
    model = model_of()
    expected = []
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
        if param.dim() == 2:
            state = [param.detach().clone(), torch.zeros_like(param)]
            update_window_(state, [param.grad], [StepCoefficients(rule.initial, Number.known(1.0), rule)], step=1)
            expected.append(state[0])
    (optimizer,) = ours(policy="zero_offload")(model)
    optimizer.step()
    optimizer.close()  # type: ignore[attr-defined]
    for param, reference in zip((each for each in model.parameters() if each.dim() == 2), expected, strict=True):
        assert torch.equal(param, reference)


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.hidden = nn.Linear(16, 16)
        self.conv = nn.Conv1d(4, 4, 3)
        self.lm_head = nn.Linear(16, 20)


def test_groups_have_hidden_matrices() -> None:
    model = WithHead()
    model.hidden.bias.requires_grad_(False)
    muon, others = rules.muon_groups(model, rules.Muon())
    assert [name for name, _ in muon["params"]] == ["hidden.weight"]
    assert [name for name, _ in others["params"]] == [
        "embed.weight", "conv.weight", "conv.bias", "lm_head.weight", "lm_head.bias",
    ]  # fmt: skip
    muon, _ = rules.muon_groups(model, rules.Muon(), lambda name, param: name == "lm_head.weight")
    assert [name for name, _ in muon["params"]] == ["lm_head.weight"]
    with pytest.raises(ValueError, match="no parameter of the model is chosen for Muon"):
        rules.muon_groups(model, rules.Muon(), lambda *_: False)


def test_hidden_layers_may_be_called_output() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))
    muon, _ = rules.muon_groups(bert, rules.Muon())
    names = [name for name, _ in muon["params"]]
    assert len([name for name in names if ".layer.0." in name]) == 6
    assert "bert.encoder.layer.1.attention.output.dense.weight" in names
    assert not any("embeddings" in name or "decoder" in name for name in names)


@pytest.mark.parametrize("shape", [(8,), (4, 4, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    param = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=r"param0 has shape .*, and Muon updates matrices; put it into a"):
        zf.ZenFlow([param], rules.Muon())
    zf.ZenFlow([param], rules.AdamW()).close()  # nothing owns the parameter


def test_sharded_matrices_are_refused() -> None:
    spec = ParamSpec("w", (8, 8), torch.float32, sharded=ShardedBy(0, 0, 2), rule=rules.Muon())
    with pytest.raises(ValueError, match="w is sharded by fully_shard, and Muon needs whole matrices"):
        check_matrices([spec])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms' must be None or one of original, match_rms_adamw"),
        ({"ns_steps": 0}, r"ns_steps=0 must be an integer in \[1, 99\]"),
        ({"ns_coefficients": (1.0, 2.0)}, "must be three numbers"),
        ({"nesterov": 1}, "nesterov=1 must be True or False"),
        ({"momentum": -1.0}, "momentum=-1.0 must be"),
        ({"betas": (0.9, 0.99)}, "Muon has no 'betas'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rules.Muon(**arguments)


@pytest.mark.parametrize("changes", [{"of_matrix": "momentum_buffer"}, {"on_matrices": rules.Rule.on_matrices}])
def test_malformed_rule_of_matrices_is_refused(changes: dict[str, Any]) -> None:
    rule = type("Changed", (rules.Muon,), changes)()
    with pytest.raises(ValueError, match=r"Changed.of_matrix='\w+' must be in Changed.window, and Changed.on_matrices"):
        zf.ZenFlow([nn.Parameter(torch.ones(8, 8))], rule)


def test_arguments_of_the_rule_do_not_change() -> None:
    model = model_of()
    (optimizer,) = ours(policy="resident")(model)
    assert optimizer.param_groups[0]["ns_steps"] == 5
    optimizer.param_groups[0]["nesterov"] = False
    model(torch.ones(2, 48)).sum().backward()
    with pytest.raises(ValueError, match=r"nesterov=False differs from the True of the rule Muon, which groups cannot"):
        optimizer.step()
    optimizer.param_groups[0]["nesterov"] = True
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.close()  # type: ignore[attr-defined]
    (other,) = ours("others", policy="resident")(model_of())
    with pytest.raises(ValueError, match=r"in param group 0 .*ns_coefficients=.* differs from the .* of the rule Muon"):
        other.load_state_dict(state)
    other.close()  # type: ignore[attr-defined]
