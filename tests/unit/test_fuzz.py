"""The seeds of the fuzz targets, without the fuzzer."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import TARGETS
from tests.support import TESTS

CORPUS = TESTS / "fuzz" / "corpus"
SEEDS = sorted(file for file in CORPUS.glob("*/*"))


@pytest.mark.parametrize("seed", SEEDS, ids=[str(seed.relative_to(CORPUS)) for seed in SEEDS])
def test_no_seed_raises(seed: Path) -> None:
    importlib.import_module(f"tests.fuzz.{seed.parent.name}").target(seed.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_no_change_of_a_seed_raises(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}").target
    seeds = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]

    @given(st.sampled_from(seeds), st.data())
    def run(seed: bytes, data: st.DataObject) -> None:
        at, length = (data.draw(st.integers(0, len(seed))) for _ in range(2))
        target(seed[:at] + data.draw(st.binary(max_size=8)) + seed[at + length % 16 :])

    run()


def test_every_target_has_seeds() -> None:
    assert {seed.parent.name for seed in SEEDS} == set(TARGETS)
