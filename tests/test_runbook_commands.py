"""The commands in the runbooks: a shell reads them, and what they ask of flopwatch, promtool and amtool exists."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from demo.servers import find

RUNBOOKS = sorted((Path(__file__).parents[1] / "alerts" / "runbooks").glob("*.md"))
EVERY_RUNBOOK = pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
OURS = re.compile(r"^(flopwatch|promtool|amtool) (?=[a-z-])([^|;&#\n]*)", re.MULTILINE)


@cache
def help_of(program: str, *words: str) -> tuple[int, str]:
    """Return the status and the help of a program's subcommand."""
    servers = find()
    command = {
        "flopwatch": [sys.executable, "-m", "flopwatch"],
        "promtool": [servers.promtool],
        "amtool": [servers.amtool],
    }[program]
    done = subprocess.run([*command, *words, "--help"], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@EVERY_RUNBOOK
def test_a_shell_reads_every_block(path: Path) -> None:
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(), flags=re.DOTALL):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=10, check=False)
        assert done.returncode == 0, done.stderr


def assert_commands_exist(*blocks: str) -> None:
    """Raise AssertionError unless what these texts ask of flopwatch, promtool and amtool exists, with its flags."""
    for program, rest in (found for block in blocks for found in OURS.findall(block)):
        words = rest.split()
        subcommand = next((word for word in words if not word.startswith("-")), "")
        status, told = help_of(program, subcommand)
        assert status == 0, told
        for word in words[words.index(subcommand) + 1 :]:
            if re.fullmatch(r"[a-z]+", word) and f"{word} " in told and help_of(program, subcommand, word)[0] == 0:
                told += help_of(program, subcommand, word)[1]
            flag = re.match(r"--?[a-z][a-z-]*", word)
            assert flag is None or re.search(rf"(?<![\w-]){re.escape(flag[0])}(?![\w-])", told), (word, told)


@EVERY_RUNBOOK
def test_our_own_commands_and_their_flags_exist(path: Path) -> None:
    text = path.read_text()
    assert_commands_exist(
        *re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL), *re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    )
