"""Dashboards of a simulated cluster in a browser: `python -m demo.cluster`.

The cluster has 64 nodes. One node has a rank that the others wait for, one has a bad link, and one run restarts. The
series of GPUs and ports are from real exporters over simulated drivers. There is one exporter for each run and one for
the spare nodes. One exporter has a GPU that gets too hot, and one has a cable that fails. Each node serves the page of
one of these exporters under its own name. The series of the runs are from the hooks of the simulator and from a real
ledger. A real Prometheus scrapes all of them. It evaluates the shipped rules at a `pace`: all windows are shorter than
in production by that factor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from alerts import AlertSettings, rules_yaml
from demo.servers import ServersError, find
from demo.stack import Child, PrometheusApi, StackError, fetch, free_ports
from flopwatch.ledger.ledger import Ledger
from flopwatch.settings import SettingsError
from flopwatch.simulate.h100 import DEVICES
from simulator.faults import Fault
from simulator.hooks import Hooks
from simulator.host import SimulatedNode
from simulator.jobs import TrainingJob
from simulator.metrics import Line, ledger_lines, series
from simulator.nodes import EPOCH, Noise, Record
from simulator.topology import PortPlace, Topology
from simulator.world import SimulatedCluster

PACE = 5.0
SPARE, HOT, LINK = "spare", "hot", "link"
STRAGGLER, BAD_LINK = (5, 3), (37, 2)  # node, and its GPU or port
FOREVER = 1e9
NODES = 64  # the faults and the meshes of the runs below fit this number
# Placeholders on the pages of the exporters, replaced for each node.
HOST, RACK, LEAF, DOMAIN = "host-of-template", "rack-of-template", "leaf-of-template", "domain-of-template"


def jobs(nodes: int) -> tuple[TrainingJob, ...]:
    """Return three runs on a half, a quarter and an eighth of the nodes."""
    usual: dict[str, Any] = {
        "queue": 8.0,
        "startup": (3.0, 4.0),
        "restore": (2.0, 3.0),
        "checkpoint_every": 30.0,
        "save_blocks": 1.0,
        "save_writes": 6.0,
        "restart_median": 10.0,
        "replace": (4.0, 8.0),
    }
    return tuple(
        TrainingJob(
            name, count, team, mesh={"tp": 8, "pp": 4, "dp": count // 4}, step_seconds=seconds, mfu=mfu, **usual
        )
        for name, team, count, seconds, mfu in (
            ("llama-70b", "language", nodes // 2, 2.0, 0.43),
            ("video-13b", "vision", nodes // 4, 1.5, 0.37),
            ("ablation-4", "language", nodes // 8, 0.8, 0.31),
        )
    )


FAULTS = (
    Fault(20.0, "slow", "llama-70b", node=STRAGGLER[0], part=STRAGGLER[1], factor=1.3, lasts=FOREVER),
    Fault(30.0, "software", "video-13b"),
    Fault(40.0, "slow_link", "video-13b", node=BAD_LINK[0], part=BAD_LINK[1], factor=1.1, lasts=FOREVER),
)


class PageServer:
    """HTTP server on loopback that serves pages from memory."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        bodies = self

        class _PageHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = bodies._bodies.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        class _Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a scrape that took too long on a busy machine, and was given up by Prometheus

        self._server = _Server(("127.0.0.1", 0), _PageHandler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> PageServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, bodies: Mapping[str, bytes]) -> None:
        """Replace all pages by `bodies`, which maps paths to pages."""
        self._bodies = dict(bodies)


class ExporterTemplate(NamedTuple):
    """An exporter and the simulated node that it reads. The exporter's page is the template for many nodes."""

    url: str
    node: SimulatedNode


class ServedCluster:
    """Simulated cluster whose pages of metrics `run` renews in real time."""

    def __init__(self, nodes: int, seed: int, bodies: PageServer, templates: Mapping[str, ExporterTemplate]) -> None:
        self.topology = Topology(nodes)
        self._bodies, self._templates, self._seed = bodies, templates, seed
        self._hooks = Hooks(seed)
        self._loads: dict[str, float] = {}
        self.failed: Exception | None = None
        self.stop = threading.Event()

    def run(self, seconds: float, step: float) -> None:
        """Simulate `seconds` and renew the pages every `step` seconds, until `stop` is set."""
        ledger, began = Ledger(), time.time()

        def send(record: Record) -> None:
            ranks, measured = self.topology.gpus_per_node, {}
            if record["event"] == "snapshot":
                measured = {"waits": self._hooks.waits(record, ranks), "work": self._hooks.work(record, ranks)}
            ledger.apply({**record, **measured})

        def look(world: SimulatedCluster, t: float) -> None:
            if self.stop.wait(max(0.0, began + t - time.time())):
                raise StopIteration
            self._publish(world, ledger, t, began)

        world = SimulatedCluster(
            self.topology,
            jobs(self.topology.nodes),
            FAULTS,
            seconds,
            self._seed,
            send,
            Noise(per_node_day=0.0, missing=0.0, late=0.0),
            step,
            look,
            step,
        )
        try:
            world.run()
        except StopIteration:
            pass
        except Exception as error:  # raised by ClusterDemo.check in another thread
            self.failed = error

    def _publish(self, world: SimulatedCluster, ledger: Ledger, t: float, began: float) -> None:
        hooks: dict[int, list[str]] = {}
        for node, sample in self._hooks(world, t):
            hooks.setdefault(node, []).append(text(sample, began))
        self._move(world, t)
        pages = {name: fetch(template.url).decode() for name, template in self._templates.items()}
        bodies = {}
        for node in range(self.topology.nodes):
            page = self._named(pages[self._kind(world, node)], node)
            bodies[f"/{self.topology.host(node)}"] = "".join([page, *hooks.get(node, ())]).encode()
        lines = (text(one, began) for one in ledger_lines(ledger, t))
        self._bodies.serve(bodies | {"/ledger": "".join(lines).encode()})

    def _kind(self, world: SimulatedCluster, node: int) -> str:
        special = {STRAGGLER[0]: HOT, BAD_LINK[0]: LINK}
        runs = (one.job.name for one in world.jobs if node in one.nodes)
        return special.get(node) or next(runs, SPARE)

    def _move(self, world: SimulatedCluster, t: float) -> None:
        """Set load, temperature and link errors of the simulated nodes to match the runs and faults at time `t`."""
        trains = {
            one.job.name: one.attempt is not None and one.attempt.activity == "step" and one.attempt.ended is None
            for one in world.jobs
        }
        trains |= {HOT: trains["llama-70b"], LINK: trains["video-13b"], SPARE: False}
        for name, template in self._templates.items():
            load = 0.95 if trains[name] else 0.0
            if self._loads.get(name) != load:
                self._loads[name] = load
                for gpu in range(self.topology.gpus_per_node):
                    template.node.load(gpu, load)
        for damage in world.broken:
            if damage.since <= t < damage.since + 60 and STRAGGLER[0] in damage.nodes:
                self._templates[HOT].node.heat(STRAGGLER[1], 92.0)
            elif damage.since <= t < damage.since + 60 and BAD_LINK[0] in damage.nodes:
                self._templates[LINK].node.symbol_errors(DEVICES[BAD_LINK[1]], 40.0)

    def _named(self, page: str, node: int) -> str:
        topology = self.topology
        names = {
            HOST: topology.host(node),
            RACK: topology.rack(node),
            LEAF: topology.leaf(PortPlace(node, 0)),
            DOMAIN: topology.domain(node),
        }
        names |= {SimulatedNode.uuid(gpu): topology.gpu(node, gpu) for gpu in range(topology.gpus_per_node)}
        for template, name in names.items():
            page = page.replace(template, name)
        return page


def text(sample: Line, began: float) -> str:
    """Return a sample in the text format, or an empty text for `up`, which Prometheus writes itself.

    Virtual time 0 is the Unix time `began`.
    """
    name, labels, value = sample
    if name == "up":  # written by Prometheus
        return ""
    if name.endswith("_timestamp_seconds"):
        value += began - EPOCH
    own = {key: label for key, label in labels.items() if key not in ("job", "instance")}
    return f"{series(name, own)} {value!r}\n"


@contextmanager
def exporters(folder: Path, names: Iterable[str]) -> Iterator[dict[str, ExporterTemplate]]:
    """Run an exporter over a simulated node for each name until the block ends.

    Raises StackError if an exporter does not start.
    """
    topology = folder / "topology.csv"
    topology.write_text(f"host,rack,leaf,domain\n{HOST},{RACK},{LEAF},{DOMAIN}\n")
    found: dict[str, ExporterTemplate] = {}
    with ExitStack() as stack:
        for name in names:
            metrics, otlp = free_ports(2)
            state = folder / name
            child = Child(
                name,
                [
                    sys.executable,
                    "-m",
                    "flopwatch",
                    "exporter",
                    f"--listen=127.0.0.1:{metrics}",
                    f"--otlp-listen=127.0.0.1:{otlp}",
                    f"--state={state}",
                    f"--host={HOST}",
                    "--simulate=h100x8",
                    f"--topology=csv:{topology}",
                ],
                os.environ,
                folder / f"{name}.log",
            )
            stack.callback(child.stop)
            _wait_for(child, f"http://127.0.0.1:{metrics}/readyz")
            found[name] = ExporterTemplate(f"http://127.0.0.1:{metrics}/metrics", SimulatedNode(state / "simulated"))
        yield found


def _wait_for(child: Child, url: str) -> None:
    for _ in range(600):
        child.check()
        try:
            fetch(url)
            return
        except OSError:
            time.sleep(0.05)
    raise child.failure("does not answer")


class ClusterDemo(AbstractContextManager["ClusterDemo"]):
    """Context manager that runs the cluster, Prometheus and the viewer. `began` is the Unix time of the start.

    Prometheus sends all series to the URLs in `remote_write`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 1,
        pace: float = PACE,
        listen: str = "",
        seconds: float = 86_400.0,
        remote_write: Sequence[str] = (),
    ) -> None:
        self.folder, self.seed, self.pace, self.seconds = folder, seed, pace, seconds
        self._listen, self._remote_write = listen, remote_write
        self._stack = ExitStack()
        self.children: list[Child] = []

    def __enter__(self) -> ClusterDemo:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        settings = AlertSettings(pace=self.pace, teams=("language", "vision"))
        step = settings.scrape_interval / self.pace
        names = [*(job.name for job in jobs(NODES)), SPARE, HOT, LINK]
        templates = self._stack.enter_context(exporters(self.folder, names))
        bodies = self._stack.enter_context(PageServer())
        self.cluster = ServedCluster(NODES, self.seed, bodies, templates)
        thread = threading.Thread(target=self.cluster.run, args=(self.seconds, step), daemon=True)
        self.began = time.time()
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self.cluster.stop.set)
        (port,) = free_ports(1)
        self.prometheus = PrometheusApi(f"http://127.0.0.1:{port}")
        (self.folder / "rules.yaml").write_text(rules_yaml(settings))
        (self.folder / "prometheus.yml").write_text(json.dumps(self._configuration(bodies.address, settings)))
        prometheus = self._child(
            "prometheus",
            [
                *find().prometheus,
                f"--config.file={self.folder}/prometheus.yml",
                f"--storage.tsdb.path={self.folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        )
        _wait_for(prometheus, f"{self.prometheus.url}/-/ready")
        listen = self._listen or f"127.0.0.1:{free_ports(1)[0]}"
        self.boards = f"http://{listen}"
        _wait_for(
            self._child(
                "boards",
                [
                    sys.executable,
                    "-m",
                    "flopwatch",
                    "boards",
                    f"--prometheus={self.prometheus.url}",
                    f"--listen={listen}",
                    f"--scrape-interval={step:g}",
                ],
            ),
            f"{self.boards}/healthz",
        )

    def _configuration(self, address: str, settings: AlertSettings) -> dict[str, object]:
        step = settings.at_pace(settings.scrape_interval)
        hosts = [self.cluster.topology.host(node) for node in range(NODES)]

        def targets(paths: Iterable[tuple[str, str]]) -> list[dict[str, object]]:
            return [
                {"targets": [address], "labels": {"__metrics_path__": f"/{path}", "instance": instance}}
                for path, instance in paths
            ]

        return {
            "global": {"scrape_interval": step, "scrape_timeout": step, "evaluation_interval": step},
            "rule_files": [f"{self.folder}/rules.yaml"],
            "remote_write": [{"url": url, "queue_config": {"batch_send_deadline": "1s"}} for url in self._remote_write],
            "scrape_configs": [
                {
                    "job_name": "flopwatch",
                    "honor_labels": True,
                    "static_configs": targets((host, f"{host}:9450") for host in hosts),
                },
                {
                    "job_name": "flopwatch-ledger",
                    "scrape_interval": settings.at_pace(settings.ledger_interval),
                    "honor_labels": True,
                    "static_configs": targets([("ledger", "ledger:9451")]),
                },
            ],
        }

    def _child(self, name: str, command: Sequence[str]) -> Child:
        child = Child(name, command, os.environ, self.folder / f"{name}.log")
        self._stack.callback(child.stop)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raise StackError if a process or the simulation failed."""
        for child in self.children:
            child.check()
        if self.cluster.failed is not None:
            raise StackError(f"the simulated cluster: {self.cluster.failed!r}") from self.cluster.failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cluster until Ctrl-C or for --seconds, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--listen", default="127.0.0.1:9452", metavar="HOST:PORT", help="address of the viewer")
    parser.add_argument("--seconds", type=float, help="duration (default: until Ctrl-C)")
    given = parser.parse_args(arguments)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="flopwatch-cluster-") as folder,
            ClusterDemo(Path(folder), seed=given.seed, listen=given.listen) as running,
        ):
            print(
                f"boards: {running.boards}/d/flopwatch-fleet?from=now-10m&to=now&refresh=5s\n"
                f"Prometheus: {running.prometheus.url}\n"
                f"After one minute, rank {8 * STRAGGLER[0] + STRAGGLER[1]} of llama-70b is slow, and a port of "
                "video-13b has errors. After two minutes, alerts fire.",
                flush=True,
            )
            end = time.time() + (given.seconds or FOREVER)
            while time.time() < end:
                running.check()
                time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    except (SettingsError, ServersError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
