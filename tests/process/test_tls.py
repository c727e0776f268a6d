"""Test real TLS on loopback between a training process, the exporter, the ledger and its clients.

Tokens and passwords are read from files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest

from flopwatch.node.scrape.scrape import Registry
from flopwatch.node.telemetry.ledger_client import Outcomes, Remote
from flopwatch.settings import ExporterSettings, SettingsError
from flopwatch.training.push.otlp import Undelivered, Wire
from tests.support import ROOT
from tests.support.hook_server import python
from tests.support.machine import PATIENCE, until
from tests.support.tls import Authority, basic, client, write

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
COMMAND = [sys.executable, "-m", "flopwatch"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "exporter")}
PASSWORD = "s3cret"
TOKEN = "t0ken-of-the-ledger"
LOOP = """
from flopwatch.training import Run
run = Run("llama-tls", push_interval=0.2, peak_flops=1e12, flops_per_token=1e9, gpu_uuid="")
run.step(tokens=1)
run.finish()
"""


@contextmanager
def started(log: Path, *flags: str | Path) -> Iterator[list[int]]:
    """Run one of our servers and yield the ports that it listens on."""
    with log.open("w") as output:
        process = subprocess.Popen([*COMMAND, *map(str, flags)], stderr=output, env=ENVIRONMENT)
    try:
        while not (ports := re.findall(r"(?:ledger|metrics|otlp)=127\.0\.0\.1:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        yield [int(port) for port in ports]
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
        for secret in (PASSWORD, TOKEN):
            assert secret not in log.read_text()


@dataclass(frozen=True)
class Stack:
    """A ledger and an exporter behind TLS."""

    folder: Path
    ca: Authority
    ledger: int
    metrics: int
    otlp: int

    def get(self, port: int, path: str, authorization: str = "") -> tuple[int, str]:
        """Return status and body of the response to a request."""
        request = urllib.request.Request(f"https://127.0.0.1:{port}{path}")
        if authorization:
            request.add_header("Authorization", authorization)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE, context=client(self.ca)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def query(self, *flags: str | Path) -> subprocess.CompletedProcess[str]:
        """Query the ledger with the command line."""
        return subprocess.run(
            [*COMMAND, "ledger", "list", "--url", f"https://127.0.0.1:{self.ledger}", *map(str, flags)],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=PATIENCE,
        )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "ca")
    certificate, key = authority.sign("server", 1)
    tls = f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}\n"
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    (folder / "tls.yml").write_text(tls)
    (folder / "users.yml").write_text(f"{tls}basic_auth_users: {{prometheus: {hashed}}}\n")
    (folder / "token").write_text(f"{TOKEN}\n")
    with (
        started(
            folder / "ledger.log",
            "ledger",
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--state",
            folder / "ledger",
            "--token-file",
            folder / "token",
            "--web-config",
            folder / "users.yml",
        ) as (ledger,),
        started(
            folder / "exporter.log",
            "exporter",
            "--simulate",
            "h100x8",
            "--state",
            folder / "exporter",
            "--listen",
            "127.0.0.1:0",
            "--web-config",
            folder / "users.yml",
            "--otlp-listen",
            "127.0.0.1:0",
            "--otlp-web-config",
            folder / "tls.yml",
            "--otlp-token-file",
            folder / "token",
            "--ledger",
            f"https://127.0.0.1:{ledger}",
            "--ledger-token-file",
            folder / "token",
            "--ledger-ca-file",
            authority.file,
        ) as (metrics, otlp),
    ):
        yield Stack(folder, authority, ledger, metrics, otlp)


@pytest.mark.long
def test_a_step_goes_from_the_hook_through_the_exporter_to_the_ledger(stack: Stack) -> None:
    trained = python(
        LOOP,
        FLOPWATCH_ENDPOINT=f"https://127.0.0.1:{stack.otlp}",
        FLOPWATCH_CA_FILE=str(stack.ca.file),
        FLOPWATCH_TOKEN_FILE=str(stack.folder / "token"),
    )
    assert (trained.returncode, trained.stderr) == (0, "")
    bearer = f"Bearer {TOKEN}"
    until(lambda: "llama-tls" in stack.get(stack.ledger, "/v1/runs", bearer)[1])
    (run,) = json.loads(stack.get(stack.ledger, "/v1/runs", bearer)[1])["runs"]
    assert (run["run"], run["state"], run["high_water_step"]) == ("llama-tls", "completed", 1)
    shown = stack.query("--ca-file", stack.ca.file, "--token-file", stack.folder / "token")
    assert shown.returncode == 0, shown.stderr
    assert "llama-tls  completed" in shown.stdout


def test_prometheus_shows_its_password_to_the_ledger_and_exporters_their_token(stack: Stack) -> None:
    password, wrong = basic(PASSWORD, "prometheus").decode(), basic("wrong", "prometheus").decode()
    for port in (stack.ledger, stack.metrics):
        assert [stack.get(port, "/metrics", given)[0] for given in (password, wrong, "", f"Bearer {TOKEN}")] == [
            200,
            401,
            401,
            401,
        ]
    assert [stack.get(stack.ledger, "/v1/runs", given)[0] for given in (password, "", f"Bearer {TOKEN}")] == [
        401,
        401,
        200,
    ]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"FLOPWATCH_TOKEN_FILE": "token"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"FLOPWATCH_TOKEN_FILE": "token", "FLOPWATCH_CA_FILE": "none.crt"}, "cannot use the CA file"),
        ({"FLOPWATCH_CA_FILE": "ca/ca.crt"}, "the answer is 401: send Authorization"),
    ],
)
def test_a_hook_without_the_right_ca_or_token_trains_on_and_logs_it(
    stack: Stack, settings: dict[str, str], problem: str
) -> None:
    trained = python(
        LOOP,
        FLOPWATCH_ENDPOINT=f"https://127.0.0.1:{stack.otlp}",
        **{name: str(stack.folder / file) for name, file in settings.items()},
    )
    assert trained.returncode == 0
    assert problem in trained.stderr


def test_a_ca_file_is_read_for_each_push(stack: Stack, tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    shutil.copy(Authority(tmp_path / "other").file, ca)
    wire = Wire(f"https://127.0.0.1:{stack.otlp}", 0.0, stack.folder / "token", ca_file=ca)
    with pytest.raises(Undelivered, match="CERTIFICATE_VERIFY_FAILED"):
        wire.send(b"")
    write(ca, stack.ca.file.read_text())
    wire.send(b"")
    wire.connection.close()


def test_a_ledgers_ca_and_token_files_are_read_for_each_request(stack: Stack, tmp_path: Path) -> None:
    ca, token = tmp_path / "ca.crt", tmp_path / "token"
    shutil.copy(Authority(tmp_path / "other").file, ca)
    token.write_text("wrong\n")
    remote = Remote(f"https://127.0.0.1:{stack.ledger}", token, tmp_path / "spool", Outcomes(Registry()), ca_file=ca)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        remote._post(b"[]", PATIENCE)
    write(ca, stack.ca.file.read_text())
    assert remote._post(b"[]", PATIENCE)[0] == 401
    write(token, TOKEN)
    assert remote._post(b"[]", PATIENCE)[0] == 200
    write(ca, (tmp_path / "other" / stack.ca.file.name).read_text())
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        remote._post(b"[]", PATIENCE)


def test_a_query_to_a_ledger_of_an_unknown_authority_names_the_flag_to_give(stack: Stack, tmp_path: Path) -> None:
    refused = stack.query("--token-file", stack.folder / "token")
    assert refused.returncode == 1
    assert refused.stderr.endswith("; set --ca-file to the CA that signed its certificate\n")
    missing = stack.query("--ca-file", tmp_path / "none.crt")
    assert (missing.returncode, missing.stderr) == (
        1,
        f"flopwatch: cannot use {tmp_path}/none.crt: No such file or directory\n",
    )


def test_plain_http_has_no_answer_there(stack: Stack) -> None:
    for port in (stack.ledger, stack.metrics, stack.otlp):
        with pytest.raises((OSError, ssl.SSLError)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE)


def test_without_a_token_users_guard_all_of_a_ledger(stack: Stack, tmp_path: Path) -> None:
    with started(
        tmp_path / "log",
        "ledger",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--state",
        tmp_path / "state",
        "--web-config",
        stack.folder / "users.yml",
    ) as (port,):
        assert [stack.get(port, path)[0] for path in ("/metrics", "/v1/runs", "/healthz")] == [401, 401, 401]


def test_settings_that_cannot_work_are_an_error_at_the_start(stack: Stack, tmp_path: Path) -> None:
    refused = subprocess.run(
        [
            *COMMAND,
            "exporter",
            "--simulate",
            "h100x8",
            "--state",
            tmp_path,
            "--listen",
            "127.0.0.1:0",
            "--otlp-listen",
            "127.0.0.1:0",
            "--otlp-web-config",
            stack.folder / "users.yml",
        ],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=PATIENCE,
    )
    assert (refused.returncode, refused.stderr.rpartition("; ")[2]) == (
        1,
        "leave out basic_auth_users and give --otlp-token-file FILE\n",
    )
    with pytest.raises(SettingsError, match="--ledger-ca-file needs a ledger with TLS"):
        ExporterSettings(ledger="http://127.0.0.1:9451", ledger_ca_file=Path("ca.crt"))
    with pytest.raises(ValueError, match="FLOPWATCH_CA_FILE is for https"):
        Wire("http://127.0.0.1:4318", 0.0, None, ca_file=Path("ca.crt"))


def test_an_authorization_in_the_environment_is_refused_and_from_a_file_sent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FLOPWATCH_HEADERS: put Authorization into the file"):
        Wire("http://127.0.0.1:9", 0.0, None, "X-Scope-OrgID=team-1,authorization=Basic%20a2V5")
    (tmp_path / "headers").write_text("nonsense\n")
    with pytest.raises(Undelivered, match="FLOPWATCH_HEADERS_FILE: write name=value"):
        Wire("http://127.0.0.1:9", 0.0, None, "", tmp_path / "headers").send(b"")
