"""Test the reported reason for a process's end: the exception's type, without signal handler or excepthook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.telemetry.otlp import ENDED_BY
from flopwatch.training.process.exit_reason import ended_by
from tests.support import ROOT
from tests.support.hook_server import HookServer, Push, python

LOOP = """
from flopwatch.training import Run
run = Run("llama", push_interval=0.05)
for _ in range(3):
    run.step(tokens=64)
"""


def last_word(code: str, run: str = "") -> tuple[Push, subprocess.CompletedProcess[str]]:
    """Run a script that creates a run and then executes `code`. Return its last push, and the finished process."""
    with HookServer() as server:
        answer = python(run or LOOP + code, FLOPWATCH_ENDPOINT=server.url)
        return server.last_word(), answer


@pytest.mark.parametrize(
    ("end", "status", "by"),
    [
        ("raise KeyError('a secret')", "failed", "KeyError"),
        ("raise OSError(28, 'a secret')", "failed", "OSError ENOSPC"),
        ("open('/a/secret')", "failed", "FileNotFoundError ENOENT"),
        (
            "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('a secret')",
            "failed",
            "OutOfMemoryError",
        ),
        ("raise KeyboardInterrupt", "stopped", "KeyboardInterrupt"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    run.finish('failed')", "failed", "ZeroDivisionError"),
        ("try:\n    1 / 0\nfinally:\n    run.finish('preempted')", "preempted", "ZeroDivisionError"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    run.finish()", "completed", None),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nrun.finish('failed')", "failed", None),
        ("import sys; sys.exit(3)", "failed", None),
        ("", "failed", None),
    ],
)
def test_the_type_of_the_exception_is_sent_and_nothing_of_its_message(end: str, status: str, by: str | None) -> None:
    push, _ = last_word(end)
    assert (push.resource["flopwatch.status"], push.resource.get("flopwatch.ended_by")) == (status, by)
    assert push.samples["training_steps_total"] == 3
    assert b"secret" not in push.body


@pytest.mark.parametrize(
    "hostile",
    [
        "class Meta(type):\n    __name__ = property(lambda self: 1 / 0)\nclass E(Exception, metaclass=Meta): pass",
        "class E(Exception):\n    __bool__ = __len__ = lambda self: 1 / 0",
        "class E(OSError):\n    errno = property(lambda self: 1 / 0)",
        "class E(OSError):\n    errno = []",
        "class E(SystemExit):\n    code = property(lambda self: 1 / 0)\nE = ValueError",
    ],
)
def test_an_exception_that_cannot_be_asked_costs_no_last_word(hostile: str) -> None:
    push, answer = last_word(f"{hostile}\nraise E")
    assert push.resource["flopwatch.status"] == "failed"
    assert push.samples["training_steps_total"] == 3
    assert "Traceback" in answer.stderr


def test_the_scripts_own_excepthook_is_called_as_ever() -> None:
    hook = """
import sys
def show(kind, value, trace):
    print("shown", kind.__name__, value, trace.tb_lineno > 0)
sys.excepthook = show
before = sys.excepthook
"""
    push, answer = last_word("", run=hook + LOOP + "assert sys.excepthook is before\nraise KeyError('mine')")
    assert answer.stdout == "shown KeyError 'mine' True\n"
    assert push.resource["flopwatch.ended_by"] == "KeyError"


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "by"), [("exit", "SystemExit 3"), ("raise", "ValueError"), ("interrupt", "KeyboardInterrupt")]
)
def test_flopwatch_run_sends_the_type_for_an_unmodified_script(tmp_path: Path, how: str, by: str) -> None:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLOPWATCH_")}
    with HookServer() as server:
        subprocess.run(
            [sys.executable, "-m", "flopwatch", "run", str(ROOT / "tests" / "scripts" / "plain.py"), how],
            env={
                **inherited,
                "PYTHONPATH": str(ROOT / "exporter"),
                "FLOPWATCH_ENDPOINT": server.url,
                "CHECKPOINT": str(tmp_path / "x.pt"),
            },
            cwd=tmp_path,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert server.last_word().resource["flopwatch.ended_by"] == by


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, ""),
        (KeyError("x"), "KeyError"),
        (SystemExit(), "SystemExit 0"),
        (SystemExit(7), "SystemExit 7"),
        (SystemExit(-9), "SystemExit -9"),
        (SystemExit("a message"), "SystemExit 1"),
        (SystemExit(1 << 40), "SystemExit"),
        (ConnectionResetError(104, "x"), "ConnectionResetError ECONNRESET"),
        (OSError("x"), "OSError"),
        (OSError(99999, "x"), "OSError"),
        (type("Größe<b>", (Exception,), {})(), "Gr__e_b_"),
        (type("E" * 100, (Exception,), {})(), "E" * 64),
    ],
)
def test_the_text_for_an_exception_is_short_and_plain(error: BaseException | None, text: str) -> None:
    assert ended_by(error) == text


@given(st.text(max_size=80).filter(lambda name: "\0" not in name and name.isprintable()), st.integers())
def test_the_exporter_accepts_the_text_for_an_exception_of_any_name(name: str, number: int) -> None:
    for base in (Exception, OSError):
        assert ENDED_BY.fullmatch(ended_by(type(name, (base,), {})(number, "x")))
    assert ENDED_BY.fullmatch(ended_by(SystemExit(number)))
