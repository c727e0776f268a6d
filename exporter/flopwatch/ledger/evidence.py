"""Evidence that the hosts of a run reported recently, in bounded memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from flopwatch.ledger.record import Evidence

MAX_PLACES = 64  # places kept per host: as many as one record can hold
MAX_HOSTS = 1 << 14
MAX_TIMES = 8  # counts kept per place, so that later ones do not displace that of a loss at once

Place = tuple[str, str, str, int | None, str]  # kind, GPU, port, rank, detail


class RunEvidence:
    """Newest evidence by host, kind and place (GPU, port, rank), and the hosts proven alive after each incident."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Place, list[tuple[float, float]]]] = {}  # the last that had evidence at the end
        self._alive: dict[int, set[str]] = {}  # by incident
        self.changed: set[str] = set()  # hosts that changed since the state was saved

    def add(self, item: Evidence, horizon: float) -> None:
        """Store evidence if it is newer than the horizon (Unix time) and than the last of its host, kind and place."""
        if item.t < horizon:
            return
        places = self._hosts.setdefault(item.host, {})
        times = places.setdefault((item.kind, item.gpu, item.port, item.rank, item.detail), [])
        if times and item.t <= times[-1][0]:
            return
        times.append((item.t, item.count))
        del times[:-MAX_TIMES]
        self.changed.add(item.host)
        self._hosts[item.host] = self._hosts.pop(item.host)
        self._forget(item.host, horizon)
        if len(places) > MAX_PLACES:
            del places[min(places, key=lambda place: places[place][-1][0])]
        if len(self._hosts) > MAX_HOSTS:
            oldest = next(iter(self._hosts))
            del self._hosts[oldest]
            self.changed.add(oldest)

    def mark_alive(self, host: str, incident: int) -> None:
        """Record that a host survived the incident with this number."""
        if host not in self.alive(incident):
            self._alive.setdefault(incident, set()).add(host)
            self.changed.add(host)

    def alive(self, incident: int) -> set[str]:
        """Return the hosts that are known to have survived the incident with this number."""
        return self._alive.get(incident, set())

    def drop_alive(self, incident: int) -> None:
        """Forget which hosts survived the incident with this number."""
        self.changed |= self._alive.pop(incident, set())

    def of(self, hosts: frozenset[str]) -> Iterator[Evidence]:
        """Yield the stored evidence of the given hosts."""
        for host in hosts & self._hosts.keys():
            for (kind, gpu, port, rank, detail), times in self._hosts[host].items():
                for t, count in times:
                    yield Evidence(kind, t, count, host, gpu, port, rank, detail)

    def forget(self, horizon: float) -> None:
        """Delete all evidence from before `horizon`, in Unix time."""
        for host in list(self._hosts):
            self._forget(host, horizon)

    def _forget(self, host: str, horizon: float) -> None:
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
        """Return a host's evidence to save in the ledger's file, or None if it has none."""
        places = [[*place, times] for place, times in self._hosts.get(host, {}).items()]
        alive = [incident for incident, hosts in self._alive.items() if host in hosts]
        return [places, alive] if places or alive else None

    def restore(self, hosts: Mapping[str, list[Any]]) -> None:
        """Load the saved evidence of each host, as `to_json` returned it."""
        for host, (places, alive) in hosts.items():
            if places:
                self._hosts[host] = {
                    (kind, gpu, port, rank, detail): [(t, count) for t, count in times]
                    for kind, gpu, port, rank, detail, times in places
                }
            for incident in alive:
                self._alive.setdefault(incident, set()).add(host)

    def hosts(self) -> set[str]:
        """Return the hosts that have evidence or survived an incident."""
        return self._hosts.keys() | set().union(*self._alive.values())
