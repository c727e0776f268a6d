"""Helpers of the tests. Test files import from here and never from one another."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
CAPTURES = TESTS / "captures"
GOLDEN = TESTS / "golden"
