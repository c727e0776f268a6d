"""What the alerts on GPUs and on ports have in common: the host of a problem, and whose run it hurts."""

from __future__ import annotations

from textwrap import indent

from alerts import recording
from alerts.alert import each
from alerts.settings import AlertSettings
from flopwatch import catalogue as m

PORT = "instance, device, port"
GPU = "instance, uuid"


def at_host(by: str, problem: str, labels: str, settings: AlertSettings, memory: float | None = None) -> str:
    """Return the series of `problem`, aggregated by `by` over `labels`, with the host of the exporter they come from.

    One exporter is one host, so they are joined on `instance`: a GPU that never told its name has a host as well. What
    is known now is believed before what was, so that a node that was renamed has its new name at once; a driver that
    hangs, or an exporter that restarts, leaves what was known last, for `memory` seconds, as long as the problem itself
    is remembered. An exporter of which no host gets known makes an alert without one, but not within its first minutes:
    the host is recorded once a minute.
    """
    window = settings.at_pace(settings.state_window if memory is None else memory)
    return f"""{by} by ({labels}) (
  (
{indent(problem, "    ")}
  )
  * on (instance) group_left (host)
  topk by (instance) (1,
    {recording.HOST}
      or on (instance)
    last_over_time({recording.HOST}[{window}])
      or on (instance)
    group by (instance) ({m.FLOPWATCH_INFO} offset {settings.at_pace(settings.new_host)})
  )
)"""


def latest(metric: m.Metric, labels: str, settings: AlertSettings, matchers: str = "") -> str:
    """Return a state as it was last told, which a hung driver or a restarting exporter does not take back."""
    return f"max by ({labels}) (last_over_time({metric}{matchers}[{settings.at_pace(settings.state_window)}]))"


def ranks_of_gpu(settings: AlertSettings) -> str:
    """Return a template that names the ranks of the GPU `$labels.uuid`; a GPU without a uuid has none."""
    window = settings.at_pace(settings.state_window)
    ranks = f'group by (run, rank) (last_over_time({m.TRAINING_RANK_INFO}{{uuid=%q,uuid!=""}}[{window}]))'
    return each(ranks, "$labels.uuid", " Rank {{ .Labels.rank }} of run {{ .Labels.run }} runs on it.")


def runs_on_host(settings: AlertSettings) -> str:
    """Return a template that names the runs with ranks on the host `$labels.host`, and how many."""
    window = settings.at_pace(settings.state_window)
    ranks = f'group by (run, rank) (last_over_time({m.TRAINING_RANK_INFO}{{host=%q,host!=""}}[{window}]))'
    return each(
        f"count by (run) ({ranks})",
        "$labels.host",
        " Run {{ .Labels.run }} has {{ .Value }} of its ranks on this node.",
    )
