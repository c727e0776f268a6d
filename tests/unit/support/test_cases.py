"""One test over every row of a table."""

from __future__ import annotations

import pytest

from tests.support.cases import for_each


def check(case: int) -> None:
    """Fail in another way for each case above 1."""
    if case == 2:
        raise KeyError("absent")
    if case == 3:
        with pytest.raises(ZeroDivisionError):
            assert 1 / case
    assert case != 4, "four"


def test_every_failed_case_is_listed_with_the_type_of_its_error() -> None:
    with pytest.raises(AssertionError) as failed:
        for_each(range(5), lambda case: f"case {case}")(check)()
    heading, *lines = str(failed.value).splitlines()[:4]
    assert heading == "3 of 5 cases failed:"
    assert lines[0] == "case 2: KeyError: 'absent'"
    assert lines[1].startswith("case 3: Failed: DID NOT RAISE")
    assert lines[2].startswith("case 4: AssertionError: four")


def test_a_test_without_cases_fails() -> None:
    with pytest.raises(AssertionError, match="no case to check"):
        for_each([])(check)()


def test_the_test_has_the_name_of_its_check() -> None:
    test = for_each([0, 1])(check)
    test()
    assert (test.__name__, test.__module__, test.__doc__) == (check.__name__, __name__, check.__doc__)
