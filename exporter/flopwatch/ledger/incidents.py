"""What a run's losses were and what was seen around them: bounded, whatever the nodes say.

An incident is the end of an attempt that did not end the run, a slow stretch or a stall
(`flopwatch.ledger.slowdowns`). The price of an end is what is booked from then until the run makes a new step, or is
lost again: what was cut short, down time, startup, steps executed again. Of the others it is what they took beyond
the usual. The cause is settled once,
when no more evidence is to come, and never changes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from flopwatch.ledger import attribution
from flopwatch.ledger.attribution import Evidence, Loss

# A failure is attributed to a signal from so long before it to so long after: https://arxiv.org/abs/2410.21680.
BEFORE, AFTER = 600.0, 300.0

MOST_PLACES = 64  # of one host: what one record can hold
MOST_HOSTS = 4096
MOST_TIMES = 8  # of one place: a count goes on, and what it was at the loss must not be forgotten
_KEPT = 3600.0  # seconds: a loss may become known by a late record
_LONGEST = 86400.0  # an attempt that made no step for so long may still tell why
# What an attempt waited for is evidence that the ledger itself has.
_WAITED = {"data_stall": "data_stall", "checkpoint_save": "checkpoint_wait"}

Place = tuple[str, str, str, int | None, str]  # kind, GPU, port, rank, detail


@dataclass(slots=True)
class Incident:
    """A loss: until it is `settled` what it costs may grow, and its cause is not known."""

    number: int
    attempt_number: int  # of the attempt that ended with it
    attempt: str
    status: str  # how that ended; nothing of a slow stretch or a stall
    began: float  # last word of progress
    ended: float  # when the end was noticed, or of a slow stretch or a stall its own
    hosts: list[str]  # until it is settled
    nodes: int  # how many these were
    silent: dict[str, float] = field(default_factory=dict)  # hosts whose last word was no farewell, and when it was
    kind: str = "end"
    waited: str = ""  # the activity that most of a stall or a slow stretch was, as far as it is known
    follows: str = ""  # the source whose seconds tell so
    until: float | None = None  # when another attempt started: what is seen later is of that
    back: float | None = None  # when the run made a new step as usual, or was lost again
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    settled: bool = False
    cause: str = "unknown"
    confidence: str = "none"
    host: str = ""
    gpu: str = ""
    port: str = ""
    why: str = ""

    def disproved(self, host: str, attempt: str, t: float) -> bool:
        """Return whether a word of a host shows that it had not gone."""
        since = self.silent.get(host)
        # Late words of the ended attempt, or of the next one before a machine could have come back from a reboot.
        return since is not None and t > since and (attempt == self.attempt or t <= since + AFTER)

    def ready(self, now: float) -> bool:
        """Return whether the run is back and nothing seen from now on would explain the loss."""
        return self.back is not None and now >= self.ended + AFTER

    def judge(self, evidence: EvidenceBook) -> attribution.Verdict:
        """Return the cause, as far as it is known."""
        back = evidence.back(self.number)
        own = [Evidence("node_gone", t, 1, host) for host, t in self.silent.items() if host not in back]
        if self.waited in _WAITED:
            own.append(Evidence(_WAITED[self.waited], self.began, 1, self.follows))
        loss = Loss(self.kind, self.began, self.ended, self.status, frozenset(self.hosts))
        # A counter that rose is noticed up to a minute later.
        latest = inf if self.until is None else max(self.until, self.ended + attribution.AT_ONCE)
        seen = (item for item in evidence.of(loss.hosts) if item.t <= latest)
        return attribution.verdict(loss, [*seen, *own], BEFORE, AFTER)

    def settle(self, evidence: EvidenceBook) -> None:
        """Decide on the cause, for good."""
        found = self.judge(evidence)
        self.cause, self.confidence, self.why = found.cause, found.confidence, found.why
        self.host, self.gpu, self.port = found.host, found.gpu, found.port
        self.settled, self.hosts, self.silent = True, [], {}

    def figures(self, evidence: EvidenceBook) -> dict[str, Any]:
        """Return what is to be told of it; the cause of one that is not settled is the one so far."""
        told = asdict(self)
        if not self.settled:
            found = self.judge(evidence)
            told |= {name: getattr(found, name) for name in ("cause", "confidence", "host", "gpu", "port", "why")}
        for name in ("hosts", "silent", "follows", "until"):
            del told[name]
        return told


class EvidenceBook:
    """What hosts have seen lately, the newest of each place and kind."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Place, list[tuple[float, float]]]] = {}
        self._back: dict[int, set[str]] = {}  # by incident: hosts that had not gone; a row each, since there are many
        self.touched: set[str] = set()  # hosts changed since the state was last saved

    def add(self, item: Evidence, horizon: float) -> None:
        """Take a piece of evidence, unless it is known, or older than the horizon."""
        if item.t < horizon:
            return
        places = self._hosts.setdefault(item.host, {})
        times = places.setdefault((item.kind, item.gpu, item.port, item.rank, item.detail), [])
        if times and item.t <= times[-1][0]:
            return
        times.append((item.t, item.count))
        del times[:-MOST_TIMES]
        self.touched.add(item.host)
        self._forget(item.host, horizon)
        if len(places) > MOST_PLACES:
            del places[min(places, key=lambda place: places[place][-1][0])]
        if len(self._hosts) > MOST_HOSTS:
            oldest = min(self._hosts, key=self._latest)
            del self._hosts[oldest]
            self.touched.add(oldest)

    def heard_of(self, host: str, incident: int) -> None:
        """Note that a host had not gone with that incident."""
        hosts = self._back.setdefault(incident, set())
        if host not in hosts:
            hosts.add(host)
            self.touched.add(host)

    def back(self, incident: int) -> set[str]:
        """Return the hosts that had not gone with that incident."""
        return self._back.get(incident, set())

    def settled(self, incident: int) -> None:
        """Forget who had not gone with that incident."""
        self.touched |= self._back.pop(incident, set())

    def of(self, hosts: frozenset[str]) -> Iterator[Evidence]:
        """Yield what these hosts have seen."""
        for host in hosts & self._hosts.keys():
            for (kind, gpu, port, rank, detail), times in self._hosts[host].items():
                for t, count in times:
                    yield Evidence(kind, t, count, host, gpu, port, rank, detail)

    def forget(self, horizon: float) -> None:
        """Forget what is older."""
        for host in list(self._hosts):
            self._forget(host, horizon)

    def _forget(self, host: str, horizon: float) -> None:
        places = self._hosts[host]
        for place, times in list(places.items()):
            if times[0][0] < horizon:
                places[place] = [seen for seen in times if seen[0] >= horizon]
                self.touched.add(host)
                if not places[place]:
                    del places[place]
        if not places:
            del self._hosts[host]

    def _latest(self, host: str) -> float:
        return max((times[-1][0] for times in self._hosts[host].values()), default=-inf)

    def state(self, host: str) -> list[Any] | None:
        """Return what `restore` takes; None if nothing is left of the host."""
        places = [[*place, times] for place, times in self._hosts.get(host, {}).items()]
        back = [incident for incident, hosts in self._back.items() if host in hosts]
        return [places, back] if places or back else None

    def restore(self, hosts: Mapping[str, list[Any]]) -> None:
        """Take back what `state` gave."""
        for host, (places, back) in hosts.items():
            if places:
                self._hosts[host] = {
                    (kind, gpu, port, rank, detail): [(t, count) for t, count in times]
                    for kind, gpu, port, rank, detail, times in places
                }
            for incident in back:
                self._back.setdefault(incident, set()).add(host)

    def hosts(self) -> Iterator[str]:
        """Yield the hosts of which something is known."""
        yield from self._hosts.keys() | set().union(*self._back.values())


def horizon(now: float, unsettled: Iterator[Incident], progress: float | None = None) -> float:
    """Return the time before which nothing is of use; `progress` is when an attempt that goes on made its last step."""
    held_up = now if progress is None else max(progress - BEFORE, now - _LONGEST)
    return min([now - _KEPT, held_up, *(incident.began - BEFORE for incident in unsettled)])
