"""Who a process is, from environments as launchers leave them: recorded (torchrun 2.13) or as their manuals say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flopwatch.training import Run
from flopwatch.training.launcher import Launch, Process, clean, launch, this_process
from tests.hook_server import ROOT

ME = Process(pid=os.getpid(), start_ticks=4711, age=1.0, pid_namespace=1)

# Recorded from `torchrun --standalone --nproc-per-node 2`, second worker.
TORCHRUN = {
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "RANK": "1", "GROUP_RANK": "0",
    "ROLE_RANK": "1", "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "33061", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "d07602a4-2331-4a6a-820f-061c94ec87df",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "1",
}
# As https://slurm.schedmd.com/srun.html and sbatch.html describe them: 2 nodes, 8 tasks, the requeued job's step 0.
SBATCH = {
    "SLURM_JOB_ID": "81234", "SLURM_JOBID": "81234", "SLURM_JOB_NAME": "llama 8b", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_RESTART_COUNT": "1",
}
SRUN = {
    **SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}
# torchrun on each of two nodes, started by srun with one task a node.
SRUN_TORCHRUN = {
    **SRUN, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "RANK": "5", "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node-7",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2",
}
# PyTorchJob of Kubeflow 1: one process a pod, no torchrun.
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "llama-8b-master-0", "MASTER_PORT": "23456",
    "WORLD_SIZE": "4", "RANK": "3", "PYTHONUNBUFFERED": "1",
}
# A JobSet's pod (so Kubeflow 2 too) under torchrun, with the restart count passed by the downward API.
JOBSET = {
    **TORCHRUN, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "RANK": "9", "LOCAL_RANK": "1",
    "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "llama-8b-node-0-0.llama-8b", "MASTER_PORT": "29500",
    "FLOPWATCH_ATTEMPT": "3",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def place(found: Launch) -> tuple[int, int, int, bool]:
    return found.rank, found.world_size, found.local_rank, found.one_node


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, (0, 1, 0, True)), (TORCHRUN, (1, 2, 1, True)), (SBATCH, (0, 1, 0, True)), (SRUN, (5, 8, 1, False)),
    (SRUN_TORCHRUN, (5, 8, 1, False)), (PYTORCHJOB, (3, 4, 0, False)), (JOBSET, (9, 16, 1, False)),
    (OPENMPI, (1, 4, 1, True)), ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, (5, 8, 1, True)),
    ({"RANK": "1"}, (0, 1, 0, True)), ({"RANK": "one", "WORLD_SIZE": "2"}, (0, 1, 0, True)),
])
def test_the_place_of_a_process_in_its_job(environ: dict[str, str], expected: tuple[int, int, int, bool]) -> None:
    assert place(launch(environ, "node-7", ME)) == expected


@pytest.mark.parametrize(("environ", "name"), [
    ({}, None), (TORCHRUN, None), (SRUN, "llama 8b-81234"), (PYTORCHJOB, "llama-8b"), (JOBSET, "llama-8b"),
    ({**PYTORCHJOB, "MASTER_ADDR": "10.1.2.3"}, None), ({**PYTORCHJOB, "MASTER_ADDR": "localhost"}, None),
])
def test_a_schedulers_name_for_the_run(environ: dict[str, str], name: str | None) -> None:
    assert launch(environ, "node-7", ME).name == name


@pytest.mark.parametrize(("environ", "attempt"), [
    (SRUN, "slurm-81234.0-1-0"), (SRUN_TORCHRUN, "slurm-81234.0-1-2"), (PYTORCHJOB, "llama-8b-master-0:23456-0"),
    (JOBSET, "3-0"),
])
def test_ranks_of_many_nodes_name_their_attempt_alike(environ: dict[str, str], attempt: str) -> None:
    per_rank = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "GROUP_RANK")
    other = {key: "0" if key in per_rank else text for key, text in environ.items()}
    assert launch(environ, "node-7", ME).attempt_without_launcher() == attempt
    assert launch(other, "node-8", ME).attempt_without_launcher() == attempt


def test_a_single_process_is_its_own_launcher() -> None:
    assert launch({}, "node-7", this_process()).attempt() == f"node-7-{os.getpid()}-{this_process().start_ticks}-0"


def test_a_job_step_of_one_node_names_scheduler_and_launcher() -> None:
    environ = {**SRUN, "SLURM_STEP_NUM_NODES": "1"}
    attempt = launch(environ, "node-7", ME).attempt()
    assert attempt.startswith(f"slurm-81234.0-1-node-7-{os.getppid()}-")


def test_a_wrapper_script_between_torchrun_and_the_ranks_is_not_the_launcher(tmp_path: Path) -> None:
    for pid, parent, environ in ((30, 20, TORCHRUN), (20, 10, TORCHRUN), (10, 1, {"HOME": "/root"})):
        (tmp_path / str(pid)).mkdir()
        # A command may hold spaces and parentheses.
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} " + "0 " * 17 + f"{pid * 100} 0\n")
        (tmp_path / str(pid) / "environ").write_text("\0".join(f"{k}={v}" for k, v in environ.items()))
    from flopwatch.training.launcher import _launcher_pid, _start_ticks

    assert _launcher_pid(tmp_path, 30) == 10
    assert _launcher_pid(tmp_path, 10) == 10
    assert _launcher_pid(tmp_path, 99) == 99
    assert _start_ticks(tmp_path, 20) == 2000
    assert _start_ticks(tmp_path, 99) == 0


def test_the_age_of_a_process_is_what_the_clock_says_it_is() -> None:
    before = time.monotonic()
    said = subprocess.run(
        [sys.executable, "-c", "import time; time.sleep(0.3)\n"
         "from flopwatch.training.launcher import this_process; print(this_process().age)"],
        env={"PYTHONPATH": str(ROOT / "exporter")}, capture_output=True, text=True, check=True)
    assert 0.3 <= float(said.stdout) <= time.monotonic() - before + 0.02  # the kernel counts in ticks of 10 ms


def test_without_proc_a_process_is_as_old_as_its_run(tmp_path: Path) -> None:
    assert this_process(tmp_path) == Process(os.getpid(), start_ticks=0, age=0.0, pid_namespace=0)


def test_a_name_is_made_of_the_characters_a_run_may_have() -> None:
    assert clean("llama 8b/β=2" + "x" * 200) == "llama-8b/--2" + "x" * 116


def test_a_run_takes_arguments_before_variables_before_the_scheduler() -> None:
    quiet = {**SRUN, "FLOPWATCH_DISABLE": "1"}
    assert Run(environ=quiet).name == "llama-8b-81234"
    assert Run(environ={**quiet, "FLOPWATCH_RUN": "mixtral"}).name == "mixtral"
    run = Run("argued", rank=2, world_size=3, local_rank=1, attempt="a 7",
              environ={**quiet, "FLOPWATCH_RUN": "mixtral"})
    assert (run.name, run.rank, run.world_size, run.local_rank, run.attempt) == ("argued", 2, 3, 1, "a-7")


def test_a_run_that_nobody_named_is_called_after_the_script_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py"])
    quiet = {"FLOPWATCH_DISABLE": "1", "FLOPWATCH_HOST": "node-7"}
    assert Run(environ=quiet).name == "train@node-7"
    assert Run(environ={**quiet, **TORCHRUN}).name == "train@node-7"
    assert Run(environ={**quiet, **SRUN_TORCHRUN, "SLURM_JOB_ID": ""}).name  # never none
    several_nodes = {key: text for key, text in SRUN_TORCHRUN.items() if not key.startswith("SLURM")}
    assert Run(environ={**quiet, **several_nodes}).name == "train@node-7"


@pytest.mark.torch
def test_every_attempt_under_torchrun_has_one_name_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT / "exporter")!r})
from flopwatch.training import Run
run = Run(environ={{**os.environ, "FLOPWATCH_DISABLE": "1"}})
with open({str(tmp_path)!r} + f"/{{os.environ['TORCHELASTIC_RESTART_COUNT']}}-{{run.rank}}", "w") as said:
    said.write(f"{{run.attempt}} {{run.world_size}}")
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
""")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1",
         "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr",
         "127.0.0.1", str(script)],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said = {path.name: path.read_text().split() for path in tmp_path.iterdir() if path != script}
    assert all(world_size == "2" for _, world_size in said.values())
    attempts = {name: attempt for name, (attempt, _) in said.items()}
    assert attempts["1-0"] == attempts["1-1"]
    assert attempts["1-0"].removesuffix("-1") == attempts["0-0"].removesuffix("-0")
    assert attempts["1-0"] != attempts["0-0"]
