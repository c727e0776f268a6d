"""Verdict on a host: applies the health rules to its samples, and compares it with the parts expected of it."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.health.expectations import Expectations, Ports
from flopwatch.node.health.facts import Facts
from flopwatch.node.health.rules import ACTIONS, BAD, DEGRADED, OK, RISES, RULES, UNKNOWN

log = logging.getLogger(__name__)

_WEIGHT = {BAD: 2, DEGRADED: 1, UNKNOWN: 1, OK: 0}
_WORST_FIRST = (BAD, DEGRADED, UNKNOWN)


class Reason(NamedTuple):
    """Finding of a rule: its name, the affected part (`gpu 3`), the verdict, the action's label, and a sentence."""

    reason: str
    part: str
    verdict: str
    action: str
    detail: str

    def __str__(self) -> str:
        return f"{self.detail}: {ACTIONS[self.action]}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result for the samples of one look: reasons, worst first, and the numbers of answering GPUs and active ports."""

    reasons: tuple[Reason, ...]
    gpus: int
    ports: int

    @property
    def verdict(self) -> str:
        """Return the worst reason's verdict: bad, degraded, unknown, or ok without a reason."""
        return self.reasons[0].verdict if self.reasons else OK


KNOWN_ROWS = {row.name for rule in RULES for row in rule.rows} | {rise.row.name for rise in RISES}
KNOWN_ROWS |= {m.GPU_INFO.name, m.INFINIBAND_INFO.name}


def booted() -> float:
    """Return the Unix time of this host's last boot."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Verdict:
    """Judge of a host's samples by the health rules and the parts expected of the host."""

    def __init__(
        self, expectations: Expectations, clock: Callable[[], float] = time.time, booted: Callable[[], float] = booted
    ) -> None:
        self._expected = expectations
        self._clock, self._booted = clock, booted
        self._logged: dict[tuple[str, ...], str] = {}

    def facts(self, samples: Iterable[Sample]) -> Facts:
        """Return the samples in the form that the rules use."""
        return Facts(samples, self._expected, self._clock(), self._booted(), KNOWN_ROWS)

    def judge(self, samples: Iterable[Sample]) -> Judgement:
        """Return the reasons that the rules find in the samples of one look."""
        return _judgement(self.facts(samples), [])

    def judge_twice(self, before: Iterable[Sample], after: Iterable[Sample], seconds: float) -> Judgement:
        """Return the reasons found in both looks, `seconds` apart, and the error counters that rose between them."""
        first, second = self.facts(before), self.facts(after)
        earlier = {(reason.reason, reason.part) for reason in _judgement(first, []).reasons}
        judgement = _judgement(second, list(_rises(first, second, seconds)))
        risen = {rise.reason for rise in RISES}
        reasons = tuple(one for one in judgement.reasons if one.reason in risen or (one.reason, one.part) in earlier)
        return Judgement(reasons, judgement.gpus, judgement.ports)

    def derive(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return samples of the verdict, its reasons and the expected numbers of parts. Logs changes of the reasons."""
        judgement = self.judge(samples)
        self._log(judgement)
        derived: list[Sample] = [(m.HOST_VERDICT_ID, (), _WEIGHT[judgement.verdict])]
        derived += [(m.HOST_VERDICT_REASON, one[:4], 1) for one in judgement.reasons]
        expected = self._expected
        parts = {
            "gpus": expected.gpus,
            "ports": sum(ports.count for ports in expected.ports.values()),
            "nvlinks": expected.gpus * expected.nvlinks_per_gpu,
            "pcie_lanes_per_gpu": expected.pcie_width,
        }
        return derived + [(m.HOST_EXPECTED_PARTS, (kind,), count) for kind, count in parts.items() if count]

    def _log(self, judgement: Judgement) -> None:
        # The key excludes the sentence, which may contain a changing number.
        now: dict[tuple[str, ...], str] = {one[:3]: f"{one.verdict}: {one}" for one in judgement.reasons}
        for key in now.keys() - self._logged.keys():
            log.warning("the node is %s", now[key])
        for key in self._logged.keys() - now.keys():
            log.info("resolved: %s", self._logged[key])
        self._logged = {key: self._logged.get(key, words) for key, words in now.items()}


def _judgement(facts: Facts, more: list[Reason]) -> Judgement:
    reasons = {reason[:4]: reason for reason in more}  # keys of series: a second sentence for one key is dropped
    for rule in RULES:
        for part, detail in rule.find(facts):
            reason = Reason(rule.reason, part, rule.verdict, rule.action, detail)
            reasons.setdefault(reason[:4], reason)
    worst_first = sorted(reasons.values(), key=lambda reason: _WORST_FIRST.index(reason.verdict))
    return Judgement(tuple(worst_first), len(facts.answering), len(facts.active))


def _rises(before: Facts, after: Facts, seconds: float) -> Iterator[Reason]:
    for rise in RISES:
        for labels, number in after.of(rise.row).items():
            more = number - before.of(rise.row).get(labels, number)
            if more > rise.per_second * seconds and labels[-1] not in rise.but:
                part, detail = after.found(rise.row, labels, f"{rise.text} ({more:g} in {seconds:g} s)")
                yield Reason(rise.reason, part, rise.verdict, rise.action, detail)


def learn(samples: Iterable[Sample]) -> Expectations:
    """Return expectations from these samples: the GPUs that answer, and the links and ports that are active now."""
    facts = Facts(samples, Expectations(), 0, 0, KNOWN_ROWS)
    model = m.GPU_INFO.labels.index("model")
    models = {labels[model] for labels in facts.of(m.GPU_INFO) if labels[:2] in facts.answering}
    ports: dict[str, Ports] = {}
    for port in sorted(facts.active):
        role = facts.roles.get(port, "") or "any"
        rate = facts.of(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND).get(port, 0.0) * 8e-9
        known = ports.get(role, Ports(0, rate))
        ports[role] = Ports(known.count + 1, round(min(known.rate_gbps, rate), 3))
    if "any" in ports and len(ports) > 1:
        del ports["any"]  # it would cover the ports of every role
    return Expectations(
        len(facts.answering),
        models.pop() if len(models) == 1 else "",
        _common(facts.nvlinks.values()),
        _common(facts.of(m.GPU_PCIE_WIDTH_LANES).values()),
        _common(facts.of(m.GPU_PCIE_GENERATION_MAX).values()),
        ports,
    )


def _common(numbers: Iterable[float]) -> int:
    """Return the number if all are equal, else 0."""
    different = {*numbers}
    return int(different.pop()) if len(different) == 1 else 0
