"""The demo's summary accuses a rank only once the verdict does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from alerts import recording
from demo import summary
from demo.stack import Labels, PrometheusApi
from flopwatch import catalogue as m

Series = list[tuple[Labels, float]]
SCORES: Mapping[str, Series] = {
    recording.STRAGGLER_LOST: [({}, 0.3)],
    recording.WAIT: [({"rank": "3"}, 0.1)],
    m.TRAINING_RANK_INFO.name: [({"rank": "3", "host": "node-7", "uuid": "GPU-a"}, 1.0)],
    m.GPU_INFO.name: [({"gpu": "5"}, 1.0)],
}


class Prometheus(PrometheusApi):
    """Prometheus that has the given series, by name."""

    def __init__(self, series: Mapping[str, Series]) -> None:
        super().__init__("http://127.0.0.1:9")
        self._series = series

    def query(self, expr: object, at: float | None = None) -> Series:
        return [sample for name, samples in self._series.items() if f"{name}{{" in str(expr) for sample in samples]


@pytest.mark.parametrize(
    ("confirmed", "row"),
    [
        ({}, ("Straggler", "none", "no rank slows the run now")),
        ({recording.CONFIRMED: [({"rank": "3"}, 0.3)]}, ("Straggler", "3 (30.0 %)", "on node-7, GPU 5 (GPU-a)")),
    ],
)
def test_a_rank_that_waits_least_is_named_once_it_is_confirmed(
    confirmed: Mapping[str, Series], row: tuple[str, str, str]
) -> None:
    found = summary.read(Prometheus({**SCORES, **confirmed}), "lm")
    assert row in summary.rows(found)
