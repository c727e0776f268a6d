"""The flap state machine: what a link's states over time make of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.node.collectors.infiniband.link import Link

HOUR = 3600.0


def link_after(*history: tuple[float, int | None]) -> Link:
    """Return a link that was seen in these states at these times."""
    link = Link()
    for at, state in history:
        link.see(state, at)
    return link


def flap(link: Link, at: float, down: float = 30.0) -> None:
    link.see(4, at)
    link.see(1, at)
    link.see(4, at + down)


@pytest.mark.parametrize(("down", "flaps"), [(24.9, 0), (25.0, 1), (600.0, 1)])
def test_a_link_down_for_25_seconds_and_back_is_a_flap(down: float, flaps: int) -> None:
    assert link_after((0, 4), (100, 1), (100 + down, 4)).flaps == flaps


def test_a_link_that_was_never_active_neither_flaps_nor_drops() -> None:
    link = link_after((0, 1), (1000, 1), (2000, 4))
    assert (link.flaps, link.drops) == (0, 0)


def test_init_and_armed_are_on_the_way_up() -> None:
    assert link_after((0, 4), (10, 1), (20, 2), (30, 3), (40, 4)).flaps == 1
    assert link_after((0, 4), (10, 2), (500, 3), (510, 4)).flaps == 0


def test_an_unreadable_state_changes_nothing() -> None:
    assert link_after((0, 4), (10, 1), (20, None), (40, 4)).flaps == 1
    assert link_after((0, 4), (10, None), (500, 4)).flaps == 0


@pytest.mark.parametrize(("until", "drops"), [(239.0, 0), (240.0, 1), (9999.0, 1)])
def test_a_link_down_for_four_minutes_is_one_drop(until: float, drops: int) -> None:
    link = link_after((0, 4), (100, 1), (100 + until / 2, 1), (100 + until, 1))
    assert link.drops == drops
    link.see(4, 100 + until + 1)
    link.see(1, 20_000)
    link.see(1, 20_240)
    assert link.drops == drops + 1


def test_three_flaps_within_12_hours_are_flapping_until_an_hour_without_one() -> None:
    link = Link()
    for at in (0, 5 * HOUR):
        flap(link, at)
        assert not link.flapping
    flap(link, 11 * HOUR)
    assert link.flapping
    link.see(4, 12 * HOUR + 29)
    assert link.flapping
    link.see(4, 12 * HOUR + 30)
    assert not link.flapping
    flap(link, 13 * HOUR)  # the third within 12 hours again
    assert link.flapping
    assert link.flaps == 4


def test_three_flaps_in_more_than_12_hours_are_not_flapping() -> None:
    link = Link()
    for at in (0, 6 * HOUR, 12 * HOUR + 1):
        flap(link, at)
    assert (link.flaps, link.flapping) == (3, False)


def test_a_cleared_link_needs_three_flaps_again() -> None:
    link = Link()
    for at in (0, 100, 200):
        flap(link, at)
    link.clear()
    assert (link.flaps, link.flapping) == (3, False)
    for at in (300, 400):
        flap(link, at)
        assert not link.flapping
    flap(link, 500)
    assert link.flapping


def test_an_outage_goes_on_across_a_restart() -> None:
    before = link_after((0, 4), (100, 1))
    kept = json.loads(json.dumps(before.dump(now=110, unix=1_000_110)))
    after = Link.load(kept, now=7, unix=1_000_127)
    after.see(4, 8)
    assert (before.flaps, after.flaps) == (0, 1)


def test_flapping_goes_on_across_a_restart_until_its_time_is_over() -> None:
    link = Link()
    for at in (0, 100, 200):
        flap(link, at)
    after = Link.load(link.dump(now=230, unix=1_000_230), now=5, unix=1_000_230 + HOUR - 10)
    assert after.flapping
    after.see(4, 14)
    assert after.flapping
    after.see(4, 15)
    assert not after.flapping


@pytest.mark.parametrize("unix", [0.0, -1e9, 4e9])
def test_a_wall_clock_that_stepped_between_two_processes_costs_no_count(unix: float) -> None:
    link = Link()
    for at in (0, 100, 200):
        flap(link, at)
    link.see(1, 300)
    after = Link.load(link.dump(now=310, unix=1_000_310), now=0, unix=unix)
    assert (after.flaps, after.drops) == (3, 0)
    after.see(4, 30)
    after.see(4, 30 + HOUR)
    assert after.flaps == 4
    assert not after.flapping


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        "x",
        {},
        {"flaps": 1},
        {"flaps": "x", "drops": 0, "recent": [], "down_since": None},
        {
            "flaps": 1,
            "drops": 0,
            "recent": [float("nan")],
            "down_since": None,
            "flapping": True,
            "was_active": True,
            "dropped": False,
        },
        {"flaps": float("inf"), "drops": 0, "recent": [], "down_since": None},
    ],
)
def test_what_was_kept_in_another_shape_is_a_new_link(stored: object) -> None:
    link = Link.load(stored, now=0, unix=0)
    assert (link.flaps, link.drops, link.flapping) == (0, 0, False)


STATES = st.lists(st.tuples(st.floats(0, 7200), st.sampled_from([None, 0, 1, 2, 3, 4, 5])), max_size=60)


@given(STATES)
def test_counts_only_rise_and_flapping_means_three_flaps_and_one_in_the_last_hour(
    steps: list[tuple[float, int | None]],
) -> None:
    link, now, counted, flapped = Link(), 0.0, (0, 0), float("-inf")
    for seconds, state in steps:
        now += seconds
        before = link.flaps
        link.see(state, now)
        flapped = now if link.flaps > before else flapped
        assert (link.flaps, link.drops) >= counted
        assert link.flaps <= before + 1
        assert not link.flapping or (link.flaps >= 3 and now - flapped < HOUR)
        counted = (link.flaps, link.drops)


@given(STATES, STATES)
def test_a_restart_at_any_moment_changes_nothing(
    first: list[tuple[float, int | None]], then: list[tuple[float, int | None]]
) -> None:
    link, now = Link(), 0.0
    for seconds, state in first:
        now += round(seconds)
        link.see(state, now)
    again = Link.load(link.dump(now, now + 1_000_000), now, now + 1_000_000)
    for seconds, state in then:
        now += round(seconds)
        assert link.see(state, now) == again.see(state, now)
        assert (link.flaps, link.drops, link.flapping) == (again.flaps, again.drops, again.flapping)
