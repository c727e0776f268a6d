"""Test parameters and FLOPs of configurations against transformers' modules, and PyTorch's count of a real run."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from flopwatch.flops import from_config
from flopwatch.flops.configs import FAMILIES
from tests.support import TESTS

pytestmark = pytest.mark.torch

CONFIGS = TESTS / "captures" / "configs"
NAMES = sorted(file.stem for file in CONFIGS.glob("*.json"))


def published(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return fields


def built(fields: dict[str, Any], device: str, **options: Any) -> Any:
    """Build the causal language model of these fields with transformers. For gemma3 build its language model only."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if fields.get("hidden_act") == "gelu":
        fields = {**fields, "hidden_act": "gelu_pytorch_tanh"}  # as transformers does, with a warning
    config: Any = AutoConfig.for_model(**fields)
    models: Any = AutoModelForCausalLM
    with torch.device(device):
        return models.from_config(getattr(config, "text_config", config), **options)


def matmul_weights(model: Any, active: float) -> float:
    """Return the weights one token passes through: matrices except look-ups and routers, `active` of the experts."""
    total = 0.0
    tied = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        last = name.removesuffix(".weight").rpartition(".")[2]
        if parameter is tied:
            total += parameter.numel()
        elif parameter.dim() == 3:
            total += parameter.numel() * active
        elif (
            parameter.dim() == 2
            and "embed" not in name
            and not name.endswith("_bias")
            and last not in ("wte", "wpe", "gate", "router", "shared_expert_gate")
        ):
            total += parameter.numel()
    return total


# Small changes that a published file of the family could have.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("llama-3-8b", {"attention_bias": True, "mlp_bias": True, "head_dim": 96, "tie_word_embeddings": True}),
    ("qwen2.5-7b", {"tie_word_embeddings": True}),
    ("qwen3-8b", {"attention_bias": True, "head_dim": 64}),
    ("qwen1.5-moe-a2.7b", {"decoder_sparse_step": 3, "mlp_only_layers": [5], "qkv_bias": False}),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2, "mlp_only_layers": [1, 7], "attention_bias": True}),
    ("gemma-7b", {"attention_bias": True}),
    ("gemma-2-9b", {"attention_bias": True, "tie_word_embeddings": False}),
    ("deepseek-v2-lite", {"attention_bias": True, "q_lora_rank": 96, "n_shared_experts": 3}),
    ("deepseek-v3", {"attention_bias": True, "q_lora_rank": None, "first_k_dense_replace": 5}),
    ("gpt2", {"n_inner": 1000, "tie_word_embeddings": False}),
    ("gpt-neox-20b", {"attention_bias": False, "tie_word_embeddings": True}),
    ("gpt-oss-20b", {"attention_bias": False}),
    ("nemotron-4-340b", {"attention_bias": True, "mlp_bias": True, "head_dim": 128}),
    ("phi-2", {"qk_layernorm": True, "num_key_value_heads": 8}),
    ("phi-3-mini-4k", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    ("phi-3.5-moe", {"attention_bias": False, "lm_head_bias": False}),
    ("olmo-7b", {"attention_bias": True, "num_key_value_heads": 8}),
    ("olmo-2-7b", {"attention_bias": True, "num_key_value_heads": 8}),
    ("olmoe-1b-7b", {"attention_bias": True, "num_key_value_heads": 8}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_parameters_and_matmuls_are_those_of_the_modules(name: str, changes: dict[str, Any]) -> None:
    fields = {**published(name), **changes}
    model, module = from_config(fields, mtp=False), built(fields, "meta")
    assert model.parameters == module.num_parameters()
    active = model.experts_per_token / model.experts if model.experts else 0.0
    assert model.matmul_weights == matmul_weights(module, active)
    # A loaded configuration gives the same result as its file.
    assert from_config(module.config, mtp=False) == model


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NAMES
        if any(kind in name for kind in ("gemma-2", "gemma-3", "gpt-oss", "olmo-3", "qwen2.5", "qwen3-8b"))
    ],
)
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9}])
def test_each_layer_has_the_window_transformers_gives_it(name: str, changes: dict[str, Any]) -> None:
    fields = published(name)
    fields.get("text_config", fields).update(changes)
    model, config = from_config(fields), built(fields, "meta").config
    windows = model.window if isinstance(model.window, tuple) else (model.window,) * model.layers
    assert windows == tuple(
        config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
    )


# Dimensions so small that a forward pass takes milliseconds, all different from each other.
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
}
TINY: list[dict[str, Any]] = [
    {"model_type": "llama", **GROUPED, "head_dim": 10},
    {"model_type": "mistral", **GROUPED, "sliding_window": 5},
    {"model_type": "mixtral", **GROUPED, "num_local_experts": 8, "num_experts_per_tok": 3},
    {"model_type": "qwen2", **GROUPED},
    {"model_type": "qwen3", **GROUPED, "head_dim": 10},
    {
        "model_type": "qwen2_moe",
        **GROUPED,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 36,
        "shared_expert_intermediate_size": 28,
        "decoder_sparse_step": 2,
    },
    {
        "model_type": "qwen3_moe",
        **GROUPED,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 36,
        "mlp_only_layers": [2],
        "head_dim": 10,
    },
    {"model_type": "gemma", **GROUPED, "head_dim": 10},
    {"model_type": "gemma2", **GROUPED, "head_dim": 10, "sliding_window": 5},
    {"model_type": "gemma3_text", **GROUPED, "head_dim": 10, "sliding_window": 5},
    {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 28},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 4, "n_head": 6, "n_positions": 64, "vocab_size": 100},
    {"model_type": "gpt_neox", **SMALL},
    {
        "model_type": "gpt_oss",
        **GROUPED,
        "head_dim": 10,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
    },
    {"model_type": "nemotron", **GROUPED, "head_dim": 10},
    {"model_type": "phi", **SMALL},
    {"model_type": "phi3", **GROUPED},
    {"model_type": "phimoe", **GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2},
    {"model_type": "olmo", **GROUPED},
    {"model_type": "olmo2", **GROUPED},
    {"model_type": "olmo3", **GROUPED, "sliding_window": 5},
    {"model_type": "olmoe", **GROUPED, "num_experts": 8, "num_experts_per_tok": 3},
]


def test_a_small_model_of_every_family_is_run() -> None:
    assert {fields["model_type"] for fields in TINY} == {*FAMILIES} - {"kimi_k2"}


@pytest.mark.long
@pytest.mark.parametrize("fields", TINY, ids=lambda fields: fields["model_type"])
def test_pytorch_counts_the_same_when_the_model_runs(fields: dict[str, Any]) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    # Eager attention computes all s x s scores, and eager experts are a loop over those that got a token.
    module = built(fields, "cpu", attn_implementation="eager", experts_implementation="eager")
    batch, length = 2, 20
    tokens = torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False, depth=10) as forward:
        module(input_ids=tokens, use_cache=False)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    # Not in the convention: routers and gates, forward and backward, and the angles of rotary embeddings.
    left_out = 0
    for name, operations in forward.get_flop_counts().items():
        last = name.rpartition(".")[2]
        if last in ("gate", "router", "shared_expert_gate"):
            left_out += 3 * sum(operations.values())
        elif last == "rotary_emb":
            left_out += sum(operations.values())
    expected = batch * from_config(fields, mtp=False).flops_per_sequence(length, "full")
    assert counter.get_total_flops() - left_out == expected


def test_pytorch_counts_the_same_where_weights_are_frozen() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = built(TINY[0], "cpu", attn_implementation="eager")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".mlp." not in name and "lm_head" not in name)
    tokens = module.model.embed_tokens.weight.new_ones((1, 20)).long()
    with FlopCounterMode(display=False) as forward:
        module.model.rotary_emb(module.model.embed_tokens(tokens), tokens)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    model = dataclasses.replace(from_config(TINY[0]), frozen=("mlp", "lm_head"))
    assert counter.get_total_flops() - forward.get_total_flops() == model.flops_per_sequence(20, "full")
