"""Place of a host in the data center: rack, leaf switch and NVLink domain.

Slurm's topology.conf (https://slurm.schedmd.com/topology.conf.html) has the leaf in SwitchName lines and the domain in
BlockName lines. A CSV file has the columns host, rack, leaf, domain (only host is required). Labels of a Kubernetes
node are those that topograph and the GPU operator write
(https://github.com/NVIDIA/topograph/blob/main/docs/reference/node-labels.md).
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

MAX_BYTES = 16 << 20  # bytes of a topology file
MAX_NODES_TEXT = 65536  # characters of a host list

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SERVER = "https://kubernetes.default.svc"

LABELS = {  # node labels of each level, the first present one wins
    "rack": ("topology.kubernetes.io/rack", "accelerator.topograph.run/sub-domain"),
    "leaf": ("fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf"),
    "domain": ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator", "nvidia.com/gpu.clique"),
}


class Place(NamedTuple):
    """Rack, leaf switch and NVLink domain of a host, empty if unknown. `source` is slurm, csv or kubernetes."""

    rack: str = ""
    leaf: str = ""
    domain: str = ""
    source: str = ""


class TopologyError(Exception):
    """Error raised by `read` if the place of the host cannot be determined. The text is the reason."""


def contains(expression: str, host: str) -> bool:
    """Return whether a Slurm host list, such as `node[001-018,020],login1`, contains this host. Raises ValueError."""
    if len(expression) > MAX_NODES_TEXT:
        raise ValueError(f"a host list of {len(expression)} characters")
    return any(_matches(part, host) for part in _split(expression))


def _split(expression: str) -> Iterable[list[str]]:
    """Yield each item of a Slurm host list in pieces: `n[1-2]x` as "n", "1-2", "x". Raises ValueError."""
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", expression):
        if part in "[]":
            raise ValueError(f"brackets that do not match in {expression[:80]!r}")
        yield re.split(r"[\[\]]", part)


def _matches(part: list[str], text: str) -> bool:
    """Return whether an item from `_split` matches a host name. Every second piece is a list of ranges."""
    rests = {text}  # possible rests of the text after so many pieces
    for index, piece in enumerate(part):
        if index % 2 == 0:
            rests = {rest[len(piece) :] for rest in rests if rest.startswith(piece)}
        else:
            ranges = [_range(item) for item in piece.split(",")]
            rests = {
                rest[length:]
                for rest in rests
                for length in range(1, min(len(rest) - len(rest.lstrip("0123456789")), 18) + 1)
                if any(inside(rest[:length]) for inside in ranges)
            }
    return "" in rests


def _range(item: str) -> Callable[[str], bool]:
    """Return a test of whether digits are in a range such as 7 or 001-018, with zeros to the same width."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
    if match is None:
        return lambda digits: digits == item
    low, high = match[1], match[2] or match[1]
    return lambda digits: int(low) <= int(digits) <= int(high) and digits == f"{int(digits):0{len(low)}d}"


def same_host(one: str, other: str) -> bool:
    """Return whether two host names are equal, ignoring the DNS domain unless both have one."""
    if "." in one and "." in other:
        return one == other
    return one.partition(".")[0] == other.partition(".")[0]


def slurm(text: str, host: str) -> Place:
    """Return the leaf switch and the block of a host from a topology.conf. Raises ValueError if it has neither."""
    found: dict[str, str] = {}  # name of the first switch and of the first block with the host
    known, names = False, {host, host.partition(".")[0]}
    for line in text.replace("\\\n", " ").splitlines():
        words = {
            key.lower(): content
            for key, equals, content in (word.partition("=") for word in line.partition("#")[0].split())
            if equals
        }
        kind = next((kind for kind in ("switchname", "blockname") if kind in words), "")
        known = known or kind != ""
        if kind and any(contains(words.get("nodes", ""), each) for each in names):
            found.setdefault(kind, words[kind])
    if not known:
        raise ValueError("it has no line with SwitchName= or BlockName=")
    if not found:
        raise ValueError(f"no switch or block in it has the node {host}")
    return Place("", found.get("switchname", ""), found.get("blockname", ""), "slurm")


def table(text: str, host: str) -> Place:
    """Return the place of a host from the text of a CSV file. Raises ValueError for other formats or an absent host."""
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    try:
        if "host" not in (rows.fieldnames or ()):
            raise ValueError("its first line has no column host; write host,rack,leaf,domain")
        for row in rows:
            if same_host((row["host"] or "").strip(), host):
                rack, leaf, domain = ((row.get(column) or "").strip() for column in ("rack", "leaf", "domain"))
                return Place(rack, leaf, domain, "csv")
    except csv.Error as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"no line in it is about the host {host}")


def labelled(labels: Mapping[str, str]) -> Place:
    """Return the place from the labels of a Kubernetes node. Raises ValueError if no label describes the topology."""
    found = {part: next((labels[name] for name in names if name in labels), "") for part, names in LABELS.items()}
    if not any(found.values()):
        raise ValueError("the node has none of topograph's labels")
    return Place(found["rack"], found["leaf"], found["domain"], "kubernetes")


def read(topology: str, host: str, account: Path = SERVICE_ACCOUNT) -> Place:
    """Return the place of a host from slurm:FILE, csv:FILE, kubernetes or kubernetes:URL. Raises TopologyError."""
    kind, _, where = topology.partition(":")
    try:
        if kind == "kubernetes":
            return labelled(_node_labels(where or API_SERVER, host, account))
        with open(where, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        text = content.decode("utf-8-sig")
        return slurm(text, host) if kind == "slurm" else table(text, host)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TopologyError(f"{where or kind}: {reason}") from error


def _node_labels(server: str, host: str, account: Path) -> dict[str, str]:
    """Request the labels of Kubernetes node `host` as the pod's service account. Raises OSError or ValueError."""
    import httpx

    from flopwatch.http.client import client, reason, url_tls
    from flopwatch.http.client import read as read_body

    headers = {"Accept": "application/json"}
    if server.startswith("https:"):
        headers["Authorization"] = f"Bearer {(account / 'token').read_text().strip()}"  # the kubelet renews it
    url = f"{server.rstrip('/')}/api/v1/nodes/{quote(host, safe='')}"
    try:
        with (
            client(url_tls(server, account / "ca.crt"), timeout=10, headers=headers) as http,
            http.stream("GET", url) as answer,
        ):
            status, content = answer.status_code, read_body(answer, MAX_BYTES)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause = reason(error)
        raise (cause if isinstance(cause, OSError) else ValueError(f"no HTTP: {error!r}")) from error
    if status != 200:
        raise ValueError(f"HTTP status {status} for the node {host}{_HINTS.get(status, '')}")
    try:
        labels = json.loads(content)["metadata"]["labels"]
        return {name: label for name, label in labels.items() if isinstance(label, str)}
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("the answer is not a Kubernetes node") from error


_HINTS = {
    401: "; its service account's token is not accepted",
    403: "; the service account may not get nodes",
    404: "; give the node's Kubernetes name with --host",
}
