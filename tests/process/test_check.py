"""`flopwatch check` as people, Slurm and node-problem-detector run it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flopwatch import catalogue as m
from flopwatch.http.exposition import Exposition
from flopwatch.node.health import check
from flopwatch.node.health.expectations import Expectations, learnt_file, load
from flopwatch.node.health.verdict import Judgement, Reason
from flopwatch.settings import SettingsError
from simulator.host import SimulatedNode
from tests.support import ROOT
from tests.support.machine import PATIENCE
from tests.support.readings import Series, gpu, h100, port, samples

SLURM = ROOT / "contrib" / "slurm"
NPD = ROOT / "contrib" / "node-problem-detector" / "flopwatch.json"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "exporter")}


def flopwatch(*arguments: str | Path) -> tuple[int, str]:
    """Return exit status and output of `flopwatch check`."""
    run = subprocess.run(
        [sys.executable, "-m", "flopwatch", "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=PATIENCE,
    )
    assert "Traceback" not in run.stderr, run.stderr
    return run.returncode, run.stdout.rstrip("\n")


@contextmanager
def exporter(*looks: Series, status: int = 200, authorization: str | None = None) -> Iterator[str]:
    """Serve these series as an exporter would, one look after the other and the last for ever, and give the URL."""
    left = list(looks)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wrong = authorization is not None and self.headers.get("authorization") != authorization
            self.send_response(401 if wrong else status)
            self.end_headers()
            page = Exposition().render(samples(left[0] if len(left) == 1 else left.pop(0)))
            self.wfile.write(f'{page}flopwatch_build_info{{version="0.2.0"}} 1.0\n'.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Answer a connection with these bytes, and give the URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", "is not a flopwatch exporter, or was cut off: there is no flopwatch_build_info"),
        (
            b"HTTP/1.0 200 OK\r\n\r\nup 1\n",
            "is not a flopwatch exporter, or was cut off: there is no flopwatch_build_info",
        ),
        (
            b"SSH-2.0-OpenSSH_9.2\r\n",
            "Server disconnected without sending a response; if it speaks TLS, give --url https://HOST:PORT/metrics",
        ),
        (b"", "Server disconnected without sending a response; if it speaks TLS, give --url https://HOST:PORT/metrics"),
    ],
)
def test_an_answer_of_another_server_is_unknown(answer: bytes, why: str) -> None:
    with answering(answer) as url:
        status, output = flopwatch("--url", url)
    assert (status, output.splitlines()[0].split(f"{url}: ")[-1].split(f"{url} ")[-1].strip()) == (3, why)


@pytest.mark.parametrize("url", ["garbage", "http://127.0.0.1:abc/", "http://[::1/metrics", "http://a b/metrics"])
def test_an_invalid_url_is_unknown(url: str) -> None:
    status, output = flopwatch("--url", url)
    assert (status, output.startswith("UNKNOWN - ")) == (3, True)


def test_a_machine_with_nothing_to_judge_is_not_called_ok(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "kmsg").touch()
    status, output = flopwatch("--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg", "--state", tmp_path / "state")
    assert (status, output.partition(";")[0]) == (3, "UNKNOWN - there is neither a GPU nor an active port")
    assert not (tmp_path / "state").exists()


BROKEN = h100() | {(m.GPU_PRESENT, gpu(3)): 0, (m.GPU_PCIE_WIDTH_LANES, gpu(1)): 8}


def test_the_page_of_an_exporter_is_parsed_into_its_samples() -> None:
    found = check.samples(Exposition().render(samples(h100())))
    assert {(row, labels): value * row.scale for row, labels, value in found} == h100()
    assert check.samples('not_of_ours 1\ngpu_present{gpu="0"} 1\n') == [(m.GPU_PRESENT, ("0", ""), 1)]


def test_a_running_exporter_is_asked(tmp_path: Path) -> None:
    with exporter(h100()) as url:
        assert flopwatch("--url", url, "--state", tmp_path) == (0, "OK - 8 GPUs, 9 active ports | gpus=8 ports=9")
    with exporter(BROKEN) as url:
        assert flopwatch("--url", url, "--state", tmp_path, "-v") == (
            2,
            "\n".join(
                [
                    "BAD - GPU 3 (0000:33:00.0, serial 1653) does not answer: reboot the host; if the part "
                    "is still missing, reseat "
                    "it; and 1 more | gpus=7 ports=9",
                    "bad: GPU 3 (0000:33:00.0, serial 1653) does not answer: reboot the host; if the part is "
                    "still missing, reseat "
                    "it [gpu_missing]",
                    "degraded: GPU 1 (0000:13:00.0, serial 1651) has 8 of 16 PCIe lanes: drain the host, power "
                    "it off and "
                    "reseat the GPU [pcie_width]",
                ]
            ),
        )


def test_the_shape_of_the_node_is_learnt_once_and_missed_from_then_on(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    with exporter(h100()) as url:
        assert flopwatch("--url", url, "--record", "--expect", shape)[0] == 0
        assert flopwatch("--url", url, "--record", "--state", tmp_path / "state")[0] == 0
    learnt = json.loads(shape.read_text())
    assert (
        learnt
        == json.loads((tmp_path / "state" / "expected.json").read_text())
        == {
            "gpus": 8,
            "gpu_model": "NVIDIA H100 80GB HBM3",
            "nvlinks_per_gpu": 18,
            "pcie_width": 16,
            "pcie_generation": 5,
            "ports": {"compute": {"count": 8, "rate_gbps": 400.0}, "storage": {"count": 1, "rate_gbps": 200.0}},
        }
    )
    fewer = {key: value for key, value in h100().items() if gpu(3) != key[1][:2]}
    with exporter(fewer) as url:
        for flags in (("--expect", shape), ("--state", tmp_path / "state")):
            assert flopwatch("--url", url, *flags) == (
                2,
                "BAD - 7 GPUs where 8 are expected: reboot the host; if the part is still missing, reseat it "
                "| gpus=7 ports=9",
            )
        assert flopwatch("--url", url, "--state", tmp_path)[0] == 0


def test_a_shape_that_another_user_learnt_is_not_expected_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learnt = learnt_file(tmp_path)
    learnt.write_text('{"gpus": 8}')
    assert load(None, tmp_path).gpus == 8
    for failure, logged in (
        (PermissionError(13, "Permission denied", str(learnt)), True),
        (OSError(5, "Input/output error", str(learnt)), False),
    ):

        def fails(*_: object, failure: OSError = failure, **__: object) -> str:
            raise failure

        monkeypatch.setattr(Path, "read_text", fails)
        if logged:
            assert load(None, tmp_path) == Expectations()
            assert "nothing is expected of this node" in caplog.text
        for file in (tmp_path / "given.json", *(() if logged else (None,))):
            with pytest.raises(SettingsError):
                load(file, tmp_path)


@pytest.mark.long
def test_a_bad_or_empty_node_is_not_learnt_unless_forced(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    with exporter(BROKEN) as url:
        status, output = flopwatch("--url", url, "--record", "--expect", shape)
        assert (status, output.partition(" (")[0]) == (3, "UNKNOWN - not recorded, the node is bad: GPU 3")
        assert not shape.exists()
        assert flopwatch("--url", url, "--record", "--expect", shape, "--force")[0] == 0
        assert json.loads(shape.read_text())["gpus"] == 7
    with exporter({}) as url:
        assert flopwatch("--url", url, "--record", "--expect", shape, "--force") == (
            3,
            "UNKNOWN - not recorded: this node has neither GPUs nor active ports",
        )
        assert flopwatch("--url", url, "--record", "--expect", "/proc/shape.json", "--force")[0] == 3


def test_two_looks_are_taken_when_asked_for(tmp_path: Path) -> None:
    down = h100() | {(m.INFINIBAND_PORT_STATE_ID, port(3)): 1}
    errors = h100() | {(m.INFINIBAND_SYMBOL_ERRORS_TOTAL, port(3)): 9}
    with exporter(down, h100()) as url:
        assert flopwatch("--url", url, "--state", tmp_path, "--seconds", "0.1") == (
            0,
            "OK - 8 GPUs, 9 active ports | gpus=8 ports=9",
        )
    with exporter(down) as url:
        assert flopwatch("--url", url, "--state", tmp_path, "--seconds", "0.1")[0] == 2
    with exporter(h100(), errors) as url:
        status, output = flopwatch("--url", url, "--state", tmp_path, "--seconds", "0.1")
        assert (status, output[:50]) == (1, "DEGRADED - port mlx5_3/1 counts symbol errors (2 i")


@pytest.mark.long
def test_an_exporter_that_cannot_be_read_is_unknown_and_never_bad(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"gpus": ')
    with (
        exporter(h100(), status=503) as failing,
        exporter(h100(), authorization="Basic YTpi") as closed,
        exporter(h100()) as fine,
    ):
        for flags, output in (
            (["--url", failing], f"{failing} answers 503 Service Unavailable"),
            (["--url", closed], f"{closed} answers 401 Unauthorized; give --user and --password-file"),
            (["--url", "http://127.0.0.1:9/metrics"], "no exporter listens at http://127.0.0.1:9/metrics"),
            (["--url", "ftp:/"], "ftp:/: Request URL is missing an 'http://' or 'https://' protocol"),
            (["--expect", tmp_path / "broken.json", "--url", fine], "--expect "),
            (["--simulate", "b200x8"], "--simulate 'b200x8': "),
            (["--password-file", "/nonexistent"], "--password-file /nonexistent: No such file or directory"),
            (["--url", "https://127.0.0.1:9/", "--ca-file", "/nonexistent"], "cannot use /nonexistent: No such file"),
            (["--gpus", "8"], "unrecognized arguments: --gpus 8"),
            (["--seconds", "soon"], "argument --seconds: soon is not a positive number of seconds"),
            (["extra"], "unrecognized arguments: extra"),
        ):
            status, line = flopwatch(*flags)
            assert (status, line.startswith(f"UNKNOWN - {output}")) == (3, True), line
        (tmp_path / "password").write_text("b\n")
        assert flopwatch("--url", closed, "--user", "a", "--password-file", tmp_path / "password")[0] == 0
        status, line = flopwatch("--url", failing, "--format", "npd")
        assert (status, len(line), line[:25]) == (2, len(line[:80]), "unknown: http://127.0.0.1")
        assert json.loads(flopwatch("--url", failing, "--json")[1])["verdict"] == "unknown"


@pytest.mark.long
def test_without_an_exporter_the_hardware_is_read(tmp_path: Path) -> None:
    simulated = ("--simulate", "h100x8", "--state", tmp_path)
    assert flopwatch(*simulated, "--record")[0] == 0
    assert flopwatch(*simulated) == (0, "OK - 8 GPUs, 9 active ports | gpus=8 ports=9")
    node = SimulatedNode(tmp_path / "simulated")
    # What the exporter keeps: here the GPU whose Xid it is.
    part = {"gpu": "3", "uuid": node.uuid(3), "pci_bus_id": "00000000:86:00.0"}
    (node.root / "gpus.json").write_text(json.dumps({node.uuid(3): dict.fromkeys(m.GPU_INFO.labels, "") | part}))
    node.xid(3, 79)
    status, output = flopwatch(*simulated, "--json")
    report = json.loads(output)
    assert (status, report["verdict"], report["gpus"]) == (2, "bad", 7)
    assert [(reason["reason"], reason["part"], reason["action"]) for reason in report["reasons"]] == [
        ("gpu_missing", "gpu 3", "reboot_then_reseat"),
        ("xid", "gpu 3", "reboot_node"),
    ]
    assert report["reasons"][1]["what_to_do"] == "reboot the host"


@pytest.mark.long
def test_a_look_at_the_hardware_writes_nothing_into_the_exporters_state(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path / "state" / "simulated")
    node.root.parent.mkdir()
    node.create()
    node.xid(3, 79)
    for name in ("gpus.json", "xid.json"):
        (node.root / name).write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in node.root.glob("*.json")}
    assert flopwatch("--simulate", "h100x8", "--state", tmp_path / "state")[0] == 2
    after = {path: path.stat().st_mtime_ns for path in node.root.glob("*.json")}
    assert after.keys() == before.keys()
    assert {path.name for path in after if after[path] == before[path]} == {"gpus.json", "xid.json"}
    assert flopwatch("--direct", "--state", tmp_path / "other", "--sysfs", node.sysfs, "--kmsg", node.kmsg)[0] != 127
    assert not (tmp_path / "other").exists()


def test_every_gpu_that_the_kernel_log_finds_broken_is_a_reason_on_a_fresh_state(tmp_path: Path) -> None:
    """The driver has lost these GPUs, so no inventory names them."""
    (tmp_path / "sys").mkdir()
    lines = ["NVRM: GPU 0000:66:00.0: RmInitAdapter failed! (0x26:0x56:1463)"]
    for number, code in enumerate((79, 109, 119, 149)):
        lines.append(f"NVRM: Xid (PCI:0000:1{number}:00): {code}, pid=1, name=python, text")
    now = int(time.monotonic() * 1e6)
    (tmp_path / "kmsg").write_text("".join(f"4,{place},{now},-;{line}\n" for place, line in enumerate(lines)))
    hardware = ("--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg", "--state", tmp_path / "state", "--direct")
    status, output = flopwatch(*hardware, "--json")
    reasons = json.loads(output)["reasons"]
    assert (status, [(one["reason"], one["part"], one["action"], one["detail"]) for one in reasons]) == (
        2,
        [
            ("xid", "gpu 0000:11:00", "reset_gpu", "GPU 0000:11:00 had Xid 109 within the last hour"),
            ("xid", "gpu 0000:12:00", "reset_gpu", "GPU 0000:12:00 had Xid 119 within the last hour"),
            ("xid", "gpu 0000:10:00", "reboot_node", "GPU 0000:10:00 had Xid 79 within the last hour"),
            ("xid", "gpu 0000:13:00", "check_nvlink", "GPU 0000:13:00 had Xid 149 within the last hour"),
            (
                "gpu_initialization_failed",
                "gpu 0000:66:00",
                "reboot_then_reseat",
                "GPU 0000:66:00 could not be initialized by the driver within the last hour",
            ),
        ],
    )
    assert flopwatch(*hardware, "--seconds", "0.1", "--json") == (status, output)


def test_a_machine_without_room_for_a_copy_of_the_state_cannot_be_judged(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tempfile; tempfile.tempdir = '/nonexistent'; "
            "from flopwatch.__main__ import main; sys.exit(main(sys.argv[1:]))",
            "check",
            "--direct",
            "--state",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
    )
    assert (run.returncode, run.stdout.partition(" (")[0], run.stderr) == (
        3,
        "UNKNOWN - cannot create a temporary folder",
        "",
    )


@pytest.mark.long
def test_a_driver_that_hangs_is_unknown_within_the_deadline(tmp_path: Path) -> None:
    simulated = ("--simulate", "h100x8", "--state", tmp_path)
    assert flopwatch(*simulated, "--record")[0] == 0
    SimulatedNode(tmp_path / "simulated").hang("nvmlDeviceGetUtilizationRates")
    assert flopwatch(*simulated, "--deadline", "8") == (
        3,
        "UNKNOWN - nothing is read from NVML where 8 GPUs are expected: run flopwatch doctor, which shows whether the "
        "driver hangs or denies access; and 1 more | gpus=0 ports=9",
    )


MISSING = Reason("gpu_missing", "gpu 3", "bad", "reboot_then_reseat", "GPU 3 | of\n8 does not answer" + 60 * "!")
NARROW = Reason("pcie_width", "gpu 1", "degraded", "reseat_gpu", "GPU 1 has 8 of 16 PCIe lanes")
BLIND = Reason("source_failed", "source nvml", "unknown", "check_exporter", "source nvml cannot be read")


@pytest.mark.parametrize(
    ("reasons", "fail_on", "nagios", "npd"),
    [
        ((), "bad", 0, (0, "ok: 8 GPUs, 8 active ports")),
        ((NARROW,), "bad", 1, (0, "degraded: GPU 1 has 8 of 16 PCIe lanes")),
        ((NARROW,), "degraded", 1, (1, "degraded: GPU 1 has 8 of 16 PCIe lanes")),
        ((MISSING,), "bad", 2, (1, "bad: GPU 3 / of 8 does not answer" + 47 * "!")),
        ((MISSING,), "degraded", 2, (1, "bad: GPU 3 / of 8 does not answer" + 47 * "!")),
        ((BLIND,), "degraded", 3, (2, "unknown: source nvml cannot be read")),
    ],
)
def test_exit_statuses_and_messages_of_both_kinds(
    reasons: tuple[Reason, ...], fail_on: str, nagios: int, npd: tuple[int, str]
) -> None:
    judgement = Judgement(reasons, 8, 8)
    assert check.nagios(judgement)[1] == check.text(judgement)[1] == check.as_json(judgement)[1] == nagios
    assert check.npd(judgement, fail_on) == (npd[1], npd[0])
    assert len(npd[1]) <= check.NPD_LENGTH
    line, _ = check.nagios(judgement)
    assert (line.count("\n"), line.count("|")) == (0, 1)


def test_node_problem_detector_passes_flags_that_exist() -> None:
    config = json.loads(NPD.read_text())
    assert config["pluginConfig"]["max_output_length"] == check.NPD_LENGTH
    conditions = {condition["type"] for condition in config["conditions"]}
    with exporter(BROKEN) as url:
        for rule in config["rules"]:
            command, *flags = rule["args"]
            assert (command, rule["condition"] in conditions) == ("check", True)
            flags[flags.index("--seconds") + 1] = "0.1"
            assert flopwatch(*flags, "--url", url) == (1, "bad: GPU 3 (0000:33:00.0, serial 1653) does not answer")


def test_a_node_whose_driver_is_being_replaced_is_degraded_and_not_unfit(tmp_path: Path) -> None:
    series = {key: number for key, number in h100().items() if key[0].domain not in ("gpu", "nvlink")}
    with exporter(series | {(m.GPU_DRIVER_LOADED, ()): 0}) as url:
        for rule, status in zip(json.loads(NPD.read_text())["rules"], (0, 1), strict=True):
            flags = ["0.1" if flag == "5" else flag for flag in rule["args"][1:]]
            assert flopwatch(*flags, "--url", url) == (
                status,
                "degraded: no NVIDIA driver is loaded, and no job can use the GPUs",
            )
        status, output = flopwatch("--url", url, "--state", tmp_path)
        assert (status, output[:11]) == (1, "DEGRADED - "), "Slurm's health check and prolog act on BAD"


class Slurm:
    """A fake scontrol and a fake flopwatch on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = "IDLE"
        self.calls = folder / "calls"
        self.script("scontrol", f'[ "$1" = show ] && exec cat {folder}/node\nprintf "%s\\n" "$@" >> {self.calls}')
        self.set_check("OK - 8 GPUs, 8 active ports | gpus=8 ports=8", 0)

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / name).chmod(0o755)

    def set_check(self, output: str, status: int) -> None:
        """Set the output and the exit status of `flopwatch check`."""
        (self.folder / "output").write_text(output)
        self.script("flopwatch", f'[ "$1" = check ] || exit 9\ncat {self.folder}/output\nexit {status}')

    def run(self, script: str, path: bool = True) -> tuple[int, list[str]]:
        """Run a script as slurmd does; return its status and what scontrol was asked to change.

        Without `path` the environment has no PATH, and the fake commands are where the script adds /usr/local/bin.
        """
        file = SLURM / script
        if not path:
            text = file.read_text()
            assert "/usr/local/bin" in text
            file = self.folder / script
            file.write_text(text.replace("/usr/local/bin", str(self.folder)))
        (self.folder / "node").write_text(
            f"NodeName=gpu7 Arch=x86_64 State={self.state} ThreadsPerCore=1 Reason=was DRAINED once\n"
            if self.state
            else ""
        )
        self.calls.unlink(missing_ok=True)
        run = subprocess.run(
            ["/bin/sh", file],
            env={"SLURMD_NODENAME": "gpu7"} | ({"PATH": f"{self.folder}:/usr/bin:/bin"} if path else {}),
            capture_output=True,
            timeout=60,
        )
        return run.returncode, self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


BAD_LINE = "BAD - GPU 3 (0000:33:00.0, serial 1653) does not answer: reboot $(touch /tmp/x) 'it' | gpus=7 ports=8\nmore"
DRAIN = [
    "update",
    "nodename=gpu7",
    "state=drain",
    "reason=flopwatch: GPU 3 (0000:33:00.0, serial 1653) does not answer: reboot $(touch /tmp/x) 'it'",
]


@pytest.mark.parametrize(
    ("output", "status", "asked"),
    [
        pytest.param(BAD_LINE, 2, DRAIN, id="bad"),
        pytest.param("OK - 8 GPUs | gpus=8", 0, [], id="ok"),
        pytest.param("DEGRADED - GPU 1 | gpus=8", 1, [], id="degraded"),
        pytest.param("UNKNOWN - no exporter listens", 3, [], id="unknown"),
        pytest.param("usage: flopwatch", 2, [], id="a wrong flag"),
        pytest.param("BAD - GPU 3", 137, [], id="killed"),
        pytest.param("", 127, [], id="no such command"),
    ],
)
def test_slurms_health_check_drains_on_bad_and_on_nothing_else(
    slurm: Slurm, output: str, status: int, asked: list[str]
) -> None:
    slurm.set_check(output, status)
    assert slurm.run("flopwatch-healthcheck.sh") == (0, asked)


@pytest.mark.parametrize(
    ("state", "asked"),
    [
        ("IDLE", DRAIN),
        ("MIXED", DRAIN),
        ("ALLOCATED", DRAIN),
        ("IDLE+DRAIN", []),
        ("MIXED+DRAIN", []),
        ("DOWN*", []),
        ("DOWN+DRAIN+NOT_RESPONDING", []),
        ("DRAINED", []),
        ("", []),
    ],
)
def test_a_node_that_is_drained_or_down_is_left_alone(slurm: Slurm, state: str, asked: list[str]) -> None:
    slurm.set_check(BAD_LINE, 2)
    slurm.state = state
    assert slurm.run("flopwatch-healthcheck.sh") == (0, asked)


@pytest.mark.parametrize(
    ("output", "status", "exits"),
    [
        (BAD_LINE, 2, 1),
        ("OK - 8 GPUs | gpus=8", 0, 0),
        ("DEGRADED - GPU 1 | gpus=8", 1, 0),
        ("UNKNOWN - no", 3, 0),
        ("usage: flopwatch", 2, 0),
        ("", 127, 0),
    ],
)
def test_the_prolog_fails_on_bad_and_on_nothing_else(slurm: Slurm, output: str, status: int, exits: int) -> None:
    slurm.set_check(output, status)
    assert slurm.run("flopwatch-prolog.sh") == (exits, [])


def test_the_scripts_find_their_commands_without_a_path_as_slurmd_runs_them(slurm: Slurm) -> None:
    slurm.set_check(BAD_LINE, 2)
    assert slurm.run("flopwatch-prolog.sh", path=False) == (1, [])
    assert slurm.run("flopwatch-healthcheck.sh", path=False) == (0, DRAIN)


def test_without_flopwatch_or_scontrol_nothing_happens(slurm: Slurm) -> None:
    slurm.set_check(BAD_LINE, 2)
    (slurm.folder / "scontrol").unlink()
    assert slurm.run("flopwatch-healthcheck.sh") == (0, [])
    (slurm.folder / "flopwatch").unlink()
    assert slurm.run("flopwatch-healthcheck.sh") == slurm.run("flopwatch-prolog.sh") == (0, [])


@pytest.mark.long
def test_the_real_check_drains_a_node_that_lost_a_gpu(slurm: Slurm, tmp_path: Path) -> None:
    with exporter(BROKEN) as url:
        slurm.script("flopwatch", f'exec env PYTHONPATH={ROOT}/exporter {sys.executable} -m flopwatch "$@" --url {url}')
        assert slurm.run("flopwatch-healthcheck.sh") == (
            0,
            [
                "update",
                "nodename=gpu7",
                "state=drain",
                "reason=flopwatch: GPU 3 (0000:33:00.0, serial 1653) does not answer: reboot the host; if the "
                "part is still "
                "missing, reseat it; and 1 more",
            ],
        )
        assert slurm.run("flopwatch-prolog.sh")[0] == 1


@pytest.mark.skipif(
    shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None,
    reason="shellcheck is not installed",
)
def test_the_scripts_are_clean() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    subprocess.run([str(program), *SLURM.glob("*.sh")], check=True, timeout=60)
