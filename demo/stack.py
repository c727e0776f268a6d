"""Start and stop the whole chain on free loopback ports: receiver, Alertmanager, Prometheus, exporter, training job.

Every program runs in its own session and writes to a log file in the state folder. The kernel kills the program when
this process dies for any reason (prctl(2), PR_SET_PDEATHSIG, through setpriv of util-linux). The kernel also kills it
when the thread that started it ends. So one thread must create a `DemoStack` and outlive it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal

from alerts import AlertSettings, alertmanager_yaml, rules_yaml
from demo import boards
from demo.boards import DashboardViewer
from demo.receiver import Receiver
from demo.servers import ROOT, Servers, find
from simulator.host import SimulatedNode

GRACE = 10.0  # seconds a program has to end after SIGTERM
_PORTS = range(20000, 32768)  # below net.ipv4.ip_local_port_range of Linux
MARK = "FLOPWATCH_DEMO_STACK"  # in the environment of every process of a stack, so that all can be found
Labels = dict[str, str]
Train = Literal["torch", "simulated"]


class StackError(RuntimeError):
    """Raised if a program of the demo fails or does not answer. The message may have the end of the program's log."""


class PrometheusApi:
    """Client for the queries of the HTTP API of Prometheus.

    Queries raise ValueError if Prometheus rejects them, and StackError if Prometheus does not answer.

    API: https://prometheus.io/docs/prometheus/latest/querying/api/
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: object, at: float | None = None) -> list[tuple[Labels, float]]:
        """Return labels and value of each series of an instant query at Unix time `at`, now by default."""
        data = self._get("query", {"query": str(expr), **({} if at is None else {"time": at})})
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def value(self, expr: object, at: float | None = None) -> float | None:
        """Return the value of an instant query with one series, None without series. Raises ValueError for several."""
        found = self.query(expr, at)
        if len(found) > 1:
            raise ValueError(f"{expr} has {len(found)} series")
        return found[0][1] if found else None

    def query_range(
        self, expr: object, start: float, end: float, step: float
    ) -> list[tuple[Labels, list[tuple[float, float]]]]:
        """Return labels and (Unix time, value) points of each series between two Unix times, every `step` seconds."""
        data = self._get("query_range", {"query": str(expr), "start": start, "end": end, "step": step})
        return [
            (series["metric"], [(float(at), float(value)) for at, value in series["values"]])
            for series in data["result"]
        ]

    def _get(self, path: str, parameters: Mapping[str, object]) -> Any:
        try:
            reply = json.loads(fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        except urllib.error.HTTPError as error:
            reply = json.loads(error.read())
        except OSError as error:
            raise StackError(f"Prometheus does not answer: {error}") from error
        if reply["status"] != "success":
            raise ValueError(f"{parameters['query']}: {reply['error']}")
        return reply["data"]


class Child:
    """Child process in its own session that logs to a file and is killed when this process dies."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self.environ, self.log = name, command, environ, log
        self.start()

    def start(self) -> None:
        """Start the program and append its output to the log. Can be called again after the program has ended."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self.command],
                cwd=ROOT,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def failure(self, what: str) -> StackError:
        """Return a StackError with the end of the log. The message is the program's name, followed by `what`."""
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return StackError("\n  ".join([f"{self.name} {what}; the end of {self.log}:", *lines]))

    def check(self) -> None:
        """Raise StackError if the program failed."""
        if self.process.poll():
            raise self.failure(f"ended with status {self.process.returncode}")

    def stop(self, kill: bool = False, grace: float = GRACE) -> None:
        """End the program by SIGTERM, then by SIGKILL after `grace` seconds. With `kill`, send SIGKILL at once."""
        if self.process.poll() is None and not kill:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                kill = True
        if kill:
            self.process.kill()
        self.process.wait()


class DemoStack:
    """Context manager that runs the whole chain, from the simulated GPU to the Slack message.

    `pace` divides every window and interval of the shipped alerts. `train` chooses the job on the simulated node.
    `trainer` has further arguments for the job, and `exporter` for the exporter. With `shows`, dashboards are shown if
    possible (demo/boards.py). With `ledger`, the ledger is a process of its own. Query and disturb the stack through
    `prometheus`, `receiver`, `node` and `control`. The job logs to `train_log`.
    """

    def __init__(
        self,
        state: Path,
        *,
        pace: float = 15.0,
        push_interval: float = 1.0,
        train: Train | None = "torch",
        trainer: Sequence[str] = (),
        exporter: Sequence[str] = (),
        run: str = "demo",
        ranks: int = 4,
        servers: Servers | None = None,
        shows: bool = False,
        ledger: bool = False,
    ) -> None:
        self.state, self.pace, self.push_interval = state.absolute(), pace, push_interval
        self.train, self.trainer, self.exporter, self.run, self.ranks = train, trainer, exporter, run, ranks
        self.servers = find() if servers is None else servers
        self.show: DashboardViewer | None = None
        self._shows, self._ledger = shows, ledger
        self.children: dict[str, Child] = {}
        self.mark = uuid.uuid4().hex
        (
            self.prometheus_address,
            self.alertmanager_address,
            self.exporter_address,
            self.otlp_address,
            self.boards_address,
            self.ledger_address,
        ) = (f"127.0.0.1:{port}" for port in free_ports(6))
        self.prometheus = PrometheusApi(f"http://{self.prometheus_address}")
        self.node = SimulatedNode(self.state / "exporter" / "simulated")
        self.train_log = self.state / "train.jsonl"
        self.control_file = self.state / "control.json"

    def __enter__(self) -> DemoStack:
        self.state.mkdir(parents=True, exist_ok=True)
        self.receiver = Receiver()
        try:
            self._start()
        except BaseException:
            self.stop(kill=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        secrets = self.state / "secrets"
        secrets.mkdir(exist_ok=True)
        (secrets / "slack-url").write_text(f"{self.receiver.url}/slack")
        (secrets / "pagerduty-key").write_text("0123456789abcdef" * 2)
        settings = AlertSettings(
            pace=self.pace,
            slack_url_file=secrets / "slack-url",
            pagerduty_key_file=secrets / "pagerduty-key",
            pagerduty_url=f"{self.receiver.url}/v2/enqueue",
            watchdog_url=f"{self.receiver.url}/watchdog",
        )
        self._start_alertmanager(settings)
        if self.servers.alertmanager:
            # Before Prometheus, which repeats a failed delivery only after a minute, at any pace.
            self._wait_for("alertmanager", f"http://{self.alertmanager_address}/-/ready")
        self._start_prometheus(settings)
        if self._ledger:
            state = self.state / "ledger"
            command = [sys.executable, "-m", "flopwatch", "ledger", "serve", "--state", str(state)]
            self._launch("ledger", *command, "--listen", self.ledger_address)
            self._wait_for("ledger", f"http://{self.ledger_address}/healthz")
        self._launch(
            "exporter",
            sys.executable,
            "-m",
            "flopwatch",
            "exporter",
            "--listen",
            self.exporter_address,
            "--otlp-listen",
            self.otlp_address,
            "--state",
            str(self.state / "exporter"),
            "--simulate",
            "h100x8",
            "--ledger",
            f"http://{self.ledger_address}" if self._ledger else "embedded",
            "--new-for",
            f"{60 / self.pace:g}",
            *self.exporter,
        )
        self._wait_for("exporter", f"http://{self.exporter_address}/readyz")
        self._wait_for("prometheus", f"{self.prometheus.url}/-/ready")
        if self._shows:
            self._start_boards()
        if self.train is not None:
            self.start_training(self.train, self.trainer)

    def _start_boards(self) -> None:
        self.show = boards.find(
            self.boards_address,
            self.prometheus.url,
            self.state / "boards",
            AlertSettings().scrape_interval / self.pace,
            (sys.executable, "-m", "flopwatch", "boards"),
        )
        if self.show is not None:
            self._launch("boards", *self.show.command, environ=self.show.environ)
            try:
                self._wait_for("boards", self.show.ready, 300.0)  # the image may have to be fetched
            except StackError as error:
                # The demo continues without dashboards.
                print(f"  no dashboards: {error}", flush=True)
                self.children.pop("boards").stop(kill=True)
                self.show = None

    def _start_alertmanager(self, settings: AlertSettings) -> None:
        if not self.servers.alertmanager:
            return
        folder = self.state / "alertmanager"
        folder.mkdir(exist_ok=True)
        (folder / "alertmanager.yml").write_text(alertmanager_yaml(settings))
        self._launch(
            "alertmanager",
            *self.servers.alertmanager,
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder}",
            f"--web.listen-address={self.alertmanager_address}",
            f"--web.external-url=http://{self.alertmanager_address}",
            "--cluster.listen-address=",
        )

    def _start_prometheus(self, settings: AlertSettings) -> None:
        folder = self.state / "prometheus"
        folder.mkdir(exist_ok=True)
        (folder / "rules.yaml").write_text(rules_yaml(settings))
        interval = settings.at_pace(settings.scrape_interval)
        targets = [self.alertmanager_address] if self.servers.alertmanager else []
        scraped = [("flopwatch", self.exporter_address, interval)]
        if self._ledger:
            scraped.append(("flopwatch-ledger", self.ledger_address, settings.at_pace(settings.ledger_interval)))
        configuration = {  # JSON is YAML
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": [str(folder / "rules.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": targets}]}]},
            "scrape_configs": [
                {"job_name": job, "scrape_interval": every, "static_configs": [{"targets": [address]}]}
                for job, address, every in scraped
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration, indent=2))
        self._launch(
            "prometheus",
            *self.servers.prometheus,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=1d",
            f"--web.listen-address={self.prometheus_address}",
            f"--web.external-url={self.prometheus.url}",
        )

    def start_training(self, kind: Train, arguments: Sequence[str] = ()) -> None:
        """Start the training job, one rank on each of the first simulated GPUs."""
        uuids = ",".join(self.node.uuid(rank) for rank in range(self.ranks))
        job = [
            "--out",
            str(self.state / "train"),
            "--log-file",
            str(self.train_log),
            "--control",
            str(self.control_file),
            "--gpu-uuids",
            uuids,
            *arguments,
        ]
        if kind == "torch":
            # Workers would outlive a torchrun that is killed, so each gets its own death signal.
            command = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local-addr",
                "127.0.0.1",
                "--nproc-per-node",
                str(self.ranks),
                "--max-restarts",
                "3",
                "--no-python",
                "setpriv",
                "--pdeathsig",
                "KILL",
                "--",
                sys.executable,
                "examples/train_lm.py",
            ]
        else:
            command = ["-m", "simulator.job", "--ranks", str(self.ranks)]
        (self.state / "tmp").mkdir(exist_ok=True)
        self._launch(
            "training",
            sys.executable,
            *command,
            *job,
            environ={
                "OMP_NUM_THREADS": "1",
                "FLOPWATCH_RUN": self.run,
                "FLOPWATCH_ENDPOINT": f"http://{self.otlp_address}",
                "FLOPWATCH_PUSH_INTERVAL": str(self.push_interval),
                "FLOPWATCH_SUBMITTED_AT": str(time.time()),
                "TMPDIR": str(self.state / "tmp"),
            },
        )

    def control(self, **wishes: object) -> None:
        """Replace the control file, which switches faults of the job at its next step: `control(slow={"2": 0.3})`."""
        draft = self.control_file.with_suffix(".part")
        draft.write_text(json.dumps(wishes))
        draft.replace(self.control_file)

    def rank_pid(self, rank: int) -> int:
        """Return the process id of one rank of the training job."""
        return int((self.state / "train" / "pids" / str(rank)).read_text())

    def restart_exporter(self, kill: bool = True) -> None:
        """End the exporter, by SIGKILL if `kill` is True, else by SIGTERM. Start it again on the same ports."""
        exporter = self.children["exporter"]
        exporter.stop(kill=kill)
        exporter.start()
        self._wait_for("exporter", f"http://{self.exporter_address}/readyz")

    def check(self) -> None:
        """Raise StackError if a program of the stack failed."""
        for child in self.children.values():
            child.check()

    def stop(self, kill: bool = False) -> None:
        """End all programs, the training job first. Raises StackError if a process or an open port is left."""
        for name in ("training", "boards", "exporter", "ledger", "prometheus", "alertmanager"):
            if name in self.children:
                self.children[name].stop(kill)
        self.receiver.close()
        deadline = time.monotonic() + GRACE
        while left := self.kill():
            if time.monotonic() > deadline:
                raise StackError(f"processes {left} did not end")
            time.sleep(0.02)
        for address in (
            self.prometheus_address,
            self.alertmanager_address,
            self.exporter_address,
            self.otlp_address,
            self.boards_address,
            self.ledger_address,
        ):
            host, _, port = address.partition(":")
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    raise StackError(f"{address} is still open")

    def kill(self) -> list[int]:
        """Kill all processes of this stack, including orphans, and return their ids."""
        found = self.processes()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def processes(self) -> list[int]:
        """Return the ids of all processes of this stack, without zombies."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def _launch(self, name: str, *command: str, environ: Mapping[str, str] | None = None) -> None:
        base = {key: value for key, value in os.environ.items() if not key.startswith("FLOPWATCH_")}
        path = os.pathsep.join(filter(None, (str(ROOT / "exporter"), base.get("PYTHONPATH"))))
        (self.state / "logs").mkdir(exist_ok=True)
        self.children[name] = Child(
            name,
            command,
            {**base, "PYTHONPATH": path, MARK: self.mark, **(environ or {})},
            self.state / "logs" / f"{name}.log",
        )

    def _wait_for(self, name: str, url: str, seconds: float = 30.0) -> None:
        """Wait until the URL answers 200. Raises StackError if the program ends or after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            if self.children[name].process.poll() is not None:
                raise self.children[name].failure(f"ended with status {self.children[name].process.returncode}")
            try:
                fetch(url)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise self.children[name].failure(f"did not answer at {url} in {seconds:.0f} s") from None
            time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Return `count` different ports that are free on 127.0.0.1.

    They are below those that Linux gives to clients and to servers that ask for port 0, so none of these takes one
    before it is used.
    """
    free: list[int] = []
    for port in SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(free) == count:
            break
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            free.append(port)
    return free


def fetch(url: str, timeout: float = 10) -> bytes:
    """Return the body of a URL. Ignores proxy settings. Raises OSError if the request fails."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout) as reply:
        content: bytes = reply.read()
        return content
