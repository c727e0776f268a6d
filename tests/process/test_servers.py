"""Where the demo takes Prometheus and Alertmanager from."""

from __future__ import annotations

import functools
import hashlib
import io
import platform
import tarfile
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from demo.servers import (
    NEWEST,
    OLDEST,
    ServersError,
    debian_mirrors,
    find,
    node_exporter,
    unpack_release,
    victoria_metrics,
    with_template,
)

PROGRAMS = ("prometheus", "promtool", "alertmanager", "amtool")
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def apt(folder: Path, files: dict[str, str]) -> Path:
    """Make an /etc/apt of these files and Debian's key."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "key.gpg").touch()
    return folder


@pytest.mark.parametrize(
    ("files", "mirrors"),
    [
        pytest.param(
            {
                "sources.list": "# deb http://old.example/debian bullseye main\n"
                "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian/ bookworm main contrib\n"
                "deb http://mirror.example/debian-security bookworm-security main\n"
            },
            ["http://mirror.example/debian"],
            id="one-line",
        ),
        pytest.param(
            {
                "sources.list.d/debian.sources": "Types: deb\n# http://snapshot.example/archive/debian/20250520T000000Z\n"
                "URIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
                "Components: main\n\nTypes: deb\n"
                "URIs: http://mirror.example/debian-security\nSuites: bookworm-security\n"
            },
            ["http://mirror.example/debian"],
            id="deb822",
        ),
        pytest.param(
            {
                "sources.list.d/debian.sources": "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\n",
                "mirrors/debian.list": "https://mirror.example/debian\n",
            },
            ["https://mirror.example/debian"],
            id="mirror list of a cloud image",
        ),
        pytest.param(
            {"sources.list": "deb http://snapshot.example/archive/debian/20250520T000000Z bookworm main\n"},
            ["http://snapshot.example/archive/debian/20250520T000000Z"],
            id="snapshot",
        ),
        pytest.param(
            {
                "sources.list.d/a-vendor.list": "deb https://vendor.example/linux/debian bookworm stable\n",
                "sources.list.d/debian.sources": "Types: deb\nURIs: http://mirror.example/debian\n",
            },
            ["http://mirror.example/debian", "https://vendor.example/linux/debian"],
            id="another vendor is tried last",
        ),
        pytest.param({"sources.list": "deb http://archive.example/ubuntu noble main\n"}, [], id="Ubuntu"),
        pytest.param({}, [], id="no apt"),
    ],
)
def test_the_debian_mirror_is_the_one_apt_uses(tmp_path: Path, files: dict[str, str], mirrors: list[str]) -> None:
    folder = apt(tmp_path, files)
    assert debian_mirrors(folder, folder / "key.gpg") == mirrors


def test_without_debians_key_no_mirror_is_trusted(tmp_path: Path) -> None:
    folder = apt(tmp_path, {"sources.list": "deb http://mirror.example/debian bookworm main\n"})
    assert debian_mirrors(folder, folder / "missing.gpg") == []


def test_programs_on_path_are_taken_and_nothing_is_fetched(tmp_path: Path) -> None:
    paths = [executable(tmp_path / "bin" / name) for name in PROGRAMS]
    servers = find({"PATH": str(tmp_path / "bin"), "FLOPWATCH_CACHE": str(tmp_path / "cache")}, log=pytest.fail)
    assert servers.prometheus == (str(paths[0]),)
    assert servers.promtool == str(paths[1])
    assert servers.alertmanager == (str(paths[2]),)
    assert servers.amtool == str(paths[3])
    assert not (tmp_path / "cache").exists()


def test_a_filled_cache_is_taken_without_the_network(tmp_path: Path) -> None:
    programs = tmp_path / "cache" / "release" / "usr" / "bin"
    for name in PROGRAMS:
        executable(programs / name)
    servers = find({"PATH": str(tmp_path), "FLOPWATCH_CACHE": str(tmp_path / "cache")}, log=pytest.fail)
    assert servers.prometheus == (str(programs / "prometheus"),)
    assert servers.alertmanager == (str(programs / "alertmanager"),)


@pytest.mark.parametrize("suite", [OLDEST, NEWEST])
def test_a_named_suite_is_taken_whatever_else_there_is(tmp_path: Path, suite: str) -> None:
    for name in (*PROGRAMS, "victoria-metrics"):
        executable(tmp_path / "bin" / name)
        executable(tmp_path / "cache" / "release" / "usr" / "bin" / name)
    programs = tmp_path / "cache" / f"debian-{suite}" / "usr" / "bin"
    for name in ("prometheus", "promtool", "prometheus-alertmanager", "amtool"):
        executable(programs / name)
    (programs.parent / "share").mkdir()
    database = executable(tmp_path / "cache" / f"victoria-metrics-{suite}" / "usr" / "bin" / "victoria-metrics")
    environ = {"PATH": str(tmp_path / "bin"), "FLOPWATCH_CACHE": str(tmp_path / "cache")}
    servers = find(environ, pytest.fail, suite)
    assert (servers.prometheus, servers.promtool) == ((str(programs / "prometheus"),), str(programs / "promtool"))
    assert victoria_metrics(environ, pytest.fail, suite) == str(database)


@pytest.mark.skipif(Path("/usr/share/prometheus/alertmanager/default.tmpl").exists(), reason="it is installed")
def test_where_no_namespace_can_be_made_alertmanager_is_left_out_and_the_reason_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "usr" / "bin" / "prometheus-alertmanager")
    (tmp_path / "usr" / "share").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))  # no unshare
    command, why = with_template(tmp_path)
    assert command == ()
    assert "user namespaces are disabled" in why


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder with one release archive as its publisher would."""
    folder = tmp_path / "releases"
    folder.mkdir()
    name = f"prometheus-2.53.3.linux-{MACHINE}"
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        for file in ("prometheus", "promtool", "../escape", "LICENSE"):
            member = tarfile.TarInfo(f"{name}/{file}")
            member.size = len(file)
            archive.addfile(member, io.BytesIO(file.encode()))
    digest = hashlib.sha256((folder / f"{name}.tar.gz").read_bytes()).hexdigest()
    others = f"{'0' * 64}  prometheus-2.53.3.darwin-arm64.tar.gz\n"
    (folder / "sha256sums.txt").write_text(f"{others}{digest}  {name}.tar.gz\n")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def test_a_release_archive_gives_its_programs_and_nothing_else(releases: tuple[str, Path], tmp_path: Path) -> None:
    unpack_release(releases[0], "prometheus-2.53.3", tmp_path / "tree")
    unpacked = sorted(path.relative_to(tmp_path / "tree") for path in (tmp_path / "tree").rglob("*") if path.is_file())
    assert unpacked == [Path("usr/bin/prometheus"), Path("usr/bin/promtool")]
    assert (tmp_path / "tree/usr/bin/prometheus").read_text() == "prometheus"
    assert (tmp_path / "tree/usr/bin/prometheus").stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / "escape").exists()


def test_a_release_archive_with_another_checksum_is_refused(releases: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = releases
    with next(folder.glob("*.tar.gz")).open("ab") as archive:
        archive.write(b"one byte more")
    with pytest.raises(ServersError, match="does not have its published SHA-256"):
        unpack_release(url, "prometheus-2.53.3", tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_release_without_a_published_checksum_is_refused(releases: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = releases
    (folder / "sha256sums.txt").write_text("")
    with pytest.raises(ServersError, match="does not have its published SHA-256"):
        unpack_release(url, "prometheus-2.53.3", tmp_path / "tree")


@pytest.mark.parametrize("name", ["prometheus-node-exporter", "node_exporter"])
def test_node_exporter_on_path_is_taken(tmp_path: Path, name: str) -> None:
    program = executable(tmp_path / "bin" / name)
    assert node_exporter({"PATH": str(tmp_path / "bin"), "FLOPWATCH_CACHE": str(tmp_path / "cache")}) == str(program)
    assert not (tmp_path / "cache").exists()
