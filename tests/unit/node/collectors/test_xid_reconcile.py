"""One count out of two sources: the properties that make neither double nor lost what they tell."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.collectors.xid.reconcile import MAX_EVENTS, MAX_STORED, Reconciler

WINDOW = 60.0

# Whether the kernel log and NVML saw an event (at least one did), and the delay of each report.
SEEN = st.sampled_from([(True, True), (True, False), (False, True)])
LATE = st.floats(0, WINDOW / 2)
HAPPENED = st.lists(st.tuples(st.floats(0, 300), SEEN, LATE, LATE), max_size=30)


def counted(kernel: list[float], nvml: list[float], order: list[bool], reconciler: Reconciler[str]) -> int:
    """Return the count of both sources, each in its own order and mixed according to `order`."""
    left = {"kernel": sorted(kernel), "nvml": sorted(nvml)}
    total = 0
    for first in [*order, *[True] * (len(kernel) + len(nvml))]:
        name = "kernel" if (first and left["kernel"]) or not left["nvml"] else "nvml"
        if left[name]:
            total += reconciler.news("79", name, left[name].pop(0))
    return total


@given(HAPPENED, st.lists(st.booleans(), max_size=60))
def test_never_more_than_happened_and_never_less_than_one_source_reported(
    happened: list[tuple[float, tuple[bool, bool], float, float]], order: list[bool]
) -> None:
    kernel = [at + late for at, (seen, _), late, _ in happened if seen]
    nvml = [at + late for at, (_, seen), _, late in happened if seen]
    total = counted(kernel, nvml, order, Reconciler(WINDOW))
    assert max(len(kernel), len(nvml)) <= total <= len(happened)


@given(HAPPENED, st.booleans(), st.lists(st.booleans(), max_size=60))
def test_the_number_is_right_if_one_source_saw_all(
    happened: list[tuple[float, tuple[bool, bool], float, float]], kernel_saw_all: bool, order: list[bool]
) -> None:
    kernel = [at + late for at, (seen, _), late, _ in happened if seen or kernel_saw_all]
    nvml = [at + late for at, (_, seen), _, late in happened if seen or not kernel_saw_all]
    assert counted(kernel, nvml, order, Reconciler(WINDOW)) == len(happened)


@given(HAPPENED, st.lists(st.booleans(), max_size=60))
def test_the_number_is_right_if_the_events_of_all_sources_are_far_apart(
    happened: list[tuple[float, tuple[bool, bool], float, float]], order: list[bool]
) -> None:
    apart = [3 * WINDOW * place for place in range(len(happened))]
    kernel = [at + event[2] for at, event in zip(apart, happened, strict=True) if event[1][0]]
    nvml = [at + event[3] for at, event in zip(apart, happened, strict=True) if event[1][1]]
    assert counted(kernel, nvml, order, Reconciler(WINDOW)) == len(happened)


@given(st.lists(st.tuples(st.floats(0, 300), st.sampled_from(["kernel", "nvml"])), max_size=30), st.integers(0, 30))
def test_another_process_goes_on_as_this_one_would(reports: list[tuple[float, str]], stop: int) -> None:
    reports.sort()
    whole = Reconciler[str](WINDOW)
    expected = [whole.news("79", source, at) for at, source in reports]
    first, second = Reconciler[str](WINDOW), Reconciler[str](WINDOW)
    seen = [first.news("79", source, at) for at, source in reports[:stop]]
    stored: list[Any] = json.loads(json.dumps(list(first)))
    second.restore(stored)
    seen += [second.news("79", source, at) for at, source in reports[stop:]]
    assert seen == expected


def test_a_repeat_of_one_source_is_news_only_if_no_source_reported_it() -> None:
    reconciler = Reconciler[str](WINDOW)
    assert [
        reconciler.news("79", "kernel", 0.0),
        reconciler.news("79", "unnumbered", 1.0, repeats=True),
        reconciler.news("79", "unnumbered", 2.0, repeats=True),
        reconciler.news("79", "nvml", 3.0),
        reconciler.news("79", "unnumbered", 100.0, repeats=True),
        reconciler.news("79", "kernel", 101.0),
        reconciler.news("79", "nvml", 102.0),
    ] == [True, False, False, False, True, False, False]


def test_keys_have_nothing_to_do_with_each_other() -> None:
    reconciler = Reconciler[tuple[str, int]](WINDOW)
    assert reconciler.news(("0000:53:00", 79), "kernel", 0.0)
    assert reconciler.news(("0000:64:00", 79), "nvml", 0.0)
    assert reconciler.news(("0000:53:00", 48), "nvml", 0.0)
    assert not reconciler.news(("0000:53:00", 79), "nvml", 0.0)


def test_memory_is_bounded_and_what_is_old_is_forgotten() -> None:
    reconciler = Reconciler[str](WINDOW)
    news = sum(reconciler.news("13", "kernel", place * 1e-4) for place in range(3 * MAX_EVENTS))
    assert news == 3 * MAX_EVENTS
    assert len(list(reconciler)) == MAX_STORED
    reconciler.forget(1.0 + 2 * WINDOW)
    assert len(list(reconciler)) == MAX_STORED
    reconciler.forget(2.0 + 2 * WINDOW)
    assert list(reconciler) == []
