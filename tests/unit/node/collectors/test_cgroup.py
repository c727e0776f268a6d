"""Owners of processes by control group: the layouts of Slurm, the kubelet's two drivers and container engines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.collectors.cgroup import owner, parse, started, user

UID = "3f1c0a52-9d7e-4b6a-8c11-0e5d2a7b9f04"
UNDERSCORES = UID.replace("-", "_")
ID = "8d1f2e3c4b5a" + "0123456789abcdef" * 3 + "0123"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "11:devices:/slurm/uid_1000/job_4711/step_0/task_0\n1:name=systemd:/system.slice/slurmd.service\n",
            "slurm:4711",
        ),
        ("4:memory:/slurm_node7/uid_1000/job_4711/step_batch/task_0\n", "slurm:4711"),
        ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_3\n", "slurm:4711"),
        ("0::/system.slice/node7_slurmstepd.scope/job_4711/step_extern/user/task_special\n", "slurm:4711"),
        # A slurmd that is itself a pod, and one seen from the namespace of the exporter's own pod.
        (
            f"0::/kubepods.slice/kubepods-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope/system.slice/slurmstepd.scope/"
            "job_12/step_0/user/task_0\n",
            "slurm:12",
        ),
        ("0::/../../../system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", "slurm:12"),
        ("0::/system.slice/slurmd.service\n", None),
        ("0::/system.slice/slurmstepd.scope/system\n", None),
        ("0::/user.slice/job_7\n", None),
    ],
)
def test_a_slurm_job_is_found_in_both_hierarchies(text: str, expected: str | None) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/besteffort/pod{UID}/{ID}",
        f"/kubepods/burstable/pod{UID}/{ID}",
        f"/kubepods/pod{UID}/{ID}",
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORES}.slice/docker-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{UNDERSCORES}.slice/crio-{ID}.scope/container",
        f"/system.slice/containerd.service/kubepods-besteffort-pod{UNDERSCORES}.slice:cri-containerd:{ID}",
        # kind: the node is a container; and the tail that is left in another cgroup namespace.
        f"/docker/{ID[::-1]}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORES}.slice/"
        f"cri-containerd-{ID}.scope",
        f"/../../pod{UID}/{ID}",
    ],
)
def test_a_pod_is_its_uid_with_every_driver(path: str) -> None:
    assert parse(f"0::{path}\n") == f"pod:{UID}"
    assert parse(f"12:cpu,cpuacct:{path}\n0::/\n") == f"pod:{UID}"


def test_a_static_pod_has_a_uid_without_dashes() -> None:
    uid = UID.replace("-", "")
    assert parse(f"0::/kubepods/burstable/pod{uid}/{ID}\n") == f"pod:{uid}"


@pytest.mark.parametrize(
    "path",
    [
        f"/docker/{ID}",
        f"/system.slice/docker-{ID}.scope",
        f"/machine.slice/libpod-{ID}.scope/container",
        f"/system.slice/crio-{ID}.scope",
        f"/default/{ID}",
        f"/system.slice/nerdctl-{ID}.scope",
        f"/docker/{ID}/init.scope",
    ],
)
def test_a_container_is_the_first_twelve_digits_of_its_id(path: str) -> None:
    assert parse(f"0::{path}\n") == "container:8d1f2e3c4b5a"


@pytest.mark.parametrize(
    "text",
    [
        "0::/\n",
        "0::/user.slice/user-1000.slice/session-3.scope\n",
        "0::/init.scope",
        "",
        "no colons",
        "a:b",
        f"0::/x/{ID}0\n",
        f"0::/x/{ID[:-1]}\n",
        "0::/kubepods/podx\n",
    ],
)
def test_other_groups_have_no_owner(text: str) -> None:
    assert parse(text) is None


def process(proc: Path, pid: int, cgroup: str, uid: int) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(cgroup)
    (proc / str(pid) / "status").write_text(f"Name:\tpython\nUmask:\t0022\nUid:\t{uid}\t0\t0\t0\nGid:\t5\t5\t5\t5\n")


def test_a_process_outside_of_any_job_belongs_to_its_real_user(tmp_path: Path) -> None:
    process(tmp_path, 4711, "0::/user.slice/user-1000.slice/session-3.scope\n", 1000)
    process(tmp_path, 4712, "0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0\n", 1000)
    assert owner(4711, tmp_path) == "user:1000"
    assert owner(4712, tmp_path) == "slurm:9"


def test_a_process_that_cannot_be_seen_is_unknown(tmp_path: Path) -> None:
    assert owner(4711, tmp_path) == "unknown"
    process(tmp_path, 4713, "0::/\n", 0)
    (tmp_path / "4713" / "status").write_text("Name:\tzombie\n")
    assert owner(4713, tmp_path) == "unknown"


def test_this_process_has_an_owner() -> None:
    assert re.fullmatch(rf"slurm:\d+|pod:[0-9a-f-]+|container:[0-9a-f]{{12}}|user:{os.getuid()}", owner(os.getpid()))


def test_when_a_process_was_started_is_the_kernels_whatever_its_name(tmp_path: Path) -> None:
    before = started(os.getpid())
    assert before is not None
    assert before.isdigit()
    assert started(1) != before
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text(f"5 (a ) R 9) S 1 {'0 ' * 17}123456 0\n")
    assert started(5, tmp_path) == "123456"
    (tmp_path / "5" / "stat").write_text("5 (a")
    assert (started(5, tmp_path), started(6, tmp_path)) == (None, None)


@given(st.text(max_size=300), st.sampled_from(["", "0::/", "1:cpu:/slurm/uid_1/job_", "0::/kubepods/pod", "Uid:\t"]))
def test_no_text_breaks_the_parsers(text: str, start: str) -> None:
    found = parse(start + text)
    assert found is None or re.fullmatch(r"slurm:[0-9]+|pod:[0-9a-f-]{32,36}|container:[0-9a-f]{12}", found)
    uid = user(start + text)
    assert uid is None or re.fullmatch(r"[0-9]+", uid)
