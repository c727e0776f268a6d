"""`flopwatch top`: show the ranks and GPUs of this host live in the terminal, without a Prometheus."""

import argparse
import select
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.commands import Commands, command, flags, given
from flopwatch.commands.check import looks
from flopwatch.settings import ExporterSettings, SettingsError

if TYPE_CHECKING:
    from flopwatch.catalogue import Metric, Sample
    from flopwatch.training.progress import Progress

    Parts = dict[tuple[str, ...], tuple[Progress, dict[str, str]]]  # ranks or GPUs: figures, and labels of the info row

SHOWN, FIRING = ("run", "rank", "host", "gpu", "device"), 8  # labels of an alert, and alerts
KEYS = "q quits, s sorts the ranks by MFU or by number"
STYLES = {"ok": "green", "degraded": "yellow", "bad": "bold red", "unknown": "yellow"}
UNKNOWN = "-"


def run(options: argparse.Namespace) -> int:
    """Show the tables until `q` or Ctrl-C, or once if the output is not a terminal. Raises SettingsError."""
    from rich.console import Console
    from rich.live import Live

    from flopwatch.node.health.check import CheckError, NotListening

    settings, console = ExporterSettings(**given(options, ExporterSettings)), Console()
    tables = Tables(options.prometheus, options.token_file)
    try:
        with looks(options, settings) as look:
            if options.once or not console.is_terminal or not sys.stdin.isatty():
                console.print(tables.draw(look()))
                return 0
            with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    try:
                        live.update(tables.draw(look()), refresh=True)
                    except (CheckError, NotListening, SettingsError) as error:  # such as a restart of the exporter
                        live.update(f"{error}; it is tried again every {options.interval:g} s", refresh=True)
                    key = sys.stdin.read(1) if select.select([sys.stdin], [], [], options.interval)[0] else ""
                    tables.by_mfu ^= key == "s"
                    if key == "q":
                        return 0
    except (CheckError, NotListening) as error:
        raise SettingsError(str(error)) from None


@contextmanager
def _keys() -> Iterator[None]:
    """Deliver each key at once and unseen until the block ends."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Tables:
    """Tables of ranks and GPUs. At first rates are those since the start, later those of the last 30 s at most."""

    def __init__(self, prometheus: str | None, token_file: Path | None) -> None:
        from flopwatch.node.health.expectations import Expectations
        from flopwatch.node.health.verdict import Verdict
        from flopwatch.training.progress import Recent

        self._prometheus = None
        if prometheus is not None:
            from flopwatch.report.prometheus import PrometheusClient

            self._prometheus = PrometheusClient(prometheus, token_file, timeout=5.0)
        self.by_mfu = False
        self._recent: defaultdict[tuple[str, ...], Recent] = defaultdict(Recent)
        self._verdict = Verdict(Expectations())

    def draw(self, samples: "list[Sample]") -> Any:
        """Return the tables for the samples of one look, with the host's health and the alerts that fire."""
        from rich.console import Group
        from rich.text import Text

        from flopwatch import catalogue as m

        totals: defaultdict[tuple[str, ...], dict[tuple[Metric, str], float]] = defaultdict(dict)
        facts: dict[Metric, dict[tuple[str, ...], dict[str, str]]] = {m.TRAINING_RANK_INFO: {}, m.GPU_INFO: {}}
        for row, labels, raw in samples:
            if row.labels[:2] in (("run", "rank"), m.GPU):
                totals[labels[:2]][row, "".join(labels[2:3])] = raw * row.scale
            if row in facts:
                facts[row][labels[:2]] = dict(zip(row.labels, labels, strict=True))
        now = time.monotonic()
        progress = {key: self._recent[key].add(now, values) for key, values in totals.items()}
        ranks, gpus = ({key: (progress[key], about) for key, about in found.items()} for found in facts.values())
        health = self._verdict.judge(samples)
        lines = [Text(f"{reason.verdict}: {reason.detail}", STYLES[reason.verdict]) for reason in health.reasons[:8]]
        lines += [Text(alert, "bold red") for alert in self._firing()]
        verdict = (health.verdict, STYLES[health.verdict])
        head = Text.assemble(f"flopwatch top  {time.strftime('%H:%M:%S')}  host ", verdict)
        return Group(head, self._ranks(ranks), _gpus(gpus, ranks), *lines, Text(KEYS, "dim"))

    def _firing(self) -> list[str]:
        """Return the alerts that fire in Prometheus and the stragglers, and the number of those beyond FIRING."""
        if self._prometheus is None:
            return []
        from flopwatch import catalogue as m

        query = f'ALERTS{{alertstate="firing",alertname!="FlopwatchWatchdog"}} or {m.RUN_STRAGGLER_INFO}'
        lines = []
        for labels in (found.labels for found in self._prometheus.query(query, time.time())):
            first = f"firing: {labels['alertname']}" if "alertname" in labels else "straggler:"
            lines.append(" ".join([first, *(f"{name} {labels[name]}" for name in SHOWN if labels.get(name))]))
        return [*lines[:FIRING], *([f"and {len(lines) - FIRING} more"] if len(lines) > FIRING else [])]

    def _ranks(self, ranks: "Parts") -> Any:
        from flopwatch import catalogue as m
        from flopwatch.training.progress import duration

        goodput: dict[str, float] = {}
        if self._prometheus is not None:
            found = self._prometheus.query("max by (run) (run:run_goodput:ratio)", time.time())
            goodput = {series.labels.get("run", ""): series.points[0][1] for series in found if series.points}
        share = "in steps" if self._prometheus is None else "goodput"
        table = _table("run", "rank", "step", "MFU", share, "step time", "tokens/s", "stall", "wait")
        order = sorted(ranks.items(), key=lambda item: (item[0][0], int(item[0][1])))
        if self.by_mfu:
            order.sort(key=lambda item: (item[0][0], item[1][0].mfu or 0.0))
        for (run, rank), (progress, _) in order:
            step, tokens = progress.step_seconds, progress.tokens_per_second
            waits = progress.last(m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL) is not None
            measured = progress.rise(m.TRAINING_MEASURED_STEP_SECONDS_TOTAL) if waits else 0.0
            table.add_row(
                run,
                rank,
                f"{progress.last(m.TRAINING_POSITION_STEPS) or 0:,.0f}",
                _percent(progress.mfu, 1),
                _percent(progress.in_steps if self._prometheus is None else goodput.get(run), 1),
                UNKNOWN if step is None else duration(step).removesuffix(" a step"),
                UNKNOWN if tokens is None else f"{tokens:,.0f}",
                _percent(progress.seconds.get("data_stall", 0.0) / progress.stepping if progress.stepping else None),
                _percent(progress.rise(m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL) / measured if measured else None),
            )
        return table if ranks else "No rank has pushed to this exporter. Start one with: flopwatch run train.py"


def _gpus(gpus: "Parts", ranks: "Parts") -> Any:
    from flopwatch import catalogue as m

    owners = {about["uuid"]: f"{run} {rank}" for (run, rank), (_, about) in ranks.items() if about["uuid"]}
    table = _table("GPU", "busy", "tensor", "power", "temp", "memory", "rank")
    for (gpu, uuid), (values, about) in sorted(gpus.items(), key=lambda item: item[0][0].zfill(4)):
        profiled = values.rise(m.GPU_PROFILED_SECONDS_TOTAL)
        used, total = values.last(m.GPU_MEMORY_USED_BYTES), values.last(m.GPU_MEMORY_TOTAL_BYTES)
        power, heat = values.last(m.GPU_POWER_WATTS), values.last(m.GPU_TEMPERATURE_CELSIUS)
        table.add_row(
            f"{gpu} {about['model'].removeprefix('NVIDIA ')}",
            _percent(values.last(m.GPU_UTILIZATION_RATIO)),
            _percent(values.rise(m.GPU_TENSOR_ACTIVE_SECONDS_TOTAL) / profiled if profiled else None),
            UNKNOWN if power is None else f"{power:.0f} W",
            UNKNOWN if heat is None else f"{heat:.0f} °C",
            UNKNOWN if used is None or total is None else f"{used / 2**30:.1f}/{total / 2**30:.0f} GiB",
            owners.get(uuid, ""),
        )
    return table if gpus else "No GPU is read here."


def _table(first: str, *others: str) -> Any:
    from rich import box, table

    made = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column(first, overflow="ellipsis", no_wrap=True)
    for name in others:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _percent(ratio: float | None, digits: int = 0) -> str:
    return UNKNOWN if ratio is None else f"{100 * ratio:.{digits}f} %"


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "top", run, "show this host's ranks, GPUs and health live in the terminal")
    flags(parser, "top")
    flags(parser, "samples", ExporterSettings())
