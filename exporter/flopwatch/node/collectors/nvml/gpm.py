"""NVML's GPU performance monitoring (GPM): activity of SMs, pipes, memory and links, as counters.

NVML returns means over the time between two samples of the hardware counters. A counter is the sum of mean times
interval. https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html. Before Hopper only DCGM has these
numbers. GPM and profilers (Nsight, CUPTI) do not disturb each other on Hopper and later, according to NVIDIA
(https://github.com/NVIDIA/DCGM/issues/62). If samples fail nevertheless, the profiled seconds do not rise.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flopwatch import catalogue as m
from flopwatch.node.collectors.nvml.fields import NvmlLibrary, Structure, Value, table

SHORTEST_INTERVAL = 0.1  # seconds between two samples, the least that NVML allows
RETRY_SECONDS = 60.0  # after the driver refused a sample to this user
MEBIBYTE = 1 << 20

# By nvmlGpmMetricId_t, in percent.
WHOLE_GPU = {metric.id: metric.row for metric in table("gpm")}
MIG_INSTANCE = {metric.id: metric.row for metric in table("gpm_mig")}
PIPES = {metric.id: metric.labels[0] for metric in table("gpm_pipes")}
PCIE_SENT, PCIE_RECEIVED, NVLINK_RECEIVED, NVLINK_SENT = 20, 21, 60, 61  # in MiB/s
TRAFFIC = (PCIE_SENT, PCIE_RECEIVED, NVLINK_RECEIVED, NVLINK_SENT)


@dataclass
class GpmActivity:
    """Totals of a GPU or MIG instance: seconds covered by samples, active seconds or moved bytes by GPM metric id."""

    profiled: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, float] = field(default_factory=dict)

    def add(self, means: dict[int, float], interval: float) -> None:
        """Add the mean of each metric, in percent or MiB/s, over `interval` seconds to the totals."""
        for metric, mean in means.items():
            if metric in TRAFFIC:
                self.bytes[metric] = self.bytes.get(metric, 0.0) + mean * MEBIBYTE * interval
            else:
                self.seconds[metric] = self.seconds.get(metric, 0.0) + mean / 100 * interval


class Meter:
    """Integrator of GPM means of one GPU or GPU instance into `activity`. `take` fills an NVML sample."""

    def __init__(
        self,
        nvml: NvmlLibrary,
        take: Callable[[Structure], object],
        metrics: tuple[int, ...],
        activity: GpmActivity,
        clock: Callable[[], float],
    ) -> None:
        self.activity = activity
        self._nvml, self._take, self._clock = nvml, take, clock
        self._before: Any = None
        self._after: Any = None
        self._taken_at: float | None = None
        self._refused_at: float | None = None
        self._seen: set[int] = set()  # activities that had a number before
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(metrics)
        self._answers = {metric: self._request.metrics[index] for index, metric in enumerate(metrics)}
        for metric, answer in self._answers.items():
            answer.metricId = metric

    def advance(self) -> bool:
        """Take a sample and add the means since the last one. Raises NVMLError.

        Return False without a sample if the last one is too recent, or if the driver refused one in the last minute.
        """
        now = self._clock()
        if self._taken_at is not None and now - self._taken_at < SHORTEST_INTERVAL:
            return False
        if self._refused_at is not None and now - self._refused_at < RETRY_SECONDS:
            return False
        taken_at, self._taken_at = self._taken_at, None
        if self._after is None:
            self._after = self._nvml.nvmlGpmSampleAlloc()
        self._take(self._after)
        self._before, self._after = self._after, self._before
        if taken_at is not None:
            self._count(self._means(self._after, self._before), now - taken_at)
        self._taken_at, self._refused_at = now, None
        return True

    @property
    def refused(self) -> bool:
        """Return whether the driver refused the last sample for lack of permission."""
        return self._refused_at is not None

    def refuse(self) -> None:
        """Keep the totals and take no sample for a minute, because the driver refused one.

        Containers without privileges were refused after some minutes: https://github.com/NVIDIA/DCGM/issues/214.
        """
        self.close()
        self._refused_at = self._clock()

    def _count(self, means: dict[int, float], interval: float) -> None:
        """Add the means to the totals. If an activity that was present before is missing, add traffic only."""
        activities = means.keys() - set(TRAFFIC)
        if not activities or self._seen - activities:
            means = {metric: mean for metric, mean in means.items() if metric in TRAFFIC}
        else:
            self._seen |= activities
            self.activity.profiled += interval
        self.activity.add(means, interval)

    def _means(self, older: Any, newer: Any) -> dict[int, float]:
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(self._request)
        return {
            metric: mean
            for metric, answer in self._answers.items()
            if answer.nvmlReturn == 0 and math.isfinite(mean := answer.value) and mean >= 0
        }

    def close(self) -> None:
        """Free the two NVML samples. The totals are kept."""
        for sample in (self._before, self._after):
            if sample is not None:
                with suppress(self._nvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)
        self._before = self._after = self._taken_at = None


def whole_gpu(activity: GpmActivity) -> Iterator[Value]:
    """Yield the activity readings of a GPU. An execution pipe (such as fp16) has a series only after its first use."""
    yield m.GPU_PROFILED_SECONDS_TOTAL, (), activity.profiled
    for metric, row in WHOLE_GPU.items():
        if metric in activity.seconds or not activity.seconds:
            yield row, (), activity.seconds.get(metric, 0.0)
    for metric, pipe in PIPES.items():
        if activity.seconds.get(metric, 0.0) > 0:
            yield m.GPU_PIPE_ACTIVE_SECONDS_TOTAL, (pipe,), activity.seconds[metric]


def mig_instance(activity: GpmActivity, gpu_instance: str) -> Iterator[Value]:
    """Yield the activity readings of the MIG GPU instance with the id `gpu_instance`."""
    yield m.GPU_MIG_PROFILED_SECONDS_TOTAL, (gpu_instance,), activity.profiled
    for metric, row in MIG_INSTANCE.items():
        if metric in activity.seconds or not activity.seconds:
            yield row, (gpu_instance,), activity.seconds.get(metric, 0.0)
