"""The verdict on a run in one sentence, and its suspects with host, GPU, cause and cost.

A stat panel of Grafana can show the legend of a series, and a legend can show labels. So the queries build labels:
`count_values` makes a label of a number, and `label_replace` makes a clause of a name.
"""

from __future__ import annotations

from collections.abc import Mapping

import dashboards as d
from alerts import recording as r
from dashboards import findings
from dashboards import parts as p
from flopwatch import catalogue as m

PARTS = "{{subject}}{{loss}}{{cause}}. {{cost}}"
SEVERITY: list[d.Threshold] = [(None, "blue"), (0, "green"), (1, "orange"), (2, "red")]
FROM = f">= {p.SETTINGS.straggler_warning:g}"
ON_HOST = f'run="", host!="", {findings.SHIPPED}'
RECENT = "[5m]"  # the window in which a cause is looked for
_THROTTLED = f"rate({m.GPU_CLOCK_EVENT_SECONDS_TOTAL}{{reason=~%s}}{RECENT}) > 0.1"
# Of a suspect's GPU, the first that is true. Each follows "GPU 3".
_CAUSES: Mapping[str, str] = {
    "reports an uncorrected memory error": f'increase({m.GPU_ECC_ERRORS_TOTAL}{{error="uncorrected"}}[30m]) > 0',
    "reports an Xid": f"time() - {m.GPU_XID_LAST_TIMESTAMP_SECONDS} < 1800",
    "throttles by heat": _THROTTLED % '".*thermal.*"',
    "throttles by a power brake": _THROTTLED % '"hw_power_brake.*"',
    "has a power limit below its default": f"{m.GPU_POWER_LIMIT_WATTS} < 0.95 * {m.GPU_POWER_LIMIT_DEFAULT_WATTS}",
    "has fewer PCIe lanes than it supports": f"{m.GPU_PCIE_WIDTH_LANES} < {m.GPU_PCIE_WIDTH_MAX_LANES}",
    "has no known fault": f"{m.GPU_INFO} * 1",
}


def text(expr: str, label: str, value: str, source: str = "", pattern: str = "") -> str:
    """Return `expr` with `label` set to `value` where the label `source` matches `pattern`, by default everywhere."""
    return f'label_replace({expr}, "{label}", "{value}", "{source}", "{pattern}")'


def number(label: str, expr: str, digits: str = "1") -> str:
    """Return a series per run that is 1, with the value of `expr`, rounded to `digits`, as the label `label`."""
    return f'count_values by (run) ("{label}", round({expr}, {digits}))'


def dollars(run: str, ledger: str, share: str = "") -> str:
    """Return the cost in US dollars of an hour of the run's GPUs, or of the share of it in an expression by run."""
    gpus = f"max by (run) ({m.RUN_GPUS}{{{ledger}}}) * $price"
    return f"({gpus} * on (run) max by (run) ({share}))" if share else f"({gpus})"


def suspects(run: str) -> str:
    """Return the late ranks and the suspects of a hang, with the labels host, uuid, gpu and cause as far as known.

    The value is the share of each step that the run loses, which is 1 while it hangs.
    """
    hang = f"max by (run, rank, host) ({m.RUN_HANG_SUSPECT_RATIO}{{{run}}} > bool 0)"
    ranks = f"({hang} or max by (run, rank, host) ({r.CONFIRMED}{{{run}}}))"
    of_rank = f"topk by (run, rank) (1, max by (run, rank, uuid) ({m.TRAINING_RANK_INFO}{{{run}}}))"
    info = f"topk by (uuid) (1, max by (uuid, gpu) ({m.GPU_INFO}))"
    placed = f"{ranks} * on (run, rank) group_left (uuid) {of_rank}"
    on_gpu = f"{placed} * on (uuid) group_left (gpu) {info} * on (uuid) group_left (cause) {_causes()}"
    return f"({on_gpu} or on (run, rank, host) {ranks})"


def _causes() -> str:
    """Return a series per GPU with its most important cause as the label `cause`. The value is 1."""
    found = [
        text(f"{weight} * (max by (uuid) ({expr}) * 0 + 1)", "cause", cause)
        for weight, (cause, expr) in zip(range(len(_CAUSES), 0, -1), _CAUSES.items(), strict=True)
    ]
    return f"(topk by (uuid) (1, {' or '.join(found)}) > bool 0)"


def first(run: str) -> str:
    """Return one of the suspects of each run: the one with most votes in a hang, else the rank that waits least.

    `topk` alone would choose among ranks that cost the same by chance, and the sentence would change at each refresh.
    """
    confirmed = f"max by (run, rank) ({r.CONFIRMED}{{{run}}})"
    one = (
        f"topk by (run) (1, max by (run, rank) ({m.RUN_HANG_SUSPECT_RATIO}{{{run}}})) or on (run) "
        f"bottomk by (run) (1, max by (run, rank) ({r.WAIT}{{{run}}}) and on (run, rank) {confirmed}) or on (run) "
        f"topk by (run) (1, {confirmed})"
    )
    return f"topk by (run) (1, {suspects(run)} and on (run, rank) ({one}))"


def _late(run: str, ledger: str) -> str:
    """Return the sentence on the run's stragglers. With several, it names the first and counts the others."""
    confirmed = f"max by (run, rank) ({r.CONFIRMED}{{{run}}})"
    lost = f"max by (run) ({confirmed})"
    kind = f'topk by (run) (1, max by (run, kind) ({m.RUN_STRAGGLER_RATIO}{{{run}, kind=~"rank|host|group|link"}}))'
    one = f"({first(run)} and on (run, rank) {confirmed})"
    joined = (
        f"{one} * on (run) group_left (percent) {number('percent', f'100 * {lost}')}"
        f" * on (run) group_left (dollars) {number('dollars', dollars(run, ledger, lost))}"
        f" * on (run) group_left (others) {number('others', f'count by (run) ({confirmed}) - 1')}"
        f" * on (run) group_left (kind) ({kind} > bool 0)"
    )
    named = f'label_join({joined}, "subject", "|", "kind", "rank", "host")'
    for value, pattern in (
        ("Rank $1 on $2", "rank[|](.*)[|](.*)"),
        ("Host $2", "host[|](.*)[|](.*)"),
        ("The process group of rank $1 on $2", "group[|](.*)[|](.*)"),
        ("The network at rank $1 on $2", "link[|](.*)[|](.*)"),
    ):
        named = text(named, "subject", value, "subject", pattern)
    with_loss = text(named, "loss", " costs $1 % of each step", "percent", "(.*)")
    # A host or a link is the cause by itself, whatever its GPUs report.
    with_gpu = f'label_join({with_loss}, "cause", "|", "kind", "gpu", "cause")'
    with_cause = text(with_gpu, "cause", ": GPU $1 $2", "cause", "rank[|](.+)[|](.+)")
    with_cause = text(with_cause, "cause", "", "cause", ".*[|].*")
    with_others = f'label_join({with_cause}, "subject", "|", "subject", "others")'
    with_others = text(with_others, "subject", "$1", "subject", "(.*)[|]0")
    with_others = text(with_others, "subject", "$1 and $2 more", "subject", "(.*)[|](.+)")
    priced = _priced(with_others)
    return _shown(f"1 + ({priced} >= bool {p.SETTINGS.straggler_critical:g})", "loss", "cause", "cost")


def _priced(expr: str, before: str = "") -> str:
    """Return `expr` with its label `dollars` as the clause `cost`. A plain dollar sign would begin a variable."""
    return text(expr, "cost", before + r"\x24\x24$1 an hour.", "dollars", "(.*)")


def _shown(expr: str, *parts: str) -> str:
    return f"max by ({', '.join(('run', 'subject', *parts))}) ({expr})"


def _hang(run: str, ledger: str) -> str:
    """Return the sentence on a run that hangs, with the first suspect if there is one."""
    open_step = f"max by (run) ({m.RUN_HANG_SECONDS}{{{run}}})"
    suspect = f"topk by (run) (1, max by (run, rank, host) ({m.RUN_HANG_SUSPECT_RATIO}{{{run}}}))"
    named = text(f'label_join({suspect}, "subject", " on ", "rank", "host")', "subject", "Rank $1", "subject", "(.*)")
    named = text(named, "subject", "Host $1", "subject", "Rank  on (.*)")
    named = text(named, "loss", " holds up the run", "", "")
    unnamed = text(open_step, "subject", "The run hangs, and no rank is suspected")
    both = f"({named} or on (run) {unnamed})"
    joined = (
        f"{both} * on (run) group_left (seconds) {number('seconds', open_step)}"
        f" * on (run) group_left (dollars) {number('dollars', dollars(run, ledger))}"
    )
    joined = text(joined, "cause", ": no step for $1 s", "seconds", "(.*)")
    return _shown(f"{_priced(joined)} * 0 + 2", "loss", "cause", "cost")


def _other(run: str, ledger: str) -> str:
    """Return the sentence on a loss that is no rank's fault."""
    kinds = f'{m.RUN_STRAGGLER_RATIO}{{{run}, kind=~"stage|imbalance|communication"}}'
    kind = f"topk by (run) (1, max by (run, kind) ({kinds}))"
    lost = f"({kind} {FROM})"
    joined = (
        f"{lost} * on (run) group_left (percent) {number('percent', f'100 * max by (run) {lost}')}"
        f" * on (run) group_left (dollars) {number('dollars', dollars(run, ledger, lost))}"
    )
    for kind, subject in (
        ("stage", "A slow pipeline stage"),
        ("imbalance", "Unevenly divided work"),
        ("communication", "Slow communication"),
    ):
        joined = text(joined, "subject", subject, "kind", kind)
    joined = text(joined, "loss", " costs $1 % of each step", "percent", "(.*)")
    return _shown(f"{_priced(joined)} * 0 + 1", "loss", "cost")


def sentence(run: str, ledger: str) -> str:
    """Return the series whose labels are the sentence: the first of a hang, an end, a loss, an alert and none of these.

    `run` and `ledger` are the matchers of the run's series in the exporters and in the ledger.
    """
    state = f"max by (run, state) ({m.RUN_STATE}{{{ledger}}}) == 1"
    down = f'max by (run) ({m.RUN_STATE}{{{ledger}, state="down"}}) == 1'
    ended = f'max by (run, state) ({m.RUN_STATE}{{{ledger}, state=~"queued|completed|stopped"}}) == 1'
    on_host = f"topk by (host) (1, max by (host, alertname) ({findings.of_alerts(ON_HOST)}))"
    on_hosts = f"max by (run, host) ({m.TRAINING_RANK_INFO}{{{run}}}) * on (host) group_left (alertname) {on_host}"
    alert = f"(max by (run, alertname) ({findings.of_alerts(run)}) or {on_hosts})"
    alert = f'label_join(topk by (run) (1, {alert}), "subject", " fires on ", "alertname", "host")'
    price = number("dollars", dollars(run, ledger))
    held = text(
        f"({state}) * on (run) group_left (dollars) {price}",
        "cost",
        "It costs \\x24\\x24$1 an hour.",
        "dollars",
        "(.*)",
    )
    known = f"(max by (run, cost) ({held}) or on (run) max by (run) ({m.TRAINING_RANK_INFO}{{{run}}}))"
    every = [
        _hang(run, ledger),
        _shown(text(f"({down}) * 0 + 2", "subject", "The run is down")),
        _late(run, ledger),
        _other(run, ledger),
        _shown(text(alert, "subject", "$1", "subject", "(.* fires) on ")),
        _shown(text(f"({ended}) * 0 - 1", "subject", "The run is $1", "state", "(.*)")),
        text(f"{known} * 0", "subject", "No alert fires on this run"),
    ]
    return " or on (run) ".join(every)


def panel(run: str, ledger: str) -> d.Json:
    """Return the panel with the sentence on one run, coloured by how bad it is."""
    return d.stat(
        "Verdict",
        "What costs the run most now, with the cause and with the cost of an hour at the price per GPU-hour above. The "
        "first of these: a hang, the end of the run, a straggler, another reason to wait, an alert. Expected: no alert "
        "fires. Otherwise look at the suspects and alerts below.",
        d.Query(sentence(run, ledger), PARTS, instant=True),
        name=True,
        thresholds=SEVERITY,
        links=[d.link("Stragglers", p.STRAGGLERS, run="$run")],
        width=d.COLUMNS,
        height=3,
        no_data="Unknown: nothing reports the run.",
    )


def priced(run: str, ledger: str) -> str:
    """Return the suspects with the cost of an hour in US dollars as the label `dollars`."""
    late = suspects(run)
    cost = number("dollars", dollars(run, ledger, f"max by (run) ({late})"))
    return f"({late} * on (run) group_left (dollars) {cost} or on (run, rank, host) {late})"


def table(run: str, ledger: str) -> d.Json:
    """Return the table of suspects of one run."""
    return d.table(
        "Suspects",
        "Ranks that the others wait for, with what their GPUs report. `Lost` is the share of each step that the run "
        "loses now, and `$ an hour` what this costs. Expected: no row. Drain the host, or repair the GPU.",
        [d.Column("Lost", priced(run, ledger), "percentunit", p.LATE)],
        key="rank",
        labels={
            "rank": "Rank",
            "host": "Node",
            "gpu": "GPU",
            "uuid": "UUID",
            "cause": "Its GPU",
            "dollars": "$ an hour",
        },
        sort="Lost",
        links={
            "Rank": [d.link("Stragglers", p.STRAGGLERS, run="$run")],
            "Node": [p.to_node(d.FIELD % "Node"), p.to_fabric(d.FIELD % "Node")],
            "GPU": [p.to_gpu(d.FIELD % "Node", d.FIELD % "UUID")],
        },
        hidden=["UUID"],
        width=12,
        height=7,
        no_data="No rank is a suspect now.",
    )


def named(run: str, ledger: str) -> str:
    """Return the firing alerts that name a straggler or a hang, with rank, host, GPU and cost of the first suspect."""
    verdicts = findings.of_alerts(f'{run}, alertname=~"TrainingStraggler|TrainingHang"')
    late = first(run)
    cost = number("dollars", dollars(run, ledger, f"max by (run) ({late})"))
    suspect = f"({late} * 0 + 1) * on (run) group_left (dollars) {cost}"
    return f"{verdicts} * on (run) group_left (rank, host, uuid, gpu, dollars) ({suspect})"


def incidents(run: str, ledger: str) -> str:
    """Return the firing alerts of a run, on its hosts, and on no host, with rank, host, GPU and cost if known."""
    on_host = f"({findings.of_alerts(ON_HOST)} and on (host) {m.TRAINING_RANK_INFO}{{{run}}})"
    of_none = findings.of_alerts(f'run="", host="", {findings.SHIPPED}')
    of_run = f"{named(run, ledger)} or on (alertname, run) {findings.of_alerts(run)}"
    return f"{of_run} or {findings.placed(on_host)} or {of_none}"


def alerts(run: str, ledger: str) -> d.Json:
    """Return the table of the firing alerts that matter to one run."""
    return findings.firing(
        "on the run",
        "Alerts of this run, on its hosts, and on no host, one row for each incident.",
        incidents(run, ledger),
        "Rank",
        "Node",
        "GPU",
        "Port",
        "$ an hour",
        width=12,
        height=7,
    )
