"""Test FLOPs counted on tensors without data: they equal the formulas, and the model stays as it was.

Run as a script, this file is one of two gloo ranks that train with and without counting.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 -- PyTorch's own idiom
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from flopwatch.catalogue import BY_NAME
from flopwatch.flops import Transformer
from flopwatch.flops.configs import from_config
from flopwatch.training import Run
from flopwatch.training.flop_counter.count import Uncountable, attach, count
from tests.support.frameworks import forget_accelerators
from tests.support.hook_server import HookServer
from tests.support.ranks import answers

pytestmark = pytest.mark.torch

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 32, 4, 64, 16, 3
SMALL = Transformer(layers=LAYERS, width=WIDTH, heads=HEADS, mlp_width=4 * WIDTH, vocabulary=VOCABULARY)


def flops(transformer: Transformer, length: int = LENGTH, convention: Any = "causal") -> int:
    """Return the FLOPs of a batch by the formula."""
    return BATCH * transformer.flops_per_sequence(length, convention)


def ids(length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % VOCABULARY


def by_flag(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_flag_with_dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, None, 0.1, True)


def by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_overwritten_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    mask = torch.zeros(q.shape[-2], q.shape[-2])
    mask[torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)] = float("-inf")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(block.mask[: q.shape[-2], : q.shape[-2]] == 0, float("-inf"))
    return F.dropout(torch.softmax(scores, -1), 0.1) @ v


def by_hand_added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    mask = torch.full((q.shape[-2], q.shape[-2]), float("-inf"), device=q.device).triu(1)
    return torch.einsum("bhqk,bhke->bhqe", (torch.einsum("bhqe,bhke->bhqk", q, k) + mask).softmax(-1), v)


def by_where(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    scores = q @ k.mT
    position = torch.arange(q.shape[-2])
    scores = torch.where(position[:, None] >= position, scores, torch.full_like(scores, -1e9))
    return scores.softmax(-1) @ v


def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def unmasked_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ v


class Block(nn.Module):
    """Pre-norm transformer block."""

    mask: torch.Tensor

    def __init__(self, attend: Callable[..., torch.Tensor] = by_flag, width: int = WIDTH) -> None:
        super().__init__()
        self.attend = attend
        self.heads = -1  # -1 infers the number of heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.ones(64, 64).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        e = x.shape[-1] // HEADS
        q, k, v = (of(h).unflatten(-1, (self.heads, e)).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v, self).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Hand-written decoder with tied embeddings."""

    def __init__(self, attend: Callable[..., torch.Tensor] = by_flag, recompute: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, **self.recompute)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture
def ranks() -> Iterator[Callable[[int], None]]:
    """Yield a function that starts a process group of the given size, in which only this rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    yield lambda size: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    dist.destroy_process_group()


@pytest.fixture
def run() -> Iterator[Run]:
    """Yield a run that pushes to a real server."""
    with HookServer() as server:
        run = Run("counting", endpoint=server.url, peak_flops=1e12, environ={})
        run.step()  # the first step counts as startup, without time or FLOPs
        yield run
        if run.alive:
            run.finish()
        assert run.snapshot().points[BY_NAME["training_hook_errors_total"]] == [({}, 0.0)]


def counted_flops(run: Run) -> float | None:
    """Return the FLOPs of the steps so far."""
    samples = run.snapshot().points.get(BY_NAME["training_model_flops_total"])
    return None if samples is None else samples[0][1]


# What is counted.


@pytest.mark.parametrize(
    "attend",
    [by_flag, by_flag_with_dropout, by_mask, by_overwritten_mask, by_hand, by_hand_added, by_where],
    ids=lambda attend: str(attend.__name__),
)
def test_a_causal_decoder_counts_as_the_formula(attend: Callable[..., torch.Tensor]) -> None:
    counted = count(LanguageModel(attend), (ids(),))
    assert counted.flops == flops(SMALL)
    assert counted.flops == 3 * counted.forward
    assert counted.tokens == BATCH * LENGTH
    assert sum(counted.by_op.values()) == counted.forward


@pytest.mark.parametrize("attend", [unmasked, unmasked_by_hand])
def test_without_a_mask_all_scores_count(attend: Callable[..., torch.Tensor]) -> None:
    assert count(LanguageModel(attend), (ids(),)).flops == flops(SMALL, convention="full")


def hugging_face(name: str, **changes: Any) -> tuple[Any, Transformer]:
    """Return a small model of transformers and its dimensions."""
    transformers: Any = importlib.import_module("transformers")
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    llama: dict[str, Any] = {
        **common,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
    }
    gated: dict[str, Any] = {
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "kv_heads": 2,
        "vocabulary": VOCABULARY,
        "mlp_matrices": 3,
    }
    if name == "gpt2":
        config = transformers.GPT2Config(**common, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64)
        dimensions = SMALL
    elif name == "mixtral":
        config = transformers.MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        dimensions = Transformer(**gated, experts_per_token=2, expert_width=48)
    elif name == "mistral":
        config = transformers.MistralConfig(**llama, sliding_window=5)
        dimensions = Transformer(**gated, mlp_width=48, window=5)
    else:
        config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[name](**llama)
        dimensions = Transformer(**gated, mlp_width=48)
    for key, value in changes.items():
        setattr(config, key, value)
    return transformers.AutoModelForCausalLM.from_config(config).train(), dimensions


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mistral"])
def test_a_model_of_transformers_counts_as_the_formula(name: str, padded: bool, attention: str) -> None:
    model, dimensions = hugging_face(name, _attn_implementation=attention)
    batch = {"input_ids": ids(), "labels": ids()}
    if padded:  # whatever the mask: a batch's FLOPs depend on its shape
        batch["attention_mask"] = torch.ones_like(ids()).tril()
    counted = count(model, (), batch)
    assert counted.flops == flops(dimensions)
    assert counted.tokens == BATCH * LENGTH


def test_a_mask_too_large_to_read_is_taken_from_the_attention_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.training.flop_counter.operators.MAX_COMPUTED", 100)
    for name in ("llama", "mistral"):
        model, dimensions = hugging_face(name)
        batch = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
        assert count(model, (), batch).flops == flops(dimensions)


def test_a_head_whose_best_answers_the_model_looks_at_is_no_router() -> None:
    class Ranked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.head(x)
            return logits, logits.topk(5).indices

    assert count(Ranked(), (torch.zeros(4, 8),)).flops == 6 * 4 * 8 * 16


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_moe", "nemotron"])
def test_the_count_matches_the_configuration(name: str) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(name)
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "sliding_window": 5,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if name == "deepseek_v3":
        small["head_dim"] = small["qk_rope_head_dim"]
    config = transformers.AutoConfig.for_model(
        name, **{key: value for key, value in small.items() if hasattr(config, key)}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    assert count(model, (), {"input_ids": ids()}).flops == flops(from_config(config.to_dict()))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_count_as_often_as_tokens_pass_them_and_the_router_does_not(experts: str) -> None:
    model, dimensions = hugging_face("mixtral")
    model.set_experts_implementation(experts)
    assert count(model, (), {"input_ids": ids()}).flops == flops(dimensions)
    assert model.config._experts_implementation == experts


def test_flex_attention_of_transformers_counts_as_scaled_dot_product_attention() -> None:
    model, dimensions = hugging_face("llama", _attn_implementation="flex_attention")
    assert count(model, (), {"input_ids": ids()}).flops == flops(dimensions)
    assert model.config._attn_implementation == "flex_attention"


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cuda")
def flash_attention(  # declared as in https://github.com/Dao-AILab/flash-attention
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> torch.Tensor:
    raise NotImplementedError("needs a card")


@flash_attention.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(q)


class FlashAttention(torch.autograd.Function):
    __module__ = "flash_attn.flash_attn_interface"
    window = (-1, -1)

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.detach() for each in qkv)
        out: torch.Tensor = flash_attention(q, k, v, 0.0, 1.0, True, *FlashAttention.window, 0.0)
        return out


def by_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    apply: Any = FlashAttention.apply
    out: torch.Tensor = apply(*(each.transpose(1, 2) for each in (q, k, v)))
    return out.transpose(1, 2)


def test_flash_attention_counts_but_not_with_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(LanguageModel(by_flash_attention), (ids(),)).flops == flops(SMALL)
    monkeypatch.setattr(FlashAttention, "window", (4, 0))
    with pytest.raises(Uncountable, match="flash_attn with a window"):
        count(LanguageModel(by_flash_attention), (ids(),))


def test_accelerate_and_autocast_around_the_forward_change_nothing() -> None:
    accelerate: Any = importlib.import_module("accelerate")
    model, dimensions = hugging_face("llama")
    forget_accelerators()  # left by other tests
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert count(model, (), {"input_ids": ids(), "labels": ids()}).flops == flops(dimensions)
    forget_accelerators()


class Torch(nn.Module):
    """torch.nn's own transformer layers between an embedding and a head."""

    def __init__(self, mask: Callable[[int], torch.Tensor], is_causal: bool) -> None:
        super().__init__()
        self.mask, self.is_causal = mask, is_causal
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True),
            LAYERS,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(tokens), mask=self.mask(tokens.shape[1]), is_causal=self.is_causal)
        return self.head(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_encoder_of_torch_with_a_causal_mask_counts_as_the_formula(is_causal: bool) -> None:
    model = Torch(nn.Transformer.generate_square_subsequent_mask, is_causal)
    counted = count(model, (ids(),))
    assert counted.flops == flops(SMALL)
    assert counted.tokens is None  # that class has no argument of that name


def test_a_torch_transformer_takes_its_masks_as_arguments() -> None:
    model = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 4 * WIDTH, batch_first=True)
    source, target = torch.zeros(BATCH, 10, WIDTH), torch.zeros(BATCH, LENGTH, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    per_token = 24 * WIDTH * WIDTH  # 4 d^2 of attention and 8 d^2 of MLP
    scores = 4 * WIDTH
    forward = (
        BATCH
        * LAYERS
        * (
            10 * per_token
            + 10 * 10 * scores  # encoder
            + LENGTH * per_token
            + LENGTH * LENGTH * scores // 2  # decoder, itself
            + LENGTH * 4 * WIDTH * WIDTH
            + 10 * 4 * WIDTH * WIDTH
            + LENGTH * 10 * scores
        )
    )  # decoder, cross
    assert count(model, (source, target), {"tgt_mask": mask}).forward == forward


def test_convolutions_count_each_multiply_add() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
    )
    forward = 2 * (3 * 8 * 9 * 10 * 10 + 4 * 8 * 9 * 4 * 4 + 8 * 4 * 4 * 4 * 4)
    assert count(model, (torch.zeros(1, 3, 10, 10),)).forward == forward


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_count_their_weights_at_each_step(kind: Any) -> None:
    model = kind(6, 10, num_layers=2)
    weights = sum(parameter.numel() for name, parameter in model.named_parameters() if "weight" in name)
    assert count(model, (torch.zeros(7, 3, 6),)).flops == 6 * 7 * 3 * weights


def test_weights_that_are_multiplied_with_each_other_count_once() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(8, 1)), nn.Parameter(torch.zeros(1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.a @ self.b)

    assert count(LowRank(), (torch.zeros(5, 8),)).flops == 6 * (5 * 8 * 8 + 8 * 8)


# Backward.


class Adapted(nn.Module):
    """Frozen linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", [None, {"use_reentrant": False}])
@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_a_frozen_weight_has_no_gradient(recompute: dict[str, Any] | None, cast: torch.dtype) -> None:
    model = LanguageModel(recompute=recompute).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.q, block.v = Adapted(block.q), Adapted(block.v)  # type: ignore[assignment]
    adapters = LAYERS * 2 * 2 * 2 * WIDTH
    frozen = flops(SMALL) - 2 * SMALL.matmul_weights * BATCH * LENGTH
    # The first block's q, k and v need no gradient, not even one for their input.
    expected = frozen - 2 * 3 * WIDTH * WIDTH * BATCH * LENGTH + 6 * adapters * BATCH * LENGTH
    with torch.autocast("cpu", cast, enabled=cast != torch.float32):
        assert count(model, (ids(),)).flops == expected


def test_what_no_gradient_goes_through_counts_forward_only() -> None:
    teacher, student = nn.Linear(8, 8), nn.Linear(8, 8)

    class Distilled(nn.Module):
        def __init__(self, teacher: nn.Module) -> None:
            super().__init__()
            self.teacher, self.student = teacher, student

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x) - wanted  # type: ignore[no-any-return]

    assert count(Distilled(teacher), (torch.zeros(4, 8),)).flops == (2 + 6) * 4 * 64
    frozen = nn.Sequential(copy.deepcopy(teacher).requires_grad_(False), student)
    assert count(frozen, (torch.zeros(4, 8),)).flops == (2 + 6) * 4 * 64


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_count(reentrant: bool) -> None:
    model = LanguageModel(recompute={"use_reentrant": reentrant})
    assert count(model, (ids(),)).flops == flops(SMALL)
    model, dimensions = hugging_face("llama")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert count(model, (), {"input_ids": ids()}).flops == flops(dimensions)
    assert model.is_activation_checkpointing


# Wrapped models.


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # imported by DDP
def test_under_ddp_and_torch_compile_the_model_inside_counts(ranks: Callable[[int], None]) -> None:
    ranks(1)
    model = LanguageModel()
    ddp = nn.parallel.DistributedDataParallel(model)
    model.blocks[0] = torch.compile(model.blocks[0])  # type: ignore[assignment]
    compiled_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for wrapped in (ddp, torch.compile(model), torch.compile(ddp)):
        assert count(wrapped, (ids(),)).flops == flops(SMALL)  # type: ignore[arg-type]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled_before


def test_parameters_that_fsdp_shards_count_whole(ranks: Callable[[int], None]) -> None:
    from torch.distributed.fsdp import fully_shard

    ranks(2)
    model = LanguageModel()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):  # before and after its parameters were first gathered
        assert count(model, (ids(),)).flops == flops(SMALL)
        model(ids()).sum().backward()
    assert all(type(p).__name__ == "DTensor" for name, p in model.named_parameters() if "blocks" in name)


@pytest.mark.parametrize("original", [True, False])
def test_parameters_that_the_older_fsdp_flattens_count_whole(original: bool, ranks: Callable[[int], None]) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    ranks(2)
    model = FullyShardedDataParallel(
        LanguageModel(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=original,
    )
    for _ in range(2):
        assert count(model, (ids(),)).flops == flops(SMALL)
        model(ids()).sum().backward()


@pytest.mark.parametrize("attend", [by_flag, by_hand])
@pytest.mark.parametrize("heads", [-1, HEADS // 2])  # in some code each rank knows its own number of heads
def test_parameters_that_tensor_parallelism_shards_count_whole(
    heads: int, attend: Callable[..., torch.Tensor], ranks: Callable[[int], None]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = LanguageModel(attend)
    model.head = nn.Linear(WIDTH, VOCABULARY)
    parallelize_module(model, mesh["tp"], {"embedding": RowwiseParallel(), "head": ColwiseParallel()})
    for block in model.blocks:
        block.heads = heads  # type: ignore[assignment]
        parallelize_module(
            block,
            mesh["tp"],
            {
                "q": ColwiseParallel(),
                "k": ColwiseParallel(),
                "v": ColwiseParallel(),
                "o": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    assert count(model, (ids(),)).flops == flops(SMALL)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert count(model, (ids(),)).flops == flops(SMALL)


def sharded(kind: str) -> nn.Module:
    """Return the decoder as two ranks share it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = LanguageModel()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        return fully_shard(model)  # type: ignore[return-value]
    for block in model.blocks:
        parallelize_module(
            block,
            init_device_mesh("cpu", (2,)),
            {
                "q": ColwiseParallel(),
                "k": ColwiseParallel(),
                "v": ColwiseParallel(),
                "o": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    return model


def train_sharded(kind: str, run: Run | None) -> list[float]:
    """Train for a few steps and return their losses."""
    model = sharded(kind)
    if run is not None:
        attach(run.recorder, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(3):
        loss = F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
        if run is not None:
            run.step()
    return values


@pytest.mark.long
def test_ranks_that_share_a_model_train_as_without_and_count_their_share() -> None:
    for rank in answers(__file__, world_size=2):
        for kind, (losses, plain, flops_of_rank) in rank.items():
            assert losses == plain
            # The first step counts as startup.
            assert flops_of_rank == 2 * flops(SMALL) / (2 if kind == "tensor" else 1)


# Models whose FLOPs cannot be counted.


class Forward(nn.Module):
    """Model that is a function of the weight of a linear layer and the batch."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = forward

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.function(self.linear.weight, x, *more)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient


def routed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x[x.sum(-1) > 0] @ weight


def branching(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ weight if x.sum() > 0 else x


def swallowed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        return branching(weight, x)
    except Exception:
        return x


def masked(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[None] @ weight, x[None], x[None], attn_mask=x[:, :1] > 0)


def masked_by_hand(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    scores = (x[None] @ weight) @ x[None].mT
    return scores.masked_fill(scores > 0.5, -9e9).softmax(-1) @ x[None] + (
        (x[None] @ weight @ x[None].mT).masked_fill((x @ x.mT) > 0, -9e9).softmax(-1) @ x[None]
    )


@torch.library.custom_op("flopwatch_test::matmul", mutates_args=())
def own_kernel(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ weight


@own_kernel.register_fake
def _(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def numpy(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy())


def attend_in_parts(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = (x @ weight).expand(1, 1, 16, 8)
    return flex_attention(heads, heads, heads)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (routed, "data"),
        (branching, "value of a tensor"),
        (swallowed, "value of a tensor"),
        (masked, "mask whose values"),
        (masked_by_hand, "mask whose values"),
        (attend_in_parts, "mask function of flex_attention"),
        (own_kernel, "flopwatch_test::matmul"),
        (Square.apply, "Square is an autograd.Function"),
        (numpy, "without data"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_only_data_or_kernels_know_is_a_reason(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(Uncountable, match=reason):
        count(Forward(function), (torch.zeros(16, 8),))


def test_a_forward_that_communicates_is_not_run(ranks: Callable[[int], None]) -> None:
    ranks(2)

    def gathered(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x @ weight

    with pytest.raises(Uncountable, match="communicates by itself: c10d"):
        count(Forward(gathered), (torch.zeros(16, 8),))


def test_a_scripted_module_is_not_looked_into() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(Uncountable, match="Linear is TorchScript"):
        count(nn.Sequential(scripted), (torch.zeros(4, 8),))


def test_positions_that_may_mean_packed_samples_are_not_guessed_at() -> None:
    model, dimensions = hugging_face("llama")
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    with pytest.raises(Uncountable, match="position_ids without attention_mask"):
        count(model, (), {"input_ids": ids(), "position_ids": positions, "use_cache": False})
    # transformers passes them to flash_attn in any case.
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(Uncountable, match="position_ids without attention_mask"):
        count(model, (), {"input_ids": ids(), "position_ids": positions})
    batch = {"input_ids": ids(), "position_ids": positions, "attention_mask": torch.ones_like(ids())}
    assert count(model, (), batch).flops == flops(dimensions)


def test_counting_takes_no_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.training.flop_counter.operators.DEADLINE", -1.0)
    with pytest.raises(Uncountable, match="took more than"):
        count(LanguageModel(), (ids(),))


def test_a_wrong_call_is_a_reason_and_no_error() -> None:
    with pytest.raises(Uncountable, match="missing a required argument"):
        count(LanguageModel())


# Side effects: there are none.


def test_the_model_and_random_numbers_are_as_before() -> None:
    class Stateful(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.seen: list[Any] = []
            self.calls = 0
            self.plain = torch.zeros(3)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.append(input_ids)
            self.plain += 1
            x = self.embedding(input_ids) + random.random() + torch.rand(WIDTH)
            self.positions.weight.data.zero_()
            return self.head(F.dropout(self.norm(x.mT).mT))  # type: ignore[no-any-return]

    model, called = Stateful(), []
    model.register_forward_pre_hook(lambda *_: called.append("before"))
    model.head.register_forward_hook(lambda *_: called.append("after"))
    model(ids()).sum().backward()
    called.clear()
    before = {
        name: (tensor, tensor.data_ptr(), tensor._version, tensor.detach().clone())
        for name, tensor in (*model.named_parameters(), *model.named_buffers(), ("plain", model.plain))
    }
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    keys = {name: list(vars(module)) for name, module in model.named_modules()}
    numbers, torch_numbers = random.getstate(), torch.get_rng_state()
    others = [thing for thing in gc.get_objects() if type(thing) is FakeTensor]  # left by an earlier compilation

    assert count(model, (ids(),)).flops == 6 * WIDTH * VOCABULARY * BATCH * LENGTH

    assert (model.calls, len(model.seen), called) == (1, 1, [])
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), ("plain", model.plain)):
        same, address, version, value = before[name]
        assert tensor is same
        assert (tensor.data_ptr(), tensor._version) == (address, version)
        assert torch.equal(tensor, value)
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert {name: list(vars(module)) for name, module in model.named_modules()} == keys
    assert random.getstate() == numbers
    assert torch.equal(torch.get_rng_state(), torch_numbers)
    gc.collect()
    assert not {id(thing) for thing in gc.get_objects() if type(thing) is FakeTensor} - set(map(id, others))


KEPT: list[Any] = []
CACHED: dict[str, Any] = {}


class Store:
    """Tensors that some layers keep for later, outside the model."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.last: Any = None


def test_no_tensor_without_data_is_left_where_the_program_would_meet_it() -> None:
    store = Store()

    def keeping(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        KEPT.append(y.sum())
        CACHED["last"] = y
        return y

    class Keeping(Forward):
        def __init__(self) -> None:
            super().__init__(keeping)
            self.store = store

        def forward(self, x: torch.Tensor, *more: Any) -> Any:
            self.store.last = super().forward(x)
            self.store.kept.append(self.store.last)
            return self.store.last

    count(Keeping(), (torch.zeros(4, 8),))
    assert (KEPT, CACHED, store.kept, store.last) == ([], {}, [], None)


def losses(wrap: Callable[[nn.Module], Any], run: Run | None, attach_last: bool = True) -> list[float]:
    """Train for a few steps, watched if there is a run, and return the losses."""
    torch.manual_seed(0)
    model: nn.Module = LanguageModel(by_flag_with_dropout)
    if run is not None and not attach_last:
        attach(run.recorder, model)
    model = wrap(model)
    if run is not None and attach_last:
        attach(run.recorder, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for _ in range(4):
        for part in (ids(), ids() + 1):
            logits = model(part % VOCABULARY)
            loss = F.cross_entropy(logits.flatten(0, 1), part.roll(-1, 1).flatten() % VOCABULARY)
            loss.backward()  # type: ignore[no-untyped-call]
            values.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step()
    return values


def test_the_loss_is_the_same_to_the_last_bit(run: Run) -> None:
    plain = losses(lambda model: model, None)
    assert losses(lambda model: model, run) == plain
    assert counted_flops(run) == 8 * flops(SMALL)


def compiled(graphs: list[int], in_place: bool) -> Callable[[nn.Module], nn.Module]:
    """Return a function that compiles a model with a backend that appends to `graphs`."""

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def wrap(model: nn.Module) -> nn.Module:
        if not in_place:
            return torch.compile(model, backend=backend)  # type: ignore[return-value]
        model.compile(backend=backend)
        return model

    torch._dynamo.reset()
    return wrap


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_compiled_as_often_as_without(in_place: bool, run: Run) -> None:
    graphs: list[int] = []
    plain = losses(compiled(graphs, in_place), None)
    without = len(graphs)
    graphs.clear()
    assert losses(compiled(graphs, in_place), run) == plain
    assert len(graphs) == without == 1
    assert counted_flops(run) == 8 * flops(SMALL)


def test_a_hook_that_is_compiled_does_nothing(run: Run) -> None:
    graphs: list[int] = []
    plain = losses(compiled(graphs, False), None)
    assert losses(compiled(graphs, False), run, attach_last=False) == plain
    assert len(graphs) == 2
    assert counted_flops(run) is None


# In a training loop.


def test_each_micro_batch_counts_by_its_shape(run: Run) -> None:
    model = LanguageModel()
    attach(run.recorder, model)
    for length, batch in ((16, 3), (8, 1), (16, 3)):
        model(ids(length, batch)).sum().backward()
    run.step()
    long, short = SMALL.flops_per_sequence(16), SMALL.flops_per_sequence(8)
    assert counted_flops(run) == 7 * long - long + short


def test_lengths_between_counted_ones_are_not_counted_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwatch.training.flop_counter import count as counted

    shapes: list[tuple[int, ...]] = []

    def counting(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> counted.Counted:
        shapes.append(tuple(args[0].shape))
        return count(model, args, kwargs)

    monkeypatch.setattr(counted, "count", counting)
    model = LanguageModel()
    attach(run.recorder, model)
    wanted = 0
    for length, batch in ((20, 2), (10, 2), (30, 1), (25, 3), (11, 7), (31, 1), (13, 2)):
        model(ids(length, batch)).sum().backward()
        wanted += batch * SMALL.flops_per_sequence(length)
    run.step()
    assert counted_flops(run) == wanted
    assert shapes == [(2, 20), (2, 10), (1, 30), (1, 31)]


def test_a_pass_without_backward_counts_a_third_and_without_gradients_nothing(run: Run) -> None:
    model = LanguageModel()
    attach(run.recorder, model)
    model(ids()).detach().sum()
    with torch.no_grad():
        model(ids())
    run.step()
    assert counted_flops(run) == flops(SMALL) / 3


def test_weights_frozen_for_a_pass_are_counted_as_frozen(run: Run) -> None:
    judge = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    attach(run.recorder, judge)
    made = torch.zeros(4, 8, requires_grad=True)
    judge(made).sum().backward()
    run.step()
    assert counted_flops(run) == 6 * 4 * 128
    judge.requires_grad_(False)
    judge(made).sum().backward()
    run.step()
    assert counted_flops(run) == (6 + 4) * 4 * 128


def test_what_cannot_be_counted_is_logged_once_and_training_goes_on(run: Run) -> None:
    model = Forward(routed)
    attach(run.recorder, model)
    for _ in range(2):
        model(torch.ones(16, 8)).sum().backward()
        run.step(tokens=16)
    assert counted_flops(run) is None
    reasons = [labels["reason"] for labels, _ in run.snapshot().points[BY_NAME["training_mfu_unavailable"]]]
    assert reasons == ["uncountable"]


def test_a_run_that_knows_its_flops_counts_nothing() -> None:
    with HookServer() as server:
        run = Run("knows", endpoint=server.url, flops_per_token=6e9, environ={})
        model = LanguageModel()
        run.watch(model)
        model(ids()).sum().backward()
        run.step(64)
        assert run.recorder.flops_source == "declared"
        assert run.snapshot().points[BY_NAME["training_model_flops_total"]] == [({}, 0.0)]  # the first step has no time
        run.finish()


def test_a_model_watched_twice_counts_once_and_the_end_of_the_run_leaves_nothing_on_it(run: Run) -> None:
    model = LanguageModel()
    run.watch(model)
    run.watch(model)
    model(ids()).sum().backward()
    run.step()
    assert counted_flops(run) == flops(SMALL)
    run.finish()
    run.watch(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_copies_and_saved_models_do_without_the_hook(run: Run) -> None:
    model = nn.Linear(8, 8)
    attached = attach(run.recorder, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.zeros(4, 8)).sum().backward()
    run.step()
    assert counted_flops(run) is None
    attached.remove()
    assert not model._forward_hooks


def main() -> None:
    dist.init_process_group("gloo")
    results = {}
    for kind, replica_ranks in (("ddp", 1), ("fsdp", 1), ("tensor", 2)):
        # Port 9 has no listener. The FLOPs are read from the run itself.
        run = Run(kind, endpoint="http://127.0.0.1:9", replica_ranks=replica_ranks, environ={})
        results[kind] = (train_sharded(kind, run), train_sharded(kind, None), counted_flops(run))
    print(json.dumps(results))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
