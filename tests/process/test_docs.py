"""Run the commands in docs/ and the README: each block runs here or in another test, or has a reason why it cannot.

A block without an entry in BLOCKS fails, and so does an entry without its block. The blocks of a page run one after the
other in one shell. They get a loopback of their own where the kernel allows it, so that the default ports are free.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alerts import AlertSettings, rules
from dashboards.__main__ import BOARDS
from demo.pictures import BOARD_HEIGHTS, END, HOME, demo_frame
from demo.servers import find
from demo.stack import StackError
from docs.generate import pages, written
from flopwatch.catalogue import BY_NAME
from flopwatch.node.scrape.compat import ALIASES
from tests.support import ROOT
from tests.support.cases import for_each
from tests.support.commands import assert_commands_exist
from tests.support.machine import PATIENCE

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The pages of the site. CHANGELOG.md is a list of all changes and grows with each.
SITE = [
    *PAGES,
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
    *sorted((ROOT / "alerts" / "runbooks").glob("*.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "RELEASE.md", "SECURITY.md")),
]
MAX_WORDS = 1500
SHELL = ("sh", "bash", "console")


@dataclass(frozen=True)
class Ran:
    """Block that runs here. `before` prepares it, `replace` fills in placeholders, and its output matches `shows`."""

    shows: str = ""
    before: str = ""
    replace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Elsewhere:
    """Block that runs in another test, which sets up what it needs."""

    test: str


@dataclass(frozen=True)
class Needs:
    """Block that cannot run where the tests run."""

    what: str


EXPORTER = (
    "flopwatch exporter --simulate h100x8 --listen 127.0.0.1:9450 --state state >/dev/null 2>&1 &\n"
    "until curl -sf 127.0.0.1:9450/readyz >/dev/null; do sleep 0.1; done"
)
UNTIL_FLOPS = (
    "until curl -s 127.0.0.1:9450/metrics | grep -q '^training_model_flops_total{.*} [1-9]'; do sleep 0.2; done"
)
JOB = f"FLOPWATCH_PUSH_INTERVAL=0.5 python -m simulator.job --out job >/dev/null 2>&1 &\n{UNTIL_FLOPS}"
WAITS = (
    "until curl -s 127.0.0.1:9450/metrics | grep -Eq 'collective_wait.*\"3\"} [0.]*[1-9]'; do sleep 0.2; done\n"
    "until curl -s 127.0.0.1:9450/v1/runs | grep -q first; do sleep 0.2; done"
)
HISTORY = "tests/captures/histories/crash_and_move.jsonl"
WAIT_FOR_LEDGER = (
    "until flopwatch ledger show first --url http://127.0.0.1:9450 2>&1 | grep -q productive; do sleep 0.2; done"
)
LEDGER = f"""flopwatch ledger serve --state books >/dev/null 2>&1 &
until curl -sf 127.0.0.1:9451/healthz >/dev/null; do sleep 0.1; done
curl -sf -o /dev/null -H 'Content-Type: application/json' --data-binary @{HISTORY} 127.0.0.1:9451/v1/snapshots"""
TRAIN = "cp tests/scripts/embedding.py train.py"
# Stand-ins for Slurm's commands on one host. The job's processes end with it, as they do in Slurm.
SLURM = f"""{TRAIN}
export SLURM_JOB_ID=3 SLURM_NNODES=1 SLURM_JOB_NODELIST=127.0.0.1 SLURM_SUBMIT_HOST=127.0.0.1
mkdir -p slurm; PATH=$PWD/slurm:$PATH
printf '%s\\n' '#!/bin/sh' 'while [ "$1" != "${{1#-}}" ]; do [ "$1" != --jobid ] || shift; shift; done' \\
    'exec "$@"' > slurm/srun
printf '%s\\n' '#!/bin/sh' 'echo 127.0.0.1' > slurm/scontrol
printf '%s\\n' '#!/bin/sh' '[ "$*" != "${{*%\\%A}}" ] && echo 3' > slurm/squeue
chmod +x slurm/*
sbatch() {{
    bash -c 'trap "kill \\$(jobs -p) 2>/dev/null; wait" EXIT; trap exit TERM; . ./'$1 > slurm-3.out 2>&1 &
}}"""
CLUSTER, ENGINE = Needs("a Kubernetes cluster"), Needs("a container engine")
PAGE = Elsewhere("tests/process/test_boards.py")
SYSTEMD = Needs("root, and systemd as the first process")

# By page: how the block's first line begins, and how the block is tested.
BLOCKS: dict[str, dict[str, Ran | Elsewhere | Needs]] = {
    "inspector.md": {
        "export NCCL_PROFILER_PLUGIN": Needs("a job with NCCL"),
        "install -d -m 1777": Needs("root"),
        "flopwatch exporter": Elsewhere("tests/process/test_nccl_inspector.py"),
    },
    "README.md": {
        "make demo": Elsewhere("tests/e2e/test_demo.py"),
        "flopwatch run": Elsewhere("tests/torch/test_run_command.py"),
        "flopwatch flops": Ran(
            r"FLOPs per token(.|\n)*NVIDIA H200 bf16: 989.4",
            replace=(("config.json", "tests/captures/configs/llama-3-8b.json"),),
        ),
        "flopwatch exporter": Elsewhere("tests/process/test_command_line.py"),
        "python -m alerts": Elsewhere("tests/process/test_readme.py"),
        "flopwatch boards": PAGE,
        "flopwatch doctor": Elsewhere("tests/process/test_doctor.py"),
        "flopwatch report": Elsewhere("tests/process/test_report.py"),
    },
    "accuracy.md": {
        "flopwatch simulate --scenario stragglers": Elsewhere("tests/rules/test_kinds.py"),
        "flopwatch simulate --scenario parallel": Elsewhere("tests/unit/simulator/test_parallel_judge.py"),
        "flopwatch simulate --scenario verdicts": Elsewhere("tests/unit/simulator/test_confusion.py"),
    },
    "adding.md": {"make generate": Needs("the example of the page in the tree")},
    "alerts.md": {
        "python -m alerts OUT": Ran(
            "OUT/rules/host.yaml\nOUT/rules/run.yaml\nOUT/rules/fleet.yaml\nOUT/optional/dcgm.yaml\nOUT/alertmanager.yml\n"
        ),
        "flopwatch maintenance start": Elsewhere("tests/process/test_maintenance.py"),
    },
    "check.md": {
        "flopwatch check\n": Elsewhere("tests/process/test_check.py"),
        "flopwatch check --record": Elsewhere("tests/process/test_check.py"),
    },
    "compatibility.md": {"victoria-metrics": Elsewhere("tests/process/test_versions.py")},
    "dashboards.md": {"flopwatch boards": PAGE},
    "dcgm.md": {"flopwatch exporter --dcgm": Elsewhere("tests/unit/node/collectors/test_dcgm.py")},
    "first-straggler.md": {
        "make demo": Elsewhere("tests/e2e/test_demo.py"),
        "flopwatch exporter --simulate": Ran(
            r'training_collective_wait_seconds_total\{run="first",rank="3"\} 0*\.?0*[1-9]',
            # A slow machine needs longer, and a fast one less.
            replace=(("sleep 20", WAITS),),
        ),
        "flopwatch ledger list": Ran(
            r"first +running(.|\n)*productive(.|\n)*late ranks \(rank, \d+\.\d% of each step\): rank 2 on ",
            before="until flopwatch ledger show first --url http://127.0.0.1:9450 | grep 'late ranks (rank'; do\n"
            "sleep 1; done",
        ),
    },
    "for-oncall.md": {"flopwatch check -v": Elsewhere("tests/process/test_check.py")},
    "frameworks.md": {"export FLOPWATCH_RUN": Elsewhere("tests/torch/test_frameworks_docs.py")},
    "goodput.md": {"flopwatch ledger replay": Ran("0.760|76.0")},
    "install.md": {
        "docker build": ENGINE,
        "flopwatch doctor": Ran(
            r"\n8\nflopwatch_collector_success\{",
            before=EXPORTER,
            replace=(("flopwatch doctor ", "flopwatch doctor --simulate h100x8 --state other "),),
        ),
    },
    "install-bare-metal.md": {
        "python3 -m venv /opt/flopwatch": SYSTEMD,
        "install -d -m 755": SYSTEMD,
        "install -m 644 contrib/systemd/flopwatch-boards": SYSTEMD,
        "systemctl disable --now": SYSTEMD,
    },
    "install-compose.md": {
        "docker compose -f contrib/compose/compose.yaml up --build": ENGINE,
        "docker compose -f contrib/compose/compose.yaml down --volumes\ndocker": ENGINE,
        "docker compose -f contrib/compose/compose.yaml down --volumes\nNODE_NAME=$(hostname)": ENGINE,
    },
    "install-slurm.md": {"install -m 755 contrib/slurm": SYSTEMD, "#SBATCH": Needs("a Slurm cluster")},
    "ledger.md": {
        "flopwatch ledger list": Ran(
            r"r +completed(.|\n)*run 'r' has completed already(.|\n)*goodput",
            before=LEDGER,
            replace=(
                (" RUN", " r"),
                ("HISTORY.jsonl", HISTORY),
                ("flopwatch ledger close", "! flopwatch ledger close"),
            ),
        )
    },
    "mfu.md": {
        "curl -s 127.0.0.1:9450": Ran(r"training_model_flops_total\{", before=f"{EXPORTER}\n{JOB}"),
        'flopwatch peak "NVIDIA H200"': Ran("NVIDIA H200 bf16: 989.4 TFLOP/s"),
    },
    "model-flops.md": {
        "flopwatch flops Llama-3-8B": Ran(
            "8,030,261,248", replace=(("Llama-3-8B/config.json", "tests/captures/configs/llama-3-8b.json"),)
        )
    },
    "one-gpu.md": {
        "pip install": Elsewhere("tests/process/test_installs.py"),
        "flopwatch exporter": Ran(replace=(("~/flopwatch-state", "state --simulate h100x8"),)),
        "flopwatch run": Ran(
            before=TRAIN, replace=(("train.py", "--peak-flops 1e12 --peak-source test train.py > train.out 2>&1 &"),)
        ),
        "flopwatch top": Ran(r"(?m)^ ?first +0 +[\d,]+ +\d+\.\d % ", before=UNTIL_FLOPS),
        "flopwatch ledger show": Ran("first: running(.|\n)*productive", before=WAIT_FOR_LEDGER),
        "cat > prometheus.yml": Ran(
            "first(.|\n)*FlopwatchWatchdog",
            replace=(
                (
                    "prometheus-data &",
                    "prometheus-data > prometheus.out 2>&1 &\n"
                    # A group of rules may begin an interval later, when the run has ended.
                    "until promtool query instant http://127.0.0.1:9090 training_steps_total 2>&1"
                    " | grep first; do sleep 0.5; done\n"
                    "until promtool query instant http://127.0.0.1:9090 ALERTS 2>&1"
                    " | grep FlopwatchWatchdog; do sleep 0.5; done",
                ),
            ),
        ),
        "flopwatch boards": PAGE,
    },
    "otlp.md": {
        "export FLOPWATCH_ENDPOINT": Ran(),
        "victoria-metrics": Elsewhere("tests/process/test_otlp_out.py"),
        "curl -s 127.0.0.1:8428": Elsewhere("tests/process/test_otlp_out.py"),
    },
    "release.md": {"flopwatch exporter --release 10m": Elsewhere("tests/unit/node/test_driver_release.py")},
    "report.md": {"pip install": Elsewhere("tests/process/test_report.py")},
    "run.md": {"flopwatch run train.py": Elsewhere("tests/torch/test_run_command.py")},
    "simulate.md": {
        "flopwatch simulate --scenario crash_loop\n": Elsewhere("tests/rules/test_fleet.py"),
        "flopwatch simulate --scenario healthy": Elsewhere("tests/rules/test_fleet.py"),
        "flopwatch simulate --scenario crash_loop --history": Ran("history.jsonl|goodput"),
        "flopwatch simulate --scenario leaf_failure --metrics": Elsewhere("tests/rules/test_fleet.py"),
        "python -m demo.rehearsal leaf_failure --pages 1\npython": Elsewhere("tests/rules/test_incidents.py"),
        "python -m demo.rehearsal leaf_failure --pages 1": Elsewhere("tests/rules/test_incidents.py"),
    },
    "slurm-quickstart.md": {
        "pip install": Elsewhere("tests/process/test_installs.py"),
        "(umask 077": Ran(replace=(("/tmp/flopwatch-ledger &", "ledger > ledger.out 2>&1 &"),)),
        "cat > first.sbatch": Ran(
            before=SLURM,
            replace=(
                ("--nproc-per-node 8", "--nproc-per-node 2"),
                ("flopwatch exporter", "flopwatch exporter --simulate h100x8"),
                ('"/tmp/flopwatch-$SLURM_JOB_ID"', "state"),
            ),
        ),
        "flopwatch ledger show": Ran(
            r"first: running, 1 attempts(.|\n)*productive(.|\n)*\n1 slurm-3",
            before="until flopwatch ledger show first --url http://127.0.0.1:9451 --token-file ledger-token 2>&1"
            " | grep -q productive; do sleep 0.2; done",
        ),
        "srun --overlap --jobid": Ran("OK - .* gpus=8 ports=9"),
    },
    "stacks.md": {
        "flopwatch ledger show RUN": Elsewhere("tests/process/test_hang_stacks.py"),
        "flopwatch stacks 4711": Elsewhere("tests/torch/test_collectives.py"),
    },
    "stragglers.md": {
        "flopwatch whatif": Ran("slowdown 1\\.973(.|\n)*replica 0, stage 0 +1\\.979(.|\n)*1 mended +23\\.446 s")
    },
    "tls.md": {
        "flopwatch ledger serve": Elsewhere("tests/process/test_tls.py"),
        "flopwatch exporter --otlp-listen": Elsewhere("tests/process/test_tls.py"),
    },
    "training.md": {"export FLOPWATCH_SUBMITTED_AT": Needs("a Slurm cluster")},
    "tuning.md": {
        "python -m alerts OUT": Ran("SUCCESS: [1-9](.|\n)*SUCCESS"),
        "python - <<'END'": Ran("SUCCESS: [1-9]"),
    },
}
# Pages none of whose blocks can run, with the reason.
WHOLE: dict[str, Needs] = {
    f"kubernetes{name}.md": CLUSTER for name in ("", "-clouds", "-gitops", "-monitoring", "-quickstart", "-schedulers")
}


def commands(page: Path) -> list[str]:
    """Return the text of each command block of a page, without prompts and output."""
    blocks = []
    for indent, language, text in re.findall(
        r"^( *)```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        typed = [line[2:] for line in lines if line.startswith("$ ")]
        if typed:
            blocks.append("\n".join(line for line in typed if line != "echo $?") + "\n")
        elif language in SHELL or re.match(r"(flopwatch|python|torchrun|curl|export|kubectl|docker) ", lines[0]):
            blocks.append("\n".join(lines) + "\n")
    return blocks


def classified(page: Path) -> list[tuple[str, Ran | Elsewhere | Needs]]:
    """Return each block of a page with its entry in BLOCKS. Raises AssertionError for a block without an entry."""
    entries = BLOCKS.get(page.name, {})
    blocks: list[tuple[str, Ran | Elsewhere | Needs]] = []
    left = set(entries)
    for text in commands(page):
        if page.name in WHOLE:
            blocks.append((text, WHOLE[page.name]))
            continue
        keys = sorted((key for key in left if text.startswith(key)), key=len)
        assert keys, f"{page.name}: say in BLOCKS what becomes of the block that begins\n{text}"
        left.remove(keys[-1])
        blocks.append((text, entries[keys[-1]]))
    assert left == set(), f"{page.name} has no such block: {left}"
    return blocks


@for_each(PAGES, lambda page: page.name)
def test_every_block_has_an_entry(page: Path) -> None:
    for text, what in classified(page):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert not isinstance(what, Elsewhere) or (ROOT / what.test).is_file()
        text = re.sub(r"(flopwatch run (?:\S+ )*?(?:train\.py|-m \S+)).*", r"\1", text)  # the rest is the script's
        joined = re.sub(r" *\\\n *", " ", re.sub(r"^(?:[A-Z_]+=\S+ )+", "", text, flags=re.M))
        assert_commands_exist(re.sub(r"(?m)(^|\| )\S*/flopwatch ", r"\1flopwatch ", joined).replace(" #", "\n#"))


def test_pages_that_are_listed_exist() -> None:
    assert {*BLOCKS, *WHOLE} <= {page.name for page in PAGES}


LOOPBACK = """
import fcntl, os, socket, struct, sys
with socket.socket() as any_:
    fcntl.ioctl(any_, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running; netdevice(7)
os.execvp(sys.argv[1], sys.argv[1:])
"""
IN_NAMESPACE = ["unshare", "--map-root-user", "--net", sys.executable, "-c", LOOPBACK]


def own_loopback() -> bool:
    """Return whether this machine allows a private network namespace with its own loopback."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, timeout=PATIENCE).returncode == 0
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(isinstance(what, Ran) for what in BLOCKS.get(page.name, {}).values())],
    ids=lambda page: page.stem,
)
def test_the_blocks_that_can_run_do(page: Path, tmp_path: Path) -> None:
    if not own_loopback():
        pytest.skip("the kernel gives no network namespace (unshare --net), and the default ports may be others'")
    for entry in ROOT.iterdir():  # so that written files stay here
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    # Servers that a block leaves in the background belong to this shell and end with it.
    script, wanted = ["set -eu", "trap 'jobs=$(jobs -p); test -z \"$jobs\" || kill $jobs; wait' EXIT"], []
    for number, (text, what) in enumerate(classified(page)):
        if isinstance(what, Ran):
            for old, new in what.replace:
                assert old in text
                text = text.replace(old, new)
            script += [what.before, f"echo '### {number}'", text]
            wanted.append((number, what.shows))
    servers = find()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "exporter"),
        "TMPDIR": str(tmp_path),
        "PATH": ":".join(
            [
                str(Path(sys.executable).parent),
                str(Path(servers.promtool).parent),
                str(Path(servers.amtool).parent),
                os.environ["PATH"],
            ]
        ),
    }
    with subprocess.Popen(
        [*IN_NAMESPACE, "bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as shell:
        try:
            output, _ = shell.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            raise
    assert shell.returncode == 0, output
    parts = {int(number): rest for number, rest in re.findall(r"^### (\d+)\n(.*?)(?=^### |\Z)", output, re.M | re.S)}
    for number, shows in wanted:
        assert re.search(shows, f"\n{parts[number]}"), output


@pytest.mark.parametrize("name", ["dcgm", "faq", "first-straggler", "threats"])
def test_every_series_that_is_named_exists(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    series = re.compile(r"(?<![\w./:\"-])(?:gpu|training|run|infiniband|nvlink|flopwatch)_[a-z_]+(?![\w*/-])")
    named = {name for quoted in re.findall(r"`([^`\n]+)`", text) for name in series.findall(quoted)}
    assert named
    assert {one for one in named if one not in BY_NAME and not one.endswith("_")} == set()


def test_what_people_write_on_a_page_is_short() -> None:
    generated = pages()
    words = {page.relative_to(ROOT).as_posix(): len(written(page, generated).split()) for page in SITE}
    assert words["docs/metrics.md"] == 0 < words["docs/check.md"] < len((ROOT / "docs/check.md").read_text().split())
    # Delete what repeats on these, or make two pages for two readers.
    assert {page: count for page, count in words.items() if count >= MAX_WORDS} == {}


@for_each(sorted((ROOT / "docs").glob("for-*.md")), lambda page: page.name)
def test_the_page_for_a_persona_is_short_and_names_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 400
    alerts = set(re.findall(r"\b(?:Training|Gpu|Node|Leaf|Infiniband|Flopwatch)[A-Z]\w+", text))
    assert {name for name in alerts if not (ROOT / "alerts" / "runbooks" / f"{name}.md").is_file()} == set()
    boards = {board["title"] for board in BOARDS.values()}
    for header, rows in re.findall(r"^\| question \|(.*)\|\n\|.*\n((?:\|.*\n)+)", text, re.M):
        if header.split("|")[0].strip() == "board":
            named = [name for row in rows.splitlines() for name in row.split("|")[2].strip().split(", ") if name]
            assert len(named) >= 5
            assert set(named) <= boards
    assert_commands_exist("\n".join(re.findall(r"`(flopwatch [^`]+)`", text)))


def test_each_page_of_the_table_for_the_engineer_on_call_is_one() -> None:
    text = (ROOT / "docs" / "for-oncall.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| ([A-Z][\w, ]+) \|", text, re.M) for name in row.split(", ")}
    groups: Any = rules(AlertSettings())["groups"]
    pages = {
        rule["alert"]
        for group in groups
        for rule in group["rules"]
        if rule.get("labels", {}).get("severity") == "critical" and "alert" in rule
    }
    assert len(named) >= 8
    assert named <= pages


def test_each_picture_is_small_and_taken_by_make_screenshots() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in SITE
        for name in re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page.read_text(encoding="utf-8"))
    }
    taken = {ROOT / "docs" / f"{name}.png" for name in (*BOARD_HEIGHTS, "demo", "report")}
    assert shown == taken == set((ROOT / "docs").glob("*.png"))
    assert [path for path in shown if path.stat().st_size > 350_000] == []
    assert "python -m demo.pictures docs" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_picture_of_the_demo_is_its_last_frame_with_the_message() -> None:
    output = f"start{HOME}first{HOME}Slack [FIRING] one{HOME}Slack [FIRING] two\n\n{HOME}after the message{END}[FIRING]"
    assert demo_frame(output) == "Slack [FIRING] two"
    with pytest.raises(StackError, match="no message within 100 s"):
        demo_frame(f"start{HOME}first")


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@for_each(PAGES, lambda page: page.name)
def test_every_link_to_a_section_leads_to_one(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        text = ((page.parent / link) if link else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
        assert anchor in map(slug, headings), f"{link}#{anchor}"


def test_dcgm_exporters_names_in_the_table_are_names_that_we_know() -> None:
    text = (ROOT / "docs" / "dcgm.md").read_text(encoding="utf-8").partition("## Moving")[2]
    named = set(re.findall(r"^\| `(DCGM_[A-Z_]+)`", text, re.M))
    assert len(named) >= 8
    assert named <= {name for alias in ALIASES for name in (alias.old, alias.new)}
