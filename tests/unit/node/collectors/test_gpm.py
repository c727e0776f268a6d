"""Activity counters against the simulated driver's GPM functions."""

from __future__ import annotations

import math
from typing import Any

import pynvml
import pytest

from flopwatch.catalogue import (
    GPU_DRAM_ACTIVE_SECONDS_TOTAL,
    GPU_GRAPHICS_ACTIVE_SECONDS_TOTAL,
    GPU_MIG_DRAM_ACTIVE_SECONDS_TOTAL,
    GPU_MIG_PROFILED_SECONDS_TOTAL,
    GPU_MIG_SM_ACTIVE_SECONDS_TOTAL,
    GPU_MIG_TENSOR_ACTIVE_SECONDS_TOTAL,
    GPU_PIPE_ACTIVE_SECONDS_TOTAL,
    GPU_PROFILED_SECONDS_TOTAL,
    GPU_SM_ACTIVE_SECONDS_TOTAL,
    GPU_SM_OCCUPANCY_SECONDS_TOTAL,
    GPU_TENSOR_ACTIVE_SECONDS_TOTAL,
)
from flopwatch.node.collectors.nvml.gpm import (
    MIG_INSTANCE,
    PIPES,
    TRAFFIC,
    WHOLE_GPU,
    GpmActivity,
    Meter,
    mig_instance,
    whole_gpu,
)

METRICS = (*WHOLE_GPU, *PIPES, *TRAFFIC)


class Driver:
    """A driver whose GPM answers are these means, and which knows what samples it has given out."""

    NVMLError = pynvml.NVMLError
    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION

    def __init__(self, **means: float) -> None:
        self.means = {int(name[1:]): mean for name, mean in means.items()}
        self.error = 0
        self.given: list[Any] = []
        self.now = 100.0

    def nvmlGpmSampleAlloc(self) -> Any:
        self.given.append(pynvml.c_nvmlGpmSample_t(pynvml.struct_c_nvmlGpmSample_t()))
        return self.given[-1]

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.given.remove(sample)

    def take(self, sample: Any) -> None:
        if self.error != 0:
            raise pynvml.NVMLError(self.error)

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        for index in range(request.numMetrics):
            metric = request.metrics[index]
            there = metric.metricId in self.means
            metric.nvmlReturn = pynvml.NVML_SUCCESS if there else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = self.means.get(metric.metricId, 0)

    def clock(self) -> float:
        return self.now


def after(driver: Driver, meter: Meter, seconds: float) -> GpmActivity:
    driver.now += seconds
    meter.advance()
    return meter.activity


def test_metric_numbers_are_those_of_the_vendors_package() -> None:
    assert list(WHOLE_GPU) == [
        pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
        pynvml.NVML_GPM_METRIC_SM_UTIL,
        pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    ]
    assert list(PIPES) == [
        pynvml.NVML_GPM_METRIC_INTEGER_UTIL,
        pynvml.NVML_GPM_METRIC_FP64_UTIL,
        pynvml.NVML_GPM_METRIC_FP32_UTIL,
        pynvml.NVML_GPM_METRIC_FP16_UTIL,
        pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL,
        pynvml.NVML_GPM_METRIC_DMMA_TENSOR_UTIL,
        pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL,
    ]
    assert TRAFFIC == (
        pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
        pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
        pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
        pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    )


def test_means_times_intervals_add_up_and_what_every_card_has_starts_at_0() -> None:
    driver = Driver(_1=100, _2=80, _3=25, _5=50, _10=40, _12=10, _13=0, _20=2, _61=1000)
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    meter.advance()
    assert list(whole_gpu(meter.activity)) == [
        (GPU_PROFILED_SECONDS_TOTAL, (), 0),
        (GPU_GRAPHICS_ACTIVE_SECONDS_TOTAL, (), 0),
        (GPU_SM_ACTIVE_SECONDS_TOTAL, (), 0),
        (GPU_SM_OCCUPANCY_SECONDS_TOTAL, (), 0),
        (GPU_TENSOR_ACTIVE_SECONDS_TOTAL, (), 0),
        (GPU_DRAM_ACTIVE_SECONDS_TOTAL, (), 0),
    ]
    after(driver, meter, 10)
    driver.means[2] = 40
    activity = after(driver, meter, 5)
    assert list(whole_gpu(activity)) == [
        (GPU_PROFILED_SECONDS_TOTAL, (), 15),
        (GPU_GRAPHICS_ACTIVE_SECONDS_TOTAL, (), 15),
        (GPU_SM_ACTIVE_SECONDS_TOTAL, (), 10),
        (GPU_SM_OCCUPANCY_SECONDS_TOTAL, (), 3.75),
        (GPU_TENSOR_ACTIVE_SECONDS_TOTAL, (), 7.5),
        (GPU_DRAM_ACTIVE_SECONDS_TOTAL, (), 6),
        (GPU_PIPE_ACTIVE_SECONDS_TOTAL, ("fp32",), 1.5),
    ]
    assert activity.bytes == {20: 15 * 2 * 2**20, 61: 15 * 1000 * 2**20}


def test_what_a_card_does_not_measure_is_absent() -> None:
    driver = Driver(_2=50, _10=50)
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    meter.advance()
    assert list(whole_gpu(after(driver, meter, 10))) == [
        (GPU_PROFILED_SECONDS_TOTAL, (), 10),
        (GPU_SM_ACTIVE_SECONDS_TOTAL, (), 5),
        (GPU_DRAM_ACTIVE_SECONDS_TOTAL, (), 5),
    ]


@pytest.mark.parametrize("mean", [math.nan, math.inf, -1.0])
def test_a_mean_that_is_none_is_a_gap_in_all_activities(mean: float) -> None:
    driver = Driver(_2=50, _5=20)
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    meter.advance()
    after(driver, meter, 10)
    driver.means[5] = mean
    activity = after(driver, meter, 10)
    assert (activity.profiled, activity.seconds) == (10, {2: 5, 5: 2})
    driver.means[5] = 30
    activity = after(driver, meter, 10)
    assert (activity.profiled, activity.seconds) == (20, {2: 10, 5: 5})


def test_samples_too_close_together_are_not_taken() -> None:
    driver = Driver(_2=50)
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    meter.advance()
    assert after(driver, meter, 0.05).profiled == 0
    assert after(driver, meter, 0.95).profiled == pytest.approx(1)


def test_an_error_is_a_gap_from_the_sample_before_to_the_next_one() -> None:
    driver = Driver(_2=100)
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    meter.advance()
    after(driver, meter, 10)
    driver.error = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(pynvml.NVMLError):
        after(driver, meter, 10)
    driver.error = 0
    assert after(driver, meter, 10).profiled == 10
    assert after(driver, meter, 10).profiled == 20


def test_two_samples_are_enough_and_are_given_back() -> None:
    driver = Driver(_2=100)
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    for _ in range(20):
        after(driver, meter, 1)
    assert len(driver.given) == 2
    meter.close()
    assert driver.given == []
    meter.close()


def test_counters_go_on_in_another_meter() -> None:
    driver, activity = Driver(_2=100), GpmActivity()
    for expected in (10, 20):
        meter = Meter(driver, driver.take, METRICS, activity, driver.clock)
        meter.advance()
        assert after(driver, meter, 10).seconds == {2: expected}
        meter.close()


def test_a_mig_instance_has_four_counters() -> None:
    driver = Driver(_1=1, _2=50, _5=25, _10=10)
    meter = Meter(driver, driver.take, tuple(MIG_INSTANCE), GpmActivity(), driver.clock)
    meter.advance()
    assert list(mig_instance(after(driver, meter, 10), "7")) == [
        (GPU_MIG_PROFILED_SECONDS_TOTAL, ("7",), 10),
        (GPU_MIG_SM_ACTIVE_SECONDS_TOTAL, ("7",), 5),
        (GPU_MIG_TENSOR_ACTIVE_SECONDS_TOTAL, ("7",), 2.5),
        (GPU_MIG_DRAM_ACTIVE_SECONDS_TOTAL, ("7",), 1),
    ]


def test_the_vendors_structure_is_filled_as_the_driver_expects() -> None:
    driver, requests = Driver(_2=50), []
    works = driver.nvmlGpmMetricsGet

    def noted(request: Any) -> None:
        requests.append((request.version, [request.metrics[index].metricId for index in range(request.numMetrics)]))
        works(request)

    driver.nvmlGpmMetricsGet = noted  # type: ignore[method-assign]
    meter = Meter(driver, driver.take, METRICS, GpmActivity(), driver.clock)
    meter.advance()
    after(driver, meter, 1)
    assert requests == [(1, [1, 2, 3, 5, 10, 4, 11, 12, 13, 7, 8, 9, 20, 21, 60, 61])]
