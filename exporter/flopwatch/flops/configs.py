"""Dimensions of a `Transformer` from a Hugging Face `config.json` or a configuration object of transformers.

data/model_families.json describes each model family (`model_type`) by its differences from Llama. It also lists the
families and fields that cannot be counted, with the reason. The meaning and default of each field are defined in
configuration_<model_type>.py and modeling_<model_type>.py of https://github.com/huggingface/transformers (read at
5.23). Anything else raises an `UnknownModel` that names what is missing or unknown.

Norms, biases and routers are in `other_parameters`, so that `parameters` is that of the model built by transformers. Of
a gemma3 with images only the language model is counted, because the image tower runs per image, not per token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal, Protocol

from flopwatch.flops.transformer import LatentAttention, Transformer

_REQUIRED = object()
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MTP = ("num_nextn_predict_layers", "num_mtp_layers")

_TABLES = json.loads(files("flopwatch").joinpath("data/model_families.json").read_text(encoding="utf-8"))


class UnknownModel(ValueError):
    """Error raised for a configuration whose FLOPs cannot be counted. The message names what is missing."""


class _HasDictionary(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class _ConfigFields:
    """Fields of one config.json with its family's defaults. A wrong value raises UnknownModel with the field's name."""

    def __init__(self, given: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]) -> None:
        self._given, self.kind, self._defaults = given, kind, defaults

    def get(self, *names: str) -> Any:
        """Return the first of these fields in the file, null as None, else the family's default, else None."""
        given = [self._given[name] for name in names if name in self._given]
        values = given or [self._defaults[name] for name in names if name in self._defaults]
        return next((value for value in values if value is not None), None)

    def has(self, name: str) -> bool:
        return name in self._given

    def number(self, *names: str, default: Any = _REQUIRED, least: int = 1, most: int = 10**9) -> Any:
        """Return the first of these fields as an integer in `least` to `most`, or the default if missing or null."""
        value = self.get(*names)
        if value is None and default is not _REQUIRED:
            return default
        if value is None:
            raise UnknownModel(f"a {self.kind} needs {' or '.join(names)}, which the file lacks")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UnknownModel(f"{names[0]} is {value!r}, not a whole number from {least} to {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnknownModel(f"{name} is {value!r}, neither true nor false")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the layer indices in a field, or an empty tuple if the field is missing."""
        value = self.get(name)
        value = [] if value is None else value
        if not isinstance(value, list | tuple) or any(type(item) is not int or item < 0 for item in value):
            raise UnknownModel(f"{name} is {value!r}, not a list of layers")
        return tuple(value)

    def layer_types(self, layers: int) -> list[bool] | None:
        """Return for each layer whether its attention has a window, or None if the field layer_types is missing."""
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise UnknownModel(f"layer_types is {value!r}, not a list")
        if unknown := sorted({str(kind) for kind in value} - {"full_attention", "sliding_attention"}):
            names = ", ".join(unknown)
            raise UnknownModel(f"layer_types has {names}: only full_attention and sliding_attention can be counted")
        if len(value) != layers:
            raise UnknownModel(f"layer_types names {len(value)} layers of {layers}")
        return [kind == "sliding_attention" for kind in value]


Windows = tuple[int | None, ...] | int | None


def _no_windows(f: _ConfigFields, layers: int) -> Windows:
    if any(f.layer_types(layers) or ()) or f.get("sliding_window") is not None:
        raise UnknownModel(f"a {f.kind} has no windows in transformers, and this file names some")
    return None


def _one_window(f: _ConfigFields, layers: int) -> Windows:
    """Return the attention window that all layers share, in tokens, or None if the layers have no window."""
    window: int | None = f.number("sliding_window", default=None)
    if (types := f.layer_types(layers)) is not None and set(types) != {window is not None}:
        raise UnknownModel(f"all layers of a {f.kind} have the same window in transformers, but layer_types differs")
    return window


def _alternating(f: _ConfigFields, layers: int) -> Windows:
    """Return each layer's window: by layer_types, else for all but each `full_every`-th layer. None without one."""
    family = FAMILIES[f.kind]
    every = f.number(*family.full_every_from, default=family.full_every)
    types = f.layer_types(layers)
    return _where(f, [(layer + 1) % every != 0 for layer in range(layers)] if types is None else types)


def _where(f: _ConfigFields, types: list[bool]) -> Windows:
    if not any(types):
        return None
    window = f.number("sliding_window")
    return tuple(window if windowed else None for windowed in types)


def _qwen_windows(f: _ConfigFields, layers: int) -> Windows:
    """Return each layer's window: by layer_types, else from max_window_layers on. None without use_sliding_window."""
    types = f.layer_types(layers)
    if not f.flag("use_sliding_window", False):
        if any(types or ()) and f.get("sliding_window"):
            raise UnknownModel("layer_types has sliding_attention and use_sliding_window is false: which is it?")
        return None
    if f.get("sliding_window") is None:
        return None
    if types is None:
        if f.kind.endswith("_moe"):
            raise UnknownModel(
                f"releases of transformers put the windows of a {f.kind} into different layers: "
                "write layer_types into the file"
            )
        first_with = f.number("max_window_layers", least=0)
        types = [layer >= first_with for layer in range(layers)]
    return _where(f, types)


def _qwen_dense(f: _ConfigFields, layers: int) -> tuple[int, ...]:
    """Return the layers with an MLP instead of experts: mlp_only_layers, and all but each decoder_sparse_step-th."""
    step, only = f.number("decoder_sparse_step", default=1), f.numbers("mlp_only_layers")
    return tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)


def _deepseek_dense(f: _ConfigFields, layers: int) -> tuple[int, ...]:
    """Return the layers with an MLP instead of experts: the first few, and all but each moe_layer_freq-th."""
    first = f.number("first_k_dense_replace", least=0)
    every = f.number("moe_layer_freq", default=1)
    return tuple(layer for layer in range(layers) if layer < first or layer % every)


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of a model family from Llama."""

    gated: bool = True
    norms: int = 2  # number per layer, each as wide as the model
    norm_vectors: int = 1  # of a norm: 2 with a shift (LayerNorm), 1 for a scale, 0 without either
    query_key_norm: Literal["", "head", "all"] = ""  # norm of query and key, as wide as one head or all heads
    query_key_bias: bool | str = "attention_bias"  # of query, key and value: always, never, or the field that decides
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    tied: bool = False  # default of tie_word_embeddings
    grouped: bool = True  # has key-value heads
    latent: bool = False
    positions: bool = False  # learned position embeddings
    sinks: bool = False
    expert_width: str = ""  # name of the field with an expert's width; empty in a family without experts
    dense: Literal["", "qwen", "deepseek"] = ""  # rule for the layers with an MLP instead of experts
    router_bias: bool = False
    shared_gate: bool = False
    windows: Literal["none", "one", "qwen", "alternating"] = "none"
    full_every: int = 0  # under "alternating": each layer at a multiple of this number has no window
    full_every_from: tuple[str, ...] = ()  # fields that replace full_every
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that published files leave out


_WINDOWS = {"none": _no_windows, "one": _one_window, "qwen": _qwen_windows, "alternating": _alternating}
_DENSE = {"qwen": _qwen_dense, "deepseek": _deepseek_dense}
FAMILIES: dict[str, _Family] = {kind: _Family(**differences) for kind, differences in _TABLES["families"].items()}

_QUERY_KEY_VALUE_HEADS_ARE_HEADS = ("llama", "phi", "phi3", "olmo", "olmo2", "olmo3", "olmoe", "nemotron")


def from_config(
    config: Mapping[str, Any] | _HasDictionary, *, mtp: bool | None = None, vocabulary: int | None = None
) -> Transformer:
    """Return the dimensions of the model that a Hugging Face `config.json` describes.

    mtp         False leaves multi-token prediction out; None and True count what num_nextn_predict_layers declares
    vocabulary  rows of the embedding and of the LM head where they are padded beyond `vocab_size`

    Raises UnknownModel, a ValueError, for a model that cannot be counted.
    """
    outer = given = config if isinstance(config, Mapping) else config.to_dict()
    kind = given.get("model_type")
    if kind == "gemma3":
        nested = given.get("text_config")
        if not isinstance(nested, Mapping):
            raise UnknownModel("a gemma3 needs text_config, and the file has none")
        given, kind = nested, "gemma3_text"
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnknownModel(_why_unknown(given, kind))
    f = _ConfigFields({**outer, **given}, str(kind), family.defaults)
    _refuse_foreign(f, family)
    try:
        return _transformer(f, family, mtp, vocabulary)
    except ValueError as error:
        raise UnknownModel(str(error)) from None


def _why_unknown(given: Mapping[str, Any], kind: object) -> str:
    if kind is None:
        return "the file has no model_type; is it the config.json of a Hugging Face model?"
    if not isinstance(kind, str):
        return f"model_type is {kind!r}, not a name"
    if missing := _TABLES["uncountable"].get(kind):
        return f"model_type {kind} cannot be counted: what is missing here is {missing}"
    nested = given.get("text_config")
    if isinstance(nested, Mapping) and nested.get("model_type") in FAMILIES:
        return (
            f"model_type {kind} is not known; its text_config is a {nested['model_type']}, which can be counted as "
            "a file of its own, without the rest of the model"
        )
    return f"model_type {kind} is not known, only {', '.join(sorted([*FAMILIES, 'gemma3']))}"


def _refuse_foreign(f: _ConfigFields, family: _Family) -> None:
    for name, what in _TABLES["foreign_fields"].items():
        if f.get(name):
            raise UnknownModel(f"a {f.kind} with {name} has {what}, which cannot be counted")
    if not family.expert_width and f.get(*_EXPERTS):
        raise UnknownModel(f"a {f.kind} has no experts in transformers, but this file has {f.get(*_EXPERTS)}")
    if not family.latent and f.get("kv_lora_rank"):
        raise UnknownModel(f"a {f.kind} has no latent attention in transformers, and this file has kv_lora_rank")
    if f.get(*_MTP) and f.kind not in ("deepseek_v3", "kimi_k2"):
        raise UnknownModel(f"multi-token prediction is known of DeepSeek-V3 only, and this {f.kind} declares it")
    if family.latent and f.get("mlp_bias"):
        raise UnknownModel(f"a {f.kind} with biases in its MLP is not known")


def _transformer(f: _ConfigFields, family: _Family, mtp: bool | None, vocabulary: int | None) -> Transformer:
    d = f.number("hidden_size", "n_embd")
    layers = f.number("num_hidden_layers", "n_layer", most=10**4)
    heads = f.number("num_attention_heads", "n_head")
    rows = f.number("vocab_size") if vocabulary is None else vocabulary
    latent = _latent(f) if family.latent else None
    kv_heads = heads
    if family.grouped:
        implied = heads if f.kind in _QUERY_KEY_VALUE_HEADS_ARE_HEADS or f.has("num_key_value_heads") else _REQUIRED
        kv_heads = f.number("num_key_value_heads", default=implied)
    e = 0 if latent else _head_dim(f, family, d, heads)

    experts = _experts(f, family)
    dense = tuple(range(layers)) if not experts else _DENSE[family.dense](f, layers) if family.dense else ()
    sparse = layers - len(dense)
    mlp_default = 4 * d if f.kind == "gpt2" else _REQUIRED
    mlp_width = f.number("intermediate_size", "n_inner", default=mlp_default) if dense else 0
    expert_width = f.number(family.expert_width) if sparse else 0

    common = _norms_and_biases(f, family, d, heads, kv_heads, e, latent)
    plain = _has(f, family.mlp_bias) * ((2 if family.gated else 1) * mlp_width + d)
    routed = experts * (d + family.router_bias) + family.shared_gate * d
    other = layers * common + len(dense) * plain + sparse * routed + family.norm_vectors * d
    other += _has(f, family.head_bias) * rows
    if family.positions:
        other += f.number("n_positions", "max_position_embeddings", "n_ctx") * d

    modules = 0 if mtp is False else f.number(*_MTP, default=0, least=0, most=100) if family.latent else 0
    if mtp and not modules:
        raise UnknownModel("the file declares no multi-token prediction (num_nextn_predict_layers)")
    if modules and f.number("moe_layer_freq", default=1) != 1:
        raise UnknownModel("multi-token prediction with a moe_layer_freq other than 1: is its layer a dense one?")
    return Transformer(
        layers=layers,
        width=d,
        heads=heads,
        vocabulary=rows,
        mlp_width=mlp_width,
        mlp_matrices=3 if family.gated else 2,
        latent=latent,
        kv_heads=None if latent else kv_heads,
        head_dim=None if latent else e,
        experts_per_token=f.number("num_experts_per_tok", "experts_per_token") if sparse else 0,
        experts=experts if sparse else None,
        expert_width=expert_width,
        shared_width=_shared_width(f, expert_width) if sparse else 0,
        dense_layers=len(dense) if dense == tuple(range(len(dense))) else dense,
        window=_WINDOWS[family.windows](f, layers),
        mtp_layers=modules,
        tied_embeddings=f.flag("tie_word_embeddings", family.tied),
        other_parameters=other,
        # Two norms before the projection and one before the head, next to those of the layer.
        mtp_other_parameters=modules and common + (routed if sparse else plain) + 3 * d,
        expert_biases=bool(sparse and _has(f, family.mlp_bias)),
    )


def _has(f: _ConfigFields, bias: bool | str) -> int:
    """Return 1 if the model has a bias, else 0. `bias` is the family's answer or names the field that decides."""
    return int(f.flag(bias, False) if isinstance(bias, str) else bias)


def _norms_and_biases(
    f: _ConfigFields, family: _Family, d: int, heads: int, kv_heads: int, e: int, latent: LatentAttention | None
) -> int:
    """Return the number of parameters of one layer's norms and attention biases."""
    common = family.norms * family.norm_vectors * d
    if latent is not None:
        q = latent.query_rank or 0
        ranks = q + latent.key_value_rank
        return common + ranks + _has(f, "attention_bias") * (ranks + latent.rope_dim + d)
    common += _has(f, family.query_key_bias) * (heads + 2 * kv_heads) * e + _has(f, family.output_bias) * d
    common += {"": 0, "head": 2 * e, "all": (heads + kv_heads) * e}[family.query_key_norm]
    if f.kind == "phi" and f.flag("qk_layernorm", False):
        common += 2 * family.norm_vectors * e
    return common + heads * family.sinks


def _experts(f: _ConfigFields, family: _Family) -> int:
    """Return the routed experts per layer: 0 if the family has none, or the file has 0 (Qwen) or null (DeepSeek)."""
    if not family.expert_width:
        return 0
    optional = family.dense and any(f.has(name) for name in _EXPERTS)
    return int(f.number(*_EXPERTS, default=0 if optional else _REQUIRED, least=0 if optional else 1))


def _head_dim(f: _ConfigFields, family: _Family, width: int, heads: int) -> int:
    """Return the dimension of a head. transformers ignores the field head_dim if every head has its own keys."""
    given: int | None = f.number("head_dim", "kv_channels", default=None) if family.grouped else None
    if given is None and width % heads:
        raise UnknownModel(f"hidden_size {width} is not a multiple of {heads} heads, and the file has no head_dim")
    return width // heads if given is None else given


def _latent(f: _ConfigFields) -> LatentAttention:
    if not f.has("q_lora_rank"):
        raise UnknownModel(f"a {f.kind} needs q_lora_rank (null if queries are not compressed), which the file lacks")
    fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(f.number("q_lora_rank", default=None), *map(f.number, fields))


def _shared_width(f: _ConfigFields, expert_width: int) -> int:
    """Return the summed width of the shared experts. The file has their number (DeepSeek) or their width (Qwen2)."""
    if f.kind == "qwen2_moe":
        return int(f.number("shared_expert_intermediate_size", least=0))
    return int(f.number("n_shared_experts", default=0, least=0)) * expert_width if FAMILIES[f.kind].latent else 0
