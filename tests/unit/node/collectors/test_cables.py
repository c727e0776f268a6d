"""Switch ports behind a host's ports, from files made by hand in the formats of ibnetdiscover(8) and of UFM."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue import INFINIBAND_INFO
from flopwatch.node.collectors.infiniband import Infiniband
from flopwatch.node.collectors.infiniband.cables import SwitchPort, ibnetdiscover, key, read, ufm
from tests.support.machine import until

GUID, SECOND = "b83fd20300a1b2c0", "b83fd20300a1b2c8"  # of the adapters mlx5_0 and mlx5_1
LEAF, SPINE, PLAIN = "fc6a1c0300111110", "fc6a1c0300222220", "0008f10400333330"
DISCOVERED = f"""\
#
# Topology file: generated on Tue Jun  9 10:00:00 2026
#
# Initiated from node {GUID} port {GUID}

vendid=0x2c9
devid=0xd2f2
sysimgguid=0x{LEAF}
switchguid=0x{LEAF}({LEAF})
Switch\t65 "S-{LEAF}"\t\t# "MF0;leaf-3:MQM9700/U1" enhanced port 0 lid 7 lmc 0
[1]\t"H-{GUID}"[1]({GUID[2:]}) \t\t# "host-17 mlx5_0" lid 21 4xNDR
[12]\t"H-{SECOND}"[1]({SECOND}) \t\t# "host-17 mlx5_1" lid 22 4xNDR
[33]\t"S-{SPINE}"[5]\t\t# "MF0;spine-1:MQM9700/U1" lid 3 4xNDR

vendid=0x2c9
devid=0xd2f2
Switch\t65 "S-{SPINE}"\t\t# "MF0;spine-1:MQM9700/U1" enhanced port 0 lid 3 lmc 0
[5]\t"S-{LEAF}"[33]\t\t# "MF0;leaf-3:MQM9700/U1" lid 7 4xNDR

vendid=0x8f1
Switch\t24 "S-{PLAIN}"\t\t# "Quantum Mellanox Technologies" base port 0 lid 9 lmc 0
[8]\t"H-0008f10403960558"[2](8f1040396055a)\t\t# "host-18 HCA-1" lid 14 4xHDR

Switch\t24 "S-0008f10400333340"\t\t# "Quantum Mellanox Technologies" base port 0 lid 10 lmc 0
[3]\t"H-0008f10403960558"[1](8f10403960559)\t\t# "host-18 HCA-1" lid 13 4xHDR

vendid=0x2c9
caguid=0x{GUID}
Ca\t1 "H-{GUID}"\t\t# "host-17 mlx5_0"
[1]({GUID}) \t"S-{LEAF}"[1]\t\t# lid 21 lmc 0 "MF0;leaf-3:MQM9700/U1" lid 7 4xNDR
"""
END = SwitchPort("leaf-3", LEAF, "1")


def link(**more: str) -> dict[str, Any]:
    """Return a link between a switch and a port of an adapter with two ports, as UFM 6.11 has it."""
    ends = {"source_guid": LEAF, "source_port": "20", "source_port_dname": "20"}
    ends |= {"destination_guid": GUID, "destination_port": "2", "destination_port_dname": "HCA-1/2"}
    return {**ends, "name": f"{LEAF}_20:{SECOND}_2", "width": "IB_4x", "severity": "Info", "capabilities": [], **more}


def test_links_of_ibnetdiscover_are_found_by_the_guid_of_port_and_adapter() -> None:
    found = dict(ibnetdiscover(DISCOVERED))
    assert found == {
        key(GUID, "1"): END,
        key(GUID[2:], "1"): END,
        key(SECOND, "1"): SwitchPort("leaf-3", LEAF, "12"),
        # Switches without management have the name of their model, which names no switch.
        "0008f10403960558/2": SwitchPort(f"S-{PLAIN}", PLAIN, "8"),
        "0008f1040396055a/2": SwitchPort(f"S-{PLAIN}", PLAIN, "8"),
        "0008f10403960558/1": SwitchPort("S-0008f10400333340", "0008f10400333340", "3"),
        "0008f10403960559/1": SwitchPort("S-0008f10400333340", "0008f10400333340", "3"),
    }


def test_a_switch_has_the_name_of_a_node_name_map() -> None:
    mapped = DISCOVERED.replace("MF0;leaf-3:MQM9700/U1", "row 4 leaf 3")
    assert dict(ibnetdiscover(mapped))[key(GUID, "1")] == SwitchPort("row 4 leaf 3", LEAF, "1")


def test_links_of_ufm_are_found_by_the_guids_of_system_and_port() -> None:
    unnamed = SwitchPort(f"S-{LEAF}", LEAF, "20")
    assert dict(ufm([link()])) == {f"{GUID}/2": unnamed, f"{SECOND}/2": unnamed}
    described = {"source_port_node_description": "leaf-3:20", "destination_port_node_description": "host-17 mlx5_1"}
    named = SwitchPort("leaf-3", LEAF, "20")
    assert dict(ufm([link(**described)])) == {f"{GUID}/2": named, f"{SECOND}/2": named}
    # UFM 6.21 names both ports, and adapters have the labels of cages.
    new = {"source_port_dname": "1/10/2", "destination_port_dname": "1/1", "name": "x:y", **described}
    new |= {"source_port_name": f"{LEAF}_20", "destination_port_name": f"{SECOND}_2"}
    found = dict(ufm([link(**new)]))
    assert found[f"{GUID}/2"] == found[f"{SECOND}/2"] == named
    other = {"source": "destination", "destination": "source"}
    turned = {
        re.sub("^(source|destination)", lambda side: other[side[1]], name): value
        for name, value in link(**described).items()
    }
    assert dict(ufm([turned])) == {f"{GUID}/2": named, f"{SECOND}/2": named}


def test_a_file_has_one_of_both_formats_and_only_wanted_ports_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "fabric"
    for text, expected in ((DISCOVERED, {key(GUID, "1"): END}), (json.dumps([link()]), {})):
        file.write_text(text)
        assert read(file, frozenset([key(GUID, "1")])) == expected
    for text, reason in (
        ("", "it has no switch; write the output of ibnetdiscover, or UFM's links as JSON"),
        ("{}", "it is not a list of UFM's links"),
        ("[1]", "it is not a list of UFM's links"),
        ("[", "Expecting value"),
        ("[" * 100_000, "recursion"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read(file, frozenset())


@given(st.text(alphabet='Switch 12"S-H[](){}#:\n\t'))
def test_any_text_is_links_or_a_value_error(text: str) -> None:
    for one in (text, f'Switch 2 "S-a" # "a"\n{text}'):
        with contextlib.suppress(ValueError):
            assert all(isinstance(end, SwitchPort) for _, end in ibnetdiscover(one))


class Host:
    """Host with two ports, whose collector reads a file about the fabric."""

    def __init__(self, folder: Path, text: str = DISCOVERED) -> None:
        self.folder, self.fabric = folder, folder / "fabric"
        self.sysfs = folder / "sys"
        for device, guid in (("mlx5_0", GUID), ("mlx5_1", SECOND)):
            port = self.sysfs / "class/infiniband" / device / "ports/1"
            (port / "gids").mkdir(parents=True)
            (port / "state").write_text("4: ACTIVE\n")
            (port / "link_layer").write_text("InfiniBand\n")
            colons = ":".join(guid[at : at + 4] for at in range(0, 16, 4))
            (port / "gids/0").write_text(f"fe80:0000:0000:0000:{colons}\n")
            (port.parents[1] / "node_guid").write_text(f"{colons}\n")
        self.fabric.write_text(text)

    def collector(self, cables: bool = True) -> Infiniband:
        return Infiniband(self.sysfs, "host-17", self.folder / "ports.json", cables=self.fabric if cables else None)


def switches(collector: Infiniband) -> dict[str, tuple[str, ...]]:
    at = INFINIBAND_INFO.labels.index("switch")
    return {labels[0]: labels[at:] for row, labels, _ in collector.read() if row is INFINIBAND_INFO}


FOUND = {"mlx5_0": ("leaf-3", LEAF, "1"), "mlx5_1": ("leaf-3", LEAF, "12")}
NONE = {"mlx5_0": ("", "", ""), "mlx5_1": ("", "", "")}


def test_infiniband_info_has_the_switch_port_at_the_other_end_of_each_cable(tmp_path: Path) -> None:
    collector = Host(tmp_path).collector()
    until(lambda: switches(collector) == FOUND)
    collector.close()


def test_a_port_is_found_by_its_adapter_where_it_has_no_address(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for file in host.sysfs.rglob("gids/0"):
        file.unlink()
    collector = host.collector()
    until(lambda: switches(collector) == FOUND)


def test_the_last_switch_port_remains_while_the_cable_is_broken_and_after_a_restart(tmp_path: Path) -> None:
    host = Host(tmp_path)
    first = host.collector()
    until(lambda: switches(first) == FOUND)
    first.close()
    lines = DISCOVERED.splitlines(keepends=True)
    host.fabric.write_text("".join(line for line in lines if GUID not in line).replace("[12]", "[13]"))
    second = host.collector()
    assert switches(second) == FOUND
    until(lambda: switches(second)["mlx5_1"][2] == "13")  # this cable was moved
    assert switches(second)["mlx5_0"] == ("leaf-3", LEAF, "1")
    second.close()
    assert switches(host.collector(cables=False)) == NONE


def test_an_unreadable_file_is_logged_once_and_costs_no_other_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Host(tmp_path, "no fabric").collector()
    with caplog.at_level(logging.WARNING):
        until(lambda: switches(collector) == NONE and caplog.messages)
        collector.read()
    reason = "it has no switch; write the output of ibnetdiscover, or UFM's links as JSON"
    assert caplog.messages == [f"--cables: {tmp_path}/fabric: {reason}"]


def test_a_slow_file_does_not_delay_a_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwatch.node.collectors.infiniband.cables.read", lambda *_: time.sleep(30))
    collector = Host(tmp_path).collector()
    begun = time.monotonic()
    assert switches(collector) == NONE
    assert time.monotonic() - begun < 5
