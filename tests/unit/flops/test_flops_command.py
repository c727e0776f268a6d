"""`flopwatch flops` as people and scripts run it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flopwatch.__main__ import main
from tests.support import TESTS

CONFIGS = TESTS / "captures" / "configs"


def answer(capsys: pytest.CaptureFixture[str], name: str, *flags: str) -> dict[str, Any]:
    """Return the JSON that the command prints."""
    assert main(["flops", str(CONFIGS / f"{name}.json"), *flags, "--json"]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


def test_the_page_shows_each_product_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", str(CONFIGS / "llama-3-8b.json"), "--seq-len", "8192"]) == 0
    assert (
        capsys.readouterr().out
        == """\
llama, sequences of s = 8192 tokens
convention causal, 6 W + 6 L H e s per token: all matmuls, attention scores below the diagonal

parameters                          8,030,261,248
active parameters, N                8,030,261,248
matmul weights of a token, W        7,504,658,432
FLOPs per token                    51,470,401,536
FLOPs per sequence            421,645,529,382,912

term                 product                                                        FLOPs per sequence  share
attention_query      32 x (4096 x 4096) x 6 x 8192                                  26,388,279,066,624   6.3%
attention_key_value  32 x (4096 x 1024 + 4096 x 1024) x 6 x 8192                    13,194,139,533,312   3.1%
attention_output     32 x (4096 x 4096) x 6 x 8192                                  26,388,279,066,624   6.3%
mlp                  32 x (4096 x 14336 + 4096 x 14336 + 14336 x 4096) x 6 x 8192  277,076,930,199,552  65.7%
lm_head              1 x (4096 x 128256) x 6 x 8192                                 25,821,343,383,552   6.1%
attention_scores     32 x 8192 x 8192 / 2 x 6 x 32 x (128 + 128)                    52,776,558,133,248  12.5%
sum                                                                                421,645,529,382,912
"""
    )


def test_json_has_exact_integers_whose_terms_sum_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "llama-3-8b", "--seq-len", "8192") == {
        "model_type": "llama",
        "convention": "causal",
        "formula": "6 W + 6 L H e s per token: all matmuls, attention scores below the diagonal",
        "sequence_length": 8192,
        "parameters": 8_030_261_248,
        "active_parameters": 8_030_261_248,
        "matmul_weights": 7_504_658_432,
        "flops_per_token": 51_470_401_536,
        "flops_per_sequence": 421_645_529_382_912,
        "terms": {
            "attention_query": 26_388_279_066_624,
            "attention_key_value": 13_194_139_533_312,
            "attention_output": 26_388_279_066_624,
            "mlp": 277_076_930_199_552,
            "lm_head": 25_821_343_383_552,
            "attention_scores": 52_776_558_133_248,
        },
    }


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--convention", "full"),
        ("--convention", "palm"),
        ("--no-mtp",),
        ("--no-mtp", "--lora-rank", "16"),
        ("--no-mtp", "--frozen", "mlp,experts", "--frozen-layers", "4"),
        ("--vocabulary", "131072"),
    ],
)
@pytest.mark.parametrize("name", ["deepseek-v3", "gemma-3-27b", "gpt-oss-120b"])
def test_the_terms_of_every_count_sum_up(capsys: pytest.CaptureFixture[str], name: str, flags: tuple[str, ...]) -> None:
    output = answer(capsys, name, "--seq-len", "4095", *flags)
    assert sum(output["terms"].values()) == output["flops_per_sequence"]
    assert all(type(flops) is int for flops in output["terms"].values())
    assert output["flops_per_token"] == output["flops_per_sequence"] / 4095


def test_recomputation_is_separate_from_what_the_model_needs(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "llama-3-8b", "--seq-len", "8192")
    full = answer(capsys, "llama-3-8b", "--seq-len", "8192", "--recompute", "full")
    selective = answer(capsys, "llama-3-8b", "--seq-len", "8192", "--recompute", "selective")
    assert full["flops_per_sequence"] == selective["flops_per_sequence"] == plain["flops_per_sequence"]
    head = plain["terms"]["lm_head"]
    assert full["hardware_flops_per_sequence"] == (plain["flops_per_sequence"] - head) * 4 // 3 + head
    assert full["hardware_flops_per_token"] * 8192 == full["hardware_flops_per_sequence"]
    assert selective["hardware_flops_per_sequence"] == (
        plain["flops_per_sequence"] + plain["terms"]["attention_scores"] // 3
    )


def test_multi_token_prediction_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with_module = answer(capsys, "deepseek-v3", "--seq-len", "4096")
    without = answer(capsys, "deepseek-v3", "--seq-len", "4096", "--no-mtp")
    assert (with_module["mtp_layers"], round(with_module["flops_per_token"] / 1e9)) == (1, 260)
    assert round(without["flops_per_token"] / 1e9) == 250
    assert with_module["parameters"] == without["parameters"]
    assert "mtp_layers" not in without
    assert main(["flops", str(CONFIGS / "deepseek-v3.json"), "--seq-len", "4096"]) == 0
    assert "with 1 multi-token prediction module, as the file declares" in capsys.readouterr().out


def test_a_step_is_its_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    output = answer(capsys, "gpt-3-175b", "--seq-len", "2048", "--sequences", "1536")
    assert output["flops_per_step"] == 1536 * output["flops_per_sequence"]


def test_a_folder_means_the_config_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CONFIGS / "gpt2.json", tmp_path / "config.json")
    assert (
        main(["flops", str(tmp_path), "--seq-len", "1024", "--lora-rank", "8", "--lora-targets", "attention_query"])
        == 0
    )
    page = capsys.readouterr().out
    assert "LoRA of rank 8: 4 FLOPs per frozen weight and token, 6 per weight of an adapter" in page
    assert "12 x (768 x 8 + 8 x 768) x 6 x 1024" in page


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, (), "No such file or directory; give the config.json of a Hugging Face model"),
        ("{", (), "is not JSON; give the config.json of a Hugging Face model"),
        ("[]", (), "holds no JSON object; give the config.json of a Hugging Face model"),
        ("{}", (), "the file has no model_type; is it the config.json of a Hugging Face model?"),
        ('{"model_type": "rwkv"}', (), "model_type rwkv is not known, only "),
        ('{"model_type": "llama", "hidden_size": 4096}', (), "a llama needs num_hidden_layers or n_layer"),
        (
            '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 8}',
            ("--mtp",),
            "declares no multi-token prediction",
        ),
        (
            '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 8}',
            ("--lora-rank", "2", "--lora-targets", "q_proj"),
            "no family is called q_proj: choose from attention_query",
        ),
        (
            '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 8}',
            ("--convention", "palm", "--lora-rank", "2"),
            "take causal or full",
        ),
    ],
)
def test_a_file_that_cannot_be_counted_ends_in_one_line_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, flags: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    assert main(["flops", str(file), "--seq-len", "8", *flags]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("flopwatch: ")
    assert message in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [("--seq-len", "0"), ("--seq-len", "many"), ("--seq-len", "8", "--lora-rank", "-1"), ()]
)
def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["flops", str(CONFIGS / "gpt2.json"), *flags])
    assert "--" in capsys.readouterr().err
