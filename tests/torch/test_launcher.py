"""Test the identity of a process from its environment: recorded (torchrun 2.13), or as in the launcher's manual.

The manuals and, where they are silent, the code that sets the variables:

Slurm        https://slurm.schedmd.com/srun.html, sbatch.html, job_array.html, heterogeneous_jobs.html, squeue.html
Open MPI     https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; PMIX_NAMESPACE as Open MPI 5 sets it
Hydra        https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
DeepSpeed    https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/launcher/launch.py
PyTorchJob   https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
TrainJob     https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
JobSet       https://jobset.sigs.k8s.io/docs/concepts/
Volcano      https://volcano.sh/en/docs/user-guide/how_to_use_pytorch_plugin/
Ray Train    https://github.com/ray-project/ray/blob/master/python/ray/train/torch/config.py
KubeRay      https://github.com/ray-project/kuberay/blob/master/ray-operator/controllers/ray/utils/constant.go
Pods         https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
W&B          https://docs.wandb.ai/models/track/environment-variables
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch.training import Run
from flopwatch.training.process.launcher import Launch, Process, Submission, clean, external_id, launch, this_process
from tests.support import ROOT
from tests.support.machine import PATIENCE, reserved_port

ME = Process(pid=os.getpid(), start_ticks=4711, age=1.0, pid_namespace=1)

# Recorded from `torchrun --standalone --nproc-per-node 2`, second worker.
TORCHRUN = {
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "RANK": "1",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "33061",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "d07602a4-2331-4a6a-820f-061c94ec87df",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_RANK": "1",
}
# As described in https://slurm.schedmd.com/srun.html and sbatch.html: 2 nodes, 8 tasks, the requeued job's step 0.
SBATCH = {
    "SLURM_JOB_ID": "81234",
    "SLURM_JOBID": "81234",
    "SLURM_JOB_NAME": "llama 8b",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_RESTART_COUNT": "1",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# torchrun on each of two nodes, started by srun with one task a node.
SRUN_TORCHRUN = {
    **SRUN,
    **TORCHRUN,
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
# PyTorchJob of Kubeflow 1: one process a pod, no torchrun.
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "llama-8b-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "PYTHONUNBUFFERED": "1",
}
# A JobSet's pod (so Kubeflow 2 too) under torchrun, with the restart count passed by the downward API.
JOBSET = {
    **TORCHRUN,
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "llama-8b-node-0-0.llama-8b",
    "MASTER_PORT": "29500",
    "FLOPWATCH_ATTEMPT": "3",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
# mpirun in a batch script of two nodes; on the second the daemon that starts the ranks is in a step.
MPIRUN = {
    **SBATCH,
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node-7-4711@1",
    "PMIX_RANK": "1",
}
MPIRUN_SECOND_NODE = {
    **MPIRUN,
    "OMPI_COMM_WORLD_RANK": "5",
    "PMIX_RANK": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN_PMI2 = {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
DEEPSPEED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
# Task 7 of an array of one-node jobs, and the whole step over both components of a heterogeneous job.
ARRAY = {
    **SRUN,
    "SLURM_JOB_ID": "81240",
    "SLURM_ARRAY_JOB_ID": "81234",
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_COUNT": "10",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "8",
}
HETEROGENEOUS = {
    **SRUN,
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "81234",
    "SLURM_JOB_ID_HET_GROUP_1": "81235",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_PROCID": "9",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
# Elastic PyTorchJob: the rendezvous is at the first worker, and torchrun passes its address on as an IP address.
ELASTIC_PYTORCHJOB = {
    **TORCHRUN,
    **POD,
    "PET_RDZV_ENDPOINT": "llama-8b-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:4",
    "MASTER_ADDR": "10.1.2.3",
    "MASTER_PORT": "23456",
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
}
TRAINJOB = {
    **TORCHRUN,
    **POD,
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "llama-8b-node-0-0.llama-8b",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
    "MASTER_ADDR": "llama-8b-node-0-0.llama-8b",
    "MASTER_PORT": "29400",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
}
VOLCANO = {
    **POD,
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_NUM": "3",
    "WORLD_SIZE": "4",
    "RANK": "2",
    "MASTER_ADDR": "llama-8b-master-0.llama-8b",
    "MASTER_PORT": "23456",
}
RAY_TRAIN = {
    "RAY_JOB_ID": "02000000",
    "RAY_RAYLET_PID": "310",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "0",
    "MASTER_ADDR": "10.1.2.3",
    "MASTER_PORT": "40817",
    "ACCELERATE_TORCH_DEVICE": "cuda:1",
}
KUBERAY = {**RAY_TRAIN, **POD, "RAY_CLUSTER_NAME": "llama-8b-x7k2p", "RAY_ADDRESS": "10.1.2.9:6379"}
# `srun ray start` on each node of a batch job: every node is in a step of its own.
RAY_ON_SLURM = {**SBATCH, **RAY_TRAIN, "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}


def place(identity: Launch) -> tuple[int, int, int, bool]:
    return identity.rank, identity.world_size, identity.local_rank, identity.one_node


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, True)),
        (TORCHRUN, (1, 2, 1, True)),
        (SBATCH, (0, 1, 0, True)),
        (SRUN, (5, 8, 1, False)),
        (SRUN_TORCHRUN, (5, 8, 1, False)),
        (PYTORCHJOB, (3, 4, 0, False)),
        (JOBSET, (9, 16, 1, False)),
        (OPENMPI, (1, 4, 1, True)),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, (5, 8, 1, True)),
        (MPIRUN, (1, 8, 1, False)),
        (MPIRUN_SECOND_NODE, (5, 8, 1, False)),
        (HYDRA, (5, 8, 1, False)),
        (SRUN_PMI2, (5, 8, 1, False)),
        (MVAPICH, (1, 4, 1, True)),
        (DEEPSPEED, (1, 4, 1, True)),
        (ARRAY, (5, 8, 1, True)),
        (HETEROGENEOUS, (9, 12, 1, False)),
        (ELASTIC_PYTORCHJOB, (9, 16, 1, False)),
        (TRAINJOB, (9, 16, 1, False)),
        (VOLCANO, (2, 4, 0, False)),
        (RAY_TRAIN, (1, 4, 1, False)),
        (RAY_ON_SLURM, (1, 4, 1, False)),
        ({**RAY_TRAIN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, (0, 1, 0, True)),
        ({"RANK": "1"}, (0, 1, 0, True)),
        ({"RANK": "one", "WORLD_SIZE": "2"}, (0, 1, 0, True)),
    ],
)
def test_the_place_of_a_process_in_its_job(environ: dict[str, str], expected: tuple[int, int, int, bool]) -> None:
    assert place(launch(environ, "node-7", ME)) == expected


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        (TORCHRUN, None),
        (SRUN, "llama 8b-81234"),
        (PYTORCHJOB, "llama-8b"),
        (JOBSET, "llama-8b"),
        ({**PYTORCHJOB, "MASTER_ADDR": "10.1.2.3"}, None),
        ({**PYTORCHJOB, "MASTER_ADDR": "localhost"}, None),
        ({**PYTORCHJOB, "MASTER_ADDR": "llama-8b-master-0.research.svc.cluster.local"}, "llama-8b"),
        ({**JOBSET, "MASTER_ADDR": "x-node-0-0.llama-8b.research.svc.cluster.local"}, "llama-8b"),
        (ARRAY, "llama 8b-81234_7"),
        (HETEROGENEOUS, "llama 8b-81234"),
        (ELASTIC_PYTORCHJOB, "llama-8b"),
        (TRAINJOB, "llama-8b"),
        (VOLCANO, "llama-8b"),
        (RAY_TRAIN, None),
        (KUBERAY, "llama-8b-x7k2p-02000000"),
        (RAY_ON_SLURM, "llama 8b-81234"),
        ({**POD, "PET_RDZV_ENDPOINT": "[fd00::1]:29400"}, None),
    ],
)
def test_a_schedulers_name_for_the_run(environ: dict[str, str], name: str | None) -> None:
    assert launch(environ, "node-7", ME).name == name


def test_ray_trains_experiment_names_the_run() -> None:
    def experiment() -> str | None:
        return "llama-8b"

    def outside() -> str | None:
        raise RuntimeError("not in a training worker")

    for get_name, name in (
        (experiment, "llama-8b"),
        (outside, "llama-8b-x7k2p-02000000"),
        (lambda: None, "llama-8b-x7k2p-02000000"),
    ):
        context = SimpleNamespace(get_experiment_name=get_name)
        modules = {"ray.train": SimpleNamespace(get_context=lambda context=context: context)}
        assert launch(KUBERAY, "node-7", ME, modules=modules).name == name
    assert launch(SRUN, "node-7", ME, modules=modules).name == "llama 8b-81234"


@pytest.mark.parametrize(
    ("environ", "attempt"),
    [
        (SRUN, "slurm-81234.0-1-0"),
        (SRUN_TORCHRUN, "slurm-81234.0-1-2"),
        (PYTORCHJOB, "llama-8b-master-0:23456-0"),
        (JOBSET, "3-0"),
        (HETEROGENEOUS, "slurm-81234.0-1-0"),
        (TRAINJOB, "llama-8b-node-0-0.llama-8b:29400-0"),
        (VOLCANO, "llama-8b-master-0.llama-8b:23456-0"),
        (RAY_TRAIN, "ray-02000000-10.1.2.3:40817-0"),
        (RAY_ON_SLURM, "slurm-81234-1-ray-02000000-10.1.2.3:40817-0"),
        (MPIRUN, "slurm-81234-1-mpi-prterun-node-7-4711@1-0"),
        (HYDRA, "job-0"),
    ],
)
def test_ranks_of_many_nodes_name_their_attempt_alike(environ: dict[str, str], attempt: str) -> None:
    per_rank = (
        "RANK",
        "LOCAL_RANK",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "GROUP_RANK",
        "NODE_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "VC_TASK_INDEX",
        "PET_NODE_RANK",
        "JOB_COMPLETION_INDEX",
    )
    other = {key: "0" if key in per_rank else text for key, text in environ.items()}
    assert launch(environ, "node-7", ME).attempt_without_launcher() == attempt
    assert launch(other, "node-8", ME).attempt_without_launcher() == attempt


def test_mpirun_in_a_batch_script_names_the_attempt_alike_on_its_own_node_and_on_others() -> None:
    attempts = {launch(environ, "node-7", ME).attempt_without_launcher() for environ in (MPIRUN, MPIRUN_SECOND_NODE)}
    assert attempts == {"slurm-81234-1-mpi-prterun-node-7-4711@1-0"}


def test_ray_nodes_in_steps_of_their_own_name_the_attempt_alike() -> None:
    attempts = {
        launch({**RAY_ON_SLURM, "SLURM_STEP_ID": step}, "node-7", ME).attempt_without_launcher()
        for step in ("0", "1", "2")
    }
    assert attempts == {"slurm-81234-1-ray-02000000-10.1.2.3:40817-0"}


@pytest.mark.parametrize("environ", [SRUN, TRAINJOB, PYTORCHJOB, VOLCANO, RAY_TRAIN, MPIRUN])
def test_of_many_nodes_rank_0_names_the_attempt_after_its_own_process(environ: dict[str, str]) -> None:
    # Not after torchrun or the first process of a container. Both may outlive an attempt, or look alike in the next.
    me = this_process()
    assert f"node-7-{me.pid}-{me.start_ticks}" in launch(environ, "node-7", me).attempt()


def test_a_single_process_is_its_own_launcher() -> None:
    assert launch({}, "node-7", this_process()).attempt() == f"node-7-{os.getpid()}-{this_process().start_ticks}-0"


def test_a_job_step_of_one_node_names_scheduler_and_launcher() -> None:
    environ = {**SRUN, "SLURM_STEP_NUM_NODES": "1"}
    attempt = launch(environ, "node-7", ME).attempt()
    assert attempt.startswith(f"slurm-81234.0-1-node-7-{os.getppid()}-")


def test_a_wrapper_script_between_torchrun_and_the_ranks_is_not_the_launcher(tmp_path: Path) -> None:
    for pid, parent, environ in ((30, 20, TORCHRUN), (20, 10, TORCHRUN), (10, 1, {"HOME": "/root"})):
        (tmp_path / str(pid)).mkdir()
        # A command may contain spaces and parentheses.
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} " + "0 " * 17 + f"{pid * 100} 0\n")
        (tmp_path / str(pid) / "environ").write_text("\0".join(f"{k}={v}" for k, v in environ.items()))
    from flopwatch.training.process.launcher import _launcher_pid, _start_ticks

    assert _launcher_pid(tmp_path, 30) == 10
    assert _launcher_pid(tmp_path, 10) == 10
    assert _launcher_pid(tmp_path, 99) == 99
    assert _start_ticks(tmp_path, 20) == 2000
    assert _start_ticks(tmp_path, 99) == 0


def test_the_age_of_a_process_matches_the_clock() -> None:
    before = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import time; time.sleep(0.3)\n"
            "from flopwatch.training.process.launcher import this_process; print(this_process().age)",
        ],
        env={"PYTHONPATH": str(ROOT / "exporter")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.3 <= float(done.stdout) <= time.monotonic() - before + 0.02  # the kernel counts in ticks of 10 ms


def test_without_proc_a_process_is_as_old_as_its_run(tmp_path: Path) -> None:
    assert this_process(tmp_path) == Process(os.getpid(), start_ticks=0, age=0.0, pid_namespace=0)


@pytest.mark.parametrize(
    ("environ", "tenant", "owner", "team"),
    [
        ({}, "", "", ""),
        ({**SRUN, "SLURM_JOB_ACCOUNT": "nlp", "SLURM_JOB_USER": "ada"}, "nlp", "ada", "nlp"),
        ({**SRUN, "SLURM_JOB_USER": "ada"}, "", "ada", ""),
        (PYTORCHJOB, "research", "", ""),
        ({**PYTORCHJOB, "SLURM_JOB_ACCOUNT": "nlp"}, "nlp", "", "nlp"),  # Slurm on Kubernetes
        (
            {
                **SRUN,
                "SLURM_JOB_ACCOUNT": "nlp",
                "SLURM_JOB_USER": "ada",
                "FLOPWATCH_TENANT": "lab",
                "FLOPWATCH_OWNER": "bob",
                "FLOPWATCH_TEAM": "llm",
            },
            "lab",
            "bob",
            "llm",
        ),
    ],
)
def test_tenant_owner_and_team_come_from_variables_before_the_scheduler(
    environ: dict[str, str], tenant: str, owner: str, team: str, tmp_path: Path
) -> None:
    (tmp_path / "namespace").write_text("research")
    identity = launch(environ, "node-7", ME, pod=tmp_path)
    assert (identity.tenant, identity.owner, identity.team) == (tenant, owner, team)


def test_a_pod_without_a_service_account_has_no_tenant(tmp_path: Path) -> None:
    assert launch(PYTORCHJOB, "node-7", ME, pod=tmp_path).tenant == ""


WANDB: Any = SimpleNamespace(run=SimpleNamespace(id="a1b2c3d4", disabled=False))


@pytest.mark.parametrize(
    ("environ", "modules", "expected"),
    [
        ({}, {}, ""),
        ({"WANDB_RUN_ID": "llama 8b"}, {}, "llama-8b"),
        ({"WANDB_RUN_ID": "env"}, {"wandb": WANDB}, "a1b2c3d4"),  # wandb.init(id=...) wins over the variable
        ({"WANDB_RUN_ID": "env"}, {"wandb": SimpleNamespace(run=None)}, "env"),  # before wandb.init()
        ({}, {"wandb": SimpleNamespace(run=SimpleNamespace(id="dummy", disabled=True))}, ""),
        ({}, {"wandb": SimpleNamespace()}, ""),
    ],
)
def test_the_id_of_a_weights_and_biases_run(environ: dict[str, str], modules: dict[str, Any], expected: str) -> None:
    assert external_id(environ, modules) == expected


def squeue(folder: Path, script: str) -> str:
    """Create a fake of Slurm's squeue command and return its path."""
    command = folder / "squeue"
    command.write_text("#!/bin/sh\n" + script)
    command.chmod(0o755)
    return str(command)


def answer(submission: Submission) -> float | None:
    """Return the time of submission once the started squeue process has ended."""
    submission()
    if submission._asked is not None:
        submission._asked.wait(PATIENCE)
    return submission()


FIRST = {key: text for key, text in SRUN.items() if key != "SLURM_RESTART_COUNT"}


def test_slurm_is_asked_once_when_its_job_was_submitted(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    # An array's first task has the array's id, so squeue prints a line for each task.
    command = squeue(
        tmp_path,
        f"""
echo "$@ $SLURM_TIME_FORMAT $SQUEUE_FORMAT" >>{asked}
[ "$SLURM_TIME_FORMAT" = %s ] && printf '1750000000\\n1750000000\\n'
""",
    )
    submission = Submission({**os.environ, **FIRST, "SQUEUE_FORMAT": "%i"}, command)
    assert submission() is None  # returns before squeue has answered
    assert answer(submission) == 1750000000
    assert submission() == 1750000000
    assert asked.read_text() == "--noheader --jobs=81234 --format=%V %s \n"


@pytest.mark.parametrize(
    ("environ", "script"),
    [
        ({}, "echo 1750000000"),
        (SRUN, "echo 1750000000"),  # requeued: Slurm's time is that of the requeue
        (FIRST, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"),
        (FIRST, "echo Unknown"),
    ],
)
def test_no_time_of_submission_rather_than_a_wrong_one(environ: dict[str, str], script: str, tmp_path: Path) -> None:
    assert answer(Submission({**os.environ, **environ}, squeue(tmp_path, script))) is None


def test_without_slurms_client_there_is_no_time_of_submission(tmp_path: Path) -> None:
    assert answer(Submission(FIRST, str(tmp_path / "squeue"))) is None


def test_a_slurm_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    now = 0.0
    submission = Submission({**os.environ, **FIRST}, squeue(tmp_path, "exec sleep 100"), clock=lambda: now)
    assert submission() is None
    now = 29.0
    assert submission() is None
    asked = submission._asked
    assert asked is not None
    assert asked.poll() is None
    now = 31.0
    assert submission() is None
    assert asked.poll() is not None


def test_a_name_is_made_of_the_characters_a_run_may_have() -> None:
    assert clean("llama 8b/β=2" + "x" * 200) == "llama-8b/--2" + "x" * 116


def test_a_run_takes_arguments_before_variables_before_the_scheduler() -> None:
    quiet = {**SRUN, "FLOPWATCH_DISABLE": "1"}
    assert Run(environ=quiet).name == "llama-8b-81234"
    assert Run(environ={**quiet, "FLOPWATCH_RUN": "mixtral"}).name == "mixtral"
    run = Run(
        "argued", rank=2, world_size=3, local_rank=1, attempt="a 7", environ={**quiet, "FLOPWATCH_RUN": "mixtral"}
    )
    assert (run.name, run.rank, run.world_size, run.local_rank, run.attempt) == ("argued", 2, 3, 1, "a-7")


def test_an_unnamed_run_is_called_after_the_script_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py"])
    quiet = {"FLOPWATCH_DISABLE": "1", "FLOPWATCH_HOST": "node-7"}
    assert Run(environ=quiet).name == "train@node-7"
    assert Run(environ={**quiet, **TORCHRUN}).name == "train@node-7"
    assert Run(environ={**quiet, **SRUN_TORCHRUN, "SLURM_JOB_ID": ""}).name  # never an empty name
    several_nodes = {key: text for key, text in SRUN_TORCHRUN.items() if not key.startswith("SLURM")}
    assert Run(environ={**quiet, **several_nodes}).name == "train@node-7"


@pytest.mark.long
@pytest.mark.torch
def test_every_attempt_under_torchrun_has_one_name_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "exporter")!r})
from flopwatch.training import Run
run = Run(environ={{**os.environ, "FLOPWATCH_DISABLE": "1"}})
count, folder = os.environ["TORCHELASTIC_RESTART_COUNT"], Path({str(tmp_path)!r})
draft = folder / f"draft-{{count}}-{{run.rank}}"
draft.write_text(f"{{run.attempt}} {{run.world_size}}")
draft.replace(folder / f"{{count}}-{{run.rank}}")
while len(list(folder.glob(f"{{count}}-*"))) < 2:
    time.sleep(0.01)  # the first that ends is the end of the other
sys.exit(count == "0")
""")
    with reserved_port() as port:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "1",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                "--monitor-interval",
                "0.1",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{port}",
                "--local-addr",
                "127.0.0.1",
                str(script),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    outputs = {path.name: path.read_text().split() for path in tmp_path.iterdir() if path != script}
    assert all(world_size == "2" for _, world_size in outputs.values())
    attempts = {name: attempt for name, (attempt, _) in outputs.items()}
    assert attempts["1-0"] == attempts["1-1"]
    assert attempts["1-0"].removesuffix("-1") == attempts["0-0"].removesuffix("-0")
    assert attempts["1-0"] != attempts["0-0"]
