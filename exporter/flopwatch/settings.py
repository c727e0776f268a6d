"""Settings of each server process: a frozen dataclass, made from a command's flags and checked on creation."""

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

DCGM_FIELDS = "1001-1005,1009-1012"  # activity, and bytes over PCIe and NVLink
KUBELET_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")


class SettingsError(ValueError):
    """Error raised for settings that cannot work. The message names the flag and what to change."""


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port to listen on. With port 0, the kernel chooses a free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse `HOST:PORT`, `[IPv6]:PORT` or `:PORT` (all IPv4 interfaces). Raises SettingsError."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise SettingsError(f"{text!r} is not an address; write HOST:PORT, for example 127.0.0.1:9450")
        return cls(host.strip("[]") or "0.0.0.0", int(port))

    @property
    def loopback(self) -> bool:
        """Return whether only clients on this host can connect."""
        return _is_loopback(self.host)

    def place(self) -> tuple[str, socket.AddressFamily]:
        """Return host and address family to bind. `::` means IPv6 and IPv4, or only IPv4 without dual-stack sockets."""
        if self.host == "::" and not socket.has_dualstack_ipv6():
            return "0.0.0.0", socket.AF_INET
        return self.host, socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """Settings of `flopwatch exporter`."""

    listen: Address = Address("0.0.0.0", 9450)
    otlp_listen: Address = Address("127.0.0.1", 4318)
    sysfs: Path = Path("/sys")
    kmsg: Path = Path("/dev/kmsg")
    dcgm: str = ""  # DCGM host engine to read: HOST:PORT or its socket's path; empty: no DCGM
    dcgm_fields: str = DCGM_FIELDS  # profiling fields of DCGM to sample, such as 1001-1005,1009
    expose: str = ""  # other exporters' names to publish too: "dcgm", "dcgm-4.8" or "dcgm-4.9", and "node"
    series: str = "core"  # that /metrics serves: "core", what a shipped rule, board or report reads, or "full"
    state: Path = Path("/var/lib/flopwatch")
    simulate: str | None = None
    ledger: str = "off"  # "embedded", "off", or the URL of a ledger
    otlp_token_file: Path | None = None
    ledger_token_file: Path | None = None
    ledger_ca_file: Path | None = None  # CA of a ledger at an https URL; None: the system's CAs
    expect: Path | None = None  # expected shape; None: the file of `flopwatch check --record`
    web_config: Path | None = None  # TLS and users of the metrics listener
    otlp_web_config: Path | None = None  # TLS of the OTLP listener, whose clients send a token
    host: str = field(default_factory=socket.gethostname)
    kubelet_socket: Path = KUBELET_SOCKET
    job_mapping: Path | None = None
    topology: str = ""  # "slurm:FILE", "csv:FILE", "kubernetes", "kubernetes:URL", or nothing
    scrape_deadline: float = 2.5  # seconds a scrape waits for sources, or less if the scraper's timeout is shorter
    stale_after: float = 30.0  # seconds for which the last good samples of a failed source are served
    ras: str = field(default_factory=lambda: os.environ.get("NCCL_RAS_ADDR", "") or "localhost:28028")  # or "off"
    inspector: str = ""  # folder of NCCL Inspector's files, "otlp" for its metrics alone, or empty
    rank_timeout: float = 300.0  # seconds without a push after which a rank's series are dropped
    silent_after: float = 60.0  # seconds without a snapshot after which the ledger calls a run down
    new_for: float = 60.0  # seconds for which a new run is served with counters at 0, so that rate() sees them start

    def __post_init__(self) -> None:
        known = self.ledger in ("embedded", "off") or self.ledger.startswith(("http://", "https://"))
        try:
            host = urlsplit(self.ledger).hostname or ""
        except ValueError:
            known, host = False, ""
        if not known:
            raise SettingsError(f"--ledger {self.ledger!r}: write embedded, off or http://HOST:PORT")
        if "://" in self.ledger and not _is_loopback(host) and self.ledger_token_file is None:
            raise SettingsError(
                f"--ledger {self.ledger}: a ledger on another host accepts no records without a token; "
                "give its file with --ledger-token-file FILE"
            )
        if self.ledger_ca_file is not None and not self.ledger.startswith("https://"):
            raise SettingsError(
                f"--ledger-ca-file needs a ledger with TLS, but --ledger is {self.ledger}; write https://HOST:PORT"
            )
        if self.listen == self.otlp_listen and self.listen.port != 0:
            raise SettingsError(f"--listen and --otlp-listen are both {self.listen}; give them different ports")
        if self.simulate is not None and self.simulate != "h100x8":
            raise SettingsError(f"--simulate {self.simulate!r}: the only simulated node is h100x8")
        if self.topology:
            _check_topology(self.topology)
        if self.ras != "off":
            Address.parse(self.ras)
        if self.inspector not in ("", "otlp") and not Path(self.inspector).is_absolute():
            raise SettingsError(
                f"--inspector {self.inspector!r}: write otlp, or the absolute path of the folder in the plugin's "
                "NCCL_INSPECTOR_DUMP_DIR"
            )
        if self.dcgm:
            _check_dcgm(self.dcgm)
        dcgm_fields(self.dcgm_fields)
        if self.dcgm and self.simulate is not None:
            raise SettingsError("--dcgm: it reads real GPUs, and --simulate replaces them; leave one out")
        if self.series not in ("core", "full"):
            raise SettingsError(f"--series {self.series!r}: write core or full (docs/metrics.md)")
        if not re.fullmatch(r"(dcgm(-4\.[89])?)?|(dcgm(-4\.[89])?,)?node", self.expose):
            raise SettingsError(
                f"--expose {self.expose!r}: write dcgm (dcgm-exporter's names before and from 4.9), dcgm-4.8 or "
                "dcgm-4.9, node (node_exporter's names of InfiniBand), or both such as dcgm,node"
            )


def dcgm_fields(text: str) -> frozenset[int]:
    """Return the profiling fields of DCGM in a list such as 1001-1005,1009. Raises SettingsError for other fields."""
    ranges = [part.partition("-") for part in text.split(",")]
    if all(first.isdigit() and (last if dash else first).isdigit() for first, dash, last in ranges):
        ids = {id for first, _, last in ranges for id in range(int(first), int(last or first) + 1)}
        if ids and ids <= set(range(1001, 1017)):
            return frozenset(ids)
    raise SettingsError(f"--dcgm-fields {text!r}: write profiling fields from 1001 to 1016, for example {DCGM_FIELDS}")


def _check_dcgm(address: str) -> None:
    if not address.removeprefix("unix:").startswith("/"):
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise SettingsError(
                f"--dcgm {address!r}: write HOST:PORT of a running nv-hostengine, for example "
                "localhost:5555, or the path of its socket (/tmp/nv-hostengine)"
            )


def _check_topology(topology: str) -> None:
    kind, colon, where = topology.partition(":")
    if kind not in ("slurm", "csv", "kubernetes") or bool(colon) != bool(where) or (kind != "kubernetes" and not where):
        raise SettingsError(
            f"--topology {topology!r}: write slurm:FILE (a topology.conf), csv:FILE "
            "(host,rack,leaf,domain), or kubernetes"
        )
    if kind == "kubernetes" and where:
        url = urlsplit(where)
        if url.scheme != "https" and not (url.scheme == "http" and _is_loopback(url.hostname or "")):
            raise SettingsError(
                f"--topology {topology!r}: write the API server's address as kubernetes:https://HOST:PORT"
            )


@dataclass(frozen=True, slots=True)
class KmsgSettings:
    """Settings of `flopwatch kmsg`, which streams the kernel log."""

    listen: Path = Path("/run/flopwatch/kmsg.sock")
    kmsg: Path = Path("/dev/kmsg")
    group: str = ""

    def __post_init__(self) -> None:
        if len(str(self.listen)) > 100:
            raise SettingsError(
                f"--listen {self.listen}: the path of a unix socket has at most 107 bytes; give a shorter one"
            )


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Settings of `flopwatch ledger serve`."""

    listen: Address = Address("127.0.0.1", 9451)
    state: Path = Path("/var/lib/flopwatch-ledger")
    token_file: Path | None = None
    web_config: Path | None = None
    silent_after: float = 60.0
    new_for: float = 60.0
    abandoned_after: float = 30 * 24 * 3600.0  # seconds after which a silent run is closed

    def __post_init__(self) -> None:
        if self.token_file is None and not self.listen.loopback:
            raise SettingsError(
                f"--listen {self.listen}: a ledger that other hosts can reach needs a token, or anyone can write "
                "records; put one into a file and give it with --token-file FILE (exporters: --ledger-token-file FILE)"
            )


@dataclass(frozen=True, slots=True)
class BoardsSettings:
    """Settings of `flopwatch boards`."""

    prometheus: str
    token_file: Path | None = None
    ca_file: Path | None = None
    listen: Address = Address("127.0.0.1", 9452)
    web_config: Path | None = None
    scrape_interval: float = 15.0  # seconds
    dashboards: Path | None = None

    def __post_init__(self) -> None:
        if not self.prometheus.startswith(("http://", "https://")):
            raise SettingsError(f"--prometheus {self.prometheus!r}: write its URL, for example http://127.0.0.1:9090")
        if self.web_config is None and not self.listen.loopback:
            raise SettingsError(
                f"--listen {self.listen}: every client of the page can query Prometheus; require authentication with "
                "--web-config FILE, or listen on 127.0.0.1"
            )
