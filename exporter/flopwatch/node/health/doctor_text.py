"""Text form of the report of `flopwatch doctor`, wrapped to the width of the terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flopwatch.node.health.doctor import REASONS, HardwarePart, Report
from flopwatch.node.health.driver_lines import together

NAMES = 8  # families shown per reason; the JSON has all of them
NARROWEST, WIDEST = 60, 110
LABEL = 12


def page(report: Report, width: int) -> str:
    """Return the report as text for a terminal of `width` columns."""
    width = min(max(width, NARROWEST), WIDEST)
    lines = list(_lines(report, width))
    return "\n".join(lines) + "\n"


def _lines(report: Report, width: int) -> Iterator[str]:
    def entry(label: str, *texts: str) -> Iterator[str]:
        rest = " " * (LABEL + 3)
        if len(label) > LABEL:
            yield f"  {label}"
        start = rest if len(label) > LABEL else f"  {label:<{LABEL}} "
        for text in filter(len, texts):
            yield from textwrap.wrap(text, width, initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)
            start = rest

    simulated = " (a simulated node)" if report.simulated else ""
    yield f"flopwatch {report.version} on {report.host}{simulated}, as {report.user}"
    yield ""
    yield from textwrap.wrap(verdict(report), width)
    for problem in report.problems:
        yield from _bullet(problem, width)
    if report.losses:
        yield ""
        yield "Missing:"
    for loss in report.losses:
        yield from _bullet(loss, width)
    yield ""
    yield "Sources"
    for source in report.sources:
        text = source.reason or f"{source.series} series in {1000 * source.seconds:.0f} ms"
        state = {"ok": "ok, ", "failed": "FAILED: ", "absent": "not here: ", "off": "off: "}[source.state]
        yield from entry(source.name, state + text, *source.messages)
    yield from entry("driver", *report.driver) if report.driver else ()
    failed = {source.name for source in report.sources if source.state == "failed"}
    for title, parts, source_of in (("GPUs", report.gpus, "nvml"), ("Ports", report.ports, "infiniband")):
        yield ""
        yield title if parts else f"{title}: {'not known' if source_of in failed else 'none'}"
        for part in parts:
            yield from entry(part.name, part.about, _read(part), owners(part) if title == "GPUs" else "")
        yield from _missing(parts, width)
    yield ""
    yield "Place, privileges (docs/privileges.md) and listeners"
    place = [f"{name} {word}" for name, word in report.place.items() if word and name not in ("host", "source")]
    unknown = "not known; set --topology (docs/identity.md)"
    yield from entry("place", f"{', '.join(place)} (from {report.place['source']})" if place else unknown)
    for access in report.privileges:
        yield from entry(access.name, access.state, f"Missing without it: {access.loses}." if access.loses else "")
    for flag, state in report.listeners.items():
        yield from entry(flag.removeprefix("--"), state)


def verdict(report: Report) -> str:
    """Return one sentence: how many things cannot be read, or that all hardware can be read."""
    if report.problems:
        count = len(report.problems)
        return f"{'One thing' if count == 1 else f'{count} things'} on this node cannot be read:"
    if not report.gpus and not report.ports:
        return (
            "There is no GPU and no InfiniBand, RoCE or EFA port here. "
            "`flopwatch exporter --simulate h100x8` simulates them."
        )
    return "All hardware of this node can be read." if report.losses else "Everything on this node can be read."


def _read(part: HardwarePart) -> str:
    if not part.present:
        return "DOES NOT ANSWER"
    if not part.readable:
        return "CANNOT BE READ"
    return "read: " + ", ".join(
        f"{source} {count} families" if index == 0 else f"{source} {count}"
        for index, (source, count) in enumerate(part.families.items())
    )


def owners(part: HardwarePart) -> str:
    """Return a line with each owner of a GPU, the source of this information, and its age."""
    if not part.owners:
        return "owner: not requested"
    age = "" if part.owner_age is None else f", {part.owner_age:.0f} s ago"
    return "owner: " + "; ".join(map(_owner, part.owners)) + age


def _owner(owner: Mapping[str, str]) -> str:
    source = owner.get("source", "")
    name = {"none": "none", "unknown": "unknown"}.get(source, "")
    if "owner_pod" in owner:
        name = f"pod {owner.get('owner_namespace', '')}/{owner['owner_pod']}, {owner.get('owner_container', '')}"
    elif "owner_job" in owner:
        name = f"job {owner['owner_job']}" + (f" of user {owner['owner_user']}" if "owner_user" in owner else "")
    elif "owner_user" in owner:
        name = f"user {owner['owner_user']}, outside of any job"
    instance = f" on {owner['mig_uuid']}" if "mig_uuid" in owner else ""
    return f"{name}{instance}" + (f" (by {source})" if source not in ("none", "unknown") else "")


def _bullet(text: str, width: int, **how: Any) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ", **how)


def _missing(parts: Sequence[HardwarePart], width: int) -> Iterator[str]:
    alike: dict[str, list[HardwarePart]] = {}
    for part in parts:
        if part.missing:
            alike.setdefault(repr(part.missing), []).append(part)
    for some in alike.values():
        title = f"No series of {together([part.name for part in some])}:"
        yield from textwrap.wrap(title, width, initial_indent="  ", subsequent_indent="    ")
        for reason in REASONS:
            names = some[0].missing.get(reason)
            if names:
                shown = shortened(names)
                more = f", and {len(shown) - NAMES} more (--json)" if len(shown) > NAMES else ""
                text = f"{reason}: {', '.join(shown[:NAMES])}{more}"
                yield from _bullet(text, width, break_on_hyphens=False)


def shortened(names: Sequence[str]) -> list[str]:
    """Return the names, with three or more that begin with the same two words as one: gpu_mig_* (7)."""
    if len(names) > 2 and all(name.startswith("nvlink_") for name in names):
        return [f"nvlink_* ({len(names)})"]
    starts = Counter("_".join(name.split("_")[:2]) for name in names)
    short: dict[str, None] = {}
    for name in names:
        start = "_".join(name.split("_")[:2])
        short[f"{start}_* ({starts[start]})" if starts[start] > 2 else name] = None
    return list(short)
