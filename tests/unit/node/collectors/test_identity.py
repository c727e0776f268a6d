"""Owners of GPUs: device ids of every plugin, Slurm jobs by process and by file, and a kubelet with every fault."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flopwatch.catalogue import (
    FLOPWATCH_IDENTITY_SOURCE_UP,
    GPU_INFO,
    GPU_OWNER_INFO,
    GPU_OWNER_UPDATED_TIMESTAMP_SECONDS,
    HOST_TOPOLOGY_INFO,
    Sample,
)
from flopwatch.node.collectors import Unsupported, identity
from flopwatch.node.collectors.identity import Devices, Identity, build
from flopwatch.node.collectors.identity.background import BackgroundCall
from flopwatch.node.collectors.identity.podresources import Assignment, PodResourcesError
from tests.support.kubelet import encoded, kubelet, pod
from tests.support.machine import PATIENCE, until

UUIDS = ["GPU-0a", "GPU-1b"]
MIG = [
    {"uuid": "MIG-x", "gpu_instance": "1", "compute_instance": "0", "profile": "3g.40gb"},
    {"uuid": "MIG-y", "gpu_instance": "2", "compute_instance": "0", "profile": "1g.10gb"},
    {"uuid": "MIG-z", "gpu_instance": "3", "compute_instance": "0", "profile": "1g.10gb"},
]
NOW = 1_700_000_000.0
SLURM = "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n"
USER = "0::/user.slice/user-1000.slice/session-3.scope\n"
POD = "0::/kubepods/pod3f1c0a52-9d7e-4b6a-8c11-0e5d2a7b9f04/x\n"
NO_OWNER = ("", "", "", "", "", "")


class Node:
    """The files that the collector reads, of a node with two GPUs; /dev/nvidia1 is GPU 0."""

    def __init__(self, root: Path) -> None:
        self.gpus, self.runtime, self.proc, self.jobs = (root / n for n in ("gpus.json", "gpu_runtime.json", "p", "j"))
        self.socket = root / "kubelet.sock"
        self.proc.mkdir()
        self.jobs.mkdir()
        inventory = {
            uuid: dict.fromkeys(GPU_INFO.labels, "")
            | {"gpu": str(index), "uuid": uuid, "pci_bus_id": f"00000000:5{index}:00.0"}
            for index, uuid in enumerate(UUIDS)
        }
        self.gpus.write_text(json.dumps(inventory))
        for index, minor in ((0, 1), (1, 0)):
            folder = self.proc / "driver" / "nvidia" / "gpus" / f"0000:5{index}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n")

    def runs(self, pids: dict[str, list[int]], mig: dict[str, list[dict[str, str]]] | None = None) -> None:
        """Say what runs on the GPUs."""
        self.runtime.write_text(
            json.dumps({uuid: {"mig": (mig or {}).get(uuid, []), "pids": pids.get(uuid, [])} for uuid in UUIDS})
        )

    def process(self, pid: int, cgroup: str, uid: int = 1000, started: int = 77) -> None:
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(cgroup)
        (folder / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        (folder / "stat").write_text(f"{pid} (py ) S 1) S 1 {'0 ' * 17}{started} 0 0\n")

    def ends(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))

    def collector(self, **settings: Any) -> Identity:
        return Identity("node-7", self.gpus, self.runtime, proc=self.proc, clock=lambda: NOW, **settings)

    def build(self, topology: str = "") -> Identity:
        return build("node-7", str(self.gpus), str(self.runtime), str(self.socket), "", str(self.proc), topology)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first read wait for first answers, however long a slow machine takes to give them."""
    monkeypatch.setattr(identity, "FIRST_ANSWER", PATIENCE)


def owners(samples: list[Sample]) -> list[tuple[str, ...]]:
    """Return gpu, the labels after host, and source of each owner series."""
    assert all(labels[2] == "node-7" for row, labels, _ in samples if row is GPU_OWNER_INFO)
    return [(labels[0], *labels[3:]) for row, labels, _ in samples if row is GPU_OWNER_INFO]


def sources(samples: list[Sample]) -> dict[str, float]:
    return {labels[0]: value for row, labels, value in samples if row is FLOPWATCH_IDENTITY_SOURCE_UP}


def updated(samples: list[Sample]) -> dict[str, float]:
    return {labels[0]: value for row, labels, value in samples if row is GPU_OWNER_UPDATED_TIMESTAMP_SECONDS}


@pytest.mark.parametrize(
    ("resource", "device", "found"),
    [
        ("nvidia.com/gpu", "GPU-0a", ("GPU-0a", "")),
        ("example.com/fast-gpu", "GPU-1b", ("GPU-1b", "")),
        ("nvidia.com/gpu.shared", "GPU-1b::3", ("GPU-1b", "")),
        ("nvidia.com/mig-3g.40gb", "MIG-x", ("GPU-0a", "MIG-x")),
        ("nvidia.com/mig-3g.40gb.shared", "MIG-x::0", ("GPU-0a", "MIG-x")),
        ("nvidia.com/mig-1g.10gb", "MIG-GPU-0a/2/0", ("GPU-0a", "MIG-y")),
        # By the number of the device file, which is not NVML's index here.
        ("nvidia.com/gpu", "nvidia0", ("GPU-1b", "")),
        ("nvidia.com/gpu", "nvidia1/vgpu2", ("GPU-0a", "")),
        ("nvidia.com/gpu", "nvidia1/gi3", ("GPU-0a", "MIG-z")),
        ("nvidia.com/gpu", "nvidia1/gi2/vgpu0", ("GPU-0a", "MIG-y")),
        ("nvidia.com/gpu", "nvidia1/gi9", ("GPU-0a", "")),
        ("gpu.nvidia.com", "gpu-0", ("GPU-1b", "")),
        ("gpu.nvidia.com", "gpu-1-mig-3g40gb-9-0", ("GPU-0a", "MIG-x")),
        ("gpu.nvidia.com", "gpu-1-mig-1g10gb-19-4", ("GPU-0a", "")),  # one of two alike
        ("gpu.nvidia.com", "k8s.gpu.nvidia.com/claim=3f1c0a52-9d7e-4b6a-8c11-0e5d2a7b9f04-gpu-0", ("GPU-1b", "")),
        ("gpu.nvidia.com", "k8s.gpu.nvidia.com/device=gpu-1", ("GPU-0a", "")),
        ("gpu.nvidia.com", "nvidia.com/gpu=GPU-0a", ("GPU-0a", "")),
        ("nvidia.com/gpu", "GPU-elsewhere", None),
        ("nvidia.com/gpu", "nvidia7", None),
        ("gpu.nvidia.com", "gpu-7", None),
        ("gpu.nvidia.com", "=", None),
        ("gpu.intel.com", "gpu-0", None),
        ("example.com/nic", "nvidia0", None),
        ("compute-domain.nvidia.com", "channel-0", None),
        ("", "", None),
    ],
)
def test_a_device_by_any_name_is_its_gpu(node: Node, resource: str, device: str, found: tuple[str, str] | None) -> None:
    gpus = json.loads(node.gpus.read_text())
    assert Devices(gpus, {"GPU-0a": {"mig": MIG, "pids": []}}, node.proc).find(resource, device) == found


def test_where_the_driver_reports_no_device_files_the_index_stands_for_them(node: Node, tmp_path: Path) -> None:
    devices = Devices(json.loads(node.gpus.read_text()), {}, tmp_path / "absent")
    assert devices.find("nvidia.com/gpu", "nvidia1") == ("GPU-1b", "")
    assert devices.find("gpu.nvidia.com", "gpu-0") == ("GPU-0a", "")


def test_an_unused_node_has_the_owner_none_for_every_gpu(node: Node) -> None:
    node.runs({})
    assert node.collector().read() == [
        (GPU_OWNER_INFO, ("0", "GPU-0a", "node-7", *NO_OWNER, "none"), 1),
        (GPU_OWNER_UPDATED_TIMESTAMP_SECONDS, ("0", "GPU-0a"), NOW),
        (GPU_OWNER_INFO, ("1", "GPU-1b", "node-7", *NO_OWNER, "none"), 1),
        (GPU_OWNER_UPDATED_TIMESTAMP_SECONDS, ("1", "GPU-1b"), NOW),
        (FLOPWATCH_IDENTITY_SOURCE_UP, ("processes",), 1),
    ]


def test_without_gpus_and_topology_there_is_nothing_to_identify(node: Node) -> None:
    node.gpus.unlink()
    with pytest.raises(Unsupported, match="no GPU"):
        node.collector().read()


def test_processes_tell_the_slurm_job_or_the_user_and_leave_pods_to_the_kubelet(node: Node) -> None:
    node.process(10, SLURM)
    node.process(11, SLURM)
    node.process(12, USER)
    node.process(13, POD, 0)
    node.runs({"GPU-0a": [10, 11, 12], "GPU-1b": [13, 12]})
    assert owners(node.collector().read()) == [
        ("0", "", "", "", "", "4711", "1000", "slurm"),
        ("1", "", "", "", "", "", "1000", "process"),
    ]
    node.runs({"GPU-1b": [13]})
    assert owners(node.collector().read()) == [("0", *NO_OWNER, "none"), ("1", *NO_OWNER, "none")]


def test_a_gpu_whose_processes_cannot_be_seen_has_an_unknown_owner(node: Node) -> None:
    node.process(10, SLURM)
    node.runs({"GPU-0a": [10, 999], "GPU-1b": [999]})
    samples = node.collector().read()
    assert owners(samples) == [("0", "", "", "", "", "4711", "1000", "slurm"), ("1", *NO_OWNER, "unknown")]
    assert updated(samples) == {"0": NOW}
    assert sources(samples) == {"processes": 0}


def test_job_mapping_files_name_jobs_of_gpus_and_instances(node: Node) -> None:
    for name, content in {
        "0": "4711\n4712\n\n",
        "0.2": " 4713 \r\n",
        "1": "",
        "7": "9",
        "1.x": "9",
        "readme": "9",
        "0.3": "x" * 65,
    }.items():
        (node.jobs / name).write_text(content)
    (node.jobs / "5").mkdir()
    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]}, {"GPU-0a": MIG})
    assert owners(node.collector(job_mapping=node.jobs).read()) == [
        ("0", "", "", "", "", "4711", "1000", "slurm"),
        ("0", "", "", "", "", "4712", "", "job_mapping"),
        ("0", "MIG-y", "", "", "", "4713", "", "job_mapping"),
        ("1", *NO_OWNER, "none"),
    ]


def test_a_job_mapping_folder_that_cannot_be_read_leaves_owners_unknown_and_slurm_known(node: Node) -> None:
    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]})
    samples = node.collector(job_mapping=node.jobs / "absent").read()
    assert owners(samples) == [("0", "", "", "", "", "4711", "1000", "slurm"), ("1", *NO_OWNER, "unknown")]
    assert sources(samples) == {"processes": 1, "job_mapping": 0}


def test_at_most_eight_owners_share_a_gpu(node: Node) -> None:
    (node.jobs / "0").write_text("".join(f"{job}\n" for job in range(100, 120)))
    found = owners(node.collector(job_mapping=node.jobs).read())
    assert [owner[5] for owner in found] == [str(job) for job in range(100, 108)] + [""]


@pytest.mark.parametrize(
    ("content", "source"),
    [
        ("", "unknown"),
        ("[]", "unknown"),
        ("{", "unknown"),
        ('{"GPU-0a": 3}', "unknown"),
        ('{"GPU-0a": {"mig": [1], "pids": ["x"]}}', "none"),
    ],
)
def test_a_runtime_file_of_another_shape_costs_nothing_but_what_it_would_tell(
    node: Node, content: str, source: str
) -> None:
    node.runtime.write_text(content)
    assert owners(node.collector().read()) == [("0", *NO_OWNER, source), ("1", *NO_OWNER, "unknown")]


def test_a_gpu_that_nvml_never_reported_has_an_unknown_owner_and_the_others_theirs(node: Node) -> None:
    node.process(10, SLURM)
    node.runtime.write_text(json.dumps({"GPU-0a": {"mig": [], "pids": [10]}}))
    samples = node.collector().read()
    assert owners(samples) == [JOB, ("1", *NO_OWNER, "unknown")]
    assert (updated(samples), sources(samples)) == ({"0": NOW}, {"processes": 1})


JOB = ("0", "", "", "", "", "4711", "1000", "slurm")
FREE = ("1", *NO_OWNER, "none")


def test_a_lost_gpu_keeps_its_last_owner_and_the_time_of_that_until_it_reports_another(
    node: Node, tmp_path: Path
) -> None:
    now = NOW
    kept = tmp_path / "last.json"

    def collector() -> Identity:
        return Identity("node-7", node.gpus, node.runtime, proc=node.proc, clock=lambda: now, last=kept)

    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]})
    identity = collector()
    assert owners(identity.read()) == [JOB, FREE]

    # The job dies with its GPU, and the file keeps the GPU's last processes. A restarted exporter knows them as well.
    node.ends(10)
    for survivor in (identity, collector()):
        now += 60
        samples = survivor.read()
        assert owners(samples) == [JOB, FREE]
        assert (updated(samples), sources(samples)) == ({"0": NOW, "1": now}, {"processes": 1})

    # Another user's process gets the number, and later the file loses its word of the GPU.
    node.process(10, USER, started=99)
    assert owners(identity.read()) == [JOB, FREE]
    node.runtime.write_text(json.dumps({"GPU-1b": {"mig": [], "pids": []}}))
    assert owners(identity.read()) == [JOB, FREE]

    # The GPU is reset. First it is free, then another user has it, then an owner that cannot be seen.
    node.runs({})
    assert owners(identity.read()) == [("0", *NO_OWNER, "none"), FREE]
    node.runs({"GPU-0a": [10]})
    assert owners(identity.read()) == [("0", "", "", "", "", "", "1000", "process"), FREE]
    node.runs({"GPU-0a": [11]})
    assert owners(identity.read()) == [("0", *NO_OWNER, "unknown"), FREE]

    # A GPU that the node forgets is forgotten here as well.
    assert json.loads(kept.read_text()).keys() == {"GPU-0a"}
    node.gpus.write_text(json.dumps({"GPU-1b": json.loads(node.gpus.read_text())["GPU-1b"]}))
    identity.read()
    assert json.loads(kept.read_text()) == {}


def test_a_lost_gpu_keeps_the_pod_that_the_kubelet_has_forgotten_and_the_job_within_a_pod_it_still_knows(
    node: Node,
) -> None:
    node.process(10, POD)
    node.process(11, SLURM)
    node.runs({"GPU-0a": [10], "GPU-1b": [11]})
    scripted = Kubelet()
    scripted.answer = [*HAS_GPU_0, Assignment("slurm", "slurmd-0", "slurmd", "nvidia.com/gpu", "GPU-1b")]
    collector = node.collector(kubelet=scripted.background())
    both = [
        ("0", "", "ml", "train-0", "worker", "", "", "kubelet"),
        ("1", "", "", "", "", "4711", "1000", "slurm"),
        ("1", "", "slurm", "slurmd-0", "slurmd", "", "", "kubelet"),
    ]
    assert owners(collector.read()) == both
    node.ends(10)
    node.ends(11)
    scripted.answers(scripted.answer[1:])
    assert owners(collector.read()) == both
    scripted.answers([])
    assert owners(collector.read()) == both
    collector.close()


def test_the_next_pod_is_the_owner_where_no_process_can_ever_be_seen(node: Node) -> None:
    node.runs({"GPU-0a": [10, 11]})
    scripted = Kubelet()
    scripted.answer = [*HAS_GPU_0, Assignment("ml", "train-1", "worker", "nvidia.com/gpu", "GPU-0a")]
    collector = node.collector(kubelet=scripted.background())
    assert len(owners(collector.read())) == 3
    scripted.answers(scripted.answer[1:])
    assert owners(collector.read()) == [("0", "", "ml", "train-1", "worker", "", "", "kubelet"), FREE]
    collector.close()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"GPU-0a": 3}',
        '{"GPU-0a": {"owners": 3, "at": 1, "processes": {}}}',
        '{"GPU-0a": {"owners": [[1,2,3,4,5,6,7,8]], "at": 1, "processes": {}}}',
    ],
)
def test_a_file_of_last_owners_of_another_shape_is_as_none(node: Node, tmp_path: Path, content: str) -> None:
    (tmp_path / "last.json").write_text(content)
    node.runs({})
    assert owners(node.collector(last=tmp_path / "last.json").read()) == [("0", *NO_OWNER, "none"), FREE]


PODS = [
    pod("ml", "train-0", "worker", "GPU-0a"),
    pod("ml", "shared-a", "main", "GPU-1b::0", "GPU-1b::1"),
    pod("dev", "shared-b", "main", "GPU-1b::2"),
    pod("default", "web", "nginx"),
    pod("default", "nic", "main", "mlx5_0", resource="example.com/nic"),
]


def test_the_kubelet_names_the_pods_that_have_a_gpu(node: Node) -> None:
    node.process(10, POD)
    node.process(11, USER)
    node.runs({"GPU-0a": [10, 11]})
    with kubelet(node.socket, encoded(PODS)):
        collector = node.build()
        samples = collector.read()
        collector.close()
    assert owners(samples) == [
        ("0", "", "ml", "train-0", "worker", "", "", "kubelet"),
        ("1", "", "dev", "shared-b", "main", "", "", "kubelet"),
        ("1", "", "ml", "shared-a", "main", "", "", "kubelet"),
    ]
    assert sources(samples) == {"kubelet": 1, "processes": 1}


def test_a_slurm_job_within_a_pod_and_the_pod_are_both_owners(node: Node) -> None:
    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]})
    with kubelet(node.socket, encoded([pod("slurm", "slurmd-0", "slurmd", "GPU-0a")])):
        collector = node.build()
        assert owners(collector.read())[:2] == [
            ("0", "", "", "", "", "4711", "1000", "slurm"),
            ("0", "", "slurm", "slurmd-0", "slurmd", "", "", "kubelet"),
        ]
        collector.close()


def test_without_a_kubelets_socket_the_node_has_no_kubelet(node: Node) -> None:
    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]})
    collector = node.build()
    samples = collector.read()
    collector.close()
    assert owners(samples) == [("0", "", "", "", "", "4711", "1000", "slurm"), ("1", *NO_OWNER, "none")]
    assert sources(samples) == {"processes": 1}


def test_a_kubelet_that_answers_garbage_costs_its_own_answer_only(node: Node) -> None:
    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]})
    with kubelet(node.socket, b"<html>"):
        collector = node.build()
        samples = collector.read()
        collector.close()
    assert owners(samples) == [("0", "", "", "", "", "4711", "1000", "slurm"), ("1", *NO_OWNER, "unknown")]
    assert updated(samples).keys() == {"0"}
    assert sources(samples) == {"kubelet": 0, "processes": 1}


def test_a_slow_kubelet_delays_no_source_and_its_answer_is_used(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "FIRST_ANSWER", 0.5)
    answer = threading.Event()

    def late(context: Any) -> bytes:
        answer.wait(PATIENCE)
        return encoded(PODS)

    node.process(10, SLURM)
    node.runs({"GPU-0a": [10]})
    with kubelet(node.socket, late):
        collector = node.build()
        samples = collector.read()
        assert owners(samples) == [("0", "", "", "", "", "4711", "1000", "slurm"), ("1", *NO_OWNER, "unknown")]
        assert sources(samples) == {"kubelet": 0, "processes": 1}
        answer.set()
        until(lambda: sources(collector.read()) == {"kubelet": 1, "processes": 1})
        assert owners(collector.read())[2:] == [
            ("1", "", "dev", "shared-b", "main", "", "", "kubelet"),
            ("1", "", "ml", "shared-a", "main", "", "", "kubelet"),
        ]
        collector.close()


class Kubelet:
    """A kubelet whose answers the test gives, asked a hundred times a second, and a clock it sets."""

    def __init__(self) -> None:
        self.answer: list[Assignment] | BaseException = []
        self.now = NOW
        self.asked = 0

    def ask(self) -> list[Assignment]:
        self.asked += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def background(self) -> BackgroundCall[list[Assignment]]:
        return BackgroundCall(self.ask, 0.01, 300, clock=lambda: self.now)

    def answers(self, answer: list[Assignment] | BaseException) -> None:
        """Let it answer this from now on, and wait until it has."""
        self.answer = answer
        asked = self.asked
        until(lambda: self.asked >= asked + 3)


TRAIN = ("0", "", "ml", "train-0", "worker", "", "", "kubelet")
HAS_GPU_0 = [Assignment("ml", "train-0", "worker", "nvidia.com/gpu", "GPU-0a")]


@pytest.mark.parametrize(
    "fault",
    [
        PodResourcesError("no answer within 10 s"),
        FileNotFoundError(2, "No such file", "kubelet.sock"),
        PermissionError(13, "Permission denied"),
    ],
)
def test_the_last_answer_of_a_failing_kubelet_holds_for_five_minutes_and_shows_its_age(
    node: Node, fault: Exception
) -> None:
    node.runs({})
    scripted = Kubelet()
    scripted.answer = HAS_GPU_0
    collector = node.collector(kubelet=scripted.background())
    samples = collector.read()
    assert (owners(samples), sources(samples)["kubelet"]) == ([TRAIN, ("1", *NO_OWNER, "none")], 1)

    scripted.answers(fault)
    scripted.now = NOW + 300
    samples = collector.read()
    assert (owners(samples), sources(samples)["kubelet"]) == ([TRAIN, ("1", *NO_OWNER, "none")], 0)
    assert updated(samples) == {"0": NOW, "1": NOW}

    scripted.now = NOW + 301
    samples = collector.read()
    assert owners(samples) == [("0", *NO_OWNER, "unknown"), ("1", *NO_OWNER, "unknown")]
    assert updated(samples) == {}

    scripted.answers([])
    assert owners(collector.read()) == [("0", *NO_OWNER, "none"), ("1", *NO_OWNER, "none")]
    collector.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RuntimeError("wires crossed"), "wires crossed"),
        (AssertionError(), "AssertionError"),
        (SystemExit(), "the background thread has ended"),
    ],
)
def test_whatever_ends_a_question_is_an_error_of_its_source_and_the_last_answer_holds_no_longer_than_it_may(
    node: Node, fault: BaseException, message: str
) -> None:
    node.runs({})
    scripted = Kubelet()
    scripted.answer = HAS_GPU_0
    kubelet_of_the_node = scripted.background()
    collector = node.collector(kubelet=kubelet_of_the_node)
    assert owners(collector.read())[0] == TRAIN
    scripted.answer = fault
    until(lambda: kubelet_of_the_node.error == message)
    samples = collector.read()
    assert (owners(samples)[0], sources(samples)) == (TRAIN, {"kubelet": 0, "processes": 1})
    scripted.now = NOW + 301
    assert owners(collector.read()) == [("0", *NO_OWNER, "unknown"), ("1", *NO_OWNER, "unknown")]
    collector.close()
    thread = kubelet_of_the_node._thread
    assert thread is not None
    thread.join(PATIENCE)


def test_without_its_http_library_the_kubelet_is_a_failing_source_that_names_the_package(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h2.connection", None)  # an import of it is an ImportError
    node.runs({})
    with kubelet(node.socket, encoded(PODS)):
        collector = node.build()
        assert sources(collector.read()) == {"kubelet": 0, "processes": 1}
        background = collector._kubelet
        assert background is not None
        assert background.error == "the package h2 is missing; pip install 'flopwatch[exporter]'"
        assert background._first.is_set(), "no later read waits for a first answer"
        collector.close()


def test_the_place_is_read_from_the_file_and_a_file_without_this_node_is_an_error(node: Node, tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("host,rack,leaf,domain\nnode-7,A07,leaf1,nvl1\n")
    collector = node.build(topology=f"csv:{tmp_path}/nodes.csv")
    place = (HOST_TOPOLOGY_INFO, ("node-7", "A07", "leaf1", "nvl1", "csv"), 1)
    assert place in collector.read()
    collector.close()
    node.gpus.unlink()  # a node without a GPU has a place
    collector = node.build(topology=f"csv:{tmp_path}/nodes.csv")
    assert collector.read() == [place, (FLOPWATCH_IDENTITY_SOURCE_UP, ("topology",), 1)]
    collector.close()
    collector = node.build(topology=f"slurm:{tmp_path}/nodes.csv")
    assert collector.read() == [(FLOPWATCH_IDENTITY_SOURCE_UP, ("topology",), 0)]
    collector.close()


def test_a_socket_without_a_server_is_a_failing_kubelet(node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(node.socket))
    collector = node.build()
    assert sources(collector.read()) == {"kubelet": 0}
    collector.close()
