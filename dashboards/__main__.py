"""`python -m dashboards OUT`: write every dashboard as OUT/<name>.json, to be imported or provisioned."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dashboards import Json, fabric, fleet, goodput, gpu, gpus, monitor, node, rack, run, stragglers

BOARDS: dict[str, Json] = {
    "fleet": fleet.BOARD,
    "run": run.BOARD,
    "stragglers": stragglers.BOARD,
    "goodput": goodput.BOARD,
    "gpus": gpus.BOARD,
    "gpu": gpu.BOARD,
    "fabric": fabric.BOARD,
    "node": node.BOARD,
    "rack": rack.BOARD,
    "monitor": monitor.BOARD,
}


def text(board: Json) -> str:
    """Return the JSON text of a dashboard, with sorted keys."""
    return json.dumps(board, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all dashboards to the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, board in BOARDS.items():
        (out / f"{name}.json").write_text(text(board), encoding="utf-8")
        print(out / f"{name}.json")


if __name__ == "__main__":
    main()
