"""Causes of losses: what each kind of evidence is held to explain, alone, against other evidence, and at a distance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue.xid import xids
from flopwatch.ledger.attribution import CAUSES, CONFIDENCES, LOSSES, IncidentCause, LostTime, attribute
from flopwatch.ledger.record import Evidence
from tests.support import ROOT
from tests.support.evidence import LEDGER_KINDS, NODE_KINDS

T = 1_700_000_000.0
HOSTS = frozenset({"n1", "n2", "n3", "n4"})
CRASH = LostTime("end", T, T + 20, "failed", HOSTS)
SLOW = LostTime("slow", T, T + 600, "", HOSTS)
STALL = LostTime("stall", T, T + 300, "", HOSTS)


def saw(kind: str, after: float = 5, host: str = "n3", detail: str = "", **place: str | int) -> Evidence:
    """Return evidence so many seconds after the last sign of progress."""
    return Evidence(kind, T + after, 1, host, detail=detail, **place)  # type: ignore[arg-type]


def xid(code: int, after: float = 5, host: str = "n3", gpu: str = "GPU-3") -> Evidence:
    return saw("xid", after, host, str(code), gpu=gpu)


def raised(name: str, rank: int = 3, after: float = 5, host: str = "n3") -> Evidence:
    return saw("exception", after, host, name, rank=rank)


def verdict(loss: LostTime, *evidence: Evidence) -> tuple[str, ...]:
    """Return cause, confidence, host, GPU and port of a loss, without the empty ones."""
    found = attribute(loss, evidence)
    return tuple(text for text in (found.cause, found.confidence, found.host, found.gpu, found.port) if text)


UNKNOWN = ("unknown", "none")
ECHO = [raised("DistBackendError", rank, 8, host) for rank, host in enumerate(("n1", "n2", "n4"))]


@pytest.mark.parametrize(
    ("name", "loss", "evidence", "expected"),
    [
        ("nothing was seen", CRASH, [], UNKNOWN),
        ("a GPU fell off the bus", CRASH, [xid(79)], ("gpu", "certain", "n3", "GPU-3")),
        ("and its rank vanished", CRASH, [xid(79), saw("pid_gone", rank=3)], ("gpu", "certain", "n3", "GPU-3")),
        ("and the others timed out", CRASH, [*ECHO, xid(79)], ("gpu", "certain", "n3", "GPU-3")),
        ("and took its NVLinks along", CRASH, [xid(74, 4), xid(79)], ("gpu", "certain", "n3", "GPU-3")),
        ("and left a hole", CRASH, [xid(79), saw("gpu_missing", 30, gpu="GPU-3")], ("gpu", "certain", "n3", "GPU-3")),
        ("the driver logs it late", CRASH, [xid(79, 60)], ("gpu", "certain", "n3", "GPU-3")),
        ("the driver logs it very late", CRASH, [xid(79, 310)], ("gpu", "likely", "n3", "GPU-3")),
        ("later than the window", CRASH, [xid(79, 321)], UNKNOWN),
        ("earlier than the window", CRASH, [xid(79, -601)], UNKNOWN),
        ("two GPUs of one host", CRASH, [xid(79), xid(79, 6, gpu="GPU-4")], ("gpu", "certain", "n3")),
        ("GPUs of two hosts at once", CRASH, [xid(79), xid(79, 6, "n1", "GPU-9")], ("gpu", "certain")),
        ("a GPU without a name", CRASH, [xid(79, gpu="")], ("gpu", "certain", "n3")),
        ("another run's host", CRASH, [xid(79, host="n9")], UNKNOWN),
        ("an uncorrectable ECC error", CRASH, [saw("ecc", gpu="GPU-1")], ("gpu", "certain", "n3", "GPU-1")),
        ("a row remap that failed", CRASH, [saw("row_remap", gpu="GPU-1")], ("gpu", "certain", "n3", "GPU-1")),
        ("a contained memory error", CRASH, [xid(94), xid(63)], ("gpu", "certain", "n3", "GPU-3")),
        ("a GSP timeout", CRASH, [xid(119)], ("gpu", "certain", "n3", "GPU-3")),
        ("a context switch timeout", CRASH, [xid(109)], ("gpu", "likely", "n3", "GPU-3")),
        ("a copy engine", CRASH, [xid(39)], ("gpu", "possible", "n3", "GPU-3")),
        ("a row was remapped, which no job notices", CRASH, [xid(63)], UNKNOWN),
        ("NVLink", CRASH, [xid(74), *ECHO], ("nvlink", "likely", "n3", "GPU-3")),
        ("NVLink recoveries alone", CRASH, [saw("nvlink", gpu="GPU-3")], ("nvlink", "possible", "n3", "GPU-3")),
        ("an NVSwitch's fatal error", CRASH, [saw("sxid", detail="12020")], ("nvlink", "certain", "n3")),
        ("an NVSwitch's corrected error", CRASH, [saw("sxid", detail="11012")], UNKNOWN),
        ("the application's Xid 13", CRASH, [xid(13)], ("software", "likely")),
        ("the application's Xid 31", CRASH, [xid(31), raised("AcceleratorError")], ("software", "likely")),
        ("Xid 43 follows any fault", CRASH, [xid(43)], ("software", "possible")),
        ("Xid 45 is a clean-up", CRASH, [xid(45)], UNKNOWN),
        ("Xid 45 cleans up after 79", CRASH, [xid(45, 2, gpu="GPU-2"), xid(79, 3)], ("gpu", "certain", "n3", "GPU-3")),
        ("a page fault behind an ECC error", CRASH, [xid(31, 2), xid(48, 3)], ("gpu", "certain", "n3", "GPU-3")),
        ("an unknown Xid", CRASH, [xid(999), xid(-1)], UNKNOWN),
        ("a port went down", CRASH, [saw("link_down", port="mlx5_0:1")], ("network", "likely", "n3", "mlx5_0:1")),
        (
            "and the others timed out",
            CRASH,
            [saw("link_down", port="mlx5_0:1"), *ECHO],
            ("network", "certain", "n3", "mlx5_0:1"),
        ),
        (
            "a whole leaf went down",
            CRASH,
            [saw("link_down", 3, host, port="mlx5_0:1") for host in HOSTS],
            ("network", "certain"),
        ),
        (
            "two ports of a host went down",
            CRASH,
            [saw("link_down", port=f"mlx5_{n}:1") for n in range(2)],
            ("network", "likely", "n3"),
        ),
        (
            "one flapped long before another went down",
            CRASH,
            [saw("link_down", -300, "n1", port="mlx5_7:1"), saw("link_down", port="mlx5_0:1")],
            ("network", "possible", "n3", "mlx5_0:1"),
        ),
        ("a port with errors", CRASH, [saw("link_errors", port="mlx5_0:1")], ("network", "possible", "n3", "mlx5_0:1")),
        ("a network card reports a fault", CRASH, [saw("nic")], ("network", "likely", "n3")),
        (
            "a link next to a GPU off the bus",
            CRASH,
            [xid(79), saw("link_down", host="n1", port="mlx5_0:1")],
            ("gpu", "certain", "n3", "GPU-3"),
        ),
        (
            "an old Xid 79 and a link just now",
            CRASH,
            [xid(79, -590), saw("link_down", host="n1", port="mlx5_0:1")],
            ("gpu", "possible", "n3", "GPU-3"),
        ),
        ("timeouts alone are an echo", CRASH, ECHO, UNKNOWN),
        (
            "connections reset are an echo",
            CRASH,
            [raised("OSError ECONNRESET"), raised("ConnectionResetError")],
            UNKNOWN,
        ),
        ("a node fell silent", CRASH, [saw("node_gone")], ("host", "likely", "n3")),
        ("and the others timed out", CRASH, [saw("node_gone"), *ECHO], ("host", "certain", "n3")),
        ("a silent node after a GPU fault", CRASH, [saw("node_gone"), xid(79)], ("gpu", "certain", "n3", "GPU-3")),
        (
            "a silent node after its link went",
            CRASH,
            [saw("node_gone"), saw("link_down", port="mlx5_0:1")],
            ("host", "likely", "n3"),
        ),
        (
            "two nodes of a rack fell silent",
            CRASH,
            [saw("node_gone", host=host) for host in ("n1", "n2")],
            ("host", "likely"),
        ),
        ("all nodes fell silent", CRASH, [saw("node_gone", host=host) for host in HOSTS], UNKNOWN),
        (
            "the only node fell silent",
            LostTime("end", T, T + 60, "silent", frozenset({"n3"})),
            [saw("node_gone")],
            ("host", "possible", "n3"),
        ),
        ("CUDA's allocator", CRASH, [raised("OutOfMemoryError"), *ECHO], ("out_of_memory", "certain")),
        ("an allocation that CUDA refused", CRASH, [saw("oom", rank=3)], ("out_of_memory", "likely")),
        ("Python's own memory", CRASH, [raised("MemoryError")], ("out_of_memory", "likely")),
        (
            "the kernel's OOM killer took a rank",
            CRASH,
            [saw("host_oom", rank=3), saw("pid_gone", rank=3)],
            ("out_of_memory", "certain", "n3"),
        ),
        (
            "the kernel's OOM killer took something, and a rank vanished",
            CRASH,
            [saw("host_oom"), saw("pid_gone", rank=3)],
            ("out_of_memory", "possible", "n3"),
        ),
        (
            "the kernel's OOM killer took something else",
            CRASH,
            [saw("host_oom"), saw("pid_gone", host="n1", rank=0)],
            UNKNOWN,
        ),
        ("an exception of the user's", CRASH, [raised("KeyError"), *ECHO], ("software", "likely")),
        ("an exception that may be an echo", CRASH, [raised("RuntimeError")], ("software", "possible")),
        (
            "the plain one next to the echo",
            CRASH,
            [raised("RuntimeError", 1), raised("KeyError", 2)],
            ("software", "likely"),
        ),
        (
            "a GPU fault that the user's code saw as an error",
            CRASH,
            [xid(79), raised("RuntimeError")],
            ("gpu", "certain", "n3", "GPU-3"),
        ),
        (
            "a bug and a link that contradict",
            CRASH,
            [raised("KeyError"), saw("link_down", host="n1", port="mlx5_0:1")],
            ("network", "possible", "n1", "mlx5_0:1"),
        ),
        ("sys.exit(3)", CRASH, [raised("SystemExit 3")], ("software", "possible")),
        ("Ctrl-C", CRASH, [raised("KeyboardInterrupt")], ("planned", "likely")),
        ("a full disk", CRASH, [raised("OSError ENOSPC")], ("storage", "likely")),
        ("a missing file is a bug", CRASH, [raised("FileNotFoundError ENOENT")], ("software", "likely")),
        ("a crash in C", CRASH, [saw("signal", detail="SIGSEGV", rank=3)], ("software", "possible")),
        ("a crash as a number", CRASH, [saw("signal", detail="11", rank=3)], ("software", "possible")),
        ("a crash as a shell's status", CRASH, [saw("exit", detail="139", rank=3)], ("software", "possible")),
        ("a crash as Python's status", CRASH, [saw("exit", detail="-11", rank=3)], ("software", "possible")),
        ("killed by another process", CRASH, [saw("signal", detail="SIGKILL", rank=3)], UNKNOWN),
        ("an invalid status", CRASH, [saw("exit", detail="--9", rank=3)], UNKNOWN),
        ("ended with status 1", CRASH, [saw("exit", detail="1", rank=3)], UNKNOWN),
        ("vanished", CRASH, [saw("pid_gone", rank=3)], UNKNOWN),
        ("waiting for a checkpoint when it died", CRASH, [saw("checkpoint_wait")], ("storage", "possible")),
        ("heat when it died", CRASH, [saw("throttle", gpu="GPU-3")], ("thermal", "possible", "n3", "GPU-3")),
        (
            "the run completed although a GPU failed",
            LostTime("end", T, T, "completed", HOSTS),
            [xid(79)],
            ("planned", "certain"),
        ),
        ("preempted", LostTime("end", T, T, "preempted", HOSTS), [], ("planned", "certain")),
        (
            "slow of heat",
            SLOW,
            [saw("throttle", 300, detail="hw_thermal_slowdown", gpu="GPU-3")],
            ("thermal", "likely", "n3", "GPU-3"),
        ),
        ("slow long after the heat", SLOW, [saw("throttle", -120, gpu="GPU-3")], UNKNOWN),
        ("hot long after being slow", SLOW, [saw("throttle", 700, gpu="GPU-3")], UNKNOWN),
        (
            "slow of heat in the whole room",
            SLOW,
            [saw("throttle", 300, host, gpu=f"GPU-{host}") for host in HOSTS],
            ("thermal", "likely"),
        ),
        (
            "slow of a flapping link",
            SLOW,
            [saw("link_down", 300, port="mlx5_0:1")],
            ("network", "likely", "n3", "mlx5_0:1"),
        ),
        (
            "slow of a link with errors",
            SLOW,
            [saw("link_errors", 300, port="mlx5_0:1")],
            ("network", "possible", "n3", "mlx5_0:1"),
        ),
        (
            "slow of heat and a link",
            SLOW,
            [saw("throttle", 300, gpu="GPU-3"), saw("link_down", 300, "n1", port="mlx5_0:1")],
            ("network", "possible", "n1", "mlx5_0:1"),
        ),
        ("slow, and an exception does not explain it", SLOW, [raised("KeyError")], UNKNOWN),
        ("stalled on data", STALL, [saw("data_stall", 200)], ("data", "likely")),
        ("stalled on a checkpoint", STALL, [saw("checkpoint_wait", 200)], ("storage", "likely")),
        ("hung on a GPU without a GSP", STALL, [xid(119, 1)], ("gpu", "certain", "n3", "GPU-3")),
        ("hung on a dead link", STALL, [saw("link_down", 1, port="mlx5_0:1")], ("network", "likely", "n3", "mlx5_0:1")),
        ("stalled on nothing that was seen", STALL, [], UNKNOWN),
        (
            "where the hosts are not known, any counts",
            LostTime("end", T, T, "failed", frozenset()),
            [xid(79, host="n77")],
            ("gpu", "certain", "n77", "GPU-3"),
        ),
        ("a kind of a later release", CRASH, [saw("cosmic_ray")], UNKNOWN),
    ],
)
def test_the_cause_of_each_loss_is_as_sure_as_its_evidence(
    name: str, loss: LostTime, evidence: list[Evidence], expected: tuple[str, ...]
) -> None:
    assert verdict(loss, *evidence) == expected
    assert verdict(loss, *reversed(evidence)) == expected, "whatever the order"


def test_each_code_of_the_xid_table_is_held_to_be_what_nvidia_holds_it_to_be() -> None:
    causes: dict[str, set[int]] = {}
    for code in xids():
        causes.setdefault(verdict(CRASH, xid(code))[0], set()).add(code)
    assert causes["software"] == {8, 11, 13, 25, 31, 32, 43, 69, 80}
    assert causes["nvlink"] == {74, 136, 144, 145, 146, 147, 148, 149, 150, 155, 166, 173}
    assert {46, 48, 54, 62, 64, 79, 94, 95, 109, 110, 119, 120, 140, 143, 156, 157, 158, 167} <= causes["gpu"]
    assert {37, 38, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 154, 176} <= causes["unknown"]
    assert set(causes) == {"software", "nvlink", "gpu", "unknown"}


def test_the_sentence_names_what_where_and_when() -> None:
    assert attribute(CRASH, [xid(79), *ECHO]).why == (
        "Xid 79 (GPU has fallen off the bus) on GPU-3 of n3, 5 s after the last sign of progress"
    )
    assert attribute(CRASH, [raised("KeyError", after=-4)]).why == (
        "KeyError in rank 3 of n3, 4 s before the last sign of progress"
    )
    assert attribute(CRASH, ECHO).why == "nothing was seen that explains it, only DistBackendError"
    assert attribute(CRASH, [saw("link_down", 3, host, port="mlx5_0:1") for host in HOSTS]).why == (
        "link down on 4 ports of 4 hosts at once: a switch, 3 s after the last sign of progress"
    )


def test_the_documentation_has_every_cause_and_every_kind_of_evidence() -> None:
    page = (ROOT / "docs" / "causes.md").read_text()
    causes = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert causes == [*reversed(CONFIDENCES), *CAUSES]
    assert [kind for kind in (*NODE_KINDS, *LEDGER_KINDS) if f"`{kind}`" not in page] == []


evidence_of_any_kind = st.builds(
    Evidence,
    st.sampled_from([*NODE_KINDS, *LEDGER_KINDS, "cosmic_ray", ""]),
    st.floats(T - 1000, T + 1000),
    st.floats(0, 1e6),
    st.sampled_from([*sorted(HOSTS), "n9"]),
    gpu=st.sampled_from(["", "GPU-1", "GPU-2"]),
    port=st.sampled_from(["", "mlx5_0:1"]),
    rank=st.none() | st.integers(0, 7),
    detail=st.sampled_from(["79", "31", "12020", "KeyError", "OSError ENOSPC", "DistBackendError", "-9", "999999"])
    | st.text(max_size=20),
)


@given(st.sampled_from(LOSSES), st.sampled_from(["failed", "silent", ""]), st.lists(evidence_of_any_kind, max_size=12))
def test_a_verdict_blames_only_what_some_evidence_within_the_window_names(
    kind: str, status: str, evidence: list[Evidence]
) -> None:
    loss = LostTime(kind, T, T + 30, status, HOSTS)
    found = attribute(loss, evidence)
    assert found.cause in CAUSES
    assert found.confidence in CONFIDENCES
    assert (found.cause == "unknown") == (found.confidence == "none")
    seen = [item for item in evidence if item.host in HOSTS and T - 600 <= item.t <= T + 330]
    if found.host:
        assert any(
            (item.host, item.gpu, item.port) == (found.host, found.gpu or item.gpu, found.port or item.port)
            for item in seen
        )
    else:
        assert not found.gpu
        assert not found.port
    if not seen:
        assert found == IncidentCause("unknown", "none", why="nothing was seen that explains it")


@given(st.lists(evidence_of_any_kind, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_the_evidence_does_not_matter(evidence: list[Evidence], random: object) -> None:
    shuffled = list(evidence)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = attribute(CRASH, evidence), attribute(CRASH, shuffled)
    assert (first.cause, first.confidence, first.host, first.gpu, first.port) == (
        second.cause,
        second.confidence,
        second.host,
        second.gpu,
        second.port,
    )
