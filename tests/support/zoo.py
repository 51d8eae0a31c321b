"""Models that every entry and policy must train as plain PyTorch does, each with its own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig

VOCABULARY, CONTEXT, WIDTH = 48, 12, 32

# Entries of a parameter, by the end of its name and a slice of its first dimension.
Entries = tuple[tuple[str, slice], ...]


@dataclass(frozen=True)
class Member:
    """One model and its data.

    Attributes:
        build: makes the model; called with a fixed seed.
        inputs: the arguments of the model at step i.
        loss: from the (compiled) model and its arguments; by default the model returns it.
        zero_gradient: entries whose true gradient is zero. Adam divides the rounding noise there by its own size and
            takes steps of lr in random directions, so that no two correct runs agree there.
        autocast: forward and loss run under ``torch.autocast`` in bf16.
        tolerance: largest difference of a weight between two correct AdamWs after 40 steps.
        needs_transformers: skipped where the package is not installed.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    loss: Callable[[Callable[..., Any], tuple[Any, ...]], Tensor] = lambda model, inputs: model(*inputs)
    zero_gradient: Entries = ()
    autocast: bool = False
    tolerance: float = 1e-5
    needs_transformers: bool = False


def generator(step: int) -> torch.Generator:
    """The generator of a step's data, which depends on the step only."""
    return torch.Generator().manual_seed(1000 + step)


def vectors(step: int) -> tuple[Tensor, Tensor]:
    """``f32[16, 32]`` and classes ``int64[16]``."""
    source = generator(step)
    return torch.randn(16, 32, generator=source), torch.randint(0, 10, (16,), generator=source)


def images(step: int) -> tuple[Tensor, Tensor]:
    """``f32[8, 3, 8, 8]`` and classes ``int64[8]``."""
    source = generator(step)
    return torch.randn(8, 3, 8, 8, generator=source), torch.randint(0, 10, (8,), generator=source)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Tokens ``int64[4, 12]`` and those that follow."""
    text = torch.randint(0, VOCABULARY, (4, CONTEXT + 1), generator=generator(step))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def ragged_tokens(step: int) -> tuple[Tensor, Tensor]:
    """Like ``tokens``, but batch and length differ from step to step."""
    batch, length = 2 + step % 3, 6 + step % 5
    text = torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator(step))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cross_entropy(model: Callable[..., Any], inputs: tuple[Any, ...]) -> Tensor:
    """The loss of a model that returns logits, computed outside of its graph."""
    return functional.cross_entropy(model(*inputs[:-1]), inputs[-1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10))


def frozen_mlp() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


class ConvNet(nn.Module):
    """Convolutions with batch norm. They have no biases: batch norm takes the mean away, so those get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = functional.gelu(self.first_norm(self.first(x)))
        x = functional.gelu(self.second_norm(self.second(x)))
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


class Broken(nn.Module):
    """Two graph breaks. ``shared`` is used in all three graphs, so its gradient has three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.shared = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = functional.gelu(self.first(self.shared(x)))
        torch._dynamo.graph_break()
        x = self.shared(functional.gelu(self.second(x)))
        torch._dynamo.graph_break()
        return functional.cross_entropy(self.head(functional.gelu(self.shared(x))), y)


class Adapted(nn.Module):
    """``never`` gets no gradient, ``adapter`` gets one in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 48), nn.Linear(48, 10)
        self.adapter, self.never = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor, use_adapter: bool, y: Tensor) -> Tensor:
        x = functional.gelu(self.body(x))
        if use_adapter:
            x = x + self.adapter(x)
        return functional.cross_entropy(self.head(x), y)


def adapted_inputs(step: int) -> tuple[Tensor, bool, Tensor]:
    x, y = vectors(step)
    return x, step % 3 == 0, y


class Expert(nn.Module):
    """One expert: a separate graph, for any number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 40), nn.Linear(40, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Router(nn.Module):
    """Top-1 routing; one expert never has a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.choose = nn.Linear(32, 32), nn.Linear(32, 4)
        with torch.no_grad():
            self.choose.bias.copy_(torch.tensor([0.0, 0.0, -0.2, -100.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = functional.gelu(self.embed(x))
        weight, choice = self.choose(x).softmax(-1).max(-1)
        return x, weight, choice


class Experts(nn.Module):
    """The loop over experts depends on values, so Dynamo runs it in Python and compiles each expert by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = Router(), Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, weight, choice = self.router(x)
        out = x
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(choice == number).flatten()
            if len(mine):
                out = out.index_add(0, mine, weight[mine, None] * expert(x[mine]))
        return functional.cross_entropy(self.head(out), y)


def few_vectors(step: int) -> tuple[Tensor, Tensor]:
    """Six vectors, so few that an expert often has no token."""
    x, y = vectors(step)
    return x[:6], y[:6]


def gpt(*, tied: bool = False) -> GPT:
    return GPT(GPTConfig(vocabulary=VOCABULARY, context=CONTEXT, layers=2, width=WIDTH, heads=2, tied=tied))


class Checkpointed(nn.Module):
    """A GPT with tied weights whose blocks are recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(tied=True)

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        x = self.gpt.token_embedding(text) + self.gpt.position_embedding(torch.arange(text.shape[1]))
        for block in self.gpt.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.gpt.head(self.gpt.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HuggingFace(nn.Module):
    """A model of the transformers package with a plain loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=text, **({"use_cache": False} if self.model.config.model_type != "bert" else {}))
        return functional.cross_entropy(logits.logits.flatten(0, 1), targets.flatten())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        attn_implementation="sdpa",
    )
    return HuggingFace(LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return HuggingFace(GPT2LMHeadModel(config))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        attn_implementation="sdpa",
    )
    return HuggingFace(MixtralForCausalLM(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=CONTEXT,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return HuggingFace(BertForMaskedLM(config))


WHOLE = slice(None)

MEMBERS: tuple[Member, ...] = (
    Member("mlp", mlp, vectors, loss=cross_entropy),
    Member("conv_batch_norm", ConvNet, images),
    Member("gpt", gpt, tokens),
    Member("gpt_tied", lambda: gpt(tied=True), tokens),
    Member("gpt_checkpointed", Checkpointed, tokens),
    # A weight that differs in the last bit of fp32 may round to another bf16, and the next gradient then differs in its
    # third digit: PyTorch's own fused and plain AdamW end up as far apart.
    Member("gpt_autocast", gpt, tokens, autocast=True, tolerance=2e-4),
    Member("gpt_dynamic_shapes", gpt, ragged_tokens),
    Member("graph_breaks", Broken, vectors),
    Member("unused_parameters", Adapted, adapted_inputs),
    Member("frozen_parameters", frozen_mlp, vectors, loss=cross_entropy),
    Member("experts_without_tokens", Experts, few_vectors),
    Member("llama", llama, tokens, needs_transformers=True),
    # The first bias of an attention holds queries, keys and values one after the other; a key's bias shifts all
    # scores of a softmax alike, so its gradient is zero.
    Member(
        "gpt2",
        gpt2,
        tokens,
        zero_gradient=(("attn.c_attn.bias", slice(WIDTH, 2 * WIDTH)),),
        needs_transformers=True,
    ),
    Member("mixtral", mixtral, tokens, needs_transformers=True),
    Member("bert", bert, tokens, zero_gradient=(("attention.self.key.bias", WHOLE),), needs_transformers=True),
)

BY_NAME = {member.name: member for member in MEMBERS}
