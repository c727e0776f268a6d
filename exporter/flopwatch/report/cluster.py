"""Queries of `flopwatch blast`: where hosts, ports, GPUs and ranks are, from the info series of the exporters."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches

from flopwatch import catalogue as m
from flopwatch.report.blast import Blast, HostPlace, HostPort, Parts, RankPlace, blast, on_ports
from flopwatch.report.prometheus import PrometheusClient
from flopwatch.settings import SettingsError

PARTS, RANKS = "[1h]", "[10m]"  # for which a host that died keeps its parts, and its ranks
LEVELS, RANK = HostPlace._fields, RankPlace._fields
PORT_NAME = re.compile(r"(?P<host>[^:]+):(?P<device>[^:/]+)(/(?P<port>\d+))?")


def find(prometheus: PrometheusClient, name: str, kind: str | None, at: float) -> Blast:
    """Return the blast radius of an object at the Unix time `at`. Raises SettingsError for an unknown name."""
    return Cluster(prometheus, at).blast(name, kind)


class Cluster:
    """Queries about a cluster, as of one time. Methods raise SettingsError if a query fails."""

    def __init__(self, prometheus: PrometheusClient, at: float) -> None:
        self._prometheus, self._at = prometheus, at
        self._answers: dict[str, list[tuple[str, ...]]] = {}
        where = self._labels(m.HOST_TOPOLOGY_INFO, "host", *LEVELS)
        self._places = {host: HostPlace(*place) for host, *place in where}

    def blast(self, name: str, kind: str | None) -> Blast:
        """Return the blast radius of an object. Raises SettingsError if no object or several ones have the name."""
        parts = self._parts(name, kind)
        hosts = {*parts.hosts, *(port.host for port in parts.ports)}
        gpus = self._gpus(_among("host", hosts)) | self._gpus(_among("uuid", parts.gpus))
        ranks = self._ranks({*hosts, *gpus.values()})
        runs = _among("run", {one.run for one in ranks if parts.have(one.host, one.uuid)})
        unsaved = self._by_run(f"max by (run) ({m.RUN_PROVISIONAL_SECONDS}{runs})") if runs else {}
        return blast(parts, gpus, ranks, self._sizes(runs), unsaved, self._idle(), self._places)

    def _parts(self, name: str, kind: str | None) -> Parts:
        """Return what is on the object with this name. Raises SettingsError."""
        found: dict[str, Parts] = {}
        port = PORT_NAME.fullmatch(name)
        if kind in (None, "gpu") and self._gpus(_equal(uuid=name)):
            found["gpu"] = Parts("gpu", name, frozenset(), frozenset([name]))
        if kind in (None, "port") and port is not None:
            wanted = _equal(**{label: value for label, value in port.groupdict().items() if value})
            if ports := self._ports(wanted):
                found["port"] = on_ports("port", name, ports, self._near({port["host"]}))
        for level in LEVELS if kind is None else {kind} & {*LEVELS}:
            below = {host for host, place in self._places.items() if getattr(place, level) == name}
            cables = self._ports(_equal(switch=name)) if level == "leaf" else set()
            if below or cables:
                found[level] = self._leaf(name, below, cables) if level == "leaf" else _whole(level, name, below)
        if kind in (None, "host") and self._known_host(name):
            found["host"] = _whole("host", name, {name})
        if len(found) > 1:
            kinds = " and a ".join(found)
            raise SettingsError(f"{name} is the name of a {kinds}; choose one, such as --kind {next(iter(found))}")
        if not found:
            raise SettingsError(self._unknown(name, kind))
        return next(iter(found.values()))

    def _leaf(self, name: str, below: set[str], cables: set[HostPort]) -> Parts:
        """Return what is on a leaf switch: GPUs by their ports' cables, and all of a host whose cables are unknown."""
        if below:
            below -= {port.host for port in self._ports(_among("host", below, 'switch!=""'))}
        return on_ports("leaf", name, cables, self._near({port.host for port in cables}), below)

    def _unknown(self, name: str, kind: str | None) -> str:
        """Return the error for an unknown name, with names that resemble it."""
        names = {text for host, place in self._places.items() for text in (host, *place)}
        names |= {text for (text,) in self._labels(m.GPU_INFO, "host")}
        names |= {text for (text,) in self._labels(m.INFINIBAND_INFO, "switch")}
        if name.startswith("GPU-"):
            names = {text for (text,) in self._labels(m.GPU_INFO, "uuid")}
        elif match := PORT_NAME.fullmatch(name):
            names |= {f"{host}:{device}/{port}" for host, device, port in self._ports(_equal(host=match["host"]))}
        nearest = get_close_matches(name, names - {""}, 3)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        if not names - {""}:
            hint = f". It has no {m.HOST_TOPOLOGY_INFO} and no {m.GPU_INFO}; is --prometheus right?"
        what = kind or "leaf, host, port, GPU, rack or NVLink domain"
        return f"this Prometheus knows no {what} {name!r}{hint}"

    def _known_host(self, name: str) -> bool:
        rows = (m.GPU_INFO, m.TRAINING_RANK_INFO)
        return name in self._places or any(self._labels(row, "host", only=_equal(host=name)) for row in rows)

    def _gpus(self, matchers: str) -> dict[str, str]:
        """Return the hosts of GPUs by uuid."""
        gpus = self._labels(m.GPU_INFO, "uuid", "host", only=matchers) if matchers else []
        return {gpu[0]: gpu[1] for gpu in gpus}

    def _ports(self, matchers: str) -> set[HostPort]:
        return {HostPort(*port) for port in self._labels(m.INFINIBAND_INFO, *HostPort._fields, only=matchers)}

    def _near(self, hosts: set[str]) -> dict[HostPort, set[str]]:
        """Return the uuids of the GPUs nearest to each port of these hosts."""
        gpus = self._gpus(_among("host", hosts))
        near: defaultdict[HostPort, set[str]] = defaultdict(set)
        if matchers := _among("uuid", gpus, 'affinity!="SYS"'):
            for device, port, uuid in self._labels(
                m.INFINIBAND_GPU_AFFINITY_INFO, "device", "port", "uuid", only=matchers
            ):
                near[HostPort(gpus[uuid], device, port)].add(uuid)
        return near

    def _ranks(self, hosts: set[str]) -> list[RankPlace]:
        """Return the ranks on these hosts, also of a host that died lately, but not those that run elsewhere now."""
        there = _among("host", hosts)
        if not there:
            return []
        now = {place[:2]: RankPlace(*place) for place in self._labels(m.TRAINING_RANK_INFO, *RANK, only=there, over="")}
        before = {place[:2]: RankPlace(*place) for place in self._labels(m.TRAINING_RANK_INFO, *RANK, only=there)}
        if missing := before.keys() - now.keys():
            runs = _among("run", {run for run, _ in missing})
            missing -= {*self._labels(m.TRAINING_RANK_INFO, *RANK[:2], only=runs, over="")}
        return [*now.values(), *(before[rank] for rank in missing)]

    def _sizes(self, runs: str) -> dict[str, float]:
        """Return the GPUs of runs from the ledger, or without it their ranks."""
        ranks = f"count by (run) (group by (run, rank) (last_over_time({m.TRAINING_RANK_INFO}{runs}{RANKS})))"
        return self._by_run(f"max by (run) ({m.RUN_GPUS}{runs}) or {ranks}") if runs else {}

    def _idle(self) -> dict[str, str]:
        """Return the hosts, by uuid, of the GPUs without a rank or another owner on hosts that are fit for work."""
        query = (
            f"{m.GPU_INFO} unless on (uuid) {m.TRAINING_RANK_INFO}"
            f' unless on (host) {m.TRAINING_RANK_INFO}{{uuid=""}}'  # a rank on one of this host's GPUs
            f' unless on (uuid) {m.GPU_OWNER_INFO}{{source!="none"}} unless on (uuid) {m.GPU_PRESENT} == 0'
            f" unless on (instance) {m.HOST_VERDICT_ID} == 2"
            f" unless on (host) {m.HOST_MAINTENANCE_UNTIL_TIMESTAMP_SECONDS} > {self._at:.0f}"
        )
        return {gpu[0]: gpu[1] for gpu in self._answer(f"group by (uuid, host) ({query})", "uuid", "host")}

    def _by_run(self, query: str) -> dict[str, float]:
        found = self._prometheus.query(query, self._at)
        return {series.labels.get("run", ""): series.points[0][1] for series in found if series.points}

    def _labels(self, row: m.Metric, *names: str, only: str = "", over: str | None = None) -> list[tuple[str, ...]]:
        """Return the values of these labels, of the series that a family had within `over` and that `only` matches."""
        over = (RANKS if row is m.TRAINING_RANK_INFO else PARTS) if over is None else over
        series = f"last_over_time({row}{only}{over})" if over else f"{row}{only}"
        return self._answer(f"group by ({', '.join(names)}) ({series})", *names)

    def _answer(self, query: str, *names: str) -> list[tuple[str, ...]]:
        """Return the values of these labels of the series in an answer. The same query is sent once."""
        if query not in self._answers:
            self._answers[query] = [
                tuple(series.labels.get(name, "") for name in names)
                for series in self._prometheus.query(query, self._at)
            ]
        return self._answers[query]


def _whole(kind: str, name: str, hosts: set[str]) -> Parts:
    return Parts(kind, name, frozenset(hosts), frozenset())


def _equal(**labels: str) -> str:
    """Return PromQL matchers of these labels."""
    return "{" + ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in labels.items()) + "}"


def _among(label: str, values: Iterable[str], *others: str) -> str:
    """Return PromQL matchers for one of these values of a label, and `others`. It is empty without a value."""
    literal = (re.sub(r"[^\w-]", r"\\\g<0>", value) for value in sorted(values) if value)
    pattern = json.dumps("|".join(literal), ensure_ascii=False)
    return "{" + ",".join([f"{label}=~{pattern}", *others]) + "}" if pattern != '""' else ""
