"""FLOPs per token against figures worked out by hand, and against PyTorch's own counter."""

import dataclasses
from typing import Any

import pytest

from flopwatch.training.flops import Convention, LatentAttention, Transformer

LLAMA_3_8B = Transformer(layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, mlp_matrices=3,
                         vocabulary=128256)
LLAMA_3_70B = Transformer(layers=80, width=8192, heads=64, kv_heads=8, mlp_width=28672, mlp_matrices=3,
                          vocabulary=128256)
LLAMA_3_405B = Transformer(layers=126, width=16384, heads=128, kv_heads=8, mlp_width=53248, mlp_matrices=3,
                           vocabulary=128256)
GPT_3 = Transformer(layers=96, width=12288, heads=96, mlp_width=49152, vocabulary=50257, tied_embeddings=True)
QWEN_3_30B_A3B = Transformer(layers=48, width=2048, heads=32, kv_heads=4, head_dim=128, experts_per_token=8,
                             expert_width=768, mlp_matrices=3, vocabulary=151936)
QWEN_3_235B_A22B = Transformer(layers=94, width=4096, heads=64, kv_heads=4, head_dim=128, experts_per_token=8,
                               expert_width=1536, mlp_matrices=3, vocabulary=151936)
DEEPSEEK_V3 = Transformer(layers=61, width=7168, heads=128, mlp_width=18432, mlp_matrices=3, vocabulary=129280,
                          latent=LatentAttention(query_rank=1536, key_value_rank=512, nope_dim=128, rope_dim=64,
                                                 value_dim=128),
                          experts_per_token=8, expert_width=2048, shared_width=2048, dense_layers=3)
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


@pytest.mark.parametrize(("model", "length", "gigaflops"), [
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
])
def test_flops_per_token_of_known_models(model: Transformer, length: int, gigaflops: str) -> None:
    decimals = len(gigaflops.partition(".")[2])
    assert f"{model.flops_per_token(length) / 1e9:.{decimals}f}" == gigaflops


@pytest.mark.parametrize(("model", "length", "convention", "percent"), [
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
])
def test_how_far_the_other_conventions_are_from_causal(
        model: Transformer, length: int, convention: Convention, percent: str) -> None:
    excess = model.flops_per_token(length, convention) / model.flops_per_token(length) - 1
    decimals = len(percent.partition(".")[2])
    assert f"{excess * 100:+.{decimals}f}" == percent


def test_the_palm_convention_takes_the_declared_parameters() -> None:
    declared = dataclasses.replace(LLAMA_3_8B, parameters=8_030_261_248)
    assert declared.flops_per_sequence(8192, "palm") == 6 * 8_030_261_248 * 8192 + 12 * 32 * 4096 * 8192**2
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert tied.flops_per_sequence(10, "palm") == tied.flops_per_sequence(10, "full")
    assert SMALL.flops_per_sequence(10, "palm") == SMALL.flops_per_sequence(10, "full") + 6 * 1000 * 64 * 10


@pytest.mark.parametrize("window", [1, 7, 99])
@pytest.mark.parametrize("windowed_layers", [None, 3])
def test_a_window_counts_every_key_that_is_seen(window: int, windowed_layers: int | None) -> None:
    model = dataclasses.replace(SMALL, window=window, windowed_layers=windowed_layers)
    length = 100
    keys = sum(min(position, window) for position in range(1, length + 1))
    windowed = 4 if windowed_layers is None else windowed_layers
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
    with pytest.raises(ValueError, match="add up flops_per_sequence"):
        dataclasses.replace(SMALL, window=4).flops(100, 100**2)


@pytest.mark.parametrize(("change", "message"), [
    ({"head_dim": None, "width": 65}, "width 65 is no multiple of 8 heads; give head_dim"),
    ({"kv_heads": 3}, "8 heads cannot share 3 key-value heads evenly"),
    ({"window": 0}, "a window of 0 keys sees nothing"),
    ({"layers": 0}, "must be at least 1"),
])
def test_impossible_dimensions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


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

        blocks = [(weight(width, heads * head_dim), weight(width, kv_heads * head_dim),
                   weight(width, kv_heads * head_dim), weight(heads * head_dim, width),
                   weight(width, mlp_width), weight(width, mlp_width), weight(mlp_width, width))
                  for _ in range(layers)]
        embedding, head = weight(vocabulary, width), weight(width, vocabulary)
        tokens = torch.zeros(batch, length, dtype=torch.long)

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(batch, length, count, head_dim).transpose(1, 2).repeat_interleave(heads // count, 1)

    # The counter sees a fused attention kernel as nothing on CPU; the math backend is plain matmuls, all s x s scores.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        x = functional.embedding(tokens, embedding)
        for query, key, value, output, up, gate, down in blocks:
            seen = functional.scaled_dot_product_attention(
                split(x @ query, heads), split(x @ key, kv_heads), split(x @ value, kv_heads))
            x = x + seen.transpose(1, 2).reshape(batch, length, -1) @ output
            x = x + (functional.silu(x @ gate) * (x @ up) if gated else functional.gelu(x @ up)) @ down
        torch.autograd.backward((x @ head).sum())

    model = Transformer(layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                        mlp_width=mlp_width, mlp_matrices=3 if gated else 2, vocabulary=vocabulary)
    assert counter.get_total_flops() == batch * model.flops_per_sequence(length, "full")
