"""Small training loops as people write them, under ``ZenFlowAdamW`` and under ``torch.optim.AdamW``."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.support.loops import (
    ENTRIES,
    ENTRY_IDS,
    EXACT,
    STEPS,
    SUMMED,
    ZERO_OFFLOAD,
    Call,
    Numbers,
    Run,
    Side,
    Trained,
    assert_close,
    both_entries,
    compare,
    compare_runs,
    loss_of,
    plain,
    small,
    synchronize,
    train,
    with_tool,
)
from tests.support.processes import chosen_cases, run_two_processes
from tests.support.training import batch

every_policy = pytest.mark.parametrize(
    "options", [EXACT, ZERO_OFFLOAD, SUMMED], ids=["exact", "zero_offload", "summed"]
)


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(500 + number))


# DCGAN


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


def dcgan(*, clipped: bool = False, clears: str = "module") -> Run:
    """PyTorch's tutorial: the generator's backward adds to gradients that the discriminator's step has consumed."""

    def run(side: Side) -> tuple[nn.Module, Numbers]:
        torch.manual_seed(1)
        gan = Gan()
        for_d = side.optimizer(gan.discriminator.named_parameters(), betas=(0.5, 0.999))
        for_g = side.optimizer(gan.generator.named_parameters(), betas=(0.5, 0.999))
        generator, discriminator = side.compile(gan.generator), side.compile(gan.discriminator)
        norms: list[float | Tensor] = []

        def judge(x: Tensor, real: bool) -> Tensor:
            verdict = discriminator(x)
            return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

        for step in range(STEPS):
            (gan.discriminator if clears == "module" else for_d).zero_grad()
            judge(batch(step)[0], True).backward()
            fake = generator(noise(step, 8, 8))
            judge(fake.detach(), False).backward()
            if clipped:
                norms.append(clip_grad_norm_(gan.discriminator.parameters(), 0.05))
            for_d.step()

            (gan.generator if clears == "module" else for_g).zero_grad()
            judge(fake, True).backward()
            if clipped:
                norms.append(clip_grad_norm_(gan.generator.parameters(), 0.05))
            for_g.step()
        return gan, norms

    return run


@both_entries
@every_policy
def test_dcgan_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare_runs(dcgan(), entry, options)


@both_entries
def test_dcgan_with_optimizer_zero_grad(entry: dict[str, Any] | None) -> None:
    compare_runs(dcgan(clears="optimizer"), entry)


@both_entries
def test_clipped_dcgan_equals_adamw(entry: dict[str, Any] | None) -> None:
    compare_runs(dcgan(clipped=True), entry, effect=dcgan())


# Several tasks


class TwoTasks(nn.Module):
    """A shared trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 24)
        self.heads = nn.ModuleList([nn.Linear(24, 10), nn.Linear(24, 4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.shared(x))
        return self.heads[0](x), self.heads[1](x).square()


def two_tasks() -> nn.Module:
    torch.manual_seed(1)
    return TwoTasks()


def task_losses(call: Call, number: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(number)
    first, second = call(inputs)
    return F.cross_entropy(first, targets), F.mse_loss(second, inputs[:, :4])


def surgery(project: bool, clear: str = "optimizer") -> Callable[[nn.Module, Call, Optimizer], Numbers]:
    """PCGrad: conflicting gradients of two tasks are each projected off the other."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        products: list[float | Tensor] = []
        for step in range(STEPS):
            kept: list[list[Tensor | None]] = []
            for task in range(2):
                task_losses(call, step)[task].backward()
                kept.append([param.grad for param in model.parameters()])
                (optimizer if clear == "optimizer" else model).zero_grad()
            for param, first, second in zip(model.parameters(), *kept, strict=True):
                if first is None or second is None:
                    param.grad = first if second is None else second
                    continue
                product = (first * second).sum()
                if product != 0:  # compiled graphs return zeros for the other task's head
                    products.append(float(product > 0))
                if project and product < 0:
                    projected = first - product / second.square().sum() * second
                    second = second - product / first.square().sum() * first
                    first = projected
                param.grad = first + second
            optimizer.step()
            optimizer.zero_grad()
        assert 0 < sum(products) < len(products), "no gradients conflict, or all do"
        return products

    return loop


@both_entries
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_gradient_surgery_equals_adamw(entry: dict[str, Any] | None, clear: str) -> None:
    compare(surgery(True, clear), entry, build=two_tasks, effect=surgery(False, clear))


def gradnorm(*, weighted: bool = True) -> Callable[[nn.Module, Call, Optimizer], Numbers]:
    """Each task's loss is weighted by the inverse norm of its gradient at the shared weight."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            losses = task_losses(call, step)
            each = [torch.autograd.grad(loss, model.shared.weight, retain_graph=True)[0] for loss in losses]
            assert model.shared.weight.grad is None
            norms += [grad.norm() for grad in each]
            factors = [0.05 / grad.norm() if weighted else 1.0 for grad in each]
            sum(factor * loss for factor, loss in zip(factors, losses, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return loop


@both_entries
@pytest.mark.parametrize("options", [EXACT, ZERO_OFFLOAD], ids=["exact", "zero_offload"])
def test_gradnorm_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    # Weights that differ in the last bit of float32 change the norms by about this much.
    compare(gradnorm(), entry, options, two_tasks, effect=gradnorm(weighted=False), rel=1e-5)


# Sharpness-aware minimization


def sam(rho: float) -> Callable[[nn.Module, Call, Optimizer], Numbers]:
    """The published form: weights are perturbed along the gradient, and restored before the step."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            loss_of(call, step).backward()
            norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
            norms.append(norm)
            synchronize(optimizer)
            moves = []
            with torch.no_grad():
                for param in model.parameters():
                    moves.append(param.grad * (rho / (norm + 1e-12)))
                    param.add_(moves[-1])
            optimizer.zero_grad()
            loss_of(call, step).backward()
            synchronize(optimizer)
            with torch.no_grad():
                for param, move in zip(model.parameters(), moves, strict=True):
                    param.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return loop


@both_entries
def test_sam_equals_adamw(entry: dict[str, Any] | None) -> None:
    compare(sam(0.5), entry, effect=sam(0.0))


def sam_with_kept_gradients(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """The variant that adds both gradients; references to the first ones are kept across ``zero_grad``."""
    for step in range(STEPS):
        loss_of(call, step).backward()
        kept = [param.grad for param in model.parameters()]
        synchronize(optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(param.grad, alpha=0.5)
        optimizer.zero_grad()
        loss_of(call, step).backward()
        synchronize(optimizer)
        with torch.no_grad():
            for param, grad in zip(model.parameters(), kept, strict=True):
                param.sub_(grad, alpha=0.5)
                param.grad.add_(grad)
        optimizer.step()
        optimizer.zero_grad()
    return None


@both_entries
def test_sam_with_kept_gradients_equals_adamw(entry: dict[str, Any] | None) -> None:
    compare(sam_with_kept_gradients, entry, effect=plain)


# Accumulation


@both_entries
@every_policy
def test_accumulation_with_average_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    """Three backwards; gradients are divided by the number of examples afterwards, and clipped."""

    def tool(model: nn.Module, optimizer: Optimizer) -> Tensor:
        for param in model.parameters():
            param.grad.div_(3.0)
        return clip_grad_norm_(model.parameters(), 0.05)

    compare(with_tool(tool, backwards=3), entry, options, effect=with_tool(None, backwards=3))


@both_entries
def test_accumulation_of_varying_length(entry: dict[str, Any] | None) -> None:
    """One to three backwards per step, the leftover batches of an epoch included."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            count = 1 + step % 3
            for part in range(count):
                loss_of(call, 10 * step + part).backward()
            for param in model.parameters():
                param.grad /= count
            values.append(model.down.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        return values

    compare(loop, entry, effect=with_tool(None))


@both_entries
def test_eager_and_compiled_uses_accumulate(entry: dict[str, Any] | None) -> None:
    """One loss goes through the compiled model and through the model itself."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            synchronize(optimizer)
            (loss_of(call, 10 * step) + loss_of(model, 10 * step + 1)).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    compare(loop, entry, effect=plain)


# Fine-tuning of some elements


def masked(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
    """Tensor hooks zero the gradient of half of every matrix."""
    handles = []
    for param in model.parameters():
        mask = (torch.arange(param.numel()).view_as(param) % 2).to(param.dtype)
        handles.append(param.register_hook(lambda grad, mask=mask: grad * mask))
    return plain(model, call, optimizer)


@both_entries
@every_policy
def test_masked_fine_tuning_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None) -> None:
    compare(masked, entry, options, effect=plain)


# Adversarial examples


def fgsm(how: str, strength: float) -> Callable[[nn.Module, Call, Optimizer], Numbers]:
    """Each batch is moved along the sign of the loss's gradient with respect to the inputs, then trained on."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            inputs, targets = batch(step)
            x = inputs.clone().requires_grad_()
            loss = F.cross_entropy(call(x), targets)
            if how == "grad":
                (direction,) = torch.autograd.grad(loss, x)
            else:
                loss.backward(inputs=[x])
                direction = x.grad
            assert all(param.grad is None for param in model.parameters())
            values.append(direction)
            F.cross_entropy(call(inputs + strength * direction.sign()), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values

    return loop


@both_entries
@every_policy
@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_fgsm_equals_adamw(options: dict[str, Any], entry: dict[str, Any] | None, how: str) -> None:
    compare(fgsm(how, 0.3), entry, options, effect=fgsm(how, 0.0))


@both_entries
def test_pgd_after_accumulation_equals_adamw(entry: dict[str, Any] | None) -> None:
    """Three ascents by ``autograd.grad`` between two backwards of one step."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            inputs, targets = batch(step)
            F.cross_entropy(call(inputs), targets).backward()
            x = inputs.clone()
            for _ in range(3):
                x.requires_grad_()
                (direction,) = torch.autograd.grad(F.cross_entropy(call(x), targets), x)
                x = (x + 0.1 * direction.sign()).detach()
            F.cross_entropy(call(x), targets).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    compare(loop, entry, effect=plain)


# Gradients of gradients, which torch.compile does not support


def penalized_inputs(weight: float) -> Callable[[nn.Module, Call, Optimizer], Numbers]:
    """WGAN-GP: the loss has a term in its gradient with respect to the inputs."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        norms: list[float | Tensor] = []
        for step in range(STEPS):
            inputs, targets = batch(step)
            x = inputs.clone().requires_grad_()
            loss = F.cross_entropy(call(x), targets)
            (by_inputs,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + weight * by_inputs.square().sum()).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return loop


def test_gradient_penalty_equals_adamw() -> None:
    compare(penalized_inputs(10.0), effect=penalized_inputs(0.0))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_penalty_on_grad_equals_adamw() -> None:
    """``.grad`` of a backward with ``create_graph`` is differentiated again."""

    def loop(model: nn.Module, call: Call, optimizer: Optimizer) -> Numbers:
        values: list[float | Tensor] = []
        for step in range(STEPS):
            loss_of(call, step).backward(create_graph=True)
            penalty = sum(param.grad.square().sum() for param in model.parameters())
            (10 * penalty).backward()
            values += [param.grad.detach().clone() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return values

    compare(loop, effect=plain)


# Two processes


def all_reduced(call: Call, number: int, rank: int) -> Tensor:
    """The loss on this rank's half of a batch."""
    inputs, targets = batch(number)
    half = slice(4 * rank, 4 * rank + 4)
    return F.cross_entropy(call(inputs[half]), targets[half])


def reduced(reduce: Callable[[list[nn.Parameter]], Any]) -> Callable[[Side, int], nn.Module]:
    """A loop that sums the gradients of both ranks by ``reduce``; what it returns is alive in the step."""

    def train(side: Side, rank: int) -> nn.Module:
        model = small()
        optimizer, call = side.optimizer(model.named_parameters()), side.compile(model)
        for step in range(6):
            all_reduced(call, step, rank).backward()
            _kept = reduce(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        return model

    return train


def per_parameter(params: list[nn.Parameter]) -> None:
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= 2


def asynchronous(params: list[nn.Parameter]) -> None:
    for work in [dist.all_reduce(param.grad.data, async_op=True) for param in params]:
        work.wait()


def flat_copies(params: list[nn.Parameter]) -> list[Tensor]:
    """Flattened, reduced in one call and copied back, as in Megatron and Apex."""
    grads = [param.grad for param in params]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= 2
    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(part)
    return [*grads, flat]


def flat_views(side: Side, rank: int) -> nn.Module:
    """Every ``.grad`` is a view of the reduced buffer."""
    model = small()
    optimizer, call = side.optimizer(model.named_parameters()), side.compile(model)
    flat = torch.zeros(sum(param.numel() for param in model.parameters()))
    begin = 0
    for param in model.parameters():
        param.grad = flat[begin : begin + param.numel()].view_as(param)
        begin += param.numel()
    for step in range(6):
        all_reduced(call, step, rank).backward()
        dist.all_reduce(flat)
        flat /= 2
        optimizer.step()
        flat.zero_()
    return model


def ddp(side: Side, rank: int, *, clipped: bool = False, no_sync: bool = False, **keywords: Any) -> nn.Module:
    model = small()
    wrapped = DistributedDataParallel(model, **keywords)
    optimizer = side.optimizer(model.named_parameters())
    for step in range(6):
        if no_sync:
            with wrapped.no_sync():
                all_reduced(wrapped, 100 + step, rank).backward()
        all_reduced(wrapped, step, rank).backward()
        if clipped:
            clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return model


def ddp_views(side: Side, rank: int) -> nn.Module:
    return ddp(side, rank, gradient_as_bucket_view=True)


def ddp_clipped(side: Side, rank: int) -> nn.Module:
    return ddp(side, rank, clipped=True)


def ddp_no_sync(side: Side, rank: int) -> nn.Module:
    return ddp(side, rank, no_sync=True)


BY_HAND = {each.__name__: reduced(each) for each in (per_parameter, asynchronous, flat_copies)}
BY_HAND["flat_views"] = flat_views
REDUCERS = {"ddp": ddp, "ddp_views": ddp_views, "ddp_clipped": ddp_clipped, "ddp_no_sync": ddp_no_sync}
CASES = [(name, entry) for name in BY_HAND for entry in range(2)] + [(name, 0) for name in REDUCERS]
CASE_IDS = [f"{name}-{ENTRY_IDS[entry]}" for name, entry in CASES]


def work(rank: int, chosen: frozenset[str]) -> dict[str, Any]:
    """Train the chosen cases under both optimizers: by ``case-optimizer``, the weights or the text of the error."""
    results: dict[str, Any] = {}
    for (name, entry), key in zip(CASES, CASE_IDS, strict=True):
        if key not in chosen:
            continue
        scenario = {**BY_HAND, **REDUCERS}[name]

        def run(side: Side, scenario: Any = scenario) -> tuple[nn.Module, Numbers]:
            return scenario(side, rank), None

        torch._dynamo.reset()
        for label, options in (("adamw", None), ("zenflow", {**EXACT, "process_group": False})):
            try:
                results[f"{key}-{label}"] = train(run, options, ENTRIES[entry]).weights
            except Exception:
                results[f"{key}-{label}"] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two_processes(partial(work, chosen=chosen_cases(request)), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASE_IDS)
def test_two_processes_equal_adamw(case: str, ranks: list[dict[str, Any]]) -> None:
    """Gradients that two processes average train as under AdamW, and both processes end with equal weights."""
    for key in (f"{case}-adamw", f"{case}-zenflow"):
        for results in ranks:
            assert not isinstance(results[key], str), results[key]
        for a, b in zip(ranks[0][key], ranks[1][key], strict=True):
            assert torch.equal(a, b), f"{key}: the processes differ"
    expected = Trained(ranks[0][f"{case}-adamw"], [])
    assert_close(Trained(ranks[0][f"{case}-zenflow"], []), expected)
