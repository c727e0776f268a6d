"""Switch ports at the other ends of this host's cables, from a file about the whole fabric.

The file is the output of ibnetdiscover (https://github.com/linux-rdma/rdma-core, ibnetdiscover(8)), or the links of UFM
as JSON (GET /ufmRest/resources/links, NVIDIA UFM Enterprise REST API Guide). A port is found by the GUID of the port or
of its adapter. A cable that broke is not in a newer file, so the last known switch port remains.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flopwatch.node.collectors.background import BackgroundCall
from flopwatch.node.collectors.infiniband.files import first_line_of

if TYPE_CHECKING:
    from flopwatch.node.collectors.infiniband.port import Port

log = logging.getLogger(__name__)
INTERVAL, RETRY = 600.0, 30.0  # seconds between two reads, and after a failure
MAX_BYTES = 256 << 20  # of the file, about a million links
SWITCH = re.compile(r'Switch\s+\d+\s+"S-([0-9a-f]+)"\s+# "([^"]*)"')
LINK = re.compile(r'\[(\d+)\]\s+"H-([0-9a-f]+)"\[(\d+)\](?:\(([0-9a-f]+)\))?')
MANAGED = re.compile(r"MF0;([^:;]+)(?::.*)?")  # "MF0;leaf-3:MQM9700/U1" is the switch leaf-3


UFM_SIDES, UFM_PARTS = ("source", "destination"), ("guid", "port", "port_name", "port_dname", "port_node_description")


class SwitchPort(NamedTuple):
    """Name and GUID of a switch, and the number of its port."""

    switch: str
    switch_guid: str
    switch_port: str


Links = dict[str, SwitchPort]  # by GUID and port number of the host's port


def key(guid: str, port: str) -> str:
    """Return the key of a port in Links, for a GUID with or without prefix, colons and leading zeros."""
    return f"{guid.lower().replace(':', '').removeprefix('0x').zfill(16)}/{port}"


def ibnetdiscover(text: str) -> Iterator[tuple[str, SwitchPort]]:
    """Yield the links of all host ports in an output of ibnetdiscover. Raises ValueError if it has no switch."""
    switches = {found[1]: found[2] for found in SWITCH.finditer(text)}
    if not switches:
        raise ValueError("it has no switch; write the output of ibnetdiscover, or UFM's links as JSON")
    alike = Counter(switches.values())
    guid = name = ""
    for line in text.splitlines():
        if found := SWITCH.match(line):
            guid, name = found[1], found[2]
            managed = MANAGED.fullmatch(name)
            # Switches without management all have the name of their model.
            name = managed[1] if managed else name if name and alike[name] == 1 else f"S-{guid}"
        elif line[:1] != "[":
            guid = guid if line.strip() else ""  # an empty line ends the switch
        elif guid and (link := LINK.match(line)):
            end = SwitchPort(name, guid, link[1])
            yield key(link[2], link[3]), end
            if link[4]:
                yield key(link[4], link[3]), end


def ufm(links: Any) -> Iterator[tuple[str, SwitchPort]]:
    """Yield the links in an answer of UFM, from both ends. Raises ValueError for another format."""
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        raise ValueError("it is not a list of UFM's links")
    for link in links:
        one, other = ({part: str(link.get(f"{side}_{part}", "")) for part in UFM_PARTS} for side in UFM_SIDES)
        # An end is named <GUID>_<number>, with the GUID of its system, and for an adapter also with that of its port.
        named = [{f"{end['guid']}_{end['port']}", end["port_name"]} for end in (one, other)]
        parts = set(str(link.get("name", "")).split(":"))
        unknown = parts - named[0] - named[1]
        if len(unknown) == 1 and parts & (named[0] | named[1]):
            named[1 if parts & named[0] else 0] |= unknown
        for end, names in ((one, named[1]), (other, named[0])):
            if not end["port_dname"].startswith("HCA-"):
                name = end["port_node_description"].rpartition(":")[0] or f"S-{end['guid']}"
                for peer in names - {""}:
                    yield key(*peer.rpartition("_")[::2]), SwitchPort(name, end["guid"], end["port"])


def read(path: Path, wanted: frozenset[str]) -> Links:
    """Return the links of the wanted ports from a file. Raises OSError or ValueError."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES} bytes")
    text = content.decode("utf-8", "replace")
    try:
        links = ufm(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else ibnetdiscover(text)
        return {place: end for place, end in links if place in wanted}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


class Cables:
    """Labels of the switch ports at the other ends of a host's ports. A thread reads the file, which may be slow.

    Without a file, all are empty.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._wanted: frozenset[str] = frozenset()
        self._call = BackgroundCall(lambda: read(path, self._wanted) if path else {}, INTERVAL, retry=RETRY)
        self._links: Links | None = None
        self._error = ""

    def news(self) -> bool:
        """Return whether the file was read since the last call. Log an error of reading it once."""
        if self._path is None:
            return False
        error = "" if self._call.error.startswith("not answered") else self._call.error
        if error and error != self._error:
            log.warning("--cables: %s", error)
        self._error = error
        before, self._links = self._links, self._call.answer(0)
        return self._links is not before

    def label(self, root: str, ports: Mapping[str, "Port"], known: Mapping[str, Mapping[str, str]]) -> None:
        """Set the labels of present ports from the file, or else as they were `known`. Begin to read it."""
        if self._path is None:
            return
        keys = {name: _keys(root, *port.labels) for name, port in ports.items()}
        self._wanted = frozenset(place for places in keys.values() for place in places)
        self._call.start()
        for name, port in ports.items():
            before = {label: known.get(name, {}).get(label, "") for label in SwitchPort._fields}
            ends = [self._links[place] for place in keys[name] if self._links and place in self._links]
            port.identity |= ends[0]._asdict() if ends else before

    def close(self) -> None:
        """Stop reading the file."""
        self._call.close()


def _keys(root: str, device: str, port: str) -> list[str]:
    """Return the keys of a port: by its own GUID, which its first address ends with, and by that of its adapter."""
    guids = (
        "".join(first_line_of(f"{root}/{device}/ports/{port}/gids/0").split(":")[-4:]),
        first_line_of(f"{root}/{device}/node_guid"),
    )
    return [key(guid, port) for guid in guids if guid.strip("0:")]
