"""Test the viewer's server: the dashboards it lists, the requests it forwards to Prometheus, and its error texts."""

from __future__ import annotations

import argparse
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from demo import boards as shows
from demo.boards import WITHOUT, provisioned
from demo.stack import free_ports
from flopwatch.boards import app
from flopwatch.boards.app import Upstream, boards_app, dashboards
from flopwatch.commands import boards as command
from flopwatch.http import server as http_server
from flopwatch.http.guard import LOOPBACK_NAMES, guarded
from flopwatch.settings import Address, BoardsSettings, SettingsError
from tests.support import ROOT
from tests.support.machine import until

SHIPPED = ROOT / "helm" / "files" / "dashboards"


class FakePrometheus:
    """Fake Prometheus that gives every request the same answer and records the requests."""

    def __init__(
        self, status: int = 200, body: bytes = b'{"status": "success", "data": []}', location: str = ""
    ) -> None:
        self.requests: list[tuple[str, str, str, str | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                form = self.rfile.read(size).decode()
                fake.requests.append((self.command, self.path, form, self.headers.get("Authorization")))
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakePrometheus:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    for name in ("assets", "public"):
        (folder / name).mkdir(parents=True)
    (folder / "index.html").write_text("<title>the page</title>")
    (folder / "assets" / "index.js").write_text("1")
    return folder


@contextmanager
def serving(page: Path, upstream: Upstream, names: tuple[str, ...] = LOOPBACK_NAMES) -> Iterator[str]:
    """Run the viewer's server and yield its URL."""
    (port,) = free_ports(1)
    made = boards_app(dashboards(SHIPPED), page, upstream, scrape_interval=5.0)
    server = http_server.server(guarded(made, names))
    with http_server.listener("--listen", Address("127.0.0.1", port), backlog=8) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.end()
            thread.join()


def get(url: str, form: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the response to a request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, form, headers), timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def as_json(url: str, form: bytes | None = None) -> Any:
    """Return the JSON at a URL."""
    return json.loads(get(url, form)[2])


def test_it_lists_the_shipped_dashboards_and_serves_each_as_it_is(page: Path) -> None:
    with FakePrometheus() as prometheus, serving(page, Upstream(prometheus.url)) as url:
        listed = {one["uid"]: one["title"] for one in as_json(f"{url}/api/boards")}
        shipped = [json.loads(file.read_text()) for file in sorted(SHIPPED.glob("*.json"))]
        assert listed == {one["uid"]: one["title"] for one in shipped}
        for one in shipped:
            assert as_json(f"{url}/api/boards/{one['uid']}") == one
        assert get(f"{url}/api/boards/nothing")[0] == 404
        assert as_json(f"{url}/api/settings") == {"scrape_interval": 5.0}


@pytest.mark.parametrize("path", ["/", "/d/flopwatch-run", "/d/flopwatch-run/training-run?var-run=x"])
def test_every_address_of_a_board_is_the_page(page: Path, path: str) -> None:
    with serving(page, Upstream("http://127.0.0.1:9")) as url:
        status, headers, body = get(url + path)
    assert (status, body) == (200, b"<title>the page</title>")
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_a_query_is_forwarded_with_a_token_that_is_read_each_time(page: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with FakePrometheus() as prometheus, serving(page, Upstream(prometheus.url + "/", token)) as url:
        assert as_json(f"{url}/api/prometheus/query_range", b"query=up&step=5") == {"status": "success", "data": []}
        token.write_text("second")
        as_json(f"{url}/api/prometheus/label/run/values?start=1&match[]=up")
    assert prometheus.requests == [
        ("POST", "/api/v1/query_range", "query=up&step=5", "Bearer first"),
        ("GET", "/api/v1/label/run/values?start=1&match[]=up", "", "Bearer second"),
    ]


@pytest.mark.parametrize(
    "path",
    [
        "admin/tsdb/delete_series",
        "../../-/quit",
        "query/../admin/tsdb/snapshot",
        "status/config",
        "label/a%2Fb/values",
        "write",
        "",
    ],
)
def test_nothing_but_reading_is_passed_on(page: Path, path: str) -> None:
    with FakePrometheus() as prometheus, serving(page, Upstream(prometheus.url)) as url:
        assert get(f"{url}/api/prometheus/{path}", b"match[]=up")[0] in (404, 405)
    assert prometheus.requests == []


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"status": "error", "errorType": "bad_data", "error": "parse error"}', "parse error"),
        (503, b"upstream is gone", "Prometheus answers 503: upstream is gone"),
    ],
)
def test_an_error_of_prometheus_is_shown_in_its_own_words(page: Path, status: int, body: bytes, message: str) -> None:
    with FakePrometheus(status, body) as prometheus, serving(page, Upstream(prometheus.url)) as url:
        code, _, answer = get(f"{url}/api/prometheus/query", b"query=(")
    assert (code, json.loads(answer)["error"]) == (status, message)


def test_an_unreachable_prometheus_is_reported_with_the_flag_to_check(page: Path) -> None:
    (port,) = free_ports(1)
    with serving(page, Upstream(f"http://127.0.0.1:{port}")) as url:
        status, _, answer = get(f"{url}/api/prometheus/query", b"query=up")
    assert status == 502
    assert "is --prometheus right?" in json.loads(answer)["error"]


def test_a_redirect_gets_no_token(page: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with (
        FakePrometheus() as elsewhere,
        FakePrometheus(302, b"", f"{elsewhere.url}/login") as prometheus,
        serving(page, Upstream(prometheus.url, tmp_path / "token")) as url,
    ):
        status, _, answer = get(f"{url}/api/prometheus/query", b"query=up")
    assert (status, elsewhere.requests) == (302, [])
    assert "answers 302" in json.loads(answer)["error"]


def test_an_answer_without_end_is_cut(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BYTES", 1 << 20)
    with FakePrometheus(200, b"x" * ((1 << 20) + 1)) as prometheus, serving(page, Upstream(prometheus.url)) as url:
        status, _, answer = get(f"{url}/api/prometheus/query", b"query=up")
    assert (status, json.loads(answer)["error"]) == (502, "the answer has more than 1 MiB; ask for less")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_page_cannot_make_it_ask(page: Path, site: str) -> None:
    with FakePrometheus() as prometheus, serving(page, Upstream(prometheus.url)) as url:
        assert get(f"{url}/api/prometheus/query?query=up", None, **{"Sec-Fetch-Site": site})[0] == 403
        assert get(f"{url}/api/prometheus/query?query=up", None, **{"Sec-Fetch-Site": "same-origin"})[0] == 200
        # a link from another page may be followed
        link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        assert get(f"{url}/d/flopwatch-run", None, **link)[0] == 200
    assert len(prometheus.requests) == 1


def test_a_web_configuration_without_authentication_is_refused_for_other_hosts(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PAGES", (page,))
    (tmp_path / "web.yml").write_text("")
    with pytest.raises(SettingsError, match="basic_auth_users"):
        app.run(BoardsSettings("http://127.0.0.1:9", listen=Address("0.0.0.0", 0), web_config=tmp_path / "web.yml"))


def test_an_unknown_host_name_is_refused(page: Path) -> None:
    with serving(page, Upstream("http://127.0.0.1:9")) as url:
        assert get(f"{url}/api/boards", Host="rebound.example:9452")[0] == 421
        assert get(f"{url}/api/boards", Host="localhost:9452")[0] == 200
    with serving(page, Upstream("http://127.0.0.1:9"), ()) as url:
        assert get(f"{url}/api/boards", Host="boards.example")[0] == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no *.json"),
        ("{", "is no dashboard"),
        ('{"title": "x"}', "is no dashboard"),
        ('{"uid": 1, "title": "x"}', "give it one of its own"),
    ],
)
def test_a_folder_without_dashboards_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(SettingsError, match=message.replace("*", r"\*")):
        dashboards(tmp_path)


def test_without_the_page_the_error_explains_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(app, "PAGES", (tmp_path,))
    with pytest.raises(SettingsError, match="make viewer"):
        app.page()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prometheus": "127.0.0.1:9090"}, "write its URL"),
        ({"prometheus": "http://x", "listen": Address("0.0.0.0", 9452)}, "--web-config"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        BoardsSettings(**given)


def test_the_command_takes_all_settings() -> None:
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    given = parser.parse_args(["boards", "--prometheus", "http://x"])
    assert {name.name for name in BoardsSettings.__dataclass_fields__.values()} <= set(vars(given))


# The program that shows the dashboards in the demo.


def chosen_viewer(tmp_path: Path, *programs: str) -> shows.DashboardViewer | None:
    """Return the viewer that the demo chooses if only `programs` are installed."""
    return shows.find(
        "127.0.0.1:3000",
        "http://127.0.0.1:9090",
        tmp_path,
        1.0,
        ("python", "boards"),
        lambda name: f"/opt/bin/{name}" if name in programs else None,
    )


def test_a_grafana_is_given_prometheus_and_the_dashboards(tmp_path: Path) -> None:
    show = chosen_viewer(tmp_path, "grafana", "docker")
    assert show is not None
    assert show.command[:2] == ("/opt/bin/grafana", "server")
    folder = Path(show.environ["GF_PATHS_PROVISIONING"])
    (source,) = json.loads((folder / "datasources" / "flopwatch.yaml").read_text())["datasources"]
    (provider,) = json.loads((folder / "dashboards" / "flopwatch.yaml").read_text())["providers"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://127.0.0.1:9090", True)
    assert Path(provider["options"]["path"]) == SHIPPED
    assert show.environ["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert show.link.startswith("http://127.0.0.1:3000/d/flopwatch-run")


def test_our_own_viewer_comes_before_an_image_that_has_to_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shows, "PAGE", tmp_path / "index.html")
    assert chosen_viewer(tmp_path, "podman") is None  # a container client without a running engine does not help either
    monkeypatch.setattr(shows, "works", lambda engine: True)
    engine = chosen_viewer(tmp_path, "podman")
    assert engine is not None
    assert engine.command[:2] == ("/opt/bin/podman", "run")
    assert engine.command[-1] == shows.IMAGE
    assert f"{SHIPPED}:/etc/grafana/flopwatch:ro" in engine.command
    assert chosen_viewer(tmp_path) is None
    assert "terminal" in WITHOUT
    (tmp_path / "index.html").touch()
    own = chosen_viewer(tmp_path, "podman")
    assert own is not None
    assert own.command == (
        "python",
        "boards",
        "--prometheus=http://127.0.0.1:9090",
        "--listen=127.0.0.1:3000",
        "--scrape-interval=1",
    )


def test_provisioning_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    made = provisioned(tmp_path, "http://p", 15.0, Path("/dashboards"))
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*.yaml")) == [
        "dashboards/flopwatch.yaml",
        "datasources/flopwatch.yaml",
    ]
