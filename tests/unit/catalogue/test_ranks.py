"""Text of the ranks of a process group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.catalogue.ranks import MAX_LENGTH, all_ranks_text, count_of, ranks_of, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "0"),
        ([0, 1], "0,1"),
        ([3, 7], "3,7"),
        (range(4), "0-3"),
        (range(1, 32, 4), "1-29:4"),
        ([0, 1, 2, 5, 9, 10, 11], "0-2,5,9-11"),
        ([0, 1, 8, 9], "0,1,8,9"),
        (range(0, 131072, 64), "0-131008:64"),
    ],
)
def test_a_regular_group_has_a_short_text(ranks: range | list[int], text: str) -> None:
    assert ranks_text(ranks) == text
    assert ranks_of(text) == tuple(ranks)


def test_an_irregular_group_of_many_ranks_has_none() -> None:
    assert ranks_text([number * number for number in range(60)]) is None


@given(st.sets(st.integers(0, 200), min_size=1, max_size=40))
def test_a_text_gives_its_ranks_back(ranks: set[int]) -> None:
    text = ranks_text(ranks)
    if text is not None:
        assert len(text) <= MAX_LENGTH
        assert ranks_of(text) == tuple(sorted(ranks))
        assert count_of(text) == len(ranks)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 1000])
def test_the_text_of_all_ranks_needs_no_list_of_them(count: int) -> None:
    assert all_ranks_text(count) == ranks_text(range(count))


@pytest.mark.parametrize("text", ["", "a", "0-", "-1", "3-1", "0-8:0", "0,", "1 ", "0-3:", "99999999", "0-3;4"])
def test_what_is_no_text_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a r"):
        ranks_of(text)
    with pytest.raises(ValueError, match="is not a r"):
        count_of(text)
