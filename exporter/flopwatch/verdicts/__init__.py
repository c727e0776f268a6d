"""Verdicts on a run: which rank is late, which one hangs, and what slows all of them. Pure functions of facts."""
