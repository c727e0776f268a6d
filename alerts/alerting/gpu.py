"""Alerts on GPUs: NVML, DCGM and the kernel log.

`critical` is a GPU on which no job can run, or a node without it; what a job survives is a `warning`. A GPU whose Xid
has paged is not told of again because it also is gone, or asks for a reset.

What is news at once is of few series, in the group hardware; what asks for states of every GPU of the cluster is in gpu
and nvlink, which are evaluated less often.
"""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import indent
from typing import Literal

from alerts import recording
from alerts.alert import Alert, each, lasts_with
from alerts.alerting.hardware import GPU, at_host, latest, ranks_of_gpu, runs_on_host
from alerts.settings import AlertSettings
from flopwatch import catalogue as m
from flopwatch.catalogue.xid import paging_xids, xids

# Xids of broken hardware after which a GPU may go on, down to severity error. 63 is less: it recurs harmlessly, and a
# remap that waits for a reset is GpuRepairPending.
HARDWARE_CLASSES = ("memory", "nvlink", "pcie", "power", "firmware")
# nvmlDeviceGpuRecoveryAction_t.
RECOVERY = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain the GPUs that exchange data with it",
    4: "drain the node and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the PCIe bus above it",
    7: "reboot the whole system",
}
OF_GPU = "{uuid=%q}"
# Pages that an Xid explains and that may last longer than it is news.
AFTER_XID = "NodeLost|GpuMissing|GpuTooFew|GpuRecoveryNeeded|NvlinkDown|NvlinkFabricUnhealthy"


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on GPUs."""
    return (
        _xid(settings),
        *_other_xids(settings),
        _repeated_xid(settings),
        _switch(settings),
        _uncorrected(settings),
        _memory_failed(settings),
        _repair_pending(settings),
        *_recovery(settings),
        _missing(settings),
        _too_few(settings),
        _driver(settings),
        _thermal(settings),
        _power(settings),
        _hot(settings),
        _pcie_degraded(settings),
        _pcie_errors(settings),
        _nvlink_down(settings),
        _nvlink_errors(settings),
        *_fabric(settings),
        _idle(settings),
    )


def _xid(settings: AlertSettings) -> Alert:
    meaning = "".join(
        f'\n{{{{- if eq $labels.xid "{code}" }}}} ({xids()[code].name}). {xids()[code].page}{{{{ end }}}}'
        for code in paging_xids()
    )
    ranks = f"last_over_time({m.TRAINING_RANK_INFO}{{uuid=%q}}[{settings.at_pace(settings.rate_window)}])"
    # By the time last seen, not by increase(): the first Xid may be the first sample of its series.
    codes, window = "|".join(map(str, paging_xids())), settings.at_pace(settings.xid_window)
    seen = f'{m.GPU_XID_LAST}{{xid=~"{codes}"}}'
    fresh, kept = settings.seconds_at_pace(settings.xid_window), settings.seconds_at_pace(settings.memory)
    # An Xid of NVLink 5 of which the kernel log says each time that it was not fatal.
    links = f"last_over_time({m.GPU_XID_NVLINK_ERRORS}%s[{window}])"
    fatal = links % '{severity!="non-fatal"}'
    recent = f"""\
(
  max by (instance, uuid, xid) (last_over_time({seen}[{window}])) > time() - {fresh}
    or
  max by (instance, uuid, xid) ({seen}) > time() - {kept}
    and on (instance, uuid) {m.GPU_PRESENT} == 0
)
  unless on (instance, uuid, xid)
({links % ""} unless on (instance, uuid, xid) {fatal})"""
    index = each(
        f"topk(1, max by (gpu) (last_over_time({m.GPU_INFO}{{uuid=%q}}[{window}])))",
        "$labels.uuid",
        " {{ .Labels.gpu }}",
    )
    identity = ("host", "uuid", "xid")
    return Alert(
        "hardware",
        "GpuXidCritical",
        "critical",
        identity,
        "\n  or\n".join(
            (
                at_host("max", recent, ", ".join(identity), settings, settings.xid_window),
                lasts_with("GpuXidCritical", identity, AFTER_XID, "host"),
                lasts_with("GpuXidCritical", identity, "GpuMemoryFailed", "host, uuid"),
            )
        ),
        "0s",  # an Xid is a fact, and the job on the GPU is lost already
        "A GPU reported an error after which it is not fit for work.",
        "GPU"
        + index
        + " ({{ $labels.uuid }}) of {{ $labels.host }} reported Xid {{ $labels.xid }}"
        + meaning
        + each(
            f"group by (run, rank) ({ranks})",
            "$labels.uuid",
            " Rank {{ .Labels.rank }} of run {{ .Labels.run }} runs on it.",
        ),
    )


def _gpu(settings: AlertSettings) -> str:
    """Return a template that names the GPU `$labels.uuid` and its host."""
    window = settings.at_pace(settings.state_window)
    index = each(
        f"topk(1, max by (gpu) (last_over_time({m.GPU_INFO}{{uuid=%q}}[{window}])))",
        "$labels.uuid",
        " {{ .Labels.gpu }}",
    )
    return "GPU" + index + "{{ with $labels.uuid }} ({{ . }}){{ end }}{{ with $labels.host }} of {{ . }}{{ end }}"


def _of_gpu(
    settings: AlertSettings,
    name: str,
    severity: Literal["critical", "warning"],
    problem: str,
    for_: float,
    summary: str,
    text: str,
    by: str = "group",
    keep: float = 0.0,
    memory: float | None = None,
    group: str = "gpu",
) -> Alert:
    """Return an alert with one series per GPU; `by` is max where the value is told, else group, as 0 is no alert in
    Grafana.
    """
    return Alert(
        group,
        name,
        severity,
        ("host", "uuid"),
        at_host(by, problem, "host, uuid", settings, memory),
        settings.at_pace(for_),
        summary,
        _gpu(settings) + text + ranks_of_gpu(settings),
        keep_firing_for=settings.at_pace(keep) if keep else "",
    )


def _meanings(codes: Iterable[int]) -> str:
    return "".join(f'\n{{{{- if eq $labels.xid "{code}" }}}} ({xids()[code].name}){{{{ end }}}}' for code in codes)


def _paged(settings: AlertSettings) -> str:
    """Return the GPUs whose critical Xid has paged, for as long as GpuXidCritical holds of one that is gone."""
    codes, kept = "|".join(map(str, paging_xids())), settings.seconds_at_pace(settings.memory)
    return f'{latest(m.GPU_XID_LAST, GPU, settings, f"""{{xid=~"{codes}"}}""")} > time() - {kept}'


def _other_xids(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on Xids that do not make a GPU unfit: those of hardware are told, those of jobs recorded."""
    hardware, jobs = [], []
    for code, row in xids().items():
        if row.page or row.category == "unused":
            continue
        if row.category in HARDWARE_CLASSES and row.severity in ("error", "critical", "fatal"):
            hardware.append(code)
        elif row.category in ("application", "engine"):
            jobs.append(code)
    window, fresh = settings.at_pace(settings.xid_window), settings.seconds_at_pace(settings.xid_window)

    def alert(name: str, severity: Literal["warning", "info"], xids_: list[int], summary: str) -> Alert:
        codes = "|".join(map(str, xids_))
        # By the time last seen, as GpuXidCritical: the first Xid may be the first sample of its series.
        seen = f'max by ({GPU}, xid) (last_over_time({m.GPU_XID_LAST}{{xid=~"{codes}"}}[{window}])) > time() - {fresh}'
        return Alert(
            "hardware",
            name,
            severity,
            ("host", "uuid", "xid"),
            at_host("group", seen, "host, uuid, xid", settings, settings.xid_window),
            "0s",  # an Xid is a fact; to wait for a second one is GpuXidRepeated
            summary,
            _gpu(settings) + " reported Xid {{ $labels.xid }}" + _meanings(xids_) + "." + ranks_of_gpu(settings),
        )

    return (
        alert("GpuXidWarning", "warning", hardware, "A GPU reported an error of its hardware that it may go on after."),
        alert("GpuXidApplication", "info", jobs, "A GPU reported an error that a job usually is the cause of."),
    )


def _repeated_xid(settings: AlertSettings) -> Alert:
    application = [code for code, row in xids().items() if row.category == "application"]
    codes = "|".join(map(str, application))
    hour, day = settings.at_pace(3600), settings.at_pace(settings.memory)
    past, today = settings.seconds_at_pace(3600), settings.seconds_at_pace(settings.memory)
    seen = f'max by ({GPU}, xid) (%s{m.GPU_XID_LAST}{{xid=~"{codes}"}}%s)'
    # A job that is at fault has the same Xid on several of the node's GPUs.
    problem = f"""\
count_over_time((
  {seen % ("", "")} > time() - {past}
)[{day}:{hour}]) >= {settings.xid_hours}
  unless on (instance, xid)
(count by (instance, xid) ({seen % ("last_over_time(", f"[{day}])")} > time() - {today}) > 1)"""
    return Alert(
        "hardware",
        "GpuXidRepeated",
        "warning",
        ("host", "uuid", "xid"),
        at_host("max", problem, "host, uuid, xid", settings),
        "0s",  # several hours were asked for already
        "One GPU alone reports an application's error again and again: it is the hardware.",
        _gpu(settings)
        + " reported Xid {{ $labels.xid }}"
        + _meanings(application)
        + ' in {{ printf "%.0f" $value }} hours of the last day, and no other GPU of the node did.'
        + ranks_of_gpu(settings),
    )


def _switch(settings: AlertSettings) -> Alert:
    window, fresh = settings.at_pace(settings.xid_window), settings.seconds_at_pace(settings.xid_window)
    problem = f"""\
max by (instance, switch, sxid) (last_over_time({m.NVLINK_SWITCH_SXID_LAST}[{window}])) > time() - {fresh}
  and on (instance, sxid)
last_over_time({m.NVLINK_SWITCH_SXID_INFO}{{severity="fatal"}}[{window}])"""
    meaning = each(
        f"group by (name) (last_over_time({m.NVLINK_SWITCH_SXID_INFO}{{sxid=%q}}[{window}]))",
        "$labels.sxid",
        " ({{ .Labels.name }})",
    )
    identity = ("host", "switch", "sxid")
    return Alert(
        "hardware",
        "NvswitchSxid",
        "critical",
        identity,
        at_host("group", problem, ", ".join(identity), settings, settings.xid_window)
        + "\n  or\n"
        + lasts_with("NvswitchSxid", identity, f"GpuXidCritical|{AFTER_XID}", "host"),
        "0s",  # the fabric manager's guide asks for a restart after one
        "An NVSwitch reported an error after which its NVLinks are not fit for work.",
        "NVSwitch {{ $labels.switch }} of {{ $labels.host }} reported SXid {{ $labels.sxid }}"
        + meaning
        + "."
        + runs_on_host(settings),
    )


def _uncorrected(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.ecc_window)
    return _of_gpu(
        settings,
        "GpuEccUncorrected",
        "warning",
        f'max by ({GPU}) (increase({m.GPU_ECC_ERRORS}{{error="uncorrected"}}[{window}])) > 0',
        0,  # one ends the process that reads it
        "A GPU's memory made errors that could not be corrected.",
        f' made {{{{ printf "%.0f" $value }}}} uncorrectable memory errors in the last {window}.',
        by="max",
        memory=settings.ecc_window,
    )


def _memory_failed(settings: AlertSettings) -> Alert:
    rows = f'{latest(m.GPU_REMAPPED_ROWS, GPU, settings, """{error="uncorrected"}""")} >= {settings.remapped_rows}'
    problem = f"""\
{latest(m.GPU_ROW_REMAP_FAILURE, GPU, settings)} == 1
  or on ({GPU})
{latest(m.GPU_SRAM_THRESHOLD, GPU, settings)} == 1
  or on ({GPU})
{rows}"""
    return _of_gpu(
        settings,
        "GpuMemoryFailed",
        "critical",
        problem,
        0,  # the board says it of itself, and never takes it back
        "A GPU's memory has used up its repairs: the board is to be replaced.",
        ":"
        + each(f"max({m.GPU_ROW_REMAP_FAILURE}{OF_GPU}) == 1", "$labels.uuid", " a row could not be replaced.")
        + each(
            f"max({m.GPU_SRAM_THRESHOLD}{OF_GPU}) == 1", "$labels.uuid", " it had more SRAM errors than it may have."
        )
        + each(
            f'max({m.GPU_REMAPPED_ROWS}{{uuid=%q,error="uncorrected"}})',
            "$labels.uuid",
            " {{ .Value }} rows were replaced after uncorrectable errors.",
        ),
    )


def _repair_pending(settings: AlertSettings) -> Alert:
    problem = f"""\
{latest(m.GPU_ROW_REMAP_PENDING, GPU, settings)} == 1
  or on ({GPU})
{latest(m.GPU_RETIRED_PAGES_PENDING, GPU, settings)} == 1
  or on ({GPU})
{latest(m.GPU_REPAIR_PENDING, GPU, settings)} == 1"""
    return _of_gpu(
        settings,
        "GpuRepairPending",
        "warning",
        problem,
        settings.repair_for,
        "A GPU waits for a reset to put a part of its memory out of use.",
        ":"
        + each(f"max({m.GPU_ROW_REMAP_PENDING}{OF_GPU}) == 1", "$labels.uuid", " rows wait to be replaced.")
        + each(f"max({m.GPU_RETIRED_PAGES_PENDING}{OF_GPU}) == 1", "$labels.uuid", " pages wait to be retired.")
        + each(
            f"max by (part) ({m.GPU_REPAIR_PENDING}{OF_GPU}) == 1",
            "$labels.uuid",
            " {{ .Labels.part }} waits for repair.",
        ),
    )


def _recovery(settings: AlertSettings) -> tuple[Alert, ...]:
    action = latest(m.GPU_RECOVERY_ACTION, GPU, settings)
    words = "".join(f"\n{{{{- if eq $value {number}.0 }}}} {text}{{{{ end }}}}" for number, text in RECOVERY.items())

    def alert(severity: Literal["critical", "warning"], wanted: str) -> Alert:
        problem = f"""\
({wanted})
  unless on ({GPU})
{_paged(settings)}"""
        return _of_gpu(
            settings,
            "GpuRecoveryNeeded",
            severity,
            problem,
            settings.repair_for,
            "The driver asks for a GPU to be reset or its node to be rebooted.",
            ": the driver asks to" + words + ".",
            by="max",
        )

    # To drain is to let the job end first.
    return (alert("critical", f"{action} > 0 != 3 != 4"), alert("warning", f"{action} == 3 or {action} == 4"))


def _missing(settings: AlertSettings) -> Alert:
    problem = f"""\
{latest(m.GPU_PRESENT, GPU, settings)} == 0
  unless on ({GPU})
{_paged(settings)}"""
    return _of_gpu(
        settings,
        "GpuMissing",
        "critical",
        problem,
        settings.missing_for,
        "A GPU of the node's inventory does not answer, and no Xid says why.",
        " does not answer, and reported no critical Xid.",
    )


def _too_few(settings: AlertSettings) -> Alert:
    known = f"group by ({GPU}, gpu) ({m.GPU_PRESENT} or {m.GPU_READABLE})"
    wanted = f'max by (instance) ({m.NODE_EXPECTED}{{kind="gpus"}})'
    # A node without any, and without a driver, has no series of one; nor has one whose driver cannot be asked.
    problem = f"""\
(
  count by (instance) ({known})
    or on (instance)
  0 * max by (instance) ({m.NODE_EXPECTED})
    unless on (instance)
  ({m.DRIVER_RELEASED} == 1 or {m.COLLECTOR_SUCCESS}{{collector=~"nvml|dcgm"}} == 0)
)
  < on (instance)
{wanted}"""
    expected = each(
        f"topk(1, {wanted} and on (instance) {recording.HOST}{{host=%q}})",
        "$labels.host",
        " of the {{ .Value }} that it should have",
    )
    return Alert(
        "gpu",
        "GpuTooFew",
        "critical",
        ("host",),
        at_host("max", problem, "host", settings),
        settings.at_pace(settings.missing_for),
        "A node has fewer GPUs than it should have, and never had the others.",
        "{{ $labels.host }} has {{ $value }} GPUs" + expected + "." + runs_on_host(settings),
    )


def _driver(settings: AlertSettings) -> Alert:
    return Alert(
        "gpu",
        "GpuDriverNotLoaded",
        "warning",
        ("host",),
        at_host("group", f"{latest(m.GPU_DRIVER_LOADED, 'instance', settings)} == 0", "host", settings),
        settings.at_pace(settings.driver_for),
        "A node with GPUs has no driver loaded.",
        "{{ $labels.host }} has GPUs in its inventory and no NVIDIA driver loaded." + runs_on_host(settings),
    )


def _held_back(settings: AlertSettings, reasons: str, matcher: str = "") -> str:
    """Return the share of time for which the clock was held back, the most of several reasons at once."""
    seconds = f'{m.GPU_CLOCK_EVENT_SECONDS}{{{matcher}reason=~"{reasons}"}}[{settings.at_pace(settings.rate_window)}]'
    return f"max by ({GPU}) (rate({seconds}))"


def _thermal(settings: AlertSettings) -> Alert:
    # The second two are the hardware's own; thermal is what drivers before R535 make of both.
    reasons = "sw_thermal_slowdown|hw_thermal_slowdown|thermal"
    return _of_gpu(
        settings,
        "GpuThermalThrottling",
        "warning",
        f"{_held_back(settings, reasons)} > {settings.throttle_share:g}",
        settings.throttle_for,
        "A GPU is too hot and its clock is held back.",
        " is held back by heat {{ $value | humanizePercentage }} of the time."
        + each(f"max({m.GPU_TEMPERATURE}{{uuid=%q}})", "$labels.uuid", " It has {{ .Value }} degrees Celsius."),
        by="max",
        keep=settings.throttle_for,
    )


def _power(settings: AlertSettings) -> Alert:
    limit, default = latest(m.GPU_POWER_LIMIT, GPU, settings), latest(m.GPU_POWER_LIMIT_DEFAULT, GPU, settings)
    problem = f"""\
{_held_back(settings, "hw_power_brake_slowdown")} > {settings.throttle_share:g}
  or on ({GPU})
{_held_back(settings, "sw_power_cap")} > {settings.power_cap_share:g}
  and on ({GPU})
({limit} < on ({GPU}) {settings.power_limit_share:g} * {default})"""
    brake = _held_back(settings, "hw_power_brake_slowdown", "uuid=%q,")
    return _of_gpu(
        settings,
        "GpuPowerThrottling",
        "warning",
        problem,
        settings.throttle_for,
        "A GPU gets less power than it is made for, and its clock is held back.",
        " is held back {{ $value | humanizePercentage }} of the time"
        + each(f"{brake} > {settings.throttle_share:g}", "$labels.uuid", " by a brake from outside, its power supply")
        + each(f"max({m.GPU_POWER_LIMIT}{{uuid=%q}})", "$labels.uuid", ". Its limit is {{ .Value }} W")
        + each(f"max({m.GPU_POWER_LIMIT_DEFAULT}{{uuid=%q}})", "$labels.uuid", ", the board's own {{ .Value }} W")
        + ".",
        by="max",
        keep=settings.throttle_for,
    )


def _hot(settings: AlertSettings) -> Alert:
    slowdown = '{limit="slowdown"}'
    problem = f"""\
{latest(m.GPU_TEMPERATURE_MARGIN, GPU, settings)} - on ({GPU})
  {latest(m.GPU_TEMPERATURE_LIMIT_MARGIN, GPU, settings, slowdown)} < {settings.temperature_margin:g}
  or on ({GPU})
{latest(m.GPU_TEMPERATURE_LIMIT, GPU, settings, slowdown)} - on ({GPU})
  {latest(m.GPU_TEMPERATURE, GPU, settings)} < {settings.temperature_margin:g}"""
    return _of_gpu(
        settings,
        "GpuHot",
        "warning",
        problem,
        settings.throttle_for,
        "A GPU is about to be slowed down by its temperature.",
        f" is within {settings.temperature_margin:g} degrees of slowing down."
        + each(f"max({m.GPU_TEMPERATURE}{{uuid=%q}})", "$labels.uuid", " It has {{ .Value }} degrees Celsius."),
    )


def _pcie_degraded(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.state_window)
    width, most = latest(m.GPU_PCIE_WIDTH, GPU, settings), latest(m.GPU_PCIE_WIDTH_MAX, GPU, settings)
    newest = latest(m.GPU_PCIE_GENERATION_MAX, GPU, settings)
    # The generation falls while a GPU idles, by design; the width does not.
    problem = f"""\
{width} < on ({GPU}) {most}
  or on ({GPU})
max by ({GPU}) (max_over_time({m.GPU_PCIE_GENERATION}[{window}])) < on ({GPU}) {newest}
  and on ({GPU})
min by ({GPU}) (min_over_time({m.GPU_UTILIZATION}[{window}])) > {settings.pcie_busy:g}"""

    def fact(metric: m.Metric, text: str) -> str:
        return each(f"max({metric}{{uuid=%q}})", "$labels.uuid", text)

    return _of_gpu(
        settings,
        "GpuPcieDegraded",
        "warning",
        problem,
        settings.degraded_for,
        "A GPU's PCIe link is narrower or slower than it could be.",
        " has"
        + fact(m.GPU_PCIE_WIDTH, " {{ .Value }}")
        + fact(m.GPU_PCIE_WIDTH_MAX, " of {{ .Value }} PCIe lanes")
        + fact(m.GPU_PCIE_GENERATION, " at generation {{ .Value }}")
        + fact(m.GPU_PCIE_GENERATION_MAX, " of {{ .Value }}")
        + ".",
    )


def _pcie_errors(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.rate_window)
    generation, width = latest(m.GPU_PCIE_GENERATION_MAX, GPU, settings), latest(m.GPU_PCIE_WIDTH_MAX, GPU, settings)
    replays = f"max by ({GPU}) (rate({m.GPU_PCIE_REPLAYS}%s[{window}]))"
    errors = f'{m.GPU_PCIE_ERRORS}{{%serror=~"fatal|non_fatal"}}[{window}]'
    # A lane of generation 3 carries 8 Gb/s, and each generation twice that.
    problem = f"""\
{replays % ""} > on ({GPU}) {settings.pcie_bit_errors * 1e9:g} * 2 ^ {generation} * on ({GPU}) {width}
  or on ({GPU})
max by ({GPU}) (increase({errors % ""})) > 0"""
    return _of_gpu(
        settings,
        "GpuPcieErrors",
        "warning",
        problem,
        settings.link_for,  # a single error is in the window for five minutes; a reading that is wrong is not
        "A GPU's PCIe link makes errors.",
        ":"
        + each(f"60 * {replays % '{uuid=%q}'}", "$labels.uuid", ' {{ printf "%.0f" .Value }} replays a minute.')
        + each(
            f"max by (error) (increase({errors % 'uuid=%q,'})) > 0",
            "$labels.uuid",
            f' {{{{ printf "%.0f" .Value }}}} {{{{ .Labels.error }}}} errors in {window}.',
        ),
        keep=settings.link_keep,
    )


def _nvlink_down(settings: AlertSettings) -> Alert:
    state = latest(m.NVLINK_LINK_STATE, f"{GPU}, link", settings)
    # 0 is inactive, 3 traffic disabled.
    problem = f"count by ({GPU}) ({state} == 0 or {state} == 3)"
    return _of_gpu(
        settings,
        "NvlinkDown",
        "critical",
        problem,
        settings.nvlink_for,
        "NVLinks of a GPU that were up are down.",
        " has lost {{ $value }} NVLinks"
        + each(f'sum({m.NVLINK_LINKS}{{uuid=%q,state=~"active|sleep"}})', "$labels.uuid", "; {{ .Value }} are up")
        + ".",
        by="max",
        group="nvlink",
    )


def _nvlink_errors(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.link_window)
    # Replayed, or corrected, is not lost; effective and symbol errors have their ratio, which has a limit.
    hard = f'{m.NVLINK_ERRORS}{{%serror!~"crc|crc_data|effective|replay|symbol"}}[{window}]'
    crc = f'{m.NVLINK_ERRORS}{{%serror=~"crc|crc_data"}}[{window}]'
    problem = f"""\
max by ({GPU}) (increase({hard % ""})) > 0
  or on ({GPU})
sum by ({GPU}) (rate({crc % ""})) > {settings.nvlink_crc_rate:g}
  or on ({GPU})
{latest(m.NVLINK_EFFECTIVE_BER, GPU, settings)} > {settings.nvlink_bit_errors:g}"""
    return _of_gpu(
        settings,
        "NvlinkErrors",
        "warning",
        problem,
        0,  # DCGM fails a GPU for one
        "A GPU's NVLinks make errors.",
        ":"
        + each(
            f"max by (error) (increase({hard % 'uuid=%q,'})) > 0",
            "$labels.uuid",
            f' {{{{ printf "%.0f" .Value }}}} {{{{ .Labels.error }}}} errors in {window}.',
        )
        + each(
            f"sum(rate({crc % 'uuid=%q,'})) > 0",
            "$labels.uuid",
            ' {{ printf "%.0f" .Value }} corrected errors a second.',
        )
        + each(
            f"max({m.NVLINK_EFFECTIVE_BER}{{uuid=%q}})",
            "$labels.uuid",
            ' Bit error ratio {{ printf "%.1e" .Value }} after correction.',
        ),
        keep=settings.link_keep,
        group="nvlink",
    )


def _fabric(settings: AlertSettings) -> tuple[Alert, ...]:
    state = latest(m.GPU_FABRIC_STATE, GPU, settings)
    health = latest(m.GPU_FABRIC_HEALTH, GPU, settings)

    def faults(names: str) -> str:
        return latest(m.GPU_FABRIC_FAULT, GPU, settings, f'{{fault=~"{names}"}}') + " == 1"

    # State 3 is completed; 1 and 2 are on the way there. Health 2 is unhealthy, 3 of limited capacity.
    worst = f"""\
{state} == 1
  or on ({GPU})
{state} == 2
  or on ({GPU})
{latest(m.GPU_FABRIC_STATUS, GPU, settings)} > 0
  or on ({GPU})
{health} == 2
  or on ({GPU})
{faults("access_timeout|incorrect_configuration|route_unhealthy")}"""
    degraded = f"""\
{health} == 3
  or on ({GPU})
{faults("degraded_bandwidth|manager_disconnected|no_partition|route_recovery")}"""

    def fact(metric: m.Metric, values: dict[int, str]) -> str:
        words = "".join(f"{{{{ if eq .Value {number}.0 }}}} {text}.{{{{ end }}}}" for number, text in values.items())
        return each(f"max({metric}{{uuid=%q}})", "$labels.uuid", words)

    text = (
        ":"
        + fact(m.GPU_FABRIC_STATE, {1: "it has not begun to register", 2: "it does not get registered"})
        + each(
            f"max({m.GPU_FABRIC_STATUS}{{uuid=%q}}) > 0",
            "$labels.uuid",
            " registration failed with nvmlReturn_t {{ .Value }}.",
        )
        + fact(m.GPU_FABRIC_HEALTH, {2: "the fabric is unhealthy", 3: "the fabric is of limited capacity"})
        + each(f"max by (fault) ({m.GPU_FABRIC_FAULT}{{uuid=%q}}) == 1", "$labels.uuid", " {{ .Labels.fault }}.")
    )

    def alert(severity: Literal["critical", "warning"], problem: str, summary: str) -> Alert:
        return _of_gpu(
            settings, "NvlinkFabricUnhealthy", severity, problem, settings.fabric_for, summary, text, group="nvlink"
        )

    return (
        alert("critical", worst, "A GPU has not joined its NVLink fabric, or the fabric fails it."),
        alert("warning", degraded, "A GPU's NVLink fabric is of limited capacity."),
    )


def _idle(settings: AlertSettings) -> Alert:
    rate, window = settings.at_pace(settings.rate_window), settings.at_pace(settings.state_window)
    active = f"max by (uuid) (rate({m.GPU_SM_ACTIVE}[{rate}])) / max by (uuid) (rate({m.GPU_PROFILED_SECONDS}[{rate}]))"
    ranks = f'group by (run, uuid, host) (last_over_time({m.TRAINING_RANK_INFO}{{%suuid!=""}}[{window}]))'
    # Where a GPU's activity is not measured, utilisation says whether anything ran at all.
    idle = f"""(
  {active} < {settings.idle_share:g}
    or on (uuid)
  max by (uuid) (max_over_time({m.GPU_UTILIZATION}[{rate}])) < {settings.idle_share:g}
)"""
    hosts = f"count by (host) ({ranks % 'run=%q,'} and on (uuid) {' '.join(idle.split())})"
    return Alert(
        "gpu",
        "GpuIdleAllocated",
        "warning",
        ("run",),
        f"count by (run) (\n  {ranks % ''}\n    and on (uuid)\n{indent(idle, '  ')}\n)",
        settings.at_pace(settings.idle_for),
        "A run holds GPUs on which nothing has run for long.",
        "Run {{ $labels.run }} has ranks on {{ $value }} GPUs that do nothing, the first of them:\n"
        f'{{{{- range $i, $gpus := printf `{hosts}` $labels.run | query | sortByLabel "host" }}}}'
        "{{ if lt $i 3 }} {{ $gpus.Value }} of {{ $gpus.Labels.host }}{{ end }}{{ end }}.",
    )
