"""Fuzz one target for a while: `python -m tests.fuzz kmsg --seconds 30`. Ends with status 1, or 77, at a crash."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from tests.fuzz import TARGETS

SEEDS = Path(__file__).parent / "corpus"
KEPT = Path(".cache/fuzz")
# One input must not take longer than this, in seconds, nor need more memory, in MiB.
SLOWEST, MEMORY = 5, 1024


def main() -> None:
    """Run the fuzzer."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=30)
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"fuzz {options.target}: skipped, atheris is not installed; it has no wheel for Python {version}?")
        return
    with atheris.instrument_imports(include=["flopwatch"]):
        target = importlib.import_module(f"tests.fuzz.{options.target}").target
    kept = KEPT / options.target
    kept.mkdir(parents=True, exist_ok=True)
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={options.seconds}",
            f"-timeout={SLOWEST}",
            f"-rss_limit_mb={MEMORY}",
            f"-artifact_prefix={kept}-",
            "-print_final_stats=1",
            "-verbosity=1",
            os.fspath(kept),
            os.fspath(SEEDS / options.target),
        ],
        target,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
