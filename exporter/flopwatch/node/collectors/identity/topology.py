"""Place of the node: rack, leaf switch, NVLink domain.

Read from Slurm's topology.conf (https://slurm.schedmd.com/topology.conf.html; leaf from SwitchName lines, domain from
BlockName lines), from a CSV file with a header and the columns host, rack, leaf, domain (only host is required), or
from the labels of the Kubernetes node, as topograph and the GPU operator write them
(https://github.com/NVIDIA/topograph/blob/main/docs/reference/node-labels.md).
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

# Limits of a topology file in bytes, and of a host list in characters.
MAX_BYTES = 16 << 20
MAX_NODES_TEXT = 65536

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SERVER = "https://kubernetes.default.svc"

# Node labels of each level. The first present label wins.
LABELS = {
    "rack": ("topology.kubernetes.io/rack", "accelerator.topograph.run/sub-domain"),
    "leaf": ("fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf"),
    "domain": ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator", "nvidia.com/gpu.clique"),
}


class Place(NamedTuple):
    """Place of a node; unknown levels are empty."""

    rack: str = ""
    leaf: str = ""
    domain: str = ""
    source: str = ""


class TopologyError(Exception):
    """Unreadable place. The text is the reason."""


def contains(expression: str, host: str) -> bool:
    """Return whether a Slurm host list such as `node[001-018,020],login1` has this host. Raises ValueError."""
    if len(expression) > MAX_NODES_TEXT:
        raise ValueError(f"a host list of {len(expression)} characters")
    return any(_matches(part, host) for part in _split(expression))


def _split(expression: str) -> Iterable[list[str]]:
    """Yield the names in a list, each as literal, bracket, literal, ..."""
    # Commas within brackets belong to them.
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", expression):
        if part in "[]":
            raise ValueError(f"brackets that do not match in {expression[:80]!r}")
        yield re.split(r"[\[\]]", part)


def _matches(part: list[str], text: str) -> bool:
    """Return whether a name, as literal, bracket, literal, ..., matches this text."""
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
    """Return a predicate for digits in a range such as 7 or 001-018, with as many leading zeros."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
    if match is None:
        return lambda digits: digits == item
    low, high = match[1], match[2] or match[1]
    return lambda digits: int(low) <= int(digits) <= int(high) and digits == f"{int(digits):0{len(low)}d}"


def same_host(one: str, other: str) -> bool:
    """Return whether two names are of one host; either may lack its domain."""
    if "." in one and "." in other:
        return one == other
    return one.partition(".")[0] == other.partition(".")[0]


def slurm(text: str, host: str) -> Place:
    """Return the place of a host in a topology.conf. Raises ValueError if the file or host is missing there."""
    leaf = domain = None
    known, names = False, {host, host.partition(".")[0]}
    for line in text.replace("\\\n", " ").splitlines():
        words = {
            key.lower(): content
            for key, equals, content in (word.partition("=") for word in line.partition("#")[0].split())
            if equals
        }
        name = words.get("switchname", words.get("blockname"))
        known = known or name is not None
        if name is None or not any(contains(words.get("nodes", ""), each) for each in names):
            continue
        if "switchname" in words and leaf is None:
            leaf = name
        elif "blockname" in words and domain is None:
            domain = name
    if not known:
        raise ValueError("it has no line with SwitchName= or BlockName=")
    if leaf is None and domain is None:
        raise ValueError(f"no switch or block in it has the node {host}")
    return Place("", leaf or "", domain or "", "slurm")


def table(text: str, host: str) -> Place:
    """Return the place of a host in a CSV. Raises ValueError for another format or a missing host."""
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
    """Return the place in the labels of a Kubernetes node. Raises ValueError without topology labels."""
    found = {part: next((labels[name] for name in names if name in labels), "") for part, names in LABELS.items()}
    if not any(found.values()):
        raise ValueError("the node has none of topograph's labels")
    return Place(found["rack"], found["leaf"], found["domain"], "kubernetes")


def read(topology: str, host: str, account: Path = SERVICE_ACCOUNT) -> Place:
    """Return the place by a setting: slurm:FILE, csv:FILE, kubernetes or kubernetes:URL. Raises TopologyError."""
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
    """Return the labels of this Kubernetes node, requested as the pod's service account."""
    import httpx

    from flopwatch.http.client import client, reason, url_tls
    from flopwatch.http.client import read as read_body

    headers = {"Accept": "application/json"}
    if server.startswith("https:"):
        # Read it each time, because the kubelet renews it.
        headers["Authorization"] = f"Bearer {(account / 'token').read_text().strip()}"
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
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("the answer is not a Kubernetes node") from error


_HINTS = {
    401: "; its service account's token is not accepted",
    403: "; the service account may not get nodes",
    404: "; give the node's Kubernetes name with --host",
}
