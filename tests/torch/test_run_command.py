"""Test `flopwatch run`: a script runs as without it, and the pushes equal those of a Run in the script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.hook_server import HookServer, Push
from tests.support.terminal import Terminal

PLAIN = ROOT / "tests" / "scripts" / "plain.py"
ENVIRON = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))},
    "PYTHONPATH": str(ROOT / "exporter"),
    "OMP_NUM_THREADS": "1",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}

SCRIPTS = {
    "globals": """
        import __main__, pickle, sys
        class Here: pass
        assert type(pickle.loads(pickle.dumps(Here()))) is __main__.Here
        print(__name__, __file__, __spec__, __package__, __doc__, type(__builtins__), type(__loader__))
        print(sys.argv, sys.path[0], sys.modules["__main__"] is __main__, sorted(globals()))
        """,
    "exit": "import sys; sys.exit(3)",
    "exit with words": "import sys; sys.exit('enough')",
    "exception": """
        def f():
            raise ValueError("deep")
        f()
        """,
    "exception of its own hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_name, trace.tb_lineno)
        1 / 0
        """,
    "exception that was handled": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise KeyError("again") from error
        """,
    "interrupt": "raise KeyboardInterrupt",
    "broken pipe": "raise BrokenPipeError",
    "syntax": "def (:",
    "future": "print(type((lambda x: int).__annotations__)); from math import pi",
    "late exit": """
        import atexit, threading, time
        atexit.register(print, "last")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        print("first")
        """,
    "spawn": """
        import multiprocessing
        def square(x):
            return x * x, __name__
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [2, 3]))
        """,
    "looking for torch": """
        import importlib.util, sys
        print(type(importlib.util.find_spec("torch").loader).__name__, "torch" in sys.modules)
        """,
    "what is not there": "import torch_that_nobody_has",
}


def python(*arguments: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**ENVIRON, **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def same(first: subprocess.CompletedProcess[str], second: subprocess.CompletedProcess[str]) -> None:
    assert (first.returncode, first.stdout, first.stderr) == (second.returncode, second.stdout, second.stderr)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_without_us(tmp_path: Path, name: str) -> None:
    lines = SCRIPTS[name].split("\n")
    (tmp_path / "script.py").write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    arguments = ("script.py", "--name", "theirs", "--", "-m")
    same(python(*arguments, cwd=tmp_path), python("-m", "flopwatch", "run", *arguments, cwd=tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "package.module", "-m", "x"),
        ("-m", "package"),
        ("-m", "nowhere"),
        ("nowhere.py",),
        ("package/module.py",),
        (".",),
    ],
)
def test_a_module_or_what_is_not_there_runs_as_without_us(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text(
        "import sys; print(__name__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0]); raise OSError(5)"
    )
    natively, ours = (python(*start, *arguments, cwd=tmp_path) for start in ((), ("-m", "flopwatch", "run")))
    if arguments == (".",):
        # otherwise Python would look for a __main__.py
        assert (ours.returncode, "can't open file" in ours.stderr) == (2, True)
    else:
        same(natively, ours)


def test_a_script_that_never_imports_torch_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(*sys.modules)")
    with HookServer() as server:
        answer = python("-m", "flopwatch", "run", "script.py", cwd=tmp_path, FLOPWATCH_ENDPOINT=server.url)
    loaded = answer.stdout.split()
    assert "flopwatch.training.import_hook" in loaded
    assert not {"torch", "opentelemetry", "flopwatch.training.push.pusher", "flopwatch.training.torch"} & set(loaded)
    assert server.pushes == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "name a script"),
        (("--seq-len", "8", "x.py"), "--seq-len goes with --config"),
        (("--config", "nowhere.json", "x.py"), "nowhere.json"),
        (("--config", "config.json", "--flops-per-token", "1", "x.py"), "not both"),
        (("--config", "config.json", "x.py"), "model_type"),
        (("--peak-source", "me", "x.py"), "goes with --peak-flops"),
        (("--epochs", "3", "x.py"), "--epochs; flags of the script go after its name"),
        (("--tokens-per-step", "many", "x.py"), "not a positive"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path: Path, flags: tuple[str, ...], complaint: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.py").write_text("print('ran')")
    answer = python("-m", "flopwatch", "run", *flags, cwd=tmp_path)
    assert answer.returncode in (1, 2)
    assert complaint in answer.stderr
    assert (answer.stdout, "Traceback" in answer.stderr) == ("", False)


# With PyTorch.


def last_push(server: HookServer) -> Push:
    (pid,) = {push.resource["flopwatch.pid"] for push in server.pushes}  # workers pushed nothing
    assert pid
    return server.pushes[-1]


@pytest.mark.long
@pytest.mark.torch
def test_an_unmodified_script_pushes_what_an_instrumented_one_does(tmp_path: Path) -> None:
    instrumented_script = tmp_path / "instrumented.py"
    instrumented_script.write_text(instrumented(PLAIN.read_text()))
    flags = ("--name", "plain", "--flops-per-token", "6")

    def samples(pace: int, *arguments: str | Path) -> dict[str, float]:
        with HookServer() as server:
            answer = python(
                *arguments,
                cwd=tmp_path,
                FLOPWATCH_ENDPOINT=server.url,
                PACE=str(pace),
                CHECKPOINT=str(tmp_path / "x.pt"),
            )
            push = last_push(server)
        assert (answer.returncode, push.resource["flopwatch.status"]) == (0, "completed"), answer.stderr
        return push.samples

    # The longer the steps, the smaller the share that a busy machine, or a slow first import, adds.
    for pace in (1, 5, 25):
        seen = samples(pace, "-m", "flopwatch", "run", *flags, PLAIN, "end")
        own = samples(pace, instrumented_script, "end")
        for name in (
            "steps_total",
            "tokens_total",
            "model_flops_total",
            "position_steps",
            "position_tokens",
            "committed_steps",
            "hook_errors_total",
        ):
            assert seen[f"training_{name}"] == own[f"training_{name}"], name
        assert (seen["training_steps_total"], seen["training_tokens_total"]) == (24, 48 * 64)
        # Two processes at different times on a machine with other work. test_attach.py compares within 2 %.
        keys = [
            f"training_activity_seconds_total{{activity={name}}}" for name in ("evaluation", "checkpoint_save", "step")
        ]
        expected = pytest.approx([own[key] for key in keys], rel=0.25, abs=0.05)
        if [seen[key] for key in keys] == expected:
            break
    assert [seen[key] for key in keys] == expected


def instrumented(script: str) -> str:
    """Return the script with the calls to a Run that an instrumented loop makes."""
    for old, new in (
        (
            "    samples: Any",
            "    from flopwatch.training import Run\n"
            "    run = Run('instrumented', flops_per_token=6, model=model)\n    samples: Any",
        ),
        (
            "enumerate(DataLoader(samples, batch_size=4, **workers), 1)",
            "enumerate(run.batches(DataLoader(samples, batch_size=4, **workers)), 1)",
        ),
        (
            "                optimizer.zero_grad()\n",
            "                optimizer.zero_grad()\n                run.step(tokens=2 * batch['input_ids'].numel())\n",
        ),
        ("with torch.no_grad():", "with torch.no_grad(), run.activity('evaluation'):"),
        ("        torch.save(", "        with run.checkpoint(): torch.save("),
        ("    print(", "    run.finish()\n    print("),
    ):
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "status"),
    [
        pytest.param("exit", "failed", marks=pytest.mark.long),
        ("raise", "failed"),
        pytest.param("interrupt", "stopped", marks=pytest.mark.long),
    ],
)
def test_the_run_ends_as_the_script_does(tmp_path: Path, how: str, status: str) -> None:
    from flopwatch.flops import from_config

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with HookServer() as server:
        answer = python(
            "-m",
            "flopwatch",
            "run",
            "--config",
            "config.json",
            PLAIN,
            how,
            cwd=tmp_path,
            FLOPWATCH_RUN="plain",
            FLOPWATCH_ENDPOINT=server.url,
            CHECKPOINT=str(tmp_path / "x.pt"),
        )
        push = last_push(server)
    assert push.resource["flopwatch.run"] == "plain"
    assert answer.returncode == {"exit": 3, "raise": 1, "interrupt": -signal.SIGINT}[how]
    assert push.resource["flopwatch.status"] == status
    assert "exporter/flopwatch" not in answer.stderr.partition("Traceback")[2]
    assert push.samples["training_steps_total"] == 12
    # 8 samples of 16 tokens a step.
    assert push.samples["training_model_flops_total"] == 12 * 8 * from_config(CONFIG).flops_per_sequence(16)
    # The script failed, so the checkpoint it had just saved may be incomplete.
    assert "training_committed_steps" not in push.samples


TOP = ("-m", "flopwatch", "run", "--top", "--name", "plain", "--flops-per-token", "6", "--peak-flops", "1e9")


@pytest.mark.torch
def test_top_shows_mfu_without_an_exporter_and_the_end_is_summed_up(tmp_path: Path) -> None:
    environ = {"FLOPWATCH_ENDPOINT": "http://127.0.0.1:9", "CHECKPOINT": str(tmp_path / "x.pt"), "PACE": "25"}
    answer = python(*TOP, PLAIN, "end", cwd=tmp_path, **environ)
    assert answer.returncode == 0, answer.stderr
    live, *_ = [line for line in answer.stderr.splitlines() if "plain: step" in line]  # one every 10 s
    summary = answer.stderr.splitlines()[-3:]
    assert re.match(r"flopwatch: plain: step \d+, MFU \d+\.\d %, [\d.]+ m?s a step, [\d,]+ tokens/s per rank, ", live)
    assert re.match(r"flopwatch: plain completed after 24 steps: MFU \d+\.\d %, [\d.]+ m?s a step, ", summary[0])
    assert re.match(r"flopwatch: of \d+ s (.*, )?\d+\.\d % step", summary[1])
    assert summary[2].startswith("flopwatch: nothing took the metrics at http://127.0.0.1:9/")


@pytest.mark.torch
def test_the_summary_agrees_with_the_last_push(tmp_path: Path) -> None:
    with HookServer() as server:
        environ = {"FLOPWATCH_ENDPOINT": server.url, "CHECKPOINT": str(tmp_path / "x.pt")}
        answer = python(*[word for word in TOP if word != "--top"], PLAIN, "raise", cwd=tmp_path, **environ)
        samples = last_push(server).samples
    mfu = samples["training_model_flops_total"] / samples["training_capacity_flops_total"]
    found = re.search(r"plain failed after (\d+) steps: MFU ([\d.]+) %", answer.stderr)
    assert found, answer.stderr
    assert int(found[1]) == samples["training_steps_total"]
    assert float(found[2]) == pytest.approx(100 * mfu, abs=0.051)
    assert f"metrics went to {server.url}/v1/metrics" in answer.stderr
    assert answer.stderr.index("Traceback") < answer.stderr.index("plain failed")  # the summary is the last word


@pytest.mark.torch
def test_only_rank_0_shows_figures(tmp_path: Path) -> None:
    environ = {"FLOPWATCH_ENDPOINT": "http://127.0.0.1:9", "CHECKPOINT": str(tmp_path / "x.pt")}
    answer = python(*TOP, PLAIN, "end", cwd=tmp_path, RANK="1", WORLD_SIZE="2", **environ)
    assert (answer.returncode, "MFU" in answer.stderr) == (0, False), answer.stderr


@pytest.mark.torch
@pytest.mark.parametrize("colour", [True, False])
def test_top_keeps_the_last_line_of_a_terminal_and_gives_it_back(tmp_path: Path, colour: bool) -> None:
    (tmp_path / "loud.py").write_text(
        "import runpy, sys, threading, time\n"
        "shout = lambda: [(print('of the script', n), time.sleep(0.05)) for n in range(60)]\n"
        "threading.Thread(target=shout).start()\n"
        f"sys.argv = ['plain.py', 'end']; runpy.run_path({str(PLAIN)!r}, run_name='__main__')\n"
    )
    environ = {**ENVIRON, "FLOPWATCH_ENDPOINT": "http://127.0.0.1:9", "PACE": "25"}
    environ |= {"CHECKPOINT": str(tmp_path / "x.pt")} | ({} if colour else {"NO_COLOR": "1"})
    with Terminal([sys.executable, *TOP, "loud.py"], environ, tmp_path) as terminal:
        screen = terminal.until(lambda lines: "MFU" in lines[-1] and "of the script 59" in "\n".join(lines))
        assert re.match(r"plain: step \d+, MFU \d+\.\d %, [\d.]+ m?s a step, ", screen[-1])
        assert not any("MFU" in line for line in screen[:-1])
        assert terminal.end() == 0
        assert "MFU" not in terminal.lines[-1]
        assert "plain completed after 24 steps" in "\n".join(terminal.lines)
        assert terminal.written.count(b"of the script") == 60
        assert (b"\x1b[7m" in terminal.written) is colour
        assert terminal.written.rindex(b"\x1b[r") > terminal.written.rindex(b"\x1b[1;23r")  # all lines scroll again
