"""The web configuration file: what it may say, and real connections to a real server while it changes."""

from __future__ import annotations

import asyncio
import base64
import http.client
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.http.passwords import MAX_WAITING, Passwords
from flopwatch.http.web_config import Web, WebConfig, parse
from flopwatch.settings import SettingsError
from tests.support import ROOT
from tests.support.machine import PATIENCE, until
from tests.support.tls import Authority, basic, client, write

# Of "s3cret" at cost 4. Fixed, since it is part of case ids, which all workers must agree on.
HASH = "$2b$04$KFHcjVXnN/N/82EM33TWA.VFIv3WWVVaTuyiAgMRVIZGcYpWKtOzW"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def test_the_example_of_the_exporter_toolkit_is_understood() -> None:
    text = f"""
# TLS and basic authentication configuration example.
tls_server_config:
  cert_file: server.crt
  key_file: server.key
basic_auth_users:
  alice: {HASH}
"""
    config = parse(text, Path("/etc/flopwatch"))
    assert config.tls_server_config.files == (Path("/etc/flopwatch/server.crt"), Path("/etc/flopwatch/server.key"))
    assert config.basic_auth_users == {"alice": HASH}
    assert config.requires_auth()


def test_every_option_that_is_supported() -> None:
    text = """
tls_server_config:
  cert_file: /a.crt
  key_file: /a.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.crt
  min_version: TLS13
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]
  prefer_server_cipher_suites: true
http_server_config:
  http2: false
  headers:
    X-Frame-Options: deny
    Strict-Transport-Security: max-age=31536000
    Content-Security-Policy: ''
"""
    config = parse(text, Path("/base"))
    assert config.tls_server_config.files == (Path("/a.crt"), Path("/a.key"), Path("/base/ca.crt"))
    assert config.http_server_config.headers == {
        "X-Frame-Options": "deny",
        "Strict-Transport-Security": "max-age=31536000",
    }
    assert config.basic_auth_users == {}
    assert config.requires_auth()


@pytest.mark.parametrize("text", ["", "# nothing", "{}", "tls_server_config:\nbasic_auth_users: {}"])
def test_an_empty_file_protects_nothing(text: str) -> None:
    config = parse(text)
    assert config == WebConfig()
    assert not config.tls_server_config.files
    assert not config.requires_auth()


def test_a_user_called_no_is_a_user() -> None:
    assert parse(f"basic_auth_users: {{no: {HASH}, 1: {HASH}}}").basic_auth_users == {"no": HASH, "1": HASH}


TLS = "tls_server_config: {cert_file: a, key_file: b, "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tls_config: {}",
            "line 1: tls_config is not known; here may be tls_server_config, http_server_config, "
            "basic_auth_users, rate_limit",
        ),
        ("\n- a\n", "line 2: write the file as keys with values"),
        ("a: b: c", "line 1 is not YAML: mapping values are not allowed here"),
        ("a: 1\na: 2", "line 2: a is there twice"),
        ("[1]: 2", "line 1: a key is not a plain word"),
        (
            "rate_limit: {interval: 1s, burst: 20}",
            "line 1: rate_limit is not supported; a scrape within a second of another shares its answer",
        ),
        ("tls_server_config: {cert_file: a}", "tls_server_config: key_file is missing"),
        (
            "tls_server_config:\n  certfile: a",
            "line 2: tls_server_config: certfile is not known; here may be cert_file, "
            "key_file, client_auth_type, client_ca_file, min_version, max_version, cipher_suites, "
            "prefer_server_cipher_suites, cert, key, client_ca, client_allowed_sans, curve_preferences",
        ),
        (
            "tls_server_config:\n  key: |-\n    PEM",
            "line 2: tls_server_config: key is not supported: put the key into a file and name it with key_file",
        ),
        (
            TLS + "client_allowed_sans: [a]}",
            "line 1: tls_server_config: client_allowed_sans is not supported: Python's ssl "
            "cannot check it; sign client certificates with a CA of their own instead",
        ),
        (
            TLS + "client_auth_type: RequireAnyClientCert}",
            "line 1: tls_server_config: client_auth_type must be one of "
            "NoClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert",
        ),
        (
            TLS + "client_auth_type: RequireAndVerifyClientCert}",
            "line 1: tls_server_config: client_auth_type RequireAndVerifyClientCert needs a client_ca_file to "
            "verify with",
        ),
        (
            TLS + "client_ca_file: c}",
            "line 1: tls_server_config: client_ca_file has no effect without client_auth_type: "
            "RequireAndVerifyClientCert",
        ),
        (TLS + "min_version: TLS10}", "line 1: tls_server_config: min_version must be one of TLS12, TLS13"),
        (
            TLS + "min_version: TLS13, max_version: TLS12}",
            "line 1: tls_server_config: min_version is above max_version",
        ),
        (TLS + "cipher_suites: TLS_A}", "line 1: tls_server_config: cipher_suites is not a list of names"),
        (
            "http_server_config: {headers: {Server: me}}",
            "line 1: headers: Server is not known; here may be "
            "Content-Security-Policy, X-Frame-Options, X-Content-Type-Options, X-XSS-Protection, "
            "Strict-Transport-Security",
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: allow}}",
            "line 1: headers: X-Frame-Options must be one of deny, sameorigin",
        ),
        (
            'http_server_config: {headers: {X-XSS-Protection: "a\\r\\nSet-Cookie: b"}}',
            "line 1: headers: X-XSS-Protection is not one line of ASCII",
        ),
        (
            "basic_auth_users:\n  alice: s3cret",
            "line 2: basic_auth_users: alice has no bcrypt hash; make one with: htpasswd -nBC 10 USER",
        ),
        (
            f"basic_auth_users: {{alice: {HASH.replace('$04$', '$31$')}}}",
            "line 1: basic_auth_users: alice has a hash of cost 31; make one of cost 4 to 16",
        ),
        ("basic_auth_users: {alice: [a]}", "line 1: basic_auth_users: alice is not a plain value"),
        ("basic_auth_users: {alice: *hunter2}", "line 1 is not YAML: found undefined alias"),
        ("[" * 5000, "this is not a web configuration: it is nested too deeply"),
    ],
)
def test_an_error_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(text)
    assert str(error.value) == message


def test_neither_errors_nor_the_configuration_show_a_secret() -> None:
    with pytest.raises(SettingsError) as error:
        parse("basic_auth_users: {alice: hunter2, alice: hunter2}")
    assert "hunter2" not in str(error.value)
    assert HASH not in repr(parse(f"basic_auth_users: {{alice: {HASH}}}"))


yaml_like = st.recursive(
    st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["null", "1e999", "2020-13-45", "*a", "&a b"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(
            st.sampled_from(
                ["tls_server_config", "http_server_config", "headers", "basic_auth_users", "cert_file", "a"]
            ),
            inner,
            max_size=3,
        ).map(lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs.items()) + "}")
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.text(max_size=200) | yaml_like)
def test_any_text_is_a_configuration_or_a_settings_error(text: str) -> None:
    with suppress(SettingsError):
        assert isinstance(parse(text), WebConfig)


def test_a_password_is_hashed_once_and_then_known(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    compare = bcrypt.checkpw

    def checkpw(password: bytes, stored: bytes) -> bool:
        hashed.append(password)
        return compare(password, stored)

    monkeypatch.setattr(bcrypt, "checkpw", checkpw)

    async def checks() -> list[bool | None]:
        passwords = Passwords()
        return [
            await passwords.check({user: HASH.replace("$04$", cost)}, basic(word))
            for user, cost, word in (
                ("alice", "$04$", "s3cret"),
                ("alice", "$04$", "s3cret"),
                ("alice", "$04$", "s3cret"),
                ("alice", "$04$", "wrong"),
                ("alice", "$04$", "wrong"),  # what is wrong is not remembered
                ("alice", "$05$", "s3cret"),  # another hash, another password
                ("bob", "$04$", "s3cret"),  # an unknown user, hashed all the same
            )
        ]

    assert asyncio.run(checks()) == [True, True, True, False, False, False, False]
    assert hashed == [b"s3cret", b"wrong", b"wrong", b"s3cret", b"s3cret"]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Basic",
        b"Basic !!!",
        b"Bearer czNjcmV0",
        b"Basic " + base64.b64encode(b"alice"),
        b"Basic " + base64.b64encode(b"alice:"),
        b"Basic " + base64.b64encode(b"\xff:s3cret"),
        b"Basic " + base64.b64encode(b"alice:s3cret\0"),
        b"Basic " + base64.b64encode(b"alice:" + b"x" * 4096),
        b"Basic " + base64.b64encode(b":"),
        "Basic ä".encode(),
    ],
)
def test_a_malformed_authorization_is_none(header: bytes) -> None:
    assert asyncio.run(Passwords().check({"alice": HASH}, header)) is False


def test_a_flood_of_passwords_is_turned_away_and_does_not_lock_out_known_clients() -> None:
    users = {"alice": HASH, "bob": bcrypt.hashpw(b"x", bcrypt.gensalt(9)).decode()}

    async def flood() -> list[bool | None]:
        passwords = Passwords()
        assert await passwords.check(users, basic("s3cret"))
        guesses = [asyncio.ensure_future(passwords.check(users, basic(str(n), "bob"))) for n in range(MAX_WAITING + 5)]
        await asyncio.sleep(0)
        assert await passwords.check(users, basic("s3cret"))
        return await asyncio.gather(*guesses)

    assert asyncio.run(flood()) == [False] * MAX_WAITING + [None] * 5


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answer like an application that knows nothing of all this."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": scope["scheme"][:2].encode()})


@contextmanager
def serving(web: Web) -> Iterator[int]:
    """Serve `hello` behind a web configuration, and give the port."""
    config = uvicorn.Config(web.protect(hello), log_config=None, lifespan="off", ws="none")
    web.secure(config)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@needs_openssl
def test_the_context_has_the_versions_suites_and_verification_of_the_file(authority: Authority) -> None:
    certificate, key = authority.sign("versions", 7)
    files = f"cert_file: {certificate}, key_file: {key}, client_ca_file: {authority.file}"
    suite = "min_version: TLS12, max_version: TLS12, cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]"
    for auth, mode in (("VerifyClientCertIfGiven", "CERT_OPTIONAL"), ("RequireAndVerifyClientCert", "CERT_REQUIRED")):
        config = parse(f"tls_server_config: {{{files}, {suite}, client_auth_type: {auth}}}")
        context = config.tls_server_config.context()
        assert context.verify_mode.name == mode
        assert config.requires_auth() == (mode == "CERT_REQUIRED")
        assert (context.minimum_version.name, context.maximum_version.name) == ("TLSv1_2", "TLSv1_2")
        below = [one["name"] for one in context.get_ciphers() if one["protocol"] != "TLSv1.3"]
        assert below == ["ECDHE-ECDSA-CHACHA20-POLY1305"]
    lasting = parse(f"tls_server_config: {{cert_file: {certificate}, key_file: {key}, min_version: TLS13}}")
    context = lasting.tls_server_config.context()
    assert (context.minimum_version.name, context.maximum_version.name) == ("TLSv1_3", "TLSv1_3")


def get(
    port: int, tls: ssl.SSLContext | None = None, authorization: bytes = b""
) -> tuple[int, str, dict[str, str], int]:
    """Return status, body and headers of GET /metrics on a new connection, and the certificate's serial number."""
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=tls)
    try:
        headers = {"Authorization": authorization.decode()} if authorization else {}
        connection.request("GET", "/metrics", headers=headers)
        serial = 0
        if isinstance(connection.sock, ssl.SSLSocket):
            certificate = connection.sock.getpeercert()
            assert certificate is not None
            serial = int(str(certificate["serialNumber"]), 16)
        response = connection.getresponse()
        return response.status, response.read().decode(), {k.lower(): v for k, v in response.getheaders()}, serial
    finally:
        connection.close()


def test_without_tls_only_users_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}\nhttp_server_config: {{headers: {{X-Frame-Options: deny}}}}")
    with serving(Web(file)) as port:
        status, body, headers, _ = get(port)
        assert (status, body, headers["www-authenticate"], headers["x-frame-options"]) == (
            401,
            "Unauthorized\n",
            "Basic",
            "deny",
        )
        assert [
            get(port, None, basic(word, user))[0]
            for user, word in (("alice", "s3cret"), ("alice", "wrong"), ("bob", "s3cret"), ("alice", "s3cret"))
        ] == [200, 401, 401, 200]
        write(file, f"basic_auth_users: {{bob: {HASH}}}")
        assert [get(port, None, basic("s3cret", user))[0] for user in ("alice", "bob")] == [401, 200]
        write(file, "basic_auth_users: {bob: broken}")
        assert [get(port, None, basic("s3cret", user))[0] for user in ("alice", "bob")] == [401, 200]


@needs_openssl
def test_only_a_prometheus_with_the_ca_and_the_password_scrapes(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.sign("server", 1)
    file = tmp_path / "web.yml"
    file.write_text(
        f"tls_server_config: {{cert_file: {certificate}, key_file: {key}, min_version: TLS13}}\n"
        f"basic_auth_users: {{alice: {HASH}}}"
    )
    with serving(Web(file)) as port:
        assert get(port, client(authority), basic("s3cret"))[:2] == (200, "ht")
        assert get(port, client(authority), basic("wrong"))[0] == 401
        assert get(port, client(authority))[0] == 401
        with pytest.raises(ssl.SSLCertVerificationError):
            get(port, ssl.create_default_context())
        old = client(authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            get(port, old)
        with pytest.raises((http.client.HTTPException, OSError)):
            get(port)


@needs_openssl
def test_a_client_without_a_certificate_of_the_ca_is_refused(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.sign("server", 1)
    own, stranger = authority.sign("prometheus", 2), Authority(tmp_path / "other").sign("stranger", 3)
    file = tmp_path / "web.yml"
    file.write_text(
        f"tls_server_config: {{cert_file: {certificate}, key_file: {key}, client_ca_file: {authority.file},"
        " client_auth_type: RequireAndVerifyClientCert}"
    )
    with serving(Web(file)) as port:
        assert get(port, client(authority, own))[0] == 200
        for refused in (None, stranger):
            with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
                get(port, client(authority, refused))


@needs_openssl
def test_a_rotated_certificate_and_ca_are_used_by_the_next_connection(tmp_path: Path, authority: Authority) -> None:
    first, second = authority.sign("first", 11), authority.sign("second", 12)
    other = Authority(tmp_path / "other")
    theirs, ours = other.sign("theirs", 21), authority.sign("ours", 22)
    server, key, ca = tmp_path / "server.crt", tmp_path / "server.key", tmp_path / "clients.crt"
    for source, target in ((first[0], server), (first[1], key), (authority.file, ca)):
        shutil.copy(source, target)
    file = tmp_path / "web.yml"
    file.write_text(
        "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: clients.crt, "
        "client_auth_type: RequireAndVerifyClientCert}"
    )
    with serving(Web(file)) as port:
        assert get(port, client(authority, ours))[3] == 11
        write(server, second[0].read_text())  # half of the pair: the old one stays in use
        assert get(port, client(authority, ours))[3] == 11
        write(key, second[1].read_text())
        assert get(port, client(authority, ours))[3] == 12
        write(ca, other.file.read_text())
        assert get(port, client(authority, theirs))[3] == 12
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            get(port, client(authority, ours))


@needs_openssl
def test_tls_does_not_go_away_while_the_process_lives(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.sign("server", 1)
    file = tmp_path / "web.yml"
    file.write_text(f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}")
    with serving(Web(file)) as port:
        write(file, "")
        assert get(port, client(authority))[0] == 200


def test_clients_must_still_authenticate_when_the_file_is_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}")
    with serving(Web(file)) as port, caplog.at_level(logging.ERROR):
        for text in ("", "http_server_config: {headers: {X-Frame-Options: deny}}"):
            write(file, text)
            assert [get(port)[0] for _ in range(2)] == [401, 401]
        assert len(caplog.records) == 2
        write(file, f"basic_auth_users: {{carol: {HASH}}}")
        assert get(port, authorization=basic("s3cret"))[0] == 401
        assert get(port, authorization=basic("s3cret", "carol"))[0] == 200
        write(file, "")
    with serving(Web(file)) as port:
        assert get(port)[0] == 200


@needs_openssl
def test_files_that_cannot_be_used_are_an_error_at_start(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.sign("server", 1)
    _, other_key = authority.sign("other", 2)
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", key, "-out", tmp_path / "locked.key"],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    (tmp_path / "empty.crt").touch()
    web = tmp_path / "web.yml"

    def problem(text: str) -> str:
        web.write_text(text)
        with pytest.raises(SettingsError) as error:
            Web(web)
        return str(error.value).removeprefix(f"--web-config {web}: ")

    def pair(certificate: Path | str, key: Path | str, more: str = "") -> str:
        return f"tls_server_config: {{cert_file: {certificate}, key_file: {key}{more}}}"

    verify = f", client_auth_type: VerifyClientCertIfGiven, client_ca_file: {tmp_path}"
    assert problem(pair("none.crt", key)) == f"cert_file {tmp_path}/none.crt: No such file or directory"
    assert problem(pair(certificate, "none.key")) == f"key_file {tmp_path}/none.key: No such file or directory"
    assert problem(pair(certificate, other_key)) == (
        f"cert_file {certificate} and key_file {other_key} cannot be used together: KEY_VALUES_MISMATCH"
    )
    assert problem(pair(certificate, tmp_path / "locked.key")).startswith(f"cert_file {certificate} and key_file")
    assert problem(pair(certificate, key, f"{verify}/empty.crt")).startswith(f"client_ca_file {tmp_path}/empty.crt: ")
    assert problem("a: 1").startswith("line 1: a is not known")
    with pytest.raises(SettingsError, match=r"--web-config .*none\.yml: No such file or directory"):
        Web(tmp_path / "none.yml")


def test_a_broken_change_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}")
    web = Web(file)
    write(file, "basic_auth_users: {alice: hunter2}")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            web.refresh()
    assert len(caplog.records) == 1
    assert "hunter2" not in caplog.text
    assert web.config.basic_auth_users == {"alice": HASH}


def test_a_file_written_in_place_is_noticed_too(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}")
    web = Web(file)
    file.write_text(f"basic_auth_users: {{carol: {HASH}}}")
    os.utime(file, (1, 1))
    web.refresh()
    assert web.config.basic_auth_users == {"carol": HASH}


@needs_openssl
def test_exporter_and_check_speak_through_tls_and_a_password(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.sign("server", 1)
    (tmp_path / "web.yml").write_text(
        f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}\nbasic_auth_users: {{alice: {HASH}}}"
    )
    (tmp_path / "password").write_text("s3cret\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "exporter")}
    command = [sys.executable, "-m", "flopwatch"]
    log = tmp_path / "log"
    with log.open("w") as output:
        exporter = subprocess.Popen(
            [
                *command,
                "exporter",
                "--simulate",
                "h100x8",
                "--state",
                tmp_path / "state",
                "--listen",
                "127.0.0.1:0",
                "--otlp-listen",
                "127.0.0.1:0",
                "--web-config",
                tmp_path / "web.yml",
            ],
            stderr=output,
            env=environment,
        )
    try:
        while (address := re.search(r"listening metrics=\S+:(\d+)", log.read_text())) is None:
            assert exporter.poll() is None, log.read_text()
            time.sleep(0.02)
        port = int(address[1])
        # On a slow machine the first pages are without the sources that have not started yet.
        until(lambda: "host_verdict_id 0.0\n" in get(port, client(authority), basic("s3cret"))[1])
        assert get(port, client(authority), basic("s3cret"))[0] == 200
        assert get(port, client(authority))[0] == 401
        check: list[str | Path] = [
            *command,
            "check",
            "--url",
            f"https://127.0.0.1:{port}/metrics",
            "--ca-file",
            authority.file,
            "--state",
            tmp_path / "state",
        ]
        known = subprocess.run(
            [*check, "--user", "alice", "--password-file", tmp_path / "password"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=PATIENCE,
        )
        assert (known.returncode, known.stdout) == (0, "OK - 8 GPUs, 9 active ports | gpus=8 ports=9\n")
        unknown = subprocess.run(check, capture_output=True, text=True, env=environment, timeout=PATIENCE)
        assert (unknown.returncode, unknown.stdout.partition("/metrics ")[2]) == (
            3,
            "answers 401 Unauthorized; give --user and --password-file\n",
        )
    finally:
        exporter.terminate()
        assert exporter.wait(PATIENCE) == 0
    assert "s3cret" not in log.read_text()
