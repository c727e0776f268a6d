"""One test over every row of a table, in place of a test per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def for_each(
    cases: Iterable[Case], name: Callable[[Case], str] = str
) -> Callable[[Callable[[Case], None]], Callable[[], None]]:
    """Turn a check of one case into a test of all cases. The test lists each failed case and its error."""
    rows = list(cases)

    def decorate(check: Callable[[Case], None]) -> Callable[[], None]:
        def test() -> None:
            assert rows, "no case to check"
            failures = []
            for case in rows:
                try:
                    check(case)
                except (Exception, pytest.fail.Exception) as error:  # pytest.raises fails with the latter
                    failures.append(f"{name(case)}: {type(error).__name__}: {error}")
            assert not failures, f"{len(failures)} of {len(rows)} cases failed:\n" + "\n".join(failures)

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
