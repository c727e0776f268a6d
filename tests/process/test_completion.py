"""Test completion in the shells that are installed, and that man reads the pages without a warning."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from docs.generate import pages
from flopwatch.__main__ import COMMANDS
from tests.support import ROOT
from tests.support.machine import PATIENCE

COMPLETION, MAN = ROOT / "contrib" / "completion", ROOT / "contrib" / "man"
MAN_PAGES = sorted(MAN.glob("*"))


def output(*command: str | Path, folder: Path = ROOT) -> str:
    """Return what a program prints. It may not fail, and may not print a warning."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "LC_ALL": "C.UTF-8", "MANWIDTH": "80"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def program(name: str) -> str:
    """Return a program's path. Skips the test without it."""
    if (path := shutil.which(name)) is None:
        pytest.skip(f"{name} is Debian's package {name}")
    return path


def test_no_file_is_left_of_a_command_that_is_gone() -> None:
    for folder in (COMPLETION, MAN):
        assert set(folder.iterdir()) == {path for path in pages() if path.parent == folder}
    assert {path.name for path in MAN_PAGES} == {"flopwatch.1", *(f"flopwatch-{name}.1" for name in COMMANDS)}


# What a user has typed before the Tab key, and what is offered.
CASES = {
    "a command": ("flopwatch pe", ["peak"]),
    "commands of a command": ("flopwatch ledger ", ["close", "export", "list", "replay", "serve", "show"]),
    "a flag": ("flopwatch exporter --led", ["--ledger", "--ledger-ca-file", "--ledger-token-file"]),
    "a flag of a command's command": ("flopwatch maintenance start --f", ["--for"]),
    "a value": ("flopwatch report --format ", ["html", "json", "markdown"]),
    "a file": ("flopwatch exporter --kmsg kernel", ["kernel.log"]),
    "a file after a command": ("flopwatch flops conf", ["config.json"]),
    "a folder": ("flopwatch exporter --state st", ["state"]),
    "nothing": ("flopwatch exporter --zzz", []),
}
BASH = """
source "$1"
function=$(complete -p flopwatch | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=($2)
[[ $2 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$function flopwatch "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder with files that can be completed."""
    for name in ("kernel.log", "config.json"):
        (tmp_path / name).touch()
    (tmp_path / "state").mkdir()
    return tmp_path


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_bash_completes(case: tuple[str, list[str]], home: Path) -> None:
    typed, expected = case
    offered = output("bash", "--norc", "-c", BASH, "bash", COMPLETION / "flopwatch.bash", typed, folder=home)
    assert sorted(filter(None, offered.splitlines())) == expected


@each_case
def test_fish_completes(case: tuple[str, list[str]], home: Path) -> None:
    typed, expected = case
    script = f"source {COMPLETION / 'flopwatch.fish'}; complete -C {typed!r}"
    offered = output(program("fish"), "-c", script, folder=home)
    assert sorted(line.split("\t")[0].rstrip("/") for line in offered.splitlines()) == expected


def test_zsh_completes(home: Path) -> None:
    """Type into an interactive zsh, because its completion works only there."""
    zsh = program("zsh")
    output(zsh, "-f", "-n", COMPLETION / "_flopwatch")
    terminal, end = os.openpty()
    shell = subprocess.Popen(
        [zsh, "-f", "-i"],
        cwd=home,
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        env={**os.environ, "HOME": str(home), "TERM": "xterm"},
    )
    try:
        load = f"fpath=({COMPLETION} $fpath); autoload -U compinit; compinit -u; bindkey '^I' list-choices"
        show(terminal, f"{load}; PS1='ready''> '\n", ["ready> "])
        for typed, expected in CASES.values():
            if len(expected) > 1:
                show(terminal, f"\x15{typed}\t", expected)  # Ctrl-U deletes the line before
    finally:
        shell.kill()
        shell.wait()
        os.close(end)
        os.close(terminal)


def show(terminal: int, text: str, expected: list[str]) -> None:
    """Type into a terminal, and wait until it shows all of `expected`."""
    os.write(terminal, text.encode())
    shown, deadline = "", time.monotonic() + PATIENCE
    while not all(word in shown for word in expected):
        assert time.monotonic() < deadline, repr(shown)
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")


@pytest.mark.skipif(shutil.which("man") is None, reason="man is Debian's package man-db")
@pytest.mark.parametrize("page", MAN_PAGES, ids=lambda page: page.stem)
def test_man_shows_a_page_without_a_warning(page: Path) -> None:
    shown = output("man", "--warnings=w", "--encoding=UTF-8", "--pager=cat", "--local-file", page)
    assert shown.startswith(f"{page.stem.upper()}(1)")
    assert "\\" not in shown
    assert "NAME\n       flopwatch" in shown


@pytest.mark.parametrize("page", MAN_PAGES, ids=lambda page: page.stem)
def test_mandoc_has_no_complaint_but_the_missing_date(page: Path) -> None:
    linted = subprocess.run(
        [program("mandoc"), "-T", "lint", "-W", "warning", page], capture_output=True, text=True, timeout=PATIENCE
    )
    assert [line for line in linted.stdout.splitlines() if not line.endswith('missing date, using "": TH')] == []
