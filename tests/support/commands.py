"""Commands quoted in docs and runbooks, checked against the programs' own help."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

from demo.servers import find

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


def assert_commands_exist(*blocks: str) -> None:
    """Raise AssertionError unless what these texts ask of flopwatch, promtool and amtool exists, with its flags."""
    for program, rest in (found for block in blocks for found in OURS.findall(block)):
        words = rest.split()
        subcommand = next((word for word in words if not word.startswith("-")), "")
        status, text = help_of(program, subcommand)
        assert status == 0, text
        for word in words[words.index(subcommand) + 1 :]:
            if re.fullmatch(r"[a-z]+", word) and f"{word} " in text and help_of(program, subcommand, word)[0] == 0:
                text += help_of(program, subcommand, word)[1]
            flag = re.match(r"--?[a-z][a-z-]*", word)
            assert flag is None or re.search(rf"(?<![\w-]){re.escape(flag[0])}(?![\w-])", text), (word, text)
