"""FLOPs from published config.json files, against totals derived here by hand from the dimensions written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.flops import Transformer, UnknownModel, from_config
from flopwatch.flops.configs import FAMILIES
from tests.support import TESTS

CONFIGS = TESTS / "captures" / "configs"


def config(name: str) -> dict[str, Any]:
    """Return the fields of a published file."""
    fields: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return fields


def model(name: str, **changes: Any) -> Transformer:
    return from_config({**config(name), **changes})


def windowed(s: int, w: int) -> int:
    """Return the keys that all tokens of a sequence see together under a window, counted one by one."""
    return sum(min(position, w) for position in range(1, s + 1))


def by_hand(s: int, weights: int, per_pair: int, pairs: int) -> int:
    """Return 6 FLOPs per weight and token, and 3 x 2 per dimension of a query-key pair, forward and backward."""
    return 6 * weights * s + 6 * per_pair * pairs


# Sequence length, and the total: weights of the matmuls, heads x (query-key + value dimension), pairs over all layers.
BY_HAND: dict[str, tuple[int, Callable[[int], int]]] = {
    "llama-2-7b": (
        4096,
        lambda s: by_hand(
            s, 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096, 32 * (128 + 128), 32 * s * s // 2
        ),
    ),
    "llama-3-8b": (
        8192,
        lambda s: by_hand(
            s,
            32 * (2 * 4096 * 4096 + 2 * 4096 * 8 * 128 + 3 * 4096 * 14336) + 128256 * 4096,
            32 * (128 + 128),
            32 * s * s // 2,
        ),
    ),
    "llama-3.1-405b": (
        8192,
        lambda s: by_hand(
            s,
            126 * (2 * 16384 * 16384 + 2 * 16384 * 8 * 128 + 3 * 16384 * 53248) + 128256 * 16384,
            128 * (128 + 128),
            126 * s * s // 2,
        ),
    ),
    "llama-3.2-1b": (
        8192,
        lambda s: by_hand(  # a tied LM head is a matmul all the same
            s,
            16 * (2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192) + 128256 * 2048,
            32 * (64 + 64),
            16 * s * s // 2,
        ),
    ),
    "mistral-7b-v0.1": (
        8192,
        lambda s: by_hand(  # every layer has the window
            s,
            32 * (2 * 4096 * 4096 + 2 * 4096 * 8 * 128 + 3 * 4096 * 14336) + 32000 * 4096,
            32 * (128 + 128),
            32 * windowed(s, 4096),
        ),
    ),
    "mixtral-8x7b": (
        8192,
        lambda s: by_hand(  # two of eight experts; its window is null
            s,
            32 * (2 * 4096 * 4096 + 2 * 4096 * 8 * 128 + 2 * 3 * 4096 * 14336) + 32000 * 4096,
            32 * (128 + 128),
            32 * s * s // 2,
        ),
    ),
    "qwen2.5-7b": (
        8192,
        lambda s: by_hand(  # use_sliding_window is false
            s,
            28 * (2 * 3584 * 3584 + 2 * 3584 * 4 * 128 + 3 * 3584 * 18944) + 152064 * 3584,
            28 * (128 + 128),
            28 * s * s // 2,
        ),
    ),
    "qwen3-8b": (
        8192,
        lambda s: by_hand(
            s,
            36 * (2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128 + 3 * 4096 * 12288) + 151936 * 4096,
            32 * (128 + 128),
            36 * s * s // 2,
        ),
    ),
    "qwen1.5-moe-a2.7b": (
        8192,
        lambda s: by_hand(  # four of 60 experts and a shared one as wide as four
            s,
            24 * (4 * 2048 * 2048 + 4 * 3 * 2048 * 1408 + 3 * 2048 * 5632) + 151936 * 2048,
            16 * (128 + 128),
            24 * s * s // 2,
        ),
    ),
    "qwen3-30b-a3b": (
        4096,
        lambda s: by_hand(  # 32 heads of 128 are twice the width
            s,
            48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 8 * 3 * 2048 * 768) + 151936 * 2048,
            32 * (128 + 128),
            48 * s * s // 2,
        ),
    ),
    "qwen3-235b-a22b": (
        4096,
        lambda s: by_hand(
            s,
            94 * (2 * 4096 * 64 * 128 + 2 * 4096 * 4 * 128 + 8 * 3 * 4096 * 1536) + 151936 * 4096,
            64 * (128 + 128),
            94 * s * s // 2,
        ),
    ),
    "gemma-7b": (
        8192,
        lambda s: by_hand(
            s, 28 * (4 * 3072 * 16 * 256 + 3 * 3072 * 24576) + 256000 * 3072, 16 * (256 + 256), 28 * s * s // 2
        ),
    ),
    "gemma-2-9b": (
        8192,
        lambda s: by_hand(  # layers 0, 2, 4 ... have the window
            s,
            42 * (2 * 3584 * 16 * 256 + 2 * 3584 * 8 * 256 + 3 * 3584 * 14336) + 256000 * 3584,
            16 * (256 + 256),
            21 * windowed(s, 4096) + 21 * s * s // 2,
        ),
    ),
    "gemma-3-1b": (
        32768,
        lambda s: by_hand(  # each sixth of 26 layers has none: 5, 11, 17, 23
            s,
            26 * (2 * 1152 * 4 * 256 + 2 * 1152 * 1 * 256 + 3 * 1152 * 6912) + 262144 * 1152,
            4 * (256 + 256),
            22 * windowed(s, 512) + 4 * s * s // 2,
        ),
    ),
    "gemma-3-4b": (
        8192,
        lambda s: by_hand(  # heads and vocabulary are the family's, the file leaves them out
            s,
            34 * (2 * 2560 * 8 * 256 + 2 * 2560 * 4 * 256 + 3 * 2560 * 10240) + 262208 * 2560,
            8 * (256 + 256),
            29 * windowed(s, 1024) + 5 * s * s // 2,
        ),
    ),
    "gemma-3-27b": (
        8192,
        lambda s: by_hand(
            s,
            62 * (2 * 5376 * 32 * 128 + 2 * 5376 * 16 * 128 + 3 * 5376 * 21504) + 262208 * 5376,
            32 * (128 + 128),
            52 * windowed(s, 1024) + 10 * s * s // 2,
        ),
    ),
    "deepseek-v2-lite": (
        4096,
        lambda s: by_hand(  # q_lora_rank null: queries are not compressed
            s,
            27 * (2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048)
            + 3 * 2048 * 10944
            + 26 * 3 * 2048 * 1408 * (6 + 2)
            + 102400 * 2048,
            16 * (192 + 128),
            27 * s * s // 2,
        ),
    ),
    "deepseek-v2": (
        4096,
        lambda s: by_hand(
            s,
            60 * (5120 * 1536 + 1536 * 128 * 192 + 5120 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 5120)
            + 3 * 5120 * 12288
            + 59 * 3 * 5120 * 1536 * (6 + 2)
            + 102400 * 5120,
            128 * (192 + 128),
            60 * s * s // 2,
        ),
    ),
    "deepseek-v3": (
        4096,
        lambda s: by_hand(  # the prediction of one more token: a layer, 2 d^2, the LM head again
            s,
            62 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168)
            + 3 * 3 * 7168 * 18432
            + 59 * 3 * 7168 * 2048 * (8 + 1)
            + 2 * 7168 * 7168
            + 2 * 129280 * 7168,
            128 * (192 + 128),
            62 * s * s // 2,
        ),
    ),
    "gpt2": (
        1024,
        lambda s: by_hand(  # n_inner is 4 x 768
            s, 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50257 * 768, 12 * (64 + 64), 12 * s * s // 2
        ),
    ),
    "gpt-3-175b": (
        2048,
        lambda s: by_hand(
            s, 96 * (4 * 12288 * 12288 + 2 * 12288 * 49152) + 50257 * 12288, 96 * (128 + 128), 96 * s * s // 2
        ),
    ),
    "gpt-neox-20b": (
        2048,
        lambda s: by_hand(s, 44 * (4 * 6144 * 6144 + 2 * 6144 * 24576) + 50432 * 6144, 64 * (96 + 96), 44 * s * s // 2),
    ),
    "gpt-oss-20b": (
        4096,
        lambda s: by_hand(  # layers 0, 2, 4 ... have the window
            s,
            24 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64 + 4 * 3 * 2880 * 2880) + 201088 * 2880,
            64 * (64 + 64),
            12 * windowed(s, 128) + 12 * s * s // 2,
        ),
    ),
    "gpt-oss-120b": (
        4096,
        lambda s: by_hand(
            s,
            36 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64 + 4 * 3 * 2880 * 2880) + 201088 * 2880,
            64 * (64 + 64),
            18 * windowed(s, 128) + 18 * s * s // 2,
        ),
    ),
    "nemotron-4-340b": (
        4096,
        lambda s: by_hand(  # squared ReLU: two matrices
            s,
            96 * (2 * 18432 * 18432 + 2 * 18432 * 8 * 192 + 2 * 18432 * 73728) + 256000 * 18432,
            96 * (192 + 192),
            96 * s * s // 2,
        ),
    ),
    "phi-2": (
        2048,
        lambda s: by_hand(s, 32 * (4 * 2560 * 2560 + 2 * 2560 * 10240) + 51200 * 2560, 32 * (80 + 80), 32 * s * s // 2),
    ),
    "phi-3-mini-4k": (
        4096,
        lambda s: by_hand(
            s, 32 * (4 * 3072 * 3072 + 3 * 3072 * 8192) + 32064 * 3072, 32 * (96 + 96), 32 * windowed(s, 2047)
        ),
    ),
    "phi-3.5-moe": (
        4096,
        lambda s: by_hand(  # its window is longer than the sequence
            s,
            32 * (2 * 4096 * 4096 + 2 * 4096 * 8 * 128 + 2 * 3 * 4096 * 6400) + 32064 * 4096,
            32 * (128 + 128),
            32 * s * s // 2,
        ),
    ),
    "olmo-7b": (
        2048,
        lambda s: by_hand(
            s, 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 50304 * 4096, 32 * (128 + 128), 32 * s * s // 2
        ),
    ),
    "olmo-2-7b": (
        4096,
        lambda s: by_hand(
            s, 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 100352 * 4096, 32 * (128 + 128), 32 * s * s // 2
        ),
    ),
    "olmo-3-7b": (
        8192,
        lambda s: by_hand(  # each fourth layer has no window
            s,
            32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 100278 * 4096,
            32 * (128 + 128),
            24 * windowed(s, 4096) + 8 * s * s // 2,
        ),
    ),
    "olmoe-1b-7b": (
        4096,
        lambda s: by_hand(
            s, 16 * (4 * 2048 * 2048 + 8 * 3 * 2048 * 1024) + 50304 * 2048, 16 * (128 + 128), 16 * s * s // 2
        ),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_count_of_a_published_model_is_the_one_by_hand(name: str) -> None:
    length, total = BY_HAND[name]
    assert model(name).flops_per_sequence(length) == total(length)


def test_every_published_file_and_every_family_is_derived_by_hand() -> None:
    assert sorted(BY_HAND) == sorted(file.stem for file in CONFIGS.glob("*.json"))
    kinds = {config(name)["model_type"] for name in BY_HAND}
    assert kinds == {*FAMILIES, "gemma3"} - {"kimi_k2"}


@pytest.mark.parametrize(
    ("name", "length", "gigaflops"),
    [
        ("llama-3-8b", 2048, "46.6"),
        ("llama-3-8b", 8192, "51.5"),
        ("llama-3-8b", 131072, "148"),
        ("llama-3.1-405b", 8192, "2524"),
        ("llama-3.1-405b", 131072, "4046"),
        ("gpt-3-175b", 2048, "1062"),
        ("qwen3-30b-a3b", 4096, "23.0"),
        ("qwen3-235b-a22b", 4096, "148"),
        ("deepseek-v3", 4096, "260"),
    ],
)
def test_flops_per_token_of_published_models_have_the_known_digits(name: str, length: int, gigaflops: str) -> None:
    decimals = len(gigaflops.partition(".")[2])
    assert f"{model(name).flops_per_token(length) / 1e9:.{decimals}f}" == gigaflops


def test_multi_token_prediction_follows_the_file_and_can_be_left_out() -> None:
    without = from_config(config("deepseek-v3"), mtp=False)
    assert f"{without.flops_per_token(4096) / 1e9:.0f}" == "250"
    assert model("deepseek-v3", num_nextn_predict_layers=0) == without
    undeclared = config("deepseek-v3")
    del undeclared["num_nextn_predict_layers"]
    assert from_config(undeclared) == without
    with pytest.raises(UnknownModel, match=r"declares no multi-token prediction \(num_nextn_predict_layers\)"):
        from_config(undeclared, mtp=True)
    # 671 billion parameters are the main model's; DeepSeek's own page counts the module apart as well.
    assert model("deepseek-v3").parameters == without.parameters
    assert without.mtp_parameters == 0
    layer = model("deepseek-v3").mtp_parameters - 2 * 7168**2 - 3 * 7168
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168
    norms, router = 2 * 7168 + 1536 + 512, 256 * 7168
    assert layer == attention + 257 * 3 * 7168 * 2048 + norms + router


@pytest.mark.parametrize(
    ("name", "changes", "sparse"),
    [
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, [layer for layer in range(48) if layer % 2 == 1]),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 5, "mlp_only_layers": [9]}, [4, 14, 19, 24, 29, 34, 39, 44]),
        ("qwen1.5-moe-a2.7b", {"mlp_only_layers": [0, 23]}, list(range(1, 23))),
        ("qwen3-30b-a3b", {"num_experts": 0}, []),
        ("deepseek-v2-lite", {"first_k_dense_replace": 3}, list(range(3, 27))),
        ("deepseek-v2-lite", {"first_k_dense_replace": 2, "moe_layer_freq": 4}, [4, 8, 12, 16, 20, 24]),
        ("deepseek-v2-lite", {"n_routed_experts": None}, []),
    ],
)
def test_only_the_layers_the_file_names_have_experts(name: str, changes: dict[str, Any], sparse: list[int]) -> None:
    fields = {**config(name), **changes}
    s, layers, d = 4096, fields["num_hidden_layers"], fields["hidden_size"]
    shared = fields.get("shared_expert_intermediate_size", 0) + fields.get("n_shared_experts", 0) * 1408
    expert = 3 * d * (fields["num_experts_per_tok"] * fields["moe_intermediate_size"] + shared)
    plain = 3 * d * fields["intermediate_size"]
    all_sparse = model(name, first_k_dense_replace=0, mlp_only_layers=[]).flops_per_sequence(s)
    assert from_config(fields).flops_per_sequence(s) == (all_sparse + (layers - len(sparse)) * 6 * (plain - expert) * s)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "qwen2.5-7b",
            {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 512},
            (None,) * 20 + (512,) * 8,
        ),
        ("qwen2.5-7b", {"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 512}, None),
        ("qwen2.5-7b", {"use_sliding_window": True, "sliding_window": None}, None),
        (
            "qwen3-8b",
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (512, None),
        ),
        (
            "qwen3-30b-a3b",
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (None, 512),
        ),
        ("mixtral-8x7b", {"sliding_window": 4096}, 4096),
        ("mistral-7b-v0.1", {"sliding_window": None}, None),
        ("gemma-2-9b", {"num_hidden_layers": 3}, (4096, None, 4096)),
        ("gemma-2-9b", {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]}, None),
        ("gemma-3-1b", {"num_hidden_layers": 4, "sliding_window_pattern": 2}, (512, None, 512, None)),
        ("gpt-oss-20b", {"num_hidden_layers": 3, "layer_types": None}, (128, None, 128)),
        ("olmo-3-7b", {"num_hidden_layers": 5, "layer_types": None}, (4096, 4096, 4096, None, 4096)),
    ],
)
def test_each_layer_has_the_window_the_file_gives_it(
    name: str, changes: dict[str, Any], expected: tuple[int | None, ...] | int | None
) -> None:
    assert model(name, **changes).window == expected


def test_a_file_without_a_window_has_the_one_of_its_family() -> None:
    fields = config("mistral-7b-v0.1")
    del fields["sliding_window"]
    assert from_config(fields).window == 4096


def test_other_names_of_the_same_dimension_are_known() -> None:
    gpt2 = {
        "model_type": "gpt2",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "max_position_embeddings": 1024,
        "vocab_size": 50257,
        "n_inner": 3072,
    }
    assert from_config(gpt2) == model("gpt2")
    saved = config("qwen3-30b-a3b")
    saved["num_local_experts"] = saved.pop("num_experts")
    assert from_config(saved) == model("qwen3-30b-a3b")
    saved = config("deepseek-v3")
    saved["num_mtp_layers"] = saved.pop("num_nextn_predict_layers")
    assert from_config(saved) == model("deepseek-v3") == model("deepseek-v3", model_type="kimi_k2")


def test_a_head_dim_need_not_divide_the_width() -> None:
    minitron = {
        "model_type": "nemotron",
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 256000,
    }
    s = 4096
    assert from_config(minitron) == from_config({**minitron, "head_dim": None, "kv_channels": 128})
    assert from_config(minitron).flops_per_sequence(s) == by_hand(
        s,
        32 * (2 * 4096 * 48 * 128 + 2 * 4096 * 8 * 128 + 2 * 4096 * 16384) + 256000 * 4096,
        48 * (128 + 128),
        32 * s * s // 2,
    )


def test_a_padded_vocabulary_lengthens_the_head_and_the_embedding() -> None:
    padded = from_config(config("gpt-3-175b"), vocabulary=51200)
    assert padded.flops_per_sequence(2048) - model("gpt-3-175b").flops_per_sequence(2048) == 6 * 943 * 12288 * 2048
    assert padded.parameters - model("gpt-3-175b").parameters == 943 * 12288
    untied = from_config(config("llama-3-8b"), vocabulary=128512)
    assert untied.parameters - model("llama-3-8b").parameters == 2 * 256 * 4096


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama-3-8b", {"model_type": "rwkv"}, "model_type rwkv is not known, only deepseek_v2, deepseek_v3, gemma,"),
        ("llama-3-8b", {"model_type": None}, "no model_type; is it the config.json of a Hugging Face model?"),
        ("llama-3-8b", {"model_type": ["llama"]}, r"model_type is \['llama'\], not a name"),
        ("llama-3-8b", {"model_type": "nemotron_h"}, "what is missing here is a formula for its Mamba layers"),
        (
            "llama-3-8b",
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            "its text_config is a llama, which can be counted as a file of its own",
        ),
        ("gemma-3-4b", {"text_config": None}, "a gemma3 needs text_config"),
        ("llama-3-8b", {"hidden_size": None}, "a llama needs hidden_size or n_embd, which the file lacks"),
        ("llama-3-8b", {"hidden_size": "4096"}, "hidden_size is '4096', not a whole number from 1 to 1000000000"),
        ("llama-3-8b", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama-3-8b", {"intermediate_size": 14336.0}, "intermediate_size is 14336.0"),
        ("llama-3-8b", {"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number from 1 to 10000"),
        ("llama-3-8b", {"num_key_value_heads": 5}, "32 heads cannot share 5 key-value heads evenly"),
        ("llama-3-8b", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', neither true nor false"),
        ("llama-3-8b", {"num_local_experts": 8}, "a llama has no experts in transformers, but this file has 8"),
        ("llama-3-8b", {"sliding_window": 4096}, "a llama has no windows in transformers"),
        ("llama-3-8b", {"kv_lora_rank": 512}, "a llama has no latent attention"),
        ("llama-3-8b", {"num_nextn_predict_layers": 1}, "multi-token prediction is known of DeepSeek-V3 only"),
        ("llama-3-8b", {"layer_types": ["linear_attention"] * 32}, "layer_types has linear_attention: only"),
        ("llama-3-8b", {"block_configs": [{}]}, "a llama with block_configs has layers of different shapes"),
        ("llama-3-8b", {"attention_chunk_size": 8192}, "has chunked attention, which cannot be counted"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "has attention that is not causal"),
        ("gpt2", {"add_cross_attention": True}, "has cross-attention"),
        ("gpt2", {"n_positions": None, "n_ctx": None}, "a gpt2 needs n_positions"),
        ("deepseek-v3", {"index_topk": 2048}, "has sparse attention with an indexer"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1]}, r"moe_layer_freq is \[0, 1\]"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "multi-token prediction with a moe_layer_freq other than 1"),
        ("deepseek-v3", {"first_k_dense_replace": None}, "a deepseek_v3 needs first_k_dense_replace"),
        ("deepseek-v3", {"kv_lora_rank": None}, "a deepseek_v3 needs kv_lora_rank"),
        ("deepseek-v3", {"mlp_bias": True}, "a deepseek_v3 with biases in its MLP is not known"),
        ("deepseek-v3", {"num_experts_per_tok": 300}, "a token cannot pass through 300 of 256 experts"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all', not a list of layers"),
        ("qwen3-30b-a3b", {"mlp_layer_types": ["sparse"] * 48}, "has its own list of expert layers"),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 512}, "write layer_types into the file"),
        ("qwen2.5-7b", {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window is false: which is it"),
        ("gemma-2-9b", {"layer_types": ["full_attention"]}, "layer_types names 1 layers of 42"),
        ("gemma-2-9b", {"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        ("gemma-2-9b", {"layer_types": ["chunked_attention"] * 42}, "layer_types has chunked_attention: only"),
        ("gemma-2-9b", {"sliding_window": None}, "a gemma2 needs sliding_window"),
        ("gemma-2-9b", {"sliding_window": -1}, "sliding_window is -1, not a whole number from 1 to 1000000000"),
        ("mistral-7b-v0.1", {"layer_types": ["full_attention"] * 32}, "all layers of a mistral have the same window"),
        ("mixtral-8x7b", {"num_local_experts": 0}, "num_experts is 0, not a whole number from 1 to 1000000000"),
        ("qwen2.5-7b", {"hidden_size": 3585}, "hidden_size 3585 is not a multiple of 28 heads"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is_missing(name: str, change: dict[str, Any], message: str) -> None:
    fields = {**config(name), **change}
    with pytest.raises(UnknownModel, match=message):
        from_config(fields)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *(
            (name, field)
            for name in ("llama-3-8b", "mistral-7b-v0.1", "qwen3-8b", "phi-2")
            for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        ),
        ("mistral-7b-v0.1", "num_key_value_heads"),
        ("gemma-7b", "num_key_value_heads"),
        ("gpt2", "n_embd"),
        ("gpt2", "n_layer"),
        ("gpt2", "n_head"),
        ("gpt2", "vocab_size"),
        ("mixtral-8x7b", "num_local_experts"),
        ("mixtral-8x7b", "num_experts_per_tok"),
        ("qwen3-30b-a3b", "num_experts"),
        ("qwen3-30b-a3b", "moe_intermediate_size"),
        ("qwen1.5-moe-a2.7b", "shared_expert_intermediate_size"),
        ("deepseek-v3", "q_lora_rank"),
        ("deepseek-v3", "v_head_dim"),
        ("deepseek-v3", "n_routed_experts"),
        ("deepseek-v3", "moe_intermediate_size"),
    ],
)
def test_a_dimension_that_is_not_there_is_never_guessed(name: str, field: str) -> None:
    fields = config(name)
    del fields[field]
    with pytest.raises(UnknownModel, match=r"needs .*, which the file lacks"):
        from_config(fields)


FIELDS = sorted({field for name in BY_HAND for field in config(name)} | {"head_dim", "layer_types", "mlp_only_layers"})
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.none()),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "other"]), max_size=70),
    st.lists(st.integers(-1, 70), max_size=5),
    st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 70)),
)


@given(name=st.sampled_from(sorted(BY_HAND)), changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_file_is_counted_or_refused(name: str, changes: dict[str, Any]) -> None:
    try:
        counted = from_config({**config(name), **changes})
    except UnknownModel:
        return
    assert counted.flops_per_sequence(100) > 0
    assert counted.parameters >= counted.active_parameters
