"""The commands in the runbooks: a shell reads them, and what they ask of flopwatch, promtool and amtool exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support import ROOT
from tests.support.cases import for_each
from tests.support.commands import assert_commands_exist

RUNBOOKS = sorted((ROOT / "alerts" / "runbooks").glob("*.md"))


@for_each(RUNBOOKS, lambda path: path.stem)
def test_a_shell_reads_every_block(path: Path) -> None:
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(), flags=re.DOTALL):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=10, check=False)
        assert done.returncode == 0, done.stderr


@for_each(RUNBOOKS, lambda path: path.stem)
def test_our_own_commands_and_their_flags_exist(path: Path) -> None:
    text = path.read_text()
    assert_commands_exist(
        *re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL), *re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    )
