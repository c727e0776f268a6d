"""Evidence that the hosts of a run reported lately, in bounded memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from flopwatch.ledger.attribution import Evidence

MAX_PLACES = 64  # of one host: as many as one record can hold
MAX_HOSTS = 4096
MAX_TIMES = 8  # of one place, so that later counts do not displace that of a loss at once

Place = tuple[str, str, str, int | None, str]  # kind, GPU, port, rank, detail


class RunEvidence:
    """Newest evidence of each host, place and kind, and the hosts that were proven alive after an incident."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Place, list[tuple[float, float]]]] = {}
        self._alive: dict[int, set[str]] = {}  # by incident
        self.changed: set[str] = set()  # hosts that changed since the state was saved

    def add(self, item: Evidence, horizon: float) -> None:
        """Store a piece of evidence unless it is older than the horizon or than what its place has."""
        if item.t < horizon:
            return
        places = self._hosts.setdefault(item.host, {})
        times = places.setdefault((item.kind, item.gpu, item.port, item.rank, item.detail), [])
        if times and item.t <= times[-1][0]:
            return
        times.append((item.t, item.count))
        del times[:-MAX_TIMES]
        self.changed.add(item.host)
        self._forget(item.host, horizon)
        if len(places) > MAX_PLACES:
            del places[min(places, key=lambda place: places[place][-1][0])]
        if len(self._hosts) > MAX_HOSTS:
            newest = {host: max(times[-1][0] for times in of_host.values()) for host, of_host in self._hosts.items()}
            oldest = min(newest, key=newest.__getitem__)
            del self._hosts[oldest]
            self.changed.add(oldest)

    def mark_alive(self, host: str, incident: int) -> None:
        """Record that a host was not gone at an incident."""
        hosts = self._alive.setdefault(incident, set())
        if host not in hosts:
            hosts.add(host)
            self.changed.add(host)

    def alive(self, incident: int) -> set[str]:
        """Return the hosts that were not gone at an incident."""
        return self._alive.get(incident, set())

    def drop_alive(self, incident: int) -> None:
        """Forget which hosts were not gone at an incident."""
        self.changed |= self._alive.pop(incident, set())

    def of(self, hosts: frozenset[str]) -> Iterator[Evidence]:
        """Yield the evidence of these hosts."""
        for host in hosts & self._hosts.keys():
            for (kind, gpu, port, rank, detail), times in self._hosts[host].items():
                for t, count in times:
                    yield Evidence(kind, t, count, host, gpu, port, rank, detail)

    def forget(self, horizon: float) -> None:
        """Delete evidence older than the horizon."""
        for host in list(self._hosts):
            self._forget(host, horizon)

    def _forget(self, host: str, horizon: float) -> None:
        """Delete the evidence of one host that is older than the horizon, and the host if nothing is left."""
        places = self._hosts[host]
        for place, times in list(places.items()):
            if times[0][0] < horizon:
                places[place] = [seen for seen in times if seen[0] >= horizon]
                self.changed.add(host)
                if not places[place]:
                    del places[place]
        if not places:
            del self._hosts[host]

    def to_json(self, host: str) -> list[Any] | None:
        """Return the state of a host to save; None if nothing is left of it."""
        places = [[*place, times] for place, times in self._hosts.get(host, {}).items()]
        alive = [incident for incident, hosts in self._alive.items() if host in hosts]
        return [places, alive] if places or alive else None

    def restore(self, hosts: Mapping[str, list[Any]]) -> None:
        """Load the states that `to_json` returned, by host."""
        for host, (places, alive) in hosts.items():
            if places:
                self._hosts[host] = {
                    (kind, gpu, port, rank, detail): [(t, count) for t, count in times]
                    for kind, gpu, port, rank, detail, times in places
                }
            for incident in alive:
                self._alive.setdefault(incident, set()).add(host)

    def hosts(self) -> set[str]:
        """Return the hosts with any state."""
        return self._hosts.keys() | set().union(*self._alive.values())
