"""The node's place, from Slurm's topology.conf, a CSV file, and a Kubernetes API server."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.collectors.identity.topology import (
    Place,
    TopologyError,
    contains,
    labelled,
    read,
    same_host,
    slurm,
    table,
)
from flopwatch.settings import ExporterSettings, SettingsError

TREE = """\
# Two leaf switches below a spine.
SwitchName=spine Switches=leaf[1-2]
switchname=leaf1 nodes=node[001-018,020] LinkSpeed=400
SwitchName=leaf2 Nodes=node[021-040],login1 \\
  LinkSpeed=400
"""
BLOCKS = "BlockName=nvl1 Nodes=gb[1-18]\nBlockName=nvl2 Nodes=gb[19-36]\nBlockSizes=18\n"


@pytest.mark.parametrize(
    ("expression", "inside", "outside"),
    [
        ("node7", ["node7"], ["node", "node77", "anode7", "node07"]),
        ("node[1-18]", ["node1", "node18"], ["node0", "node19", "node01", "node", "node1x"]),
        ("node[001-018,020]", ["node001", "node018", "node020"], ["node1", "node019", "node0001"]),
        ("node[08-12]", ["node08", "node10", "node12"], ["node8", "node13", "node010"]),
        ("node[98-102]", ["node98", "node100"], ["node098", "node103"]),
        ("r[1-2]n[01-18]-ib", ["r1n01-ib", "r2n18-ib"], ["r3n01-ib", "r1n1-ib", "r1n01"]),
        ("n[1-2][1-3]", ["n11", "n23"], ["n1", "n31", "n14"]),
        ("a[1-2],b,c[3,5]", ["a1", "b", "c3", "c5"], ["c4", "a", "a1,b", ""]),
        ("node[0-99999999999]", ["node4711"], ["node100000000000"]),
        ("", [], ["", "node"]),
    ],
)
def test_a_host_list_names_exactly_its_hosts(expression: str, inside: list[str], outside: list[str]) -> None:
    assert [host for host in [*inside, *outside] if contains(expression, host)] == inside


@pytest.mark.parametrize(
    ("expression", "reason"),
    [("node[1-2", "brackets"), ("node1-2]", "brackets"), ("n[1[2]]", "brackets"), ("x" * 70_000, "70000 characters")],
)
def test_a_host_list_that_is_none_is_a_value_error(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        contains(expression, "node1")


def test_names_with_and_without_a_domain_are_one_host() -> None:
    assert same_host("node1", "node1.cluster.example")
    assert same_host("node1.cluster.example", "node1.cluster.example")
    assert not same_host("node1.a", "node1.b")
    assert not same_host("node1", "node2.cluster.example")


def test_a_tree_gives_the_leaf_switch_and_blocks_the_nvlink_domain() -> None:
    assert slurm(TREE, "node018") == Place(leaf="leaf1", source="slurm")
    assert slurm(TREE, "node021.cluster.example") == Place(leaf="leaf2", source="slurm")
    assert slurm(BLOCKS, "gb19") == Place(domain="nvl2", source="slurm")
    assert slurm(TREE + BLOCKS.replace("gb[1-18]", "node[1-1000],node[001-040]"), "node020") == Place(
        leaf="leaf1", domain="nvl1", source="slurm"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TREE, "no switch or block in it has the node node019"),
        ("", "no line with SwitchName= or BlockName="),
        ("topology: default\n", "no line with SwitchName= or BlockName="),
        ("SwitchName=s Nodes=node[1", "brackets"),
    ],
)
def test_a_topology_without_this_node_is_an_error_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        slurm(text, "node019")


def test_a_table_gives_the_place_of_a_host() -> None:
    text = "host,rack,leaf,domain\nnode1,A07,leaf1,nvl1\nnode2.example, A08 ,leaf2,\n\nnode3,A09\n"
    assert table(text, "node1.example") == Place("A07", "leaf1", "nvl1", "csv")
    assert table(text, "node2") == Place("A08", "leaf2", "", "csv")
    assert table(text, "node3") == Place("A09", "", "", "csv")
    assert table("rack,host\nA07,node1\n", "node1") == Place("A07", "", "", "csv")
    with pytest.raises(ValueError, match="no line in it is about the host node4"):
        table(text, "node4")
    with pytest.raises(ValueError, match="no column host"):
        table("node1,A07\n", "node1")


def test_labels_of_both_generations_of_topograph_are_known() -> None:
    old = {
        "network.topology.nvidia.com/accelerator": "nvl1",
        "network.topology.nvidia.com/leaf": "s1",
        "network.topology.nvidia.com/spine": "s2",
        "kubernetes.io/hostname": "node-7",
    }
    new = {
        "accelerator.topograph.run/domain": "nvl1",
        "accelerator.topograph.run/sub-domain": "A07",
        "fabric.topograph.run/tier-0": "s1",
        "fabric.topograph.run/tier-1": "s2",
    }
    assert labelled(old) == Place("", "s1", "nvl1", "kubernetes")
    assert labelled(new) == Place("A07", "s1", "nvl1", "kubernetes")
    assert labelled({"nvidia.com/gpu.clique": "c0ffee.1"}) == Place("", "", "c0ffee.1", "kubernetes")
    with pytest.raises(ValueError, match="none of topograph's labels"):
        labelled({"kubernetes.io/hostname": "node-7"})


def test_files_are_read_by_the_setting_and_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(TREE)
    (tmp_path / "nodes.csv").write_bytes(b"\xef\xbb\xbfhost,rack\r\nnode1,A07\r\n")  # as spreadsheets write it
    (tmp_path / "latin").write_bytes(b"host\nn\xf6de\n")
    assert read(f"slurm:{tmp_path}/topology.conf", "node001") == Place("", "leaf1", "", "slurm")
    assert read(f"csv:{tmp_path}/nodes.csv", "node1") == Place("A07", "", "", "csv")
    for setting, reason in (
        (f"csv:{tmp_path}/absent", "absent: No such file"),
        (f"csv:{tmp_path}/latin", "latin: 'utf-8' codec"),
        (f"slurm:{tmp_path}", "Is a directory"),
        (f"slurm:{tmp_path}/nodes.csv", r"nodes\.csv: it has no line"),
    ):
        with pytest.raises(TopologyError, match=reason):
            read(setting, "node1")


@contextmanager
def api_server(status: int, body: bytes, asked: list[tuple[str, str | None]], tls: Path | None = None) -> Iterator[str]:
    """Answer every request like this, and note path and authorisation."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


NODE = json.dumps({"kind": "Node", "metadata": {"name": "node-7", "labels": {"fabric.topograph.run/tier-0": "s1"}}})


def test_the_api_server_is_asked_for_this_node(tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []
    with api_server(200, NODE.encode(), asked) as url:
        assert read(f"kubernetes:{url}", "node-7", tmp_path) == Place("", "s1", "", "kubernetes")
        assert read(f"kubernetes:{url}/proxy/", "../x", tmp_path).leaf == "s1"
    assert asked == [("/api/v1/nodes/node-7", None), ("/proxy/api/v1/nodes/..%2Fx", None)]


def certificate(folder: Path) -> None:
    """Make a key, and a certificate ca.crt that it signed itself."""
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=kubernetes",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key",
            "-out",
            "ca.crt",
        ],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=30,
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_over_tls_the_service_account_proves_both_sides(tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "both").write_text((tmp_path / "key").read_text() + (tmp_path / "ca.crt").read_text())
    (tmp_path / "token").write_text("s3cret\n")
    asked: list[tuple[str, str | None]] = []
    with api_server(200, NODE.encode(), asked, tls=tmp_path / "both") as url:
        assert read(f"kubernetes:{url}", "node-7", tmp_path).leaf == "s1"
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "token").write_text("s3cret")
        certificate(tmp_path / "other")
        with pytest.raises(TopologyError, match="certificate verify failed"):
            read(f"kubernetes:{url}", "node-7", tmp_path / "other")
    assert asked == [("/api/v1/nodes/node-7", "Bearer s3cret")]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, b"{}", "HTTP status 403 for the node node-7; the service account may not get nodes"),
        (404, b"{}", "404 for the node node-7; give the node's Kubernetes name with --host"),
        (200, b"<html>", "Expecting value"),
        (200, b"[]", "not a Kubernetes node"),
        (200, b'{"metadata": {"labels": null}}', "not a Kubernetes node"),
        (200, b'{"metadata": {"labels": {}}}', "none of topograph's labels"),
    ],
)
def test_an_unusable_answer_of_the_api_server_is_an_error(
    tmp_path: Path, status: int, body: bytes, reason: str
) -> None:
    with api_server(status, body, []) as url, pytest.raises(TopologyError, match=reason):
        read(f"kubernetes:{url}", "node-7", tmp_path)


def test_no_api_server_and_no_service_account_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="refused"):
        read("kubernetes:http://127.0.0.1:9", "node-7", tmp_path)
    with pytest.raises(TopologyError, match="No such file"):
        read("kubernetes:https://127.0.0.1:9", "node-7", tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        "slurm:/etc/slurm/topology.conf",
        "csv:nodes.csv",
        "kubernetes",
        "kubernetes:https://10.96.0.1:443",
        "kubernetes:http://127.0.0.1:8001",
    ],
)
def test_a_valid_setting_is_accepted(setting: str) -> None:
    assert ExporterSettings(topology=setting).topology == setting


@pytest.mark.parametrize(
    "setting",
    [
        "slurm",
        "slurm:",
        "csv:",
        "yaml:x",
        "kubernetes:",
        "kubernetes:http://10.96.0.1",
        "kubernetes:10.96.0.1:443",
        "/etc/slurm/topology.conf",
    ],
)
def test_a_setting_that_names_nothing_is_refused_with_what_to_write(setting: str) -> None:
    with pytest.raises(SettingsError, match=r"--topology .* write"):
        ExporterSettings(topology=setting)


@given(st.text(max_size=200), st.text(alphabet="node019[],-.", max_size=30))
def test_no_text_breaks_the_parsers(text: str, host: str) -> None:
    for parse, content, name in (
        (slurm, text, host),
        (slurm, f"SwitchName=s Nodes={text}", host),
        (slurm, f"SwitchName=s Nodes={host}", text),
        (table, text, host),
        (table, f"host\n{text}", host),
    ):
        try:
            found = parse(content, name)
        except ValueError:
            continue
        assert found.source in ("slurm", "csv")
