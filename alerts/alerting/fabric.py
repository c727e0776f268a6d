"""Alerts on the fabric: InfiniBand, RoCE and EFA ports, from sysfs.

A port is `critical` where a run that pages has ranks on its node and it is one of those they talk over; the rest are
warnings, since a slow or lossy port shows in the run as a straggler, which pages by what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import indent
from typing import Literal

from alerts import recording
from alerts.alert import Alert, each
from alerts.alerting.hardware import PORT, at_host, latest, runs_on_host
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

# What is wrong with the ports that a matcher names, or with all, and how the message says it; the second is empty
# where the first compares ports, and one alone has no value.
Problem = tuple[Callable[[str], str], str]


def alerts(settings: AlertSettings) -> tuple[Alert, ...]:
    """Return the alerts on ports."""
    return (
        _link_errors(settings),
        *_port_down(settings),
        _flapping(settings),
        _slow_port(settings),
        _error_rate(settings),
        _packet_loss(settings),
        _congestion(settings),
        _rail_imbalance(settings),
        _roce(settings),
        _efa(settings),
        _transceiver(settings),
        _stuck(settings),
    )


def _link_errors(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.link_window)

    def problems(port: str = "") -> tuple[str, ...]:
        """Return what is wrong with a port, or with the one that matchers name, in four expressions."""
        return (
            f"increase({m.INFINIBAND_SYMBOL_ERRORS}{port}[{window}]) > {settings.symbol_errors}",
            f"increase({m.INFINIBAND_LINK_DOWNED}{port}[{window}]) > 0",
            # 4 is active, 5 active-defer.
            f"{m.INFINIBAND_STATE}{port} < 4 and on (instance, device, port) {recording.PORT_WAS_ACTIVE}",
            f"{m.INFINIBAND_PRESENT}{port} == 0",
        )

    texts = (
        f' {{{{ printf "%.0f" .Value }}}} symbol errors in {window}.',
        f" The link went down in the last {window}.",
        " Its state is {{ .Value }} (4 is active).",
        " It is gone from /sys.",
    )
    found = "".join(
        each(
            f"max(({problem}) and on (instance, device, port) {m.INFINIBAND_INFO}{{host=%[3]q}})",
            "$labels.device $labels.port $labels.host",
            text,
        )
        for problem, text in zip(problems("{device=%[1]q,port=%[2]q}"), texts, strict=True)
    )
    return Alert(
        "hardware",
        "InfinibandLinkErrors",
        "warning",
        ("host", "device", "port"),
        at_host("group", "\n  or\n".join(problems()), "host, device, port", settings),
        settings.at_pace(settings.link_for),
        "An InfiniBand link makes errors, goes down, or is not active.",
        "Port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.host }}:"
        + found
        + each(
            f"group by (run) ({m.TRAINING_RANK_INFO}{{host=%q}})",
            "$labels.host",
            " Run {{ .Labels.run }} has ranks on this node.",
        ),
        keep_firing_for=settings.at_pace(settings.link_keep),
    )


def _matchers(port: str, other: str = "") -> str:
    """Return the label matchers of a series: those of the port, where one is asked for, and others."""
    both = ",".join(matcher for matcher in (port, other) if matcher)
    return f"{{{both}}}" if both else ""


def _of_port(
    settings: AlertSettings,
    name: str,
    problems: tuple[Problem, ...],
    for_: float,
    summary: str,
    severity: Literal["critical", "warning", "info"] = "warning",
    condition: str = "",
    keep: float = 0.0,
) -> Alert:
    """Return an alert with one series per port that has any of the problems, and the `condition` on its host."""
    told = "".join(
        each(
            f"max(({problem('device=%[1]q,port=%[2]q')}) and on ({PORT}) {m.INFINIBAND_INFO}{{host=%[3]q}})",
            "$labels.device $labels.port $labels.host",
            words,
        )
        for problem, words in problems
    )
    wrong = f"\n  or on ({PORT})\n".join(
        f"group by ({PORT}) (\n{indent(problem(''), '  ')}\n)" for problem, _ in problems
    )
    return Alert(
        "fabric",
        name,
        severity,
        ("host", "device", "port"),
        at_host("group", wrong, "host, device, port", settings) + condition,
        settings.at_pace(for_),
        summary,
        "Port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.host }}:" + told + runs_on_host(settings),
        keep_firing_for=settings.at_pace(keep) if keep else "",
    )


def _rate(settings: AlertSettings, row: m.Metric, more_than: float, a_minute: bool = False) -> Callable[[str], str]:
    """Return a problem: a counter that rises faster than so many a second, or a minute."""
    window, often = settings.at_pace(settings.link_window), "60 * " if a_minute else ""
    return lambda port: f"{often}rate({row}{_matchers(port)}[{window}]) > {more_than:g}"


def _rises(settings: AlertSettings, row: m.Metric) -> Callable[[str], str]:
    """Return a problem: a counter that rises at all."""
    window = settings.at_pace(settings.link_window)
    return lambda port: f"increase({row}{_matchers(port)}[{window}]) > 0"


def _port_down(settings: AlertSettings) -> tuple[Alert, ...]:
    window = settings.at_pace(settings.state_window)

    def down(port: str) -> str:
        state = latest(m.INFINIBAND_STATE, PORT, settings, _matchers(port))
        return f"{state} < 4 and on ({PORT}) {recording.PORT_WAS_ACTIVE}"  # 4 is active, 5 active-defer

    def gone(port: str) -> str:
        return f"{latest(m.INFINIBAND_PRESENT, PORT, settings, _matchers(port))} == 0"

    def alert(severity: Literal["critical", "warning"], spare: str, condition: str) -> Alert:
        return _of_port(
            settings,
            "InfinibandPortDown",
            (
                (lambda port: down(port) + spare, " Its state is {{ .Value }} (4 is active)."),
                (lambda port: gone(port) + spare, " It is gone from /sys."),
            ),
            settings.port_down_for,
            "A port that was in use has no link, or is gone.",
            severity,
            condition,
        )

    # Without a storage or management port a job goes on training.
    spare = f' unless on ({PORT}) last_over_time({m.INFINIBAND_INFO}{{role=~"management|storage"}}[{window}])'
    hurt = f"""
  and on (host)
group by (host) (last_over_time({m.TRAINING_RANK_INFO}[{window}]) and on (run) {recording.PAGES})"""
    return alert("critical", spare, hurt), alert("warning", "", "")


def _flapping(settings: AlertSettings) -> Alert:
    flaps = each(
        f"max({m.INFINIBAND_FLAPS}{{device=%[1]q,port=%[2]q}} and on ({PORT}) {m.INFINIBAND_INFO}{{host=%[3]q}})",
        "$labels.device $labels.port $labels.host",
        " {{ .Value }} flaps so far.",
    )
    return Alert(
        "fabric",
        "InfinibandLinkFlapping",
        "warning",
        ("host", "device", "port"),
        at_host("group", f"{latest(m.INFINIBAND_FLAPPING, PORT, settings)} == 1", "host, device, port", settings),
        "0s",  # the exporter has waited for three flaps, and holds the state for an hour after the last
        "A link goes down and comes back, again and again.",
        "Port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.host }} goes down and comes back."
        + flaps
        + runs_on_host(settings),
    )


def _slow_port(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.state_window)

    def slow(port: str) -> str:
        rate = f"min by ({PORT}) (last_over_time({m.INFINIBAND_RATE}{_matchers(port)}[{window}]))"
        return f"""\
{rate} * 8e-9 < on ({PORT}) {settings.rate_share:g} * 8e-9 * {latest(m.INFINIBAND_EXPECTED_RATE, PORT, settings)}
  and on ({PORT})
{latest(m.INFINIBAND_STATE, PORT, settings)} >= 4"""

    expected = each(
        f"max(8e-9 * {m.INFINIBAND_EXPECTED_RATE}{{device=%[1]q,port=%[2]q}} and on ({PORT}) "
        f"{m.INFINIBAND_INFO}{{host=%[3]q}})",
        "$labels.device $labels.port $labels.host",
        ' of {{ printf "%.0f" .Value }} Gb/s.',
    )
    return _of_port(
        settings,
        "InfinibandRateLow",
        ((slow, ' It runs at {{ printf "%.0f" .Value }}' + expected),),
        settings.rate_for,
        "A link runs slower than it did.",
    )


def _error_rate(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.bit_error_window)

    def bits(port: str) -> str:
        return f"""\
rate({m.INFINIBAND_SYMBOL_ERRORS}{_matchers(port)}[{window}])
  > on ({PORT}) {8 * settings.bit_errors:g} * {latest(m.INFINIBAND_RATE, PORT, settings)}"""

    # What is worse has been told of, and is in the longer window for a while after.
    told = """
  unless on (host, device, port)
ALERTS{alertname="InfinibandLinkErrors"}"""

    def fact(words: str) -> str:
        return f' {{{{ printf "%.1f" .Value }}}} {words}.'

    def rises(words: str) -> str:
        return f' {{{{ printf "%.0f" .Value }}}} {words} in {settings.at_pace(settings.link_window)}.'

    return _of_port(
        settings,
        "InfinibandErrorRate",
        (
            (bits, ' {{ printf "%.2g" .Value }} symbol errors a second.'),
            (
                _rate(settings, m.INFINIBAND_LINK_RECOVERY, settings.recoveries, a_minute=True),
                fact("recoveries of the link a minute"),
            ),
            (_rate(settings, m.INFINIBAND_RECEIVE_ERRORS, settings.receive_errors), fact("broken packets a second")),
            (_rises(settings, m.INFINIBAND_LINK_INTEGRITY), rises("local link integrity errors")),
            (_rises(settings, m.INFINIBAND_BUFFER_OVERRUN), rises("buffer overruns")),
            (_rises(settings, m.INFINIBAND_CORRUPT_PACKETS), rises("packets that were corrupted on their way")),
        ),
        settings.error_for,
        "A link makes more errors than a good one, and corrects or repeats most of them.",
        condition=told,
        keep=settings.link_keep,
    )


def _packet_loss(settings: AlertSettings) -> Alert:
    def loss(row: m.Metric, more_than: float, words: str) -> Problem:
        return _rate(settings, row, more_than), f' {{{{ printf "%.1f" .Value }}}} {words}.'

    return _of_port(
        settings,
        "InfinibandPacketLoss",
        (
            loss(m.INFINIBAND_ACK_TIMEOUTS, settings.ack_timeouts, "acknowledgements a second are missing"),
            loss(m.INFINIBAND_SLOW_RESTARTS, settings.slow_restarts, "slow restarts a second after loss"),
            loss(m.INFINIBAND_TRANSMIT_DISCARDS, settings.discards, "packets a second are dropped before sending"),
            loss(m.INFINIBAND_RECEIVE_DISCARDS, settings.discards, "packets a second are dropped on arrival"),
        ),
        settings.loss_for,
        "Packets to or from a port are lost.",
        keep=settings.link_keep,
    )


def _compute(settings: AlertSettings, rate: str) -> str:
    """Return a rate of the ports that collectives go over, without those of storage and management."""
    return (
        f"({rate} and on ({PORT}) "
        f'last_over_time({m.INFINIBAND_INFO}{{role="compute"}}[{settings.at_pace(settings.state_window)}]))'
    )


def _congestion(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.link_window)
    marked, received = (
        f"rate({row}%s[{window}])" for row in (m.INFINIBAND_CONGESTION_MARKED, m.INFINIBAND_RECEIVE_PACKETS)
    )

    def told(port: str) -> str:
        return f"{marked % port} / {received % port} > {settings.marked_share:g}"

    wait = _compute(settings, f"rate({m.INFINIBAND_TRANSMIT_WAIT}[{window}])")
    sent = f"rate({m.INFINIBAND_TRANSMIT_DATA}[{window}])"
    # A tick of waiting has no unit, and waiting costs nothing by itself: it is compared with the node's other rails,
    # and counts only where the port also sends less than they do.
    waits = f"""\
({wait}
  > on (instance) group_left ()
{settings.wait_factor:g} * quantile by (instance) (0.5, {wait}))
  and on ({PORT})
({sent}
  < on (instance) group_left ()
{settings.slow_rail_share:g} * quantile by (instance) (0.5, {_compute(settings, sent)}))"""

    return _of_port(
        settings,
        "InfinibandCongestion",
        (
            (
                lambda port: told(_matchers(port)),
                " {{ .Value | humanizePercentage }} of the packets it receives have met a queue.",
            ),
            (
                lambda port: f"{waits}{_one(port)}",
                " It waits for credit more than the node's other rails, and sends less.",
            ),
        ),
        settings.congestion_for,
        "A port sends or receives through queues.",
    )


def _one(port: str) -> str:
    """Return what restricts an expression that compares ports to one of them."""
    return f" and {m.INFINIBAND_TRANSMIT_DATA}{_matchers(port)}" if port else ""


def _rail_imbalance(settings: AlertSettings) -> Alert:
    sent = _compute(settings, f"rate({m.INFINIBAND_TRANSMIT_DATA}[{settings.at_pace(settings.link_window)}])")
    median = f"quantile by (instance) (0.5, {sent})"

    def behind(port: str) -> str:
        share = f"""\
{sent}
  / on (instance) group_left ()
({median} > {settings.rail_busy:g})
  < {settings.rail_share:g}"""
        return share + _one(port)

    return _of_port(
        settings,
        "RailImbalance",
        ((behind, " It sends {{ .Value | humanizePercentage }} of what the node's other rails send."),),
        settings.rail_for,
        "One rail of a node carries less than the others.",
    )


def _roce(settings: AlertSettings) -> Alert:
    window, state = settings.at_pace(settings.link_window), settings.at_pace(settings.state_window)

    def silent(port: str) -> str:
        return (
            f"rate({m.INFINIBAND_CONGESTION_MARKED}{_matchers(port)}[{window}]) > 0 and on ({PORT}) "
            f"rate({m.INFINIBAND_CONGESTION_NOTIFICATIONS_SENT}[{window}]) == 0"
        )

    def lossy(port: str) -> str:
        return (
            f"rate({m.INFINIBAND_PACKET_SEQUENCE_ERRORS}{_matchers(port)}[{window}]) > "
            f"{settings.sequence_errors:g} and on ({PORT}) "
            f'last_over_time({m.INFINIBAND_INFO}{{link_layer="Ethernet"}}[{state}])'
        )

    return _of_port(
        settings,
        "RoceMisconfigured",
        (
            (
                _rises(settings, m.INFINIBAND_CONGESTION_NOTIFICATIONS_IGNORED),
                " It ignores congestion notifications: DCQCN is off.",
            ),
            (silent, " It receives packets with the congestion mark and tells no sender."),
            (
                lossy,
                ' {{ printf "%.1f" .Value }} packets a second are lost on their way: priority flow control is off, or '
                "not for this traffic.",
            ),
        ),
        settings.roce_for,
        "A RoCE port is not set up for a lossless fabric.",
    )


def _efa(settings: AlertSettings) -> Alert:
    window = settings.at_pace(settings.link_window)

    def fact(words: str) -> str:
        return f' {{{{ printf "%.1f" .Value }}}} {words}.'

    return _of_port(
        settings,
        "EfaErrors",
        (
            (
                _rate(settings, m.INFINIBAND_IMPAIRED_CONNECTIONS, settings.efa_peer_errors),
                fact("connections a second are impaired"),
            ),
            (
                _rate(settings, m.INFINIBAND_UNRESPONSIVE_PEERS, settings.efa_peer_errors),
                fact("times a second a peer does not respond: look at the peer"),
            ),
            (
                _rate(settings, m.INFINIBAND_COMMAND_ERRORS, settings.efa_command_errors, a_minute=True),
                fact("commands a minute fail"),
            ),
            (_rises(settings, m.INFINIBAND_COMMANDS_LOST), " The adapter never completed a command."),
            (
                lambda port: f"increase({m.INFINIBAND_KEEP_ALIVES}{_matchers(port)}[{window}]) == 0",
                " The adapter gives no sign of life.",
            ),
        ),
        settings.link_for,  # one lost command is in the window for five minutes
        "An EFA adapter fails, or has peers that do.",
        keep=settings.link_keep,
    )


def _transceiver(settings: AlertSettings) -> Alert:
    return _of_port(
        settings,
        "InfinibandTransceiverHot",
        (
            (
                lambda port: (
                    latest(m.INFINIBAND_TEMPERATURE, PORT, settings, _matchers(port, 'sensor=~"Module.*"'))
                    + f" > {settings.transceiver_celsius:g}"
                ),
                " Its transceiver has {{ .Value }} degrees Celsius.",
            ),
        ),
        settings.transceiver_for,
        "A port's transceiver is too hot.",
    )


def _stuck(settings: AlertSettings) -> Alert:
    return Alert(
        "fabric",
        "InfinibandCounterStuck",
        "info",
        ("host", "device", "port", "counter"),
        at_host(
            "group",
            f"{latest(m.INFINIBAND_SATURATED, f'{PORT}, counter', settings)} == 1",
            "host, device, port, counter",
            settings,
        ),
        "0s",  # it does not end by itself
        "An error counter of a port stands at its highest value and counts no more.",
        "Counter {{ $labels.counter }} of port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.host }} counts "
        "no more: the alerts on it are blind until it is cleared.",
    )
