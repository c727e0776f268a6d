"""Hypothesis on a machine that may stall: an example is too slow after seconds, not after its default of 0.2."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import HealthCheck, settings

settings.register_profile("flopwatch", deadline=timedelta(seconds=20), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flopwatch")
