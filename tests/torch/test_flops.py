"""Test FLOPs per token against figures worked out by hand, and against PyTorch's own counter."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from typing import Any

import pytest

from flopwatch.flops import Convention, LatentAttention, Transformer

LLAMA_3_8B = Transformer(
    layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, mlp_matrices=3, vocabulary=128256
)
LLAMA_3_70B = Transformer(
    layers=80, width=8192, heads=64, kv_heads=8, mlp_width=28672, mlp_matrices=3, vocabulary=128256
)
LLAMA_3_405B = Transformer(
    layers=126, width=16384, heads=128, kv_heads=8, mlp_width=53248, mlp_matrices=3, vocabulary=128256
)
GPT_3 = Transformer(layers=96, width=12288, heads=96, mlp_width=49152, vocabulary=50257, tied_embeddings=True)
QWEN_3_30B_A3B = Transformer(
    layers=48,
    width=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    experts_per_token=8,
    expert_width=768,
    mlp_matrices=3,
    vocabulary=151936,
)
QWEN_3_235B_A22B = Transformer(
    layers=94,
    width=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    experts_per_token=8,
    expert_width=1536,
    mlp_matrices=3,
    vocabulary=151936,
)
DEEPSEEK_V3 = Transformer(
    layers=61,
    width=7168,
    heads=128,
    mlp_width=18432,
    mlp_matrices=3,
    vocabulary=129280,
    latent=LatentAttention(query_rank=1536, key_value_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts_per_token=8,
    expert_width=2048,
    shared_width=2048,
    dense_layers=3,
)
# 8 query heads of width 16 in 4 layers: small enough to count on paper.
SMALL = Transformer(layers=4, width=64, heads=8, head_dim=16, mlp_width=100, vocabulary=1000)


def test_llama_3_8b_is_counted_weight_by_weight() -> None:
    query_and_output, key_and_value = 2 * 4096 * 4096, 2 * 4096 * 1024
    mlp, head = 3 * 4096 * 14336, 128256 * 4096
    weights = 32 * (query_and_output + key_and_value + mlp) + head
    assert LLAMA_3_8B.matmul_weights == weights == 7_504_658_432
    # 6 W s + 6 L H e s^2 with s = 8192
    assert LLAMA_3_8B.flops_per_sequence(8192) == 6 * weights * 8192 + 6 * 32 * 4096 * 8192**2
    assert LLAMA_3_8B.flops_per_sequence(8192) == 421_645_529_382_912


@pytest.mark.parametrize(
    ("model", "length", "gigaflops"),
    [
        (LLAMA_3_8B, 2048, "46.6"),
        (LLAMA_3_8B, 8192, "51.5"),
        (LLAMA_3_8B, 131072, "148"),
        (LLAMA_3_70B, 8192, "449"),
        (LLAMA_3_405B, 8192, "2524"),
        (LLAMA_3_405B, 131072, "4046"),
        (GPT_3, 2048, "1062"),
        (QWEN_3_30B_A3B, 4096, "23.0"),
        (QWEN_3_235B_A22B, 4096, "148"),
        (DEEPSEEK_V3, 4096, "250"),
    ],
)
def test_flops_per_token_of_known_models(model: Transformer, length: int, gigaflops: str) -> None:
    decimals = len(gigaflops.partition(".")[2])
    assert f"{model.flops_per_token(length) / 1e9:.{decimals}f}" == gigaflops


@pytest.mark.parametrize(
    ("model", "length", "convention", "percent"),
    [
        (LLAMA_3_8B, 2048, "full", "+3.5"),
        (LLAMA_3_8B, 8192, "full", "+12.5"),
        (LLAMA_3_8B, 8192, "palm", "+18.6"),
        (LLAMA_3_8B, 131072, "full", "+70"),
        (LLAMA_3_70B, 8192, "palm", "+8.6"),
        (LLAMA_3_405B, 8192, "palm", "+4.5"),
        (GPT_3, 2048, "full", "+1.4"),
        (QWEN_3_30B_A3B, 4096, "palm", "+29"),
        (QWEN_3_235B_A22B, 4096, "full", "+12.8"),
        (DEEPSEEK_V3, 4096, "full", "+12.3"),
    ],
)
def test_how_far_the_other_conventions_are_from_causal(
    model: Transformer, length: int, convention: Convention, percent: str
) -> None:
    excess = model.flops_per_token(length, convention) / model.flops_per_token(length) - 1
    decimals = len(percent.partition(".")[2])
    assert f"{excess * 100:+.{decimals}f}" == percent


def test_the_palm_convention_takes_every_parameter() -> None:
    norms = (2 * 32 + 1) * 4096
    whole = dataclasses.replace(LLAMA_3_8B, other_parameters=norms)
    assert whole.parameters == whole.active_parameters == 8_030_261_248
    assert whole.flops_per_sequence(8192, "palm") == 6 * 8_030_261_248 * 8192 + 12 * 32 * 4096 * 8192**2
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert tied.flops_per_sequence(10, "palm") == tied.flops_per_sequence(10, "full")
    assert SMALL.flops_per_sequence(10, "palm") == SMALL.flops_per_sequence(10, "full") + 6 * 1000 * 64 * 10


@pytest.mark.parametrize("window", [1, 7, 99])
@pytest.mark.parametrize("windowed", [4, 3])
def test_a_window_counts_every_key_that_is_seen(window: int, windowed: int) -> None:
    windows = window if windowed == 4 else (window, None, window, window)
    model = dataclasses.replace(SMALL, window=windows)
    length = 100
    keys = sum(min(position, window) for position in range(1, length + 1))
    matmuls = 6 * SMALL.matmul_weights * length
    scores = 12 * 8 * 16 * keys * windowed + 6 * 8 * 16 * length**2 * (4 - windowed)
    assert model.flops_per_sequence(length) == matmuls + scores
    assert model.flops_per_sequence(length, "full") == SMALL.flops_per_sequence(length, "full")


def test_a_window_as_long_as_the_sequence_is_no_window() -> None:
    assert dataclasses.replace(SMALL, window=100).flops_per_sequence(100) == SMALL.flops_per_sequence(100)


def test_packed_samples_cost_their_squared_lengths() -> None:
    lengths = (3, 5, 92)
    packed = SMALL.flops(sum(lengths), sum(n * n for n in lengths))
    assert packed == sum(SMALL.flops_per_sequence(n) for n in lengths)
    assert packed < SMALL.flops_per_sequence(100)
    assert packed == SMALL.flops_of_samples(lengths)


def test_packed_samples_under_a_window_need_each_length() -> None:
    model = dataclasses.replace(SMALL, window=4)
    with pytest.raises(ValueError, match="flops_of_samples takes the length of each"):
        model.flops(100, 100**2)
    pairs = (3 * 3 / 2) + (1 + 2 + 3 + 4 + 4) + (1 + 2 + 3 + 89 * 4)  # 3 keys are within the window: half of 3 x 3
    assert model.flops_of_samples((3, 5, 92)) == 6 * SMALL.matmul_weights * 100 + 12 * 4 * 8 * 16 * pairs
    assert model.flops(100, 100**2, "full") == SMALL.flops(100, 100**2, "full")


def test_full_recomputation_runs_the_layers_once_more_and_selective_the_scores() -> None:
    model, length = LLAMA_3_8B, 8192
    head, forward_scores = 128256 * 4096, 2 * 32 * 4096 * length**2  # causal: half of 4 L H e s^2
    layers = model.matmul_weights - head
    needed = model.flops_per_sequence(length)
    assert needed == (6 * layers + 6 * head) * length + 3 * forward_scores
    assert model.hardware_flops_per_sequence(length, "full") == (8 * layers + 6 * head) * length + 4 * forward_scores
    assert model.hardware_flops_per_sequence(length, "selective") == needed + forward_scores
    assert model.hardware_flops_per_sequence(length, "selective", "full") == (
        model.flops_per_sequence(length, "full") + 2 * forward_scores
    )
    with pytest.raises(ValueError, match="write full or selective"):
        model.hardware_flops_per_sequence(length, "block")  # type: ignore[arg-type]


def test_the_megatron_paper_counts_full_recomputation_the_same() -> None:
    # 96 B s l h^2 (1 + s / 6 h + V / 16 l h), equation 3 of https://arxiv.org/abs/2104.04473, all s x s scores.
    s, layers, h, vocabulary = 2048, 96, 12288, 51200
    model = dataclasses.replace(GPT_3, vocabulary=vocabulary)
    assert model.hardware_flops_per_sequence(s, "full", "full") == (
        96 * s * layers * h**2 + 16 * s**2 * layers * h + 6 * s * h * vocabulary
    )


def test_lora_spares_the_gradients_of_the_frozen_weights() -> None:
    length, rank = 100, 8
    adapters = rank * 4 * ((64 + 128) + 2 * (64 + 128) + (128 + 64) + (64 + 100) + (100 + 64))
    model = dataclasses.replace(SMALL, lora_rank=rank)
    scores = 6 * 4 * 8 * 16 * length**2
    assert model.lora_parameters == adapters
    assert model.flops_per_sequence(length) == (4 * SMALL.matmul_weights + 6 * adapters) * length + scores
    assert model.parameters == SMALL.parameters
    head = 1000 * 64
    assert model.hardware_flops_per_sequence(length, "full") == (
        (6 * (SMALL.matmul_weights - head) + 4 * head + 8 * adapters) * length + scores * 4 // 3
    )
    query = dataclasses.replace(model, lora_targets=("attention_query",))
    assert query.lora_parameters == rank * 4 * (64 + 128)


def test_an_expert_has_adapters_of_its_own() -> None:
    model = dataclasses.replace(
        SMALL, experts=16, experts_per_token=2, expert_width=10, lora_rank=4, lora_targets=("experts",)
    )
    adapters = 4 * ((64 + 10) + (10 + 64))
    assert model.lora_parameters == 4 * 16 * adapters
    assert {term.name: term.flops for term in model.terms(100)}["lora_experts"] == 6 * 4 * 2 * adapters * 100


def test_frozen_weights_have_no_weight_gradient() -> None:
    length, mlp, head = 100, 4 * 2 * 64 * 100, 1000 * 64
    frozen = dataclasses.replace(SMALL, frozen=("mlp", "lm_head"))
    assert SMALL.flops_per_sequence(length) - frozen.flops_per_sequence(length) == 2 * (mlp + head) * length


def test_the_lowest_layers_frozen_run_forward_only() -> None:
    length, layer = 100, (SMALL.matmul_weights - 1000 * 64) // 4
    scores = 6 * 8 * 16 * length**2  # of one layer
    frozen = dataclasses.replace(SMALL, frozen_layers=3)
    assert frozen.flops_per_sequence(length) == (
        (2 * 3 * layer + 6 * layer + 6 * 1000 * 64) * length + 3 * scores // 3 + scores
    )
    # Without a backward pass there is nothing to recompute for.
    assert frozen.hardware_flops_per_sequence(length, "full") == (
        frozen.flops_per_sequence(length) + 2 * layer * length + scores // 3
    )
    # A tied LM head trains the embedding, whose gradient passes through all layers.
    tied = dataclasses.replace(frozen, tied_embeddings=True)
    assert tied.flops_per_sequence(length) == (4 * 3 * layer + 6 * layer + 6 * 1000 * 64) * length + 4 * scores


def test_multi_token_prediction_adds_a_layer_a_projection_and_the_head_again() -> None:
    model, s = dataclasses.replace(DEEPSEEK_V3, mtp_layers=1), 4096
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168
    layer = attention + 3 * 7168 * 2048 * (8 + 1)
    added = 6 * (layer + 2 * 7168**2 + 129280 * 7168) * s + 3 * 128 * (192 + 128) * s**2
    assert model.flops_per_sequence(s) - DEEPSEEK_V3.flops_per_sequence(s) == added
    assert f"{model.flops_per_token(s) / 1e9:.0f}" == "260"
    excess = model.flops_per_token(s, "full") / model.flops_per_token(s) - 1
    assert f"{excess:+.1%}" == "+12.0%"
    # As a parameter the LM head counts once.
    assert f"{model.flops_per_token(s, 'palm') / model.flops_per_token(s) - 1:+.0%}" == "+12%"
    # Its layer and projection are recomputed, the heads are not.
    heads = 2 * 129280 * 7168
    assert model.hardware_flops_per_sequence(s, "full") == model.flops_per_sequence(s) + (
        2 * (model.matmul_weights - heads) * s + 62 * 128 * (192 + 128) * s**2
    )


def test_a_padded_vocabulary_is_a_longer_lm_head() -> None:
    padded = dataclasses.replace(GPT_3, vocabulary=51200)
    assert padded.flops_per_sequence(2048) - GPT_3.flops_per_sequence(2048) == 6 * (51200 - 50257) * 12288 * 2048


def test_experts_are_parameters_and_only_the_active_ones_count() -> None:
    model = dataclasses.replace(QWEN_3_30B_A3B, experts=128, dense_layers=(0, 5), mlp_width=6144)
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    dense, expert, head = 3 * 2048 * 6144, 3 * 2048 * 768, 151936 * 2048
    assert model.matmul_weights == 48 * attention + 2 * dense + 46 * 8 * expert + head
    assert model.parameters == 48 * attention + 2 * dense + 46 * 128 * expert + 2 * head
    assert model.active_parameters == 48 * attention + 2 * dense + 46 * 8 * expert + 2 * head
    with pytest.raises(ValueError, match="needs experts="):
        QWEN_3_30B_A3B.parameters  # noqa: B018


MODELS = {
    "dense": SMALL,
    "grouped, gated, windowed": dataclasses.replace(LLAMA_3_8B, window=(64,) * 20 + (None,) * 12),
    "experts, latent, two more tokens": dataclasses.replace(DEEPSEEK_V3, mtp_layers=2, other_parameters=7),
    "adapters": dataclasses.replace(LLAMA_3_8B, lora_rank=16),
    "frozen": dataclasses.replace(SMALL, frozen=("mlp",), frozen_layers=2),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("convention", ["causal", "full", "palm"])
@pytest.mark.parametrize("length", [1, 63, 4097])
def test_each_term_is_the_product_it_shows(name: str, convention: Convention, length: int) -> None:
    model = MODELS[name]
    if convention == "palm" and name in ("adapters", "frozen"):
        with pytest.raises(ValueError, match="not defined for frozen weights"):
            model.terms(length, convention)
        return
    terms = model.terms(length, convention)
    for term in terms:
        product = re.sub(r"\d+", r"Fraction(\g<0>)", term.product.replace(" x ", " * "))
        assert eval(product, {"Fraction": Fraction}) == term.flops, term
    assert sum(term.flops for term in terms) == model.flops_per_sequence(length, convention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None, "width": 65}, "width 65 is not a multiple of 8 heads; give head_dim"),
        ({"kv_heads": 3}, "8 heads cannot share 3 key-value heads evenly"),
        ({"window": 0}, "a window of 0 keys sees nothing"),
        ({"layers": 0}, "must be at least 1"),
        ({"window": (4, None)}, "2 windows for 4 layers; give one each"),
        ({"experts": 4, "experts_per_token": 5}, "a token cannot pass through 5 of 4 experts"),
        ({"lora_rank": 8, "lora_targets": ("q_proj",)}, "no family is called q_proj: choose from attention_query"),
        ({"frozen": ("embedding",)}, "no family is called embedding"),
        ({"frozen_layers": 5}, "5 frozen layers of 4"),
        ({"lora_rank": 8, "frozen_layers": 1}, "LoRA freezes everything but the adapters"),
        ({"lora_rank": 8, "mtp_layers": 1}, "multi-token prediction with frozen weights is not defined"),
    ],
)
def test_impossible_dimensions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_a_sequence_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 0 tokens has nothing to count"):
        SMALL.flops_per_sequence(0)


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(ValueError, match="write causal, full or palm"):
        SMALL.flops_per_sequence(10, "megatron")  # type: ignore[arg-type]


@pytest.mark.torch
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "gated"), [(4, 4, 32, False), (8, 2, 24, True)])
def test_pytorch_counts_the_same_operations(heads: int, kv_heads: int, head_dim: int, gated: bool) -> None:
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    layers, width, mlp_width, vocabulary, length, batch = 3, 96, 200, 500, 40, 2
    with torch.device("meta"):

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, requires_grad=True)

        blocks = [
            (
                weight(width, heads * head_dim),
                weight(width, kv_heads * head_dim),
                weight(width, kv_heads * head_dim),
                weight(heads * head_dim, width),
                weight(width, mlp_width),
                weight(width, mlp_width),
                weight(mlp_width, width),
            )
            for _ in range(layers)
        ]
        embedding, head = weight(vocabulary, width), weight(width, vocabulary)
        tokens = torch.zeros(batch, length, dtype=torch.long)

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(batch, length, count, head_dim).transpose(1, 2).repeat_interleave(heads // count, 1)

    # The counter misses a fused attention kernel on CPU. The math backend is plain matmuls, all s x s scores.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        x = functional.embedding(tokens, embedding)
        for query, key, value, output, up, gate, down in blocks:
            seen = functional.scaled_dot_product_attention(
                split(x @ query, heads), split(x @ key, kv_heads), split(x @ value, kv_heads)
            )
            x = x + seen.transpose(1, 2).reshape(batch, length, -1) @ output
            x = x + (functional.silu(x @ gate) * (x @ up) if gated else functional.gelu(x @ up)) @ down
        torch.autograd.backward((x @ head).sum())

    model = Transformer(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        mlp_matrices=3 if gated else 2,
        vocabulary=vocabulary,
    )
    assert counter.get_total_flops() == batch * model.flops_per_sequence(length, "full")
