"""Test what all commands share: errors that suggest a word, and the flags' other names."""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import flopwatch
from docs.commands import choices
from flopwatch.__main__ import _parser, main
from flopwatch.catalogue import all_metrics
from flopwatch.flops.peaks import names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dcotor"], "did you mean doctor?"),
        (["ledger", "lst"], "did you mean list?"),
        (["exporter", "--lisen", ":9450"], "unrecognized arguments: --lisen :9450; did you mean --listen?"),
        (["exporter", "--web.listen-adress=:9450"], "did you mean --web.listen-address?"),
        (["flops", "config.json", "--seq-len", "1", "--convention", "casual"], "did you mean causal?"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_one(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    advice, error = capsys.readouterr().err.splitlines()
    assert error.startswith("flopwatch")
    assert error.endswith(expected)
    assert advice.startswith("See flopwatch ")


def test_nothing_is_suggested_for_a_word_that_is_like_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["exporter", "--zzz"], ["exporter", "extra"], ["zzz"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "did you mean" not in capsys.readouterr().err


def test_the_flags_of_node_exporter_are_accepted() -> None:
    ours = ["exporter", "--listen", ":9100", "--sysfs", "/host/sys", "--web-config", "web.yml"]
    theirs = [*("exporter", "--web.listen-address=:9100", "--path.sysfs=/host/sys"), "--web.config.file=web.yml"]
    parsed = [vars(_parser().parse_args(arguments)) for arguments in (ours, theirs)]
    for one in parsed:
        del one["parser"]
    assert parsed[0] == parsed[1]
    ledgers = [
        vars(_parser().parse_args(["ledger", "serve", flag, ":9451"]))["listen"]
        for flag in ("--listen", "--web.listen-address")
    ]
    assert ledgers[0] == ledgers[1]


def test_a_length_may_be_given_in_thousands_of_tokens() -> None:
    lengths = [_parser().parse_args(["flops", "c.json", "--seq-len", text]).seq_len for text in ("8192", "8k")]
    assert lengths == [8192, 8192]
    for wrong in ("k", "8kk", "0k", "-8k", "8.5k"):
        with pytest.raises(SystemExit):
            main(["flops", "c.json", "--seq-len", wrong])


def test_the_table_of_peaks_is_listed_by_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peak", "--list", "--dtype", "fp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split("  ")[0] == "NVIDIA H200" and line.endswith(" 1,979 TFLOP/s") for line in lines)
    assert not any(line.startswith("NVIDIA A100") for line in lines)  # has no fp8
    assert main(["peak", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["NVIDIA H200"] == 989.4e12
    assert found.keys() < set(names())  # those that are refused are not listed
    assert main(["peak", "--list", "--dtype", "fp2"]) == 1
    assert "no peaks are known for dtype 'fp2'" in capsys.readouterr().err
    assert main(["peak", "--list", "NVIDIA H200"]) == 1


def test_a_part_of_a_cards_name_is_refused_with_the_names_it_is_part_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peak", "h200"]) == 1
    error = capsys.readouterr().err
    assert "'h200' is not in the table of peaks" in error
    assert "of this name it has NVIDIA H200" in error
    assert main(["peak", "Voodoo"]) == 1
    assert "of this name" not in capsys.readouterr().err


def test_every_command_prints_json_but_servers_the_live_view_and_the_script() -> None:
    def below(parser: argparse.ArgumentParser) -> Iterator[str]:
        inner = choices(parser)
        if not inner and "--json" not in parser._option_string_actions:
            yield parser.prog.removeprefix("flopwatch ")
        for one in inner.values():
            yield from below(one)

    assert list(below(_parser())) == ["exporter", "ledger serve", "run", "top", "boards", "kmsg"]


def test_metrics_and_maintenance_are_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [row.name for row in all_metrics()]
    assert all(row["help"] and row["source"] and row["type"] for row in rows)
    assert main(["metrics", "--key", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [row["name"] for row in rows if row["key"]]
    state = ["--state", str(tmp_path)]
    answers = []
    for action in (["list"], ["start", "--for", "2h"], ["list"], ["stop"]):
        assert main(["maintenance", *action, "--json", *state]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers.pop(2) == pytest.approx(answers[1], abs=0.001)
    assert [answer["in_maintenance"] for answer in answers] == [False, True, False]
    assert answers[0]["until_timestamp_seconds"] is None
    assert answers[1]["until_timestamp_seconds"] == pytest.approx(time.time() + 7200, abs=60)


def every_flag(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from parser._actions
    for inner in choices(parser).values():
        yield from every_flag(inner)


def test_each_line_of_the_flag_tables_is_a_flag_of_a_command() -> None:
    known = [([*flag.option_strings, flag.dest], flag.help or "") for flag in every_flag(_parser())]
    with (Path(flopwatch.__file__).parent / "data" / "flags.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names, text = set(row["names"].split()), row["help"].partition("{")[0]
            assert any(names <= set(own) and shown.startswith(text) for own, shown in known), row
