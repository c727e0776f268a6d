"""`flopwatch flops`: print the FLOPs of a model from its config.json, term by term."""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flopwatch.commands import Commands, command, flags, given, number
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    from flopwatch.flops import Transformer

FORMULAS = {
    "causal": "6 W + 6 L H e s per token: all matmuls, attention scores below the diagonal",
    "full": "6 W + 12 L H e s per token: all matmuls, all s x s attention scores",
    "palm": "6 N + 12 L H e s per token: all parameters a token passes through, all s x s attention scores",
}


def run(options: argparse.Namespace) -> None:
    """Print the FLOPs of the model. Raises SettingsError."""
    model = _model(options)
    try:
        answer = _answer(model, options)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    print(json.dumps(answer, indent=2) if options.json else _page(model, answer, options))


def _model(options: argparse.Namespace) -> "Transformer":
    from flopwatch.flops import Transformer, from_config

    file = options.config / "config.json" if options.config.is_dir() else options.config
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}; give the config.json of a Hugging Face model") from None
    except (ValueError, RecursionError):
        raise SettingsError(f"{file} is not JSON; give the config.json of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{file} holds no JSON object; give the config.json of a Hugging Face model")
    options.model_type = config.get("model_type")
    try:
        model = from_config(config, mtp=options.mtp, vocabulary=options.vocabulary)
        return replace(model, **given(options, Transformer))
    except ValueError as error:
        raise SettingsError(f"{file}: {error}") from None


def _answer(model: "Transformer", options: argparse.Namespace) -> dict[str, Any]:
    s, convention = options.seq_len, options.convention
    terms: dict[str, int] = {}
    for term in model.terms(s, convention):
        terms[term.name] = terms.get(term.name, 0) + term.flops
    total = model.flops_per_sequence(s, convention)
    answer: dict[str, Any] = {"model_type": options.model_type, "convention": convention}
    answer |= {"formula": FORMULAS[convention], "sequence_length": s}
    answer |= {name: getattr(model, name) for name in ("parameters", "active_parameters", "matmul_weights")}
    if model.mtp_layers:
        answer |= {"mtp_layers": model.mtp_layers, "mtp_parameters": model.mtp_parameters}
    if model.lora_rank:
        answer |= {"lora_parameters": model.lora_parameters}
    answer |= {"flops_per_token": _per_token(total, s), "flops_per_sequence": total}
    if options.sequences is not None:
        answer |= {"flops_per_step": options.sequences * total}
    if options.recompute is not None:
        executed = model.hardware_flops_per_sequence(s, options.recompute, convention)
        answer |= {"recompute": options.recompute, "hardware_flops_per_token": _per_token(executed, s)}
        answer["hardware_flops_per_sequence"] = executed
    return {**answer, "terms": terms}


def _per_token(flops: int, tokens: int) -> int | float:
    return flops / tokens if flops % tokens else flops // tokens


def _page(model: "Transformer", answer: dict[str, Any], options: argparse.Namespace) -> str:
    total = answer["flops_per_sequence"]
    rows = [("term", "product", "FLOPs per sequence", "share")]
    rows += [
        (term.name, term.product, f"{term.flops:,}", f"{term.flops / total:.1%}")
        for term in model.terms(options.seq_len, options.convention)
    ]
    rows.append(("sum", "", f"{total:,}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        f"{name:<{widths[0]}}  {product:<{widths[1]}}  {flops:>{widths[2]}}  {share:>{widths[3]}}".rstrip()
        for name, product, flops, share in rows
    ]
    names = {"active_parameters": "active parameters, N", "matmul_weights": "matmul weights of a token, W"}
    names |= {"mtp_parameters": "parameters of multi-token prediction", "lora_parameters": "parameters of adapters"}
    facts = []
    for key, value in answer.items():
        if key.endswith(("parameters", "weights", "_per_token", "_per_sequence", "_per_step")):
            text = names.get(key, key.replace("_", " ").replace("flops", "FLOPs"))
            facts.append((text, f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"))
    left, right = (max(len(fact[column]) for fact in facts) for column in range(2))
    notes = [
        f"{options.model_type}, sequences of s = {options.seq_len} tokens",
        f"convention {options.convention}, {FORMULAS[options.convention]}",
    ]
    if model.mtp_layers:
        declared = f"{model.mtp_layers} multi-token prediction module{'s' * (model.mtp_layers != 1)}"
        notes.append(f"with {declared}, as the file declares (without: --no-mtp)")
    if model.lora_rank:
        notes.append(f"LoRA of rank {model.lora_rank}: 4 FLOPs per frozen weight and token, 6 per weight of an adapter")
    elif model.frozen or model.frozen_layers:
        notes.append("frozen weights: 4 FLOPs per token, and 2 where no gradient flows either")
    if options.recompute is not None:
        notes.append(f"hardware FLOPs: {options.recompute} recomputation, for HFU and never for MFU")
    return "\n".join([*notes, "", *(f"{text:<{left}}  {number:>{right}}" for text, number in facts), "", *table])


def _tokens(text: str) -> int:
    """Return a number of tokens. `k` is 1,024, as in the names of models: 8k is 8,192."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


_positive = number(int, lambda value: value >= 1, "a whole number from 1 on")
_length = number(_tokens, lambda value: value >= 1, "a whole number from 1 on, such as 8192 or 8k")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "flops", run, "count the FLOPs a model needs per token and per sequence, term by term")
    flags(parser, "flops", types={"length": _length, "positive": _positive, "names": _names})
    parser.set_defaults(frozen=())
