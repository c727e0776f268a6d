"""Why a run lost time: a loss joined to the evidence around it. Pure functions; docs/causes.md says it in prose.

A failure is attributed to a signal from ten minutes before it to five minutes after
(https://arxiv.org/abs/2410.21680). What a distributed job says when a peer is lost (a timeout in a collective, a
connection closed) is an echo and never a cause; without evidence the cause is `unknown`. Codes are classed by
data/xid.csv and data/sxid.csv, exceptions by their type's name: nothing here reads a message.
"""

from __future__ import annotations

import errno
import functools
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flopwatch.catalogue.xid import sxids, xids

CAUSES = (
    "gpu",
    "nvlink",
    "network",
    "thermal",
    "host",
    "out_of_memory",
    "software",
    "storage",
    "data",
    "planned",
    "unknown",
)
CONFIDENCES = ("none", "possible", "likely", "certain")
LOSSES = ("end", "slow", "stall")

# What a node's record may say (`flopwatch.node.telemetry.evidence`), and the three kinds that the ledger itself adds.
NODE_KINDS = (
    "xid",
    "sxid",
    "ecc",
    "row_remap",
    "gpu_missing",
    "nvlink",
    "link_down",
    "link_errors",
    "nic",
    "throttle",
    "oom",
    "host_oom",
    "exception",
    "signal",
    "exit",
    "pid_gone",
)
LEDGER_KINDS = ("node_gone", "checkpoint_wait", "data_stall")

PLANNED = ("completed", "stopped", "preempted", "resized")

# Of one piece of evidence: enough by itself, a good reason, a hint. A hardware fault that a node lives through for ten
# minutes weighs as much as a good reason at the very moment, so each is halved over its window.
DECISIVE, STRONG, WEAK = 8.0, 4.0, 2.0
# A silent node outweighs what was seen of its links and loses to a fault of its GPUs.
_NODE_GONE = 5.0
# Evidence of one moment, as far as scrapes a minute apart can tell.
AT_ONCE = 60.0
# These last; to explain a slow stretch or a stall they must have been there during it.
_LASTING = frozenset({"throttle", "checkpoint_wait", "data_stall", "link_errors"})
# A machine that fails takes its parts along: of one host these do not contradict each other.
_OF_A_MACHINE = frozenset({"gpu", "nvlink", "network", "thermal", "host"})
# Causes that have a place to go to. A bug, a full memory or a slow file system is nobody's card.
_PLACED = frozenset({"gpu", "nvlink", "network", "thermal", "host"})

# What PyTorch, its launcher and Python raise when a peer or the connection to it is gone, and what PyTorch raises for
# an error of the device, of which the Xid is the source.
ECHOES = frozenset(
    {
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "DistQueueEmptyError",
        "NCCLError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "TimeoutError",
        "EOFError",
        "ChildFailedError",
        "SignalException",
        "ProcessExitedException",
        "ProcessRaisedException",
        "RendezvousConnectionError",
        "RendezvousTimeoutError",
        "RendezvousClosedError",
        "RendezvousGracefulExitError",
        "AcceleratorError",
    }
)
_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "CUDAOutOfMemoryError"})
# A lost peer is a RuntimeError too where gloo says so, and so is an error of CUDA in PyTorch before 2.8.
_VAGUE = frozenset({"RuntimeError", "OSError", "Exception", "SystemExit", "CalledProcessError"})
_STORAGE_ERRORS = frozenset({"ENOSPC", "EDQUOT", "EIO", "ESTALE", "EROFS", "EREMOTEIO", "ENODEV", "EUCLEAN"})
_CRASHES = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})

# By class of data/xid.csv: the cause, and the weight where the severity is fatal or critical, error. What is a warning
# or less stops no job.
_XID: dict[str, tuple[str, float, float]] = {
    "memory": ("gpu", DECISIVE, DECISIVE),  # an error is 94: contained, at the price of the process
    "pcie": ("gpu", DECISIVE, STRONG),
    "firmware": ("gpu", DECISIVE, STRONG),
    "power": ("gpu", DECISIVE, STRONG),
    "driver": ("gpu", STRONG, WEAK),
    "engine": ("gpu", WEAK, WEAK),
    "security": ("gpu", STRONG, WEAK),
    "nvlink": ("nvlink", STRONG, WEAK),
    "application": ("software", STRONG, STRONG),
}
_STOPPED_PROCESSING = 43  # said of the job's channel after any fault of it
_SXID = {"always fatal": DECISIVE, "potentially fatal": STRONG}


@dataclass(frozen=True, slots=True)
class Evidence:
    """Something seen at a place: how often up to now, and the Unix time when last."""

    kind: str
    t: float
    count: float
    host: str
    gpu: str = ""
    port: str = ""
    rank: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """Time that a run lost.

    Of an end, `began` is the attempt's last sign of progress and `ended` when its end was noticed, not when the run was
    back; of a slow stretch or a stall, both are its own. `hosts` are the attempt's; empty: not known.
    """

    kind: str
    began: float
    ended: float
    status: str
    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause of a loss, how sure that is, the place to blame where evidence names one, and why in a sentence."""

    cause: str
    confidence: str
    host: str = ""
    gpu: str = ""
    port: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one piece of evidence says of a loss; without a cause it is an echo or says nothing."""

    evidence: Evidence
    cause: str
    weight: float
    text: str
    distance: float = 0.0
    score: float = 0.0


def verdict(loss: Loss, evidence: Iterable[Evidence], before: float = 600.0, after: float = 300.0) -> Verdict:
    """Return the cause of a loss; evidence older or younger than the window, in seconds, is left out."""
    if loss.kind == "end" and loss.status in PLANNED:
        return Verdict("planned", "certain", why=f"the run itself said {loss.status}")
    claims = [claim for item in evidence if (claim := _claim(loss, item, before, after)) is not None]
    claims = _without_common_silence(loss, _without_strangers(claims))
    reasons = sorted(
        (claim for claim in claims if claim.cause),
        key=lambda claim: (-claim.score, CAUSES.index(claim.cause), claim.evidence.t, _place(claim.evidence)),
    )
    echoes = [claim for claim in claims if not claim.cause]
    if not reasons:
        return Verdict("unknown", "none", why=_nothing(echoes))
    return _judge(loss, reasons, echoes)


def _judge(loss: Loss, reasons: Sequence[_Claim], echoes: Sequence[_Claim]) -> Verdict:
    """Return the verdict for the strongest claim, which is the first."""
    best = reasons[0]
    sure = 3 if best.weight >= DECISIVE else 2 if best.weight >= STRONG else 1
    near = [claim for claim in reasons if claim.cause == best.cause and claim.score > best.score / 2]
    together = [claim for claim in near if abs(claim.evidence.t - best.evidence.t) <= AT_ONCE]
    why = f"{best.text}{_at(best.evidence)}, {_when(loss, best.evidence)}"
    if best.score < 0.8 * best.weight:
        sure -= 1
    against = next((claim for claim in reasons if claim.score > best.score / 2 and _contradicts(best, claim)), None)
    if against is not None:
        sure -= 1
        why += f"; against it {against.text}{_at(against.evidence)}"
    elif best.cause in ("network", "host") and any(claim.weight for claim in echoes):
        sure += 1  # the others lost their peer, as they must have
    if best.cause not in _PLACED and best.evidence.kind != "host_oom":
        return Verdict(best.cause, _confidence(sure), why=why)
    if len(together) < len(near) and {_place(claim.evidence) for claim in near} != {_place(best.evidence)}:
        # One after the other at several places: the nearest is named, less surely.
        sure -= 1
        together = [best]
    hosts = {claim.evidence.host for claim in together}
    gpus = {claim.evidence.gpu for claim in together}
    ports = {(claim.evidence.host, claim.evidence.port) for claim in together}
    if best.cause == "network" and len(hosts) > 1:
        sure += 1
        why = f"{best.text} on {len(ports)} ports of {len(hosts)} hosts at once: a switch, {_when(loss, best.evidence)}"
    elif len(hosts) > 1:
        why += f"; at once on {len(hosts)} hosts"
    return Verdict(
        best.cause,
        _confidence(sure),
        host=best.evidence.host if len(hosts) == 1 else "",
        gpu=best.evidence.gpu if len(hosts) == len(gpus) == 1 else "",
        port=best.evidence.port if len(ports) == 1 else "",
        why=why,
    )


def _claim(loss: Loss, evidence: Evidence, before: float, after: float) -> _Claim | None:
    """Return what a piece of evidence says of a loss; None if it is of another place or time, or says nothing."""
    if loss.hosts and evidence.host not in loss.hosts:
        return None
    if evidence.t < loss.began:
        distance, reach = loss.began - evidence.t, before
    else:
        distance, reach = max(0.0, evidence.t - loss.ended), after
    if loss.kind != "end" and evidence.kind in _LASTING:
        reach = min(reach, AT_ONCE)
    elif loss.kind != "end" and evidence.t > loss.began + after:
        return None  # what happens once slows from then on
    if distance > reach:
        return None
    said = _says(loss.kind, evidence)
    if said is None:
        return None
    cause, weight, text = said
    return _Claim(evidence, cause, weight, text, distance, weight * 0.5 ** (distance / reach if distance else 0.0))


def _says(loss: str, evidence: Evidence) -> tuple[str, float, str] | None:
    """Return cause, weight and a few words for evidence of a loss; a weight without a cause is an echo."""
    kind, end = evidence.kind, loss == "end"
    if kind in ("exception", "signal", "exit", "pid_gone"):
        return _last_words(kind, evidence.detail) if end else None
    found: dict[str, tuple[str, float, str]] = {
        "ecc": ("gpu", DECISIVE, "an uncorrectable ECC error"),
        "row_remap": ("gpu", DECISIVE, "a failed row remap"),
        "gpu_missing": ("gpu", DECISIVE, "a GPU that is missing"),
        "nvlink": ("nvlink", WEAK, "NVLink errors"),
        "link_down": ("network", STRONG, "link down"),
        "link_errors": ("network", WEAK, "link errors"),
        "nic": ("network", STRONG, "a network card whose driver reports a fault"),
        "throttle": ("thermal", WEAK if end else STRONG, f"clocks throttled ({evidence.detail or 'heat or power'})"),
        "oom": ("out_of_memory", STRONG if end else WEAK, "an allocation that CUDA refused"),
        "host_oom": (
            "out_of_memory",
            WEAK if evidence.rank is None else DECISIVE,
            "the kernel killed a process for memory"
            if evidence.rank is None
            else "the kernel killed the rank for memory",
        ),
        "node_gone": ("host", _NODE_GONE, "a node that fell silent while others spoke"),
        "checkpoint_wait": ("storage", WEAK if end else STRONG, "waiting for a checkpoint"),
        "data_stall": ("data", WEAK if end else STRONG, "waiting for data"),
    }
    if kind == "xid":
        return _xid(evidence.detail)
    if kind == "sxid":
        row = sxids().get(evidence.detail)
        weight = _SXID.get(row.category) if row is not None else None
        return None if row is None or weight is None else ("nvlink", weight, f"SXid {evidence.detail} ({row.name})")
    if kind == "node_gone" and loss == "slow":
        return None
    return found.get(kind)


def _xid(code: str) -> tuple[str, float, str] | None:
    row = xids().get(int(code)) if code.isdecimal() else None
    if row is None or row.category not in _XID:
        return None
    cause, grave, error = _XID[row.category]
    weight = {"fatal": grave, "critical": grave, "error": error}.get(row.severity)
    if code == str(_STOPPED_PROCESSING):
        weight = WEAK
    return None if weight is None else (cause, weight, f"Xid {code} ({row.name})")


def _last_words(kind: str, detail: str) -> tuple[str, float, str]:
    """Return what the way in which a process ended says."""
    if kind == "pid_gone":
        return "", 0.0, "a process that vanished"
    if kind != "exception":
        name = _signal_name(kind, detail)
        text = f"a process ended by {name}" if name else f"a process that ended with status {detail or 'unknown'}"
        return ("software", WEAK, text) if name in _CRASHES else ("", 0.0, text)
    name, _, more = detail.partition(" ")
    text = detail or "an exception"
    if name in _OUT_OF_MEMORY:
        return "out_of_memory", DECISIVE, text
    if name == "MemoryError" or more == "ENOMEM":
        return "out_of_memory", STRONG, text
    if more in _STORAGE_ERRORS:
        return "storage", STRONG, text
    if name in ECHOES or more in _network_errors():
        return "", WEAK, text
    if name == "KeyboardInterrupt":
        return "planned", STRONG, "Ctrl-C"
    return "software", WEAK if name in _VAGUE or not name else STRONG, text


def _signal_name(kind: str, detail: str) -> str:
    """Return the name of the signal in `9`, `SIGKILL` or, of an exit status as shells and Python tell it, 137 or -9."""
    if not re.fullmatch(r"-?[0-9]{1,3}", detail):
        return detail if kind == "signal" else ""
    number = int(detail)
    if kind == "exit":
        number = -number if number < 0 else number - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


@functools.cache
def _network_errors() -> frozenset[str]:
    codes = (
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EPIPE,
    )
    return frozenset(errno.errorcode[code] for code in codes)


def _without_strangers(claims: Sequence[_Claim]) -> list[_Claim]:
    """Return the claims without what the OOM killer took on hosts where no rank vanished: some other process."""
    lost = {claim.evidence.host for claim in claims if claim.evidence.kind in ("pid_gone", "signal", "exit")}
    return [
        claim
        for claim in claims
        if claim.evidence.kind != "host_oom" or claim.evidence.rank is not None or claim.evidence.host in lost
    ]


def _without_common_silence(loss: Loss, claims: Sequence[_Claim]) -> list[_Claim]:
    """Return the claims without the silence of nodes where all are silent, which no one of them explains."""
    gone = {claim.evidence.host for claim in claims if claim.evidence.kind == "node_gone"}
    if not gone or not loss.hosts or gone < loss.hosts:
        return list(claims)
    kept = [claim for claim in claims if claim.evidence.kind != "node_gone"]
    if len(loss.hosts) > 1:
        return [
            *kept,
            *(
                _Claim(claim.evidence, "", 0.0, "all nodes silent at once")
                for claim in claims
                if claim.evidence.kind == "node_gone"
            ),
        ]
    # There are no others to compare the one node with.
    return [
        *kept,
        *(
            _Claim(
                claim.evidence,
                "host",
                WEAK,
                "the only node fell silent",
                claim.distance,
                claim.score * WEAK / claim.weight,
            )
            for claim in claims
            if claim.evidence.kind == "node_gone"
        ),
    ]


def _contradicts(best: _Claim, other: _Claim) -> bool:
    if other.cause == best.cause:
        return False
    same_host = other.evidence.host == best.evidence.host
    return not (same_host and {best.cause, other.cause} <= _OF_A_MACHINE)


def _confidence(sure: int) -> str:
    return CONFIDENCES[max(1, min(3, sure))]


def _place(evidence: Evidence) -> tuple[str, str, str]:
    return evidence.host, evidence.gpu, evidence.port


def _at(evidence: Evidence) -> str:
    rank = "" if evidence.rank is None else f" in rank {evidence.rank}"
    part = evidence.gpu or evidence.port
    return f"{rank}{f' on {part}' if part else ''} {'of' if rank or part else 'on'} {evidence.host}"


def _when(loss: Loss, evidence: Evidence) -> str:
    name = {"end": "the last sign of progress"}.get(loss.kind, "it began")
    if evidence.t < loss.began:
        return f"{loss.began - evidence.t:.0f} s before {name}"
    return f"{evidence.t - loss.began:.0f} s after {name}"


def _nothing(echoes: Sequence[_Claim]) -> str:
    texts = sorted({claim.text for claim in echoes})
    return "nothing was seen that explains it" + (f", only {', '.join(texts[:3])}" if texts else "")
