"""Attribution of lost time to a cause, by the evidence near it. Pure functions. docs/causes.md explains the rules.

Evidence counts from ten minutes before a failure to five minutes after it (https://arxiv.org/abs/2410.21680). What
ranks report when a peer is lost, such as a timeout of a collective, is an echo and never a cause. Without evidence the
cause is `unknown`. Xids and SXids are classified by data/xid.csv and data/sxid.csv, exceptions by their type's name.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flopwatch.catalogue.xid import read_table, sxids, xids
from flopwatch.ledger.record import Evidence

# Causes with hardware to repair. On one host they do not contradict each other, since a failing host loses its parts.
_HARDWARE = ("gpu", "nvlink", "network", "thermal", "host")
CAUSES = (*_HARDWARE, "out_of_memory", "software", "storage", "data", "planned", "unknown")
CONFIDENCES = ("none", "possible", "likely", "certain")
LOSSES = ("end", "slow", "stall")

_EXIT_KINDS = ("exception", "signal", "exit", "pid_gone")  # of evidence
PLANNED = ("completed", "stopped", "preempted", "resized")

# Weights: enough alone, a good reason, a hint. Halved over the window: DECISIVE ten minutes before equals STRONG.
DECISIVE, STRONG, WEAK = 8.0, 4.0, 2.0
# A silent node outweighs errors of its links, and is outweighed by a fault of its GPUs.
_NODE_GONE = 5.0
_WEIGHTS = {"decisive": DECISIVE, "strong": STRONG, "weak": WEAK, "silence": _NODE_GONE}  # words in data/causes.csv
BEFORE, AFTER = 600.0, 300.0  # seconds around a failure in which a signal can explain it
# Seconds within which evidence counts as simultaneous, since scrapes are up to a minute apart.
AT_ONCE = 60.0
# Lasting conditions. They explain a slow stretch or a stall only if they were present during it.
_LASTING = frozenset({"throttle", "checkpoint_wait", "data_stall", "link_errors"})

_CRASHES = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})

_SXID = {"always fatal": DECISIVE, "potentially fatal": STRONG}


@dataclass(frozen=True, slots=True)
class LostTime:
    """Time that a run lost: an attempt's end (`kind` is `end`), a slow stretch (`slow`) or a stall (`stall`)."""

    kind: str
    began: float  # Unix time; of an end, the last sign of progress
    ended: float  # of an end, when it was noticed
    status: str
    hosts: frozenset[str]  # empty if unknown


@dataclass(frozen=True, slots=True)
class IncidentCause:
    """Cause of a loss, its confidence, the host, GPU or port if the evidence names one, and the reason as text."""

    cause: str
    confidence: str
    host: str = ""
    gpu: str = ""
    port: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Claim:
    """Cause that one piece of evidence suggests for a loss. The cause is empty for an echo of a lost peer."""

    evidence: Evidence
    cause: str
    weight: float
    text: str
    score: float = 0.0


def attribute(loss: LostTime, evidence: Iterable[Evidence]) -> IncidentCause:
    """Return the cause of a loss by the evidence from BEFORE seconds before it to AFTER seconds after it."""
    if loss.kind == "end" and loss.status in PLANNED:
        return IncidentCause("planned", "certain", why=f"the run itself reported {loss.status}")
    claims = [claim for item in evidence if (claim := _claim(loss, item)) is not None]
    claims = _drop_common_silence(loss, _drop_foreign_kills(claims))
    reasons = sorted(
        (claim for claim in claims if claim.cause),
        key=lambda claim: (-claim.score, CAUSES.index(claim.cause), claim.evidence.t, _place(claim.evidence)),
    )
    echoes = [claim for claim in claims if not claim.cause]
    if not reasons:
        texts = sorted({claim.text for claim in echoes})
        only = f", only {', '.join(texts[:3])}" if texts else ""
        return IncidentCause("unknown", "none", why=f"nothing was seen that explains it{only}")
    return _judge(loss, reasons, echoes)


def _judge(loss: LostTime, reasons: Sequence[_Claim], echoes: Sequence[_Claim]) -> IncidentCause:
    """Return the cause of the first and strongest claim. Its confidence depends on its weight and the other claims."""
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
        sure += 1  # the other ranks lost their peer, as expected
    if best.cause not in _HARDWARE and best.evidence.kind != "host_oom":
        return IncidentCause(best.cause, _confidence(sure), why=why)
    if len(together) < len(near) and {_place(claim.evidence) for claim in near} != {_place(best.evidence)}:
        # One after the other at several places: name the nearest, with less confidence.
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
    host = best.evidence.host if len(hosts) == 1 else ""
    gpu = best.evidence.gpu if len(hosts) == len(gpus) == 1 else ""
    port = best.evidence.port if len(ports) == 1 else ""
    return IncidentCause(best.cause, _confidence(sure), host, gpu, port, why)


def _claim(loss: LostTime, evidence: Evidence) -> _Claim | None:
    """Return the cause that evidence suggests, or None if it is of another host or time or explains nothing."""
    if loss.hosts and evidence.host not in loss.hosts:
        return None
    early, late = loss.began - evidence.t, max(0.0, evidence.t - loss.ended)
    distance, reach = (early, BEFORE) if early > 0 else (late, AFTER)
    if loss.kind != "end" and evidence.kind in _LASTING:
        reach = min(reach, AT_ONCE)
    elif loss.kind != "end" and evidence.t > loss.began + AFTER:
        return None  # a single event only explains a loss after it
    if distance > reach:
        return None
    if (reading := _interpret(loss.kind, evidence)) is None:
        return None
    cause, weight, text = reading
    return _Claim(evidence, cause, weight, text, weight * 0.5 ** (distance / reach if distance else 0.0))


class _Reading(NamedTuple):
    """Line of data/causes.csv: how one kind of evidence, Xid class, exception or errno is read.

    `weight` is for an attempt's end, or for an Xid that is fatal or critical. `other_weight` is for a slow stretch or a
    stall, or for an Xid with the severity `error`. Exceptions without a cause are echoes: PyTorch, its launcher and
    Python raise them for a lost peer, and for a device error, which has an Xid. RuntimeError is weak, because a lost
    peer raises it with gloo, as does an error of CUDA in PyTorch before 2.8.
    """

    cause: str
    weight: float
    other_weight: float
    text: str


@cache
def _readings() -> dict[tuple[str, str], _Reading]:
    """Return the lines of data/causes.csv by what they are of, and its name."""
    readings = {}
    for row in read_table("causes.csv"):
        weights = _WEIGHTS[row["weight"]], _WEIGHTS[row["other_weight"]]
        readings[row["of"], row["name"]] = _Reading(row["cause"], *weights, row["text"])
    return readings


def _interpret(loss: str, evidence: Evidence) -> tuple[str, float, str] | None:
    """Return cause, weight and text of evidence for a kind of loss, or None. The cause of an echo is empty."""
    kind, end = evidence.kind, loss == "end"
    if kind in _EXIT_KINDS:
        return _process_end(kind, evidence.detail) if end else None
    if kind == "xid":
        return _xid(evidence.detail)
    if kind == "sxid":
        row = sxids().get(evidence.detail)
        weight = _SXID.get(row.category) if row is not None else None
        return None if row is None or weight is None else ("nvlink", weight, f"SXid {evidence.detail} ({row.name})")
    if kind == "node_gone" and loss == "slow":
        return None
    own = kind == "host_oom" and evidence.rank is not None
    known = _readings().get(("evidence", "host_oom of a rank" if own else kind))
    if known is None:
        return None
    text = known.text.format(evidence.detail or "heat or power")
    return known.cause, known.weight if end else known.other_weight, text


def _xid(code: str) -> tuple[str, float, str] | None:
    """Return the cause, the weight and a text for an Xid code, or None if such an Xid ends no job."""
    row = xids().get(int(code)) if code.isdecimal() else None
    known = None if row is None else _readings().get(("xid class", row.category))
    if row is None or known is None:
        return None
    cause, grave = known.cause, known.weight
    weight = {"fatal": grave, "critical": grave, "error": known.other_weight}.get(row.severity)
    if code == "43":  # follows any fault of the job's channel
        weight = WEAK
    return None if weight is None else (cause, weight, f"Xid {code} ({row.name})")


def _process_end(kind: str, detail: str) -> tuple[str, float, str]:
    """Return the cause, the weight and a text for how a process ended. The cause of an echo is empty."""
    if kind == "pid_gone":
        return "", 0.0, "a process that vanished"
    if kind != "exception":
        name = _signal_name(kind, detail)
        text = f"a process ended by {name}" if name else f"a process that ended with status {detail or 'unknown'}"
        return ("software", WEAK, text) if name in _CRASHES else ("", 0.0, text)
    name, _, more = detail.partition(" ")
    found = [known for key in (("errno", more), ("exception", name)) if (known := _readings().get(key)) is not None]
    if not found:
        return "software", STRONG if name else WEAK, detail or "an exception"
    known = max(found, key=lambda one: one.weight)
    return known.cause, known.weight, known.text or detail


def _signal_name(kind: str, detail: str) -> str:
    """Return a signal's name from its number, name or exit status (137 or -9 for SIGKILL), else an empty text."""
    if not re.fullmatch(r"-?[0-9]{1,3}", detail):
        return detail if kind == "signal" else ""
    number = int(detail)
    if kind == "exit":
        number = -number if number < 0 else number - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _drop_foreign_kills(claims: Sequence[_Claim]) -> list[_Claim]:
    """Drop claims of OOM kills on hosts where no rank was lost, since another process was killed there."""
    lost = {claim.evidence.host for claim in claims if claim.evidence.kind in ("pid_gone", "signal", "exit")}
    pairs = [(claim, claim.evidence) for claim in claims]
    return [claim for claim, one in pairs if one.kind != "host_oom" or one.rank is not None or one.host in lost]


def _drop_common_silence(loss: LostTime, claims: Sequence[_Claim]) -> list[_Claim]:
    """Turn `node_gone` claims into echoes if all nodes fell silent, since no single host is then to blame."""
    gone = {claim.evidence.host for claim in claims if claim.evidence.kind == "node_gone"}
    if not gone or not loss.hosts or gone < loss.hosts:
        return list(claims)
    kept = [one for one in claims if one.evidence.kind != "node_gone"]
    for one in (one for one in claims if one.evidence.kind == "node_gone"):
        if len(loss.hosts) > 1:
            kept.append(_Claim(one.evidence, "", 0.0, "all nodes silent at once"))
        else:  # a single node cannot be compared with others
            score = one.score * WEAK / one.weight
            kept.append(_Claim(one.evidence, "host", WEAK, "the only node fell silent", score))
    return kept


def _contradicts(best: _Claim, other: _Claim) -> bool:
    """Return whether `other` suggests another cause than `best`. Two hardware causes on one host do not contradict."""
    if other.cause == best.cause:
        return False
    same_host = other.evidence.host == best.evidence.host
    return not (same_host and {best.cause, other.cause} <= set(_HARDWARE))


def _confidence(sure: int) -> str:
    """Return the confidence for a level from 1 (possible) to 3 (certain). Other levels are clamped."""
    return CONFIDENCES[max(1, min(3, sure))]


def _place(evidence: Evidence) -> tuple[str, str, str]:
    return evidence.host, evidence.gpu, evidence.port


def _at(evidence: Evidence) -> str:
    rank = "" if evidence.rank is None else f" in rank {evidence.rank}"
    part = evidence.gpu or evidence.port
    return f"{rank}{f' on {part}' if part else ''} {'of' if rank or part else 'on'} {evidence.host}"


def _when(loss: LostTime, evidence: Evidence) -> str:
    name = {"end": "the last sign of progress"}.get(loss.kind, "it began")
    if evidence.t < loss.began:
        return f"{loss.began - evidence.t:.0f} s before {name}"
    return f"{evidence.t - loss.began:.0f} s after {name}"
