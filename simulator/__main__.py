"""`python -m simulator`: simulate a fleet from a checkout of the project."""

from __future__ import annotations

import argparse
import sys

from flopwatch.settings import SettingsError
from simulator.command_line import DESCRIPTION, add_arguments, run


def main() -> int:
    """Parse the flags, run the simulation and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=f"{DESCRIPTION}.")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except SettingsError as error:
        print(f"simulator: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
