"""Summary of the demo's run, read from the HTTP API of Prometheus and drawn as a screen, a line or a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from alerts import recording
from demo.stack import PrometheusApi
from flopwatch import catalogue as m

NOT_YET = "-"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that slows the run by the verdict, with its host and GPU."""

    rank: str
    score: float  # share of every step it costs
    host: str
    gpu: str
    uuid: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {percent(self.score)} of each step, on {self.host}, GPU {self.gpu} ({self.uuid})"


@dataclass(frozen=True, slots=True)
class Summary:
    """Values of one run at one moment. A value is None or empty while Prometheus has no series for it."""

    mfu: float | None
    effective_mfu: float | None
    goodput: float | None
    ettr: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    steps: float | None
    straggler: Straggler | None
    waits_measured: bool
    buckets: dict[str, float]  # seconds by bucket, "open" for those not yet in a bucket
    firing: list[str]


def read(prometheus: PrometheusApi, run: str) -> Summary:
    """Return the current summary of a run."""
    this = f'{{run="{run}"}}'
    buckets = {
        labels["bucket"]: seconds
        for labels, seconds in prometheus.query(f"max by (bucket) ({m.RUN_SECONDS_TOTAL}{this})")
        if seconds > 0
    }
    still_open = prometheus.value(f"max({m.RUN_OPEN_SECONDS}{this})")
    if still_open:
        buckets["open"] = still_open
    firing = prometheus.query(
        'group by (alertname, severity) (ALERTS{alertstate="firing",alertname!="FlopwatchWatchdog"})'
    )
    return Summary(
        # Both from the ledger, so that they are of the same moment. The MFU of the ranks until the ledger has one.
        mfu=prometheus.value(
            f"max({m.RUN_MODEL_FLOPS_TOTAL}{this}) / (max({m.RUN_STEP_CAPACITY_FLOPS_TOTAL}{this}) > 0)"
            f" or sum(increase({m.TRAINING_MODEL_FLOPS_TOTAL}{this}[1d]))"
            f" / (sum(increase({m.TRAINING_CAPACITY_FLOPS_TOTAL}{this}[1d])) > 0)"
        ),
        effective_mfu=prometheus.value(
            f"max({m.RUN_RETAINED_FLOPS_TOTAL}{this}) / (max({m.RUN_CAPACITY_FLOPS_TOTAL}{this}) > 0)"
        ),
        goodput=prometheus.value(f"max({recording.GOODPUT}{this})"),
        ettr=prometheus.value(f"max({recording.ETTR}{this})"),
        step_seconds=prometheus.value(f"max({recording.STEP_DURATION}{this})"),
        tokens_per_second=prometheus.value(f"max({recording.TOKENS}{this})"),
        steps=prometheus.value(f"max({m.TRAINING_POSITION_STEPS}{this})"),
        straggler=_straggler(prometheus, this),
        waits_measured=bool(prometheus.query(f"{recording.STRAGGLER_LOST}{this}")),
        buckets=dict(sorted(buckets.items(), key=lambda item: -item[1])),
        firing=sorted(f"{labels['alertname']} ({labels.get('severity', '')})" for labels, _ in firing),
    )


def _straggler(prometheus: PrometheusApi, this: str) -> Straggler | None:
    scores = prometheus.query(f"topk(1, {recording.CONFIRMED}{this})")
    if not scores:
        return None
    rank, score = scores[0][0]["rank"], scores[0][1]
    info = {labels["rank"]: labels for labels, _ in prometheus.query(f"{m.TRAINING_RANK_INFO}{this}")}.get(rank, {})
    uuid = info.get("uuid", "")
    gpus = prometheus.query(f'{m.GPU_INFO}{{uuid="{uuid}"}}') if uuid else []
    return Straggler(rank, score, info.get("host", "?"), gpus[0][0]["gpu"] if gpus else "?", uuid)


def percent(ratio: float | None) -> str:
    """Format a ratio as a percentage, None as NOT_YET."""
    return NOT_YET if ratio is None else f"{100 * ratio:.1f} %"


def number(value: float | None, unit: str = "", scale: float = 1.0) -> str:
    """Format a number with thousands separators, after multiplication by `scale`. Format None as NOT_YET."""
    return NOT_YET if value is None else f"{value * scale:,.0f}{unit}"


def clock(seconds: float) -> str:
    """Format elapsed seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def line(summary: Summary, elapsed: float) -> str:
    """Return one line of progress, for an output that is not a terminal."""
    return (
        f"{clock(elapsed)}  MFU {percent(summary.mfu)}  goodput {percent(summary.goodput)}  "
        f"step {number(summary.steps)}  {number(summary.step_seconds, ' ms', 1000)}  straggler {_late(summary)}  "
        f"firing: {', '.join(summary.firing) or 'nothing'}"
    )


def _late(summary: Summary) -> str:
    if summary.straggler is not None:
        return f"{summary.straggler.rank} ({percent(summary.straggler.score)})"
    return "none" if summary.waits_measured else NOT_YET


def _where(summary: Summary) -> str:
    late = summary.straggler
    if late is not None:
        return f"on {late.host}, GPU {late.gpu} ({late.uuid})"
    return "no rank slows the run now" if summary.waits_measured else "no rank is measured yet"


def rows(summary: Summary) -> list[tuple[str, str, str]]:
    """Return the rows of the summary's table: name, value and meaning."""
    total = sum(summary.buckets.values())
    buckets = " · ".join(
        f"{bucket.replace('_', ' ')} {percent(seconds / total)}"
        for bucket, seconds in summary.buckets.items()
        if seconds >= 0.001 * total
    )
    found = [
        ("MFU", percent(summary.mfu), "model FLOPs over peak FLOPs in steps, mean of the whole run"),
        ("Effective MFU", percent(summary.effective_mfu), "of the whole run, over all time the GPUs were held"),
        ("Goodput", percent(summary.goodput), "share of the wall clock that advanced the model"),
        ("ETTR", percent(summary.ettr), "the same since submission"),
        ("Steps", number(summary.steps), f"{number(summary.step_seconds, ' ms', 1000)} each"),
        ("Tokens/s", number(summary.tokens_per_second), ""),
        ("Straggler", _late(summary), _where(summary)),
        ("Time went to", "", buckets or NOT_YET),
    ]
    return [row for row in found if row[0] != "ETTR" or summary.ettr is not None]


def table(summary: Summary, plain: bool) -> Table:
    """Return the summary as a table, with ASCII borders if `plain` is True."""
    drawn = Table(show_header=False, box=box.ASCII2 if plain else box.ROUNDED)
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(justify="right", no_wrap=True, style="cyan")
    drawn.add_column(style="dim")
    for row in rows(summary):
        drawn.add_row(*row)
    return drawn


def screen(
    summary: Summary, title: str, links: Sequence[tuple[str, str]], story: Sequence[str], message: str | None
) -> RenderableType:
    """Return the screen of the demo for a terminal of 100 x 30."""
    grid = Table.grid(padding=(0, 2))
    for name, url in links:
        grid.add_row(Text(name, style="bold"), Text(url, style=f"blue link {url}", overflow="fold"))
    firing = Text(", ".join(summary.firing) or "nothing", style="bold red" if summary.firing else "green")
    parts: list[RenderableType] = [
        grid,
        table(summary, plain=False),
        Text.assemble(("Firing alerts  ", "bold"), firing),
        Text("\n".join(story)),
    ]
    if message is not None:
        parts.append(Panel(Text(message), title="Slack", title_align="left", border_style="magenta"))
    return Panel(Group(*parts), title=title, title_align="left")
