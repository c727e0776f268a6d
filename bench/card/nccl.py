"""Section `nccl`: eight ranks with tensor, pipeline and data parallelism over NCCL on one GPU.

One rank is late or stops. The exporters of two hosts and a ledger name it. The exporters ask NCCL's RAS and read NCCL
Inspector's files. All raw answers are kept in the folder of the report. CARD_NCCL is a folder with a newer NCCL
(libnccl.so.2) and the plugins of both (inspector-VERSION.so). Without it only the NCCL of PyTorch is tested.
CARD_NCCL_SETUPS names some of the jobs, separated by commas.

    python -m bench.card.nccl cpu OUT

tests everything but NCCL with gloo.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "exporter"))

from bench.card import nccl_ras
from bench.card.nccl_rank import ENVIRON, RAS_PORT, answer_questions, host_of, measure_cost, prepare
from bench.card.report import Report, Unavailable, shortened
from bench.parallel import ALL, KINDS, Outcome, Page
from flopwatch.node.telemetry.inspector_formats import of_line
from tests.support import ledger_process
from tests.support.exporter_process import Exporter, exporter
from tests.support.parallel_job import HOSTS, SIZE, Control, Platform, Trial, start

USUAL = 12  # steps before a rank stops, more than those after which the exporter asks RAS
LATE = 0.4  # seconds of a step
FAULTS = {"tp": (5, 2), "dp": (2, 0), "pp": (5, 1), "": (None, 0)}  # rank, and microbatch in which it stops
STARTS_IN, ENDS_IN = 110.0, 25.0  # seconds
LIMITS = {"healthy": 25.0, "late": 75.0, "missing": 60.0}  # seconds of a trial after its first steps
RAS_ANSWERS_IN = 8.0  # seconds after the rank was named
ANSWERS_IN = 6.0  # seconds for the ranks to write what they know
LEAST = 80.0  # seconds that must be left to begin a trial
HAS_CUDA = "import torch; raise SystemExit(not torch.cuda.is_available())"
PLUGIN = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "1000000"}
PLUGIN |= {"NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES": "0"}
SERIES = ("run_straggler", "run_hang", "run_whatif", "run_imbalance", "run_communication")


class Setup(NamedTuple):
    """Job of eight ranks: kinds of its trials, whether NCCL is the newer one, and the plugin."""

    name: str
    kinds: tuple[str, ...]
    newer: bool = False
    plugin: str = ""
    textfile: bool = False
    cost: bool = False


FIVE = ("missing in tp", "late in tp", "missing in pp", "missing in dp", "healthy")
GPU_SETUPS = (
    Setup("newer", FIVE, newer=True, plugin="inspector-2.30.7.so"),
    Setup("own", ("missing in tp", "late in tp"), cost=True),
    Setup("textfile", ("healthy",), newer=True, plugin="inspector-2.30.7.so", textfile=True),
    Setup("own-plugin", ("healthy",), plugin="inspector-2.28.9.so"),
)
CPU_SETUPS = (Setup("gloo", FIVE, cost=True),)


class Site(NamedTuple):
    """Ledger and exporters, folders for raw answers, NCCL and NCCL Inspector, and the device of the ranks."""

    ledger: ledger_process.Ledger
    hosts: list[Exporter]
    folder: Path
    nccl: Path | None
    device: str


@contextmanager
def site(folder: Path, device: str) -> Iterator[Site]:
    """Start a ledger and the exporters of two hosts."""
    nccl = Path(os.environ["CARD_NCCL"]) if os.environ.get("CARD_NCCL") else None
    with ExitStack() as opened:
        state = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        (folder / "inspector").mkdir(parents=True)
        ledger = opened.enter_context(ledger_process.serving(state / "ledger"))
        flags = ("--ledger", f"http://127.0.0.1:{ledger.port}", "--inspector", str(folder / "inspector"))
        hosts = [
            opened.enter_context(
                exporter(state / f"node-{one}", *flags, "--host", f"node-{one}", "--ras", f"localhost:{RAS_PORT + one}")
            )
            for one in range(HOSTS)
        ]
        try:
            yield Site(ledger, hosts, folder, nccl, device)
        finally:
            for one, host in enumerate(hosts):
                (folder / f"exporter-{one}.log").write_text(host.log)


class Job:
    """Running ranks of a setup."""

    def __init__(self, setup: Setup, outcomes: list[Outcome], where: Site) -> None:
        self.setup, self.site, self.folder = setup, where, where.folder / setup.name
        self.folder.mkdir()
        endpoints = [f"http://{host.otlp}" for host in where.hosts]
        trials = [one.trial for one in outcomes]
        self.control: Control
        self.control, self.pids = start(self.folder, ALL, trials, endpoints, self._platform())
        self._alive = set(self.pids)

    def _platform(self) -> Platform:
        setup, folder, nccl = self.setup, self.folder, self.site.nccl
        environ: dict[str, str] = dict(ENVIRON)
        if setup.plugin and nccl is not None:
            files = self.site.folder / "inspector" / setup.name
            files.mkdir()
            environ |= PLUGIN | {
                "NCCL_PROFILER_PLUGIN": str(nccl / setup.plugin),
                "NCCL_INSPECTOR_DUMP_DIR": str(files),
            }
            environ |= {"NCCL_INSPECTOR_PROM_DUMP": "1"} if setup.textfile else {}
        library = nccl / "libnccl.so.2" if setup.newer and nccl is not None else None
        common: dict[str, Any] = {"usual": USUAL, "begun": lambda rank, groups: answer_questions(rank, folder)}
        common["prepare"] = partial(prepare, folder=folder, environ=environ, library=library)
        if setup.cost:
            device = self.site.device
            common["ended"] = lambda rank, groups: measure_cost(rank, device, folder)
        if self.site.device == "cpu":
            return Platform(**common)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        return Platform("nccl", "cuda", rendezvous, declares_waits=not setup.plugin, **common)

    def check(self) -> None:
        """Raise RuntimeError with the last error in the log of a rank that has failed."""
        for rank, pid in enumerate(self.pids):
            if pid in self._alive:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._alive.discard(pid)
                    if status:
                        text = (self.folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
                        error = next((line for line in reversed(text) if "Error" in line), "no error in its log")
                        code = os.waitstatus_to_exitcode(status)
                        raise RuntimeError(f"rank {rank} ended with {code}: {error[:300]}")

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until a condition is true. Raises TimeoutError after so many seconds, RuntimeError if a rank fails."""
        end = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s")
            time.sleep(0.1)

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended."""
        self.check()
        return not self._alive

    def kill(self) -> None:
        """End the ranks that are left."""
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def ask(self, name: str) -> None:
        """Have the ranks write what they know, and wait for most of it."""
        (self.folder / f"ask-{name}").touch()
        with suppress(TimeoutError):
            self.wait(lambda: len(list(self.folder.glob(f"{name}-rank-*.done"))) == SIZE, ANSWERS_IN, "answers")


def outcome_of(setup: Setup, kind: str) -> Outcome:
    """Return a trial of a kind that has not begun."""
    _, where, late = KINDS[kind]
    rank, at = FAULTS[where]
    name = f"{setup.name}-{kind}".replace(" ", "-")
    return Outcome(kind, Trial(name, rank, where, LATE if late else 0.0, at), ALL)


def try_one(number: int, one: Outcome, job: Job, report: Report) -> None:
    """Judge one trial by the ledger's page, store its evidence, and end it."""
    control, trial, setup = job.control, one.trial, job.setup
    label = f"{setup.name}.{one.kind}".replace(" ", "_")
    job.wait(lambda: control.steps[number] >= USUAL, STARTS_IN, f"{USUAL} steps")
    began, taken = time.monotonic(), control.steps[number]
    missing = trial.rank is not None and trial.late == 0
    limit = LIMITS[one.kind.partition(" ")[0]]
    while (seconds := time.monotonic() - began) < limit:
        one.judge(Page(job.site.ledger), seconds)
        if one.done and not (missing and seconds < (one.after or 0.0) + RAS_ANSWERS_IN):
            break
        time.sleep(1.0)
        job.check()
    if not missing:
        steps = control.steps[number] - taken
        report.info(f"{label}.step", f"{(time.monotonic() - began) / max(1, steps):.2f} s a step, {steps} steps")
    trial_line(one, label, report)
    store(one, job, label, report)
    if missing or trial.rank is None:
        ask_ras(one, job, label, report)
        job.ask(trial.run)
        flight_recorder_lines(one, job, label, report)
    control.end(number)
    job.wait(lambda: control.steps[number] >= control.last[number], ENDS_IN, "the end of the trial")


def trial_line(one: Outcome, label: str, report: Report) -> None:
    """Judge whether the late or missing rank was named with its line, and no other."""
    wrong = f", wrong: {shortened(one.wrong)}" if one.wrong else ""
    if one.trial.rank is None:
        known = "judged" if one.judged else "too early to judge"
        report.check(label, False if one.wrong else one.judged or None, known + wrong, "no rank")
    else:
        after = "not named" if one.after is None else f"named after {one.after:.0f} s, {one.line or 'no line'}"
        report.check(label, one.right, after + wrong, f"rank {one.trial.rank} with its line")


def store(one: Outcome, job: Job, label: str, report: Report) -> None:
    """Write the pages of ledger and exporters. Report the verdict's series."""
    run, folder = one.trial.run, job.folder
    page = job.site.ledger.ask("GET", "/metrics")[1]
    rows = [row for row in page.splitlines() if f'run="{run}"' in row]
    (folder / f"{run}-ledger.txt").write_text("\n".join(rows) + "\n")
    (folder / f"{run}-stacks.txt").write_text(job.site.ledger.ask("GET", f"/v1/runs/stacks?run={run}")[1])
    (folder / f"{run}-run.json").write_text(job.site.ledger.ask("GET", f"/v1/runs?run={run}")[1])
    for number, host in enumerate(job.site.hosts):
        (folder / f"{run}-exporter-{number}.txt").write_text(host.get("/metrics"))
    for row in rows:
        if row.startswith(SERIES):
            report.info(f"{label}.ledger", row)


def ask_ras(one: Outcome, job: Job, label: str, report: Report) -> None:
    """Store dialogues with the RAS of each host. Report the results of flopwatch's query and parser."""
    for host, running in enumerate(job.site.hosts):
        counted = {
            name.partition("outcome=")[2].rstrip("}"): int(value)
            for name, value in running.series().items()
            if name.startswith("flopwatch_nccl_ras_queries_total") and value
        }
        report.info(f"{label}.ras_exporter_{host}", counted or "not asked")
        pids = {rank: pid for rank, pid in enumerate(job.pids) if host_of(rank) == host}
        port, path = RAS_PORT + host, job.folder / f"{one.trial.run}-ras-{host}"
        try:
            raw = nccl_ras.dialogue(port, nccl_ras.JSON, path.with_suffix(".json.txt"))
            path.with_suffix(".json").write_bytes(raw)
        except OSError as error:
            report.info(f"{label}.ras_{host}", f"no answer: {error}")
            continue
        report.info(f"{label}.ras_{host}", f"{len(raw)} bytes: {nccl_ras.judged(raw, pids)}")
        answer = nccl_ras.queried(port, pids)
        report.info(f"{label}.ras_query_{host}", answer)
        if host == 0 and one.trial.where in ("tp", "dp") and job.setup.newer:
            ras_line(one, answer, label, report)
        if job.setup.newer:  # before 2.29.2 the text can damage the process that answers
            with suppress(OSError):
                nccl_ras.dialogue(port, nccl_ras.TEXT, path.with_suffix(".text.txt"))


def ras_line(one: Outcome, answer: Mapping[str, Any], label: str, report: Report) -> None:
    """Judge whether the missing rank is behind in a communicator."""
    fewest = [ranks for _, ranks in answer.get("behind", ())]
    report.check(f"{label}.ras_names", str(one.trial.rank) in fewest, answer, f"rank {one.trial.rank}")


def flight_recorder_lines(one: Outcome, job: Job, label: str, report: Report) -> None:
    """Report what the flight recorder of the missing rank and of another gave."""
    for rank in dict.fromkeys((one.trial.rank or 0, (one.trial.rank or 0) ^ 1)):
        path = job.folder / f"{one.trial.run}-rank-{rank}.json"
        if not path.exists():
            report.info(f"{label}.flight_recorder_{rank}", "not written")
            continue
        found = json.loads(path.read_text())
        for name in ("about", "groups", "text", "text with operations"):
            report.info(f"{label}.rank_{rank}", f"{name}: {found.get(name)}")
        report.facts.setdefault("seconds", {})[f"{label}-{rank}"] = {k: v["seconds"] for k, v in found.items()}


def inspector_lines(job: Job, report: Report) -> None:
    """Report what the reader makes of the plugin's files, and what the exporters counted."""
    for path in sorted((job.site.folder / "inspector" / job.setup.name).rglob("*")):
        if path.suffix == ".log":
            counts: Counter[str] = Counter()
            for line in path.read_bytes().splitlines():
                try:
                    found = of_line(line)
                    counts[f"{found.kind} of {found.member.size} {found.member.name}" if found else "other"] += 1
                except ValueError:
                    counts["malformed"] += 1
            report.info(f"{job.setup.name}.inspector_file", f"{path.name}: {dict(counts)}")
        elif path.is_file():
            report.info(f"{job.setup.name}.inspector_file", f"{path.name}: {path.stat().st_size} bytes")
    for number, host in enumerate(job.site.hosts):
        counted = {name: value for name, value in host.series().items() if "nccl_inspector" in name}
        report.info(f"{job.setup.name}.inspector_exporter_{number}", counted)


def cost_lines(job: Job, report: Report) -> None:
    """Report the cost of a read of the process groups, if ranks measured it."""
    for path in sorted(job.folder.glob("cost-rank-[01].json")):
        report.info(f"{job.setup.name}.cost", f"{path.stem}: {json.loads(path.read_text())}")


def time_is_over(name: str, report: Report) -> bool:
    """Return whether too little time is left to begin something, and report it."""
    over = report.end - time.monotonic() < LEAST
    if over:
        report.info(f"{name}.time", "not run, because the time is over")
    return over


def run_setup(setup: Setup, where: Site, report: Report) -> None:
    """Run the trials of a setup. Raises an exception if a rank fails or takes too long."""
    outcomes = [outcome_of(setup, kind) for kind in setup.kinds]
    job = Job(setup, outcomes, where)
    over = threading.Event()
    try:
        for number, one in enumerate(outcomes):
            if time_is_over(one.trial.run, report):
                return
            try_one(number, one, job, report)
            if number == 0 and setup.newer:
                nccl_ras.monitor(RAS_PORT, job.folder / "monitor.jsonl", over)
        job.wait(lambda: job.ended, ENDS_IN + (ENDS_IN if setup.cost else 0), "the end of the ranks")
        cost_lines(job, report)
    finally:
        over.set()
        job.kill()
        if setup.plugin:
            inspector_lines(job, report)


def run_setups(setups: Sequence[Setup], where: Site, report: Report) -> None:
    """Run setups until the time is over. An exception is a FAIL line of its setup."""
    for setup in setups:
        if (setup.newer or setup.plugin) and where.nccl is None:
            report.info(f"{setup.name}.unavailable", "CARD_NCCL has no folder with a newer NCCL and its plugins")
        elif not time_is_over(setup.name, report):
            try:
                run_setup(setup, where, report)
            except Exception as error:
                report.check(f"{setup.name}.ran", False, f"{type(error).__name__}: {error}", "all trials")


def run_chosen(device: str, report: Report) -> None:
    """Run the setups of a device, or those in CARD_NCCL_SETUPS."""
    chosen = os.environ.get("CARD_NCCL_SETUPS", "")
    setups = GPU_SETUPS if device == "cuda" else CPU_SETUPS
    with site(report.folder / "nccl", device) as where:
        run_setups([setup for setup in setups if not chosen or setup.name in chosen.split(",")], where, report)


def section(device: str, seconds: float, report: Report) -> None:
    """Run the setups with NCCL. Raises Unavailable."""
    if device != "cuda":
        raise Unavailable(f"needs CUDA, and --device is {device}")
    # Forked ranks cannot use CUDA if this process has initialized it.
    if subprocess.run([sys.executable, "-c", HAS_CUDA], check=False).returncode != 0:
        raise Unavailable("PyTorch finds no CUDA device")
    run_chosen(device, report)


if __name__ == "__main__":
    run_chosen(sys.argv[1], Report("nccl", "", print, folder=Path(sys.argv[2])))
