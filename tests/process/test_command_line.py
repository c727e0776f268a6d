"""Test the command as users and the kubelet run it: flags, a whole simulated node, its faults and its shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import flopwatch
from flopwatch import catalogue as m
from flopwatch.__main__ import main
from simulator.host import SimulatedNode
from tests.support import ROOT
from tests.support.exporter_process import ENVIRONMENT, Series, alive, exporter, flopwatch_command
from tests.support.machine import PATIENCE, shortest, until
from tests.support.otlp_by_hand import gauge, process, training


def test_the_version_is_the_packages() -> None:
    assert flopwatch_command("--version").stdout == f"flopwatch {flopwatch.__version__}\n"


def test_the_catalogue_is_printed_as_the_documentation_has_it() -> None:
    assert "\ngpu_present{gpu,uuid} gauge\n    1 if the GPU answers" in flopwatch_command("metrics").stdout
    assert flopwatch_command("metrics", "--key").stdout.count("Source: ") == 20


# Modules that an installation without extras does not have.
EXTRAS = (
    "anyio bcrypt fastapi h11 h2 httpx jinja2 msgspec prometheus_client pydantic pynvml rich starlette uvicorn yaml"
)
HOOK_ONLY = (
    f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}.split())); sys.argv[0] = 'flopwatch'; "
    "from flopwatch.__main__ import main; sys.exit(main())"
)


@pytest.mark.parametrize(
    ("arguments", "extra", "status"),
    [
        (["exporter", "--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0"], "exporter", 1),
        (["ledger", "serve", "--listen", "127.0.0.1:0"], "ledger", 1),
        (["ledger", "list"], "ledger", 1),
        (["boards", "--prometheus", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"], "boards", 1),
        (["report", "lm", "--prometheus", "http://127.0.0.1:9"], "report", 1),
        (["ledger", "show", "lm"], "ledger", 1),
        (["ledger", "close", "lm"], "ledger", 1),
        (["ledger", "export", "lm"], "ledger", 1),
        (["ledger", "replay", str(ROOT / "tests" / "captures" / "histories" / "crash_and_move.jsonl")], "ledger", 1),
        (["simulate", "--gpus", "16", "--days", "0.1"], "exporter", 1),
        (["check"], "exporter", 3),
        (["top"], "top", 1),
        (["doctor"], "exporter", 1),
        (["capture", "/nonexistent/capture"], "exporter", 1),
    ],
)
def test_a_command_of_an_extra_that_is_not_installed_is_one_line_with_what_to_install(
    arguments: list[str], extra: str, status: int, tmp_path: Path
) -> None:
    state = ["--state", str(tmp_path)] if arguments[0] in ("exporter", "check", "doctor") else []
    done = subprocess.run(
        [sys.executable, "-c", HOOK_ONLY, *arguments, *state],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"flopwatch: this needs flopwatch[{extra}]: pip install 'flopwatch[{extra}]' (")
    assert done.returncode == status


@pytest.mark.parametrize(("command", "package"), [("size", "bench"), ("simulate", "simulator")])
def test_a_command_of_the_checkout_names_what_an_installed_package_lacks(
    command: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flopwatch, "__file__", str(tmp_path / "site-packages" / "flopwatch" / "__init__.py"))
    assert main([command, "--nodes", "8"]) == 1
    assert f"{command} needs {package}/ of the source tree" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["metrics"],
        ["size", "--nodes", "8"],
        ["peak", "--help"],
        ["flops", "--help"],
        ["maintenance", "list"],
        ["stacks", "--help"],
        ["whatif", "--help"],
        ["run", "--help"],
    ],
)
def test_a_command_that_needs_no_extra_works_with_the_hook_alone(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK_ONLY, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--listen", "9450"], 2, "'9450' is not an address; write HOST:PORT, for example 127.0.0.1:9450"),
        (["--rank-timeout", "-1"], 2, "-1 is not a positive number of seconds"),
        (
            ["--sysfs", "/nowhere", "--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0"],
            1,
            "--sysfs /nowhere: not a folder. Give the one where sysfs is mounted",
        ),
        (["--ledger", "maybe"], 1, "write embedded, off or http://HOST:PORT"),
        (["--ledger", "http://[::1"], 1, "write embedded, off or http://HOST:PORT"),
        (["--series", "all"], 1, "--series 'all': write core or full (docs/metrics.md)"),
        (["--simulate", "b200x8"], 1, "the only simulated node is h100x8"),
        (["--listen", ":9450", "--otlp-listen", ":9450"], 1, "give them different ports"),
        (
            [
                "--state",
                "/dev/null/state",
                "--ledger",
                "embedded",
                "--listen",
                "127.0.0.1:0",
                "--otlp-listen",
                "127.0.0.1:0",
            ],
            1,
            "--state /dev/null/state cannot be written: Not a directory; --ledger embedded needs it: choose another "
            "--state DIR",
        ),
        (["--otlp-token-file", "/nonexistent"], 1, "--otlp-token-file /nonexistent: No such file or directory"),
        (["--ledger-token-file", "/dev/null"], 1, "/dev/null is empty; put the token on its first line"),
    ],
)
def test_settings_that_cannot_work_are_an_error_at_start_that_names_what_to_change(
    flags: list[str], status: int, message: str
) -> None:
    run = flopwatch_command("exporter", *flags)
    assert (run.returncode, run.stderr.strip().splitlines()[-1].endswith(message)) == (status, True), run.stderr
    assert "Traceback" not in run.stderr


def test_a_port_in_use_is_named_with_the_flag_to_change(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = flopwatch_command("exporter", "--listen", "127.0.0.1:0", "--otlp-listen", address, "--state", tmp_path)
    assert run.returncode == 1
    assert run.stderr == (
        f"flopwatch: cannot listen on {address}: Address already in use; "
        "choose another --otlp-listen HOST:PORT, or port 0 for a free one\n"
    )


def test_a_simulated_node_is_served_whole(tmp_path: Path) -> None:
    with exporter(tmp_path / "state", "--simulate", "h100x8", "--ledger", "embedded") as node:
        # The first read of the kernel log may finish before the first read of the GPUs that it names.
        node.wait_for(f"gpu_xid_errors_total{{gpu=7,uuid={SimulatedNode.uuid(7)},xid=79}}", 0)
        scraped = node.wait_for_hardware()
        names = {series.partition("{")[0] for series in scraped}
        assert not {row.name for row in m.all_metrics() if row.key and row.domain in ("gpu", "infiniband")} - names
        assert {
            series.partition("collector=")[2]: value
            for series, value in scraped.items()
            if series.startswith("flopwatch_collector_success")
        } == {"nvml}": 1, "infiniband}": 1, "xid}": 1, "identity}": 1, "training}": 1, "ledger}": 1, "verdict}": 1}
        assert sum(series.startswith("gpu_present") for series in scraped) == 8
        assert sum(series.startswith("infiniband_port_present") for series in scraped) == 9
        assert all(
            "source=simulated" in series and "host=node-7" in series
            for series in scraped
            if series.startswith("gpu_info")
        )
        for owner, limit in (("uuid", 120), ("device", 60)):
            per_owner = [re.search(rf"\b{owner}=([^,}}]+)", series) for series in scraped]
            owners = [match.group(1) for match in per_owner if match is not None]
            assert 0 < max(owners.count(one) for one in owners) <= limit
        assert node.get("/readyz") == "ready\n"
        assert node.get("/healthz") == "ok\n"
        assert "<td>nvml</td><td>ok</td>" in node.get("/")


@pytest.mark.long
def test_a_rank_may_claim_only_a_gpu_of_the_node_or_a_slice_of_one(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with exporter(state, "--simulate", "h100x8") as node:
        node.wait_for("flopwatch_collector_success{collector=nvml}", 1)
        SimulatedNode(state / "simulated").mig(4, "on")
        series = node.wait_until(lambda found: any(name.startswith("gpu_mig_info") for name in found))
        part = next(found[1] for name in series if (found := re.search(r"gpu_mig_info\{.*mig_uuid=([^,}]+)", name)))
        node.push(
            *(
                process(gauge("training_rank_info", 1, uuid=uuid), rank=rank)
                for rank, uuid in enumerate((SimulatedNode.uuid(3), "GPU-of-another-node", part))
            )
        )
        scraped = node.wait_for("flopwatch_otlp_pushes_total{outcome=foreign_gpu}", 1)
        where = {series: value for series, value in scraped.items() if series.startswith("training_rank_info")}
        assert where == {
            f"training_rank_info{{run=lm,rank={rank},host=node-7,uuid={uuid},local_rank=,attempt=a1,"
            f"dp=,tp=,pp=,cp=,ep=}}": 1
            for rank, uuid in ((0, SimulatedNode.uuid(3)), (1, ""), (2, SimulatedNode.uuid(4)))
        }


def test_a_rank_on_a_host_without_a_driver_may_claim_no_gpu(tmp_path: Path) -> None:
    with exporter(tmp_path / "state") as node:
        node.push(process(gauge("training_rank_info", 1, uuid="GPU-of-another-node"), gauge("training_loss", 2.5)))
        scraped = node.series()
    assert {series: value for series, value in scraped.items() if series.startswith("training_")} == {
        "training_rank_info{run=lm,rank=0,host=node-7,uuid=,local_rank=,attempt=a1,dp=,tp=,pp=,cp=,ep=}": 1,
        "training_loss{run=lm}": 2.5,
    }
    assert scraped["flopwatch_otlp_pushes_total{outcome=foreign_gpu}"] == 1


def test_a_hung_driver_costs_its_own_series_and_they_come_back(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with exporter(state, "--simulate", "h100x8", "--stale-after", "10") as node:
        power = f"gpu_power_watts{{gpu=0,uuid={SimulatedNode.uuid(0)}}}"
        failures = "flopwatch_collector_failures_total{collector=nvml,reason=deadline}"
        before = node.wait_for_hardware()
        assert power in before
        simulated = SimulatedNode(state / "simulated")
        simulated.hang("nvmlDeviceGetUtilizationRates")
        time.sleep(1.1)  # not shared with the last read
        began = time.monotonic()
        scraped = node.series()
        assert time.monotonic() - began < 6  # the call hangs for ever, and the scrape waits 2.5 s for it
        assert scraped["flopwatch_collector_success{collector=nvml}"] == 0
        assert scraped["flopwatch_collector_success{collector=infiniband}"] == 1
        assert scraped[failures] == before[failures] + 1
        assert power in scraped  # as long as --stale-after allows
        while power in scraped:
            time.sleep(0.5)
            scraped = node.series()
        assert scraped["flopwatch_collector_success{collector=infiniband}"] == 1
        simulated.clear()
        assert power in node.wait_for("flopwatch_collector_success{collector=nvml}", 1)


def test_a_missing_nvml_library_is_logged_once_and_the_rest_is_served(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).create()
    with exporter(tmp_path / "state", "--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg") as node:
        node.wait_for("flopwatch_collector_success{collector=infiniband}", 1)
        node.wait_for("flopwatch_collector_supported{collector=nvml}", 0)
        time.sleep(1.1)
        scraped = node.series()
        assert scraped["flopwatch_collector_supported{collector=nvml}"] == 0
        assert "flopwatch_collector_success{collector=nvml}" not in scraped
        assert scraped["infiniband_port_state_id{device=mlx5_0,port=1}"] == 4
        assert sum("source=nvml state='not supported" in line for line in node.log.splitlines()) == 1, node.log


@pytest.mark.long
def test_no_infiniband_count_falls_over_real_restarts_clears_and_boots(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).create()
    series = "infiniband_receive_errors_total{device=mlx5_0,port=1}"
    register = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_errors"
    history = tmp_path / "state/port_history.json"
    # Cleared by a boot, counts, cleared without a boot.
    for number, boot, total in ((14, "", 14), (0, "another", 14), (5, "", 19), (2, "", 21), (2, "another", 21)):
        register.write_text(f"{number}\n")
        if boot:
            history.write_text(json.dumps(json.loads(history.read_text()) | {"boot": boot}))
        with exporter(tmp_path / "state", "--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg") as node:
            assert node.wait_until(lambda found: series in found)[series] == total
            assert node.end() == 0


@pytest.mark.long
def test_two_exporters_on_one_state_folder_warn_and_serve(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).create()
    flags = ("--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg")
    with exporter(tmp_path / "state", *flags) as first, exporter(tmp_path / "state", *flags) as second:
        first.wait_for("infiniband_port_state_id{device=mlx5_0,port=1}", 4)
        second.wait_for("infiniband_port_state_id{device=mlx5_0,port=1}", 4)
        assert second.log.count("another exporter uses --state") == 1  # both exporters write to one log here


@pytest.mark.long
def test_a_state_folder_that_cannot_be_written_costs_only_what_is_kept_there(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).create()
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    with exporter(blocked, "--sysfs", tmp_path / "sys", "--kmsg", tmp_path / "kmsg") as node:
        node.wait_for("infiniband_port_state_id{device=mlx5_0,port=1}", 4)
        assert f"--state {blocked} cannot be written" in node.log
        assert node.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_soon_and_leaves_no_child(number: int, tmp_path: Path) -> None:
    def ending() -> float:
        with exporter(tmp_path / "state", "--simulate", "h100x8", "--ledger", "embedded") as node:
            node.wait_for_hardware()
            children = node.children()
            assert len(children) == 4
            began = time.monotonic()
            assert node.end(number) == 0
            took = time.monotonic() - began
            assert not any(map(alive, children))
            return took

    assert shortest(ending, 4) < 4  # two, on a machine busy with other tests


@pytest.mark.parametrize("stopped", [False, True])
def test_a_kill_leaves_no_child_either(stopped: bool, tmp_path: Path) -> None:
    with exporter(tmp_path / "state", "--simulate", "h100x8") as node:
        node.wait_for("flopwatch_collector_success{collector=nvml}", 1)
        children = node.children()
        for pid in children if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        node.end(signal.SIGKILL)
        try:
            until(lambda: not any(map(alive, children)))
        finally:
            for pid in filter(alive, children):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_an_exporter_that_is_killed_and_started_again_loses_no_second_of_the_ledger(tmp_path: Path) -> None:
    def book(scraped: Series) -> Series:
        return {series: value for series, value in scraped.items() if series.startswith("run_") and value}

    state, started = tmp_path / "state", time.time() - 93  # after 60 s without a push the run is down
    say: dict[str, Any] = {"start_unix": started, "attempt": "a1"}
    with exporter(state, "--ledger", "embedded", "--new-for", "0.001") as node:
        node.push(training(5, 10.0, started + 11, **say))
        node.push(training(20, 40.0, started + 41, **say))
        before = book(node.wait_for("run_high_water_steps{tenant=,run=lm}", 20))
        assert before["run_seconds_total{tenant=,run=lm,bucket=productive}"] == 40
        node.end(signal.SIGKILL)
    with exporter(state, "--ledger", "embedded", "--new-for", "0.001") as node:
        after = book(node.wait_for("run_high_water_steps{tenant=,run=lm}", 20))
        moving = ("run_open_seconds{tenant=,run=lm}",)
        assert {k: v for k, v in after.items() if k not in moving} == {
            k: v for k, v in before.items() if k not in moving
        }
        node.push(training(45, 90.0, started + 91, status="completed", **say))
        final = book(node.wait_for("run_state{tenant=,run=lm,state=completed}", 1))
        # What an uninterrupted exporter would have attributed: 1 s of startup, 90 s of steps, nothing open.
        assert {k: v for k, v in final.items() if "_seconds" in k and "gpu" not in k and "timestamp" not in k} == {
            "run_seconds_total{tenant=,run=lm,bucket=productive}": pytest.approx(90),
            "run_seconds_total{tenant=,run=lm,bucket=startup}": pytest.approx(1),
            "run_provisional_seconds{tenant=,run=lm}": pytest.approx(90),
        }
        assert final["run_attempts_total{tenant=,run=lm}"] == 1
        assert node.end() == 0


@pytest.mark.long
def test_a_stopping_exporter_sends_its_last_records_to_the_ledger_with_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    log = tmp_path / "ledger.log"
    with log.open("w") as output:
        ledger = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flopwatch",
                "ledger",
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--state",
                tmp_path / "ledger",
                "--token-file",
                tmp_path / "token",
            ],
            stderr=output,
            env=ENVIRONMENT,
        )
    try:
        while (address := re.search(r"listening ledger=(\S+)", log.read_text())) is None:
            assert ledger.poll() is None, log.read_text()
            time.sleep(0.02)
        url = f"http://{address.group(1)}"
        for number in range(4):
            state, run = tmp_path / f"state{number}", f"lm{number}"
            with exporter(state, "--ledger", url, "--ledger-token-file", tmp_path / "token") as node:
                node.push(
                    training(45, 90.0, time.time() - 9, run=run, start_unix=time.time() - 100, status="completed")
                )
                assert node.end() == 0
            with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as response:
                completed = f'run_state{{tenant="",run="{run}",state="completed"}} 1.0\n' in response.read().decode()
            kept = list((state / "spool").glob("*"))
            if completed and not kept:
                break  # the exporter does not wait for a ledger that takes longer than half a second
        assert (completed, kept) == (True, [])
    finally:
        ledger.terminate()
        assert ledger.wait(PATIENCE) == 0


def test_a_final_push_and_a_stop_at_once_are_both_honoured(tmp_path: Path) -> None:
    state, started = tmp_path / "state", time.time() - 100
    with exporter(state, "--ledger", "embedded") as node:
        node.push(training(45, 90.0, started + 91, start_unix=started, status="stopped"))
        assert node.end() == 0
    with exporter(state, "--ledger", "embedded") as node:
        node.wait_for("run_state{tenant=,run=lm,state=stopped}", 1)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "flopwatch", "metrics"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
