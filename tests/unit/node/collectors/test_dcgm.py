"""The DCGM backend against a small libdcgm built from the documented ABI."""

from __future__ import annotations

import ctypes
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from flopwatch.catalogue import GPU_INFO, Sample
from flopwatch.node.collectors import Unsupported
from flopwatch.node.collectors.dcgm import Dcgm, HostEngineError, abi, build
from flopwatch.node.scrape.reader import Reader, Spec
from flopwatch.settings import DCGM_FIELDS, ExporterSettings, SettingsError, dcgm_fields
from tests.support.fake_dcgm import compile_library

A100, H100 = "value 1 -1 63 i 0x80000\n", "value 1 -1 63 i 0x90000\n"
# Two GPUs, which DCGM numbers in the opposite order.
GPUS = """
gpus 0 1
value 1 0 54 s GPU-b
value 1 1 54 s GPU-a
"""
SWITCH = """
switches 0
value 3 0 866 i 0
value 3 0 867 i 0x5
value 3 0 868 i 0
value 3 0 869 i 0
"""


class HostEngine:
    """A host engine scripted by a file, and the collector that reads it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.script = folder / "dcgm.txt"
        self.calls_file = folder / "dcgm.txt.calls"
        self.library = folder / "libdcgm.so.4"
        self.gpus = folder / "gpus.json"
        self.now = 0.0
        shutil.copy(library, self.library)  # a library of its own for each test
        self.gpus.write_text(
            json.dumps(
                {
                    uuid: dict.fromkeys(GPU_INFO.labels, "") | {"gpu": gpu, "uuid": uuid}
                    for gpu, uuid in (("0", "GPU-a"), ("1", "GPU-b"))
                }
            )
        )

    def set_script(self, text: str) -> None:
        self.script.write_text(text)

    def calls(self) -> list[str]:
        """Return the calls since the last time."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls

    def collector(self, address: str = "localhost:5555", ids: str = "1001-1016") -> Dcgm:
        load = partial(abi.Library, str(self.library))
        return Dcgm(address, self.gpus, load, lambda: self.now, dcgm_fields(ids))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("dcgm"))


@pytest.fixture
def engine(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> HostEngine:
    engine = HostEngine(tmp_path, library)
    monkeypatch.setenv("FAKE_DCGM", str(engine.script))
    return engine


def series(samples: list[Sample]) -> dict[str, float]:
    """Return the samples as `name{label values}`, in base units."""
    return {f"{row}{{{','.join(labels)}}}": number * row.scale for row, labels, number in samples}


def test_structures_are_laid_out_as_documented() -> None:
    value = abi.FieldValue
    assert ctypes.sizeof(value) == 4128
    assert [
        getattr(value, name).offset
        for name in ("version", "entityGroupId", "entityId", "fieldId", "fieldType", "status", "ts", "value")
    ] == [0, 4, 8, 12, 14, 16, 24, 32]


def test_the_series_of_a_node(engine: HostEngine) -> None:
    engine.set_script(
        GPUS
        + A100
        + SWITCH
        + """
at 1000
value 1 1 153 i 41
value 1 0 153 i 40
value 1 1 572 s 1820123
value 1 1 573 i 4
value 1 1 574 i 1
value 1 1 575 i 0
value 1 1 1004 d 0.5
value 1 1 1001 d 0.9
value 1 1 1007 d 0.25
value 1 1 1015 d 0.125
value 1 1 1009 i 2000000
value 1 1 1011 i 1024
value 3 0 858 i 55
value 3 0 859 i 105
value 3 0 860 i 110
value 3 0 861 i 8
value 3 0 862 i 16
value 3 0 856 i 0
value 3 0 857 i 20034
value 3 0 864 i 0
links 0x000103 0x000203 0x000303 0x000001
value 6 -1 870 i 2
value 6 0x303 870 i 0
value 6 -1 784 i 0
value 6 -1 787 i 0
value 6 0x203 787 i 3
cpus 0
value 7 0 1130 d 120.5
value 7 0 1133 d 900
"""
    )
    collector = engine.collector()
    collector.read()
    engine.set_script(engine.script.read_text().replace("at 1000", "at 1010"))
    assert series(collector.read()) == {
        "gpu_temperature_margin_celsius{1,GPU-b}": 40,
        "gpu_temperature_margin_celsius{0,GPU-a}": 41,
        "gpu_chassis_info{0,GPU-a,1820123,4,1,0}": 1,
        "flopwatch_profiling_paused{0,GPU-a}": 0,
        "gpu_profiled_seconds_total{0,GPU-a}": 10,
        "gpu_tensor_active_seconds_total{0,GPU-a}": 5,
        "gpu_graphics_active_seconds_total{0,GPU-a}": 9,
        "gpu_pipe_active_seconds_total{0,GPU-a,fp32}": 2.5,
        "gpu_pipe_active_seconds_total{0,GPU-a,tensor_dfma}": 1.25,
        "gpu_pcie_transmit_bytes_total{0,GPU-a}": 20_000_000,
        "nvlink_transmit_raw_bytes_total{0,GPU-a}": 10_240,
        "nvlink_switch_temperature_celsius{0000:05:00.0}": 55,
        "nvlink_switch_temperature_limit_celsius{0000:05:00.0,slowdown}": 105,
        "nvlink_switch_temperature_limit_celsius{0000:05:00.0,shutdown}": 110,
        "nvlink_switch_transmit_bytes_total{0000:05:00.0}": 1 << 20,
        "nvlink_switch_receive_bytes_total{0000:05:00.0}": 2 << 20,
        "nvlink_switch_last_sxid_id{0000:05:00.0,fatal}": 0,
        "nvlink_switch_last_sxid_id{0000:05:00.0,non_fatal}": 20034,
        "nvlink_switch_reset_required{0000:05:00.0}": 0,
        "nvlink_switch_links{0000:05:00.0,active}": 2,
        "nvlink_switch_links{0000:05:00.0,off}": 1,
        "nvlink_switch_errors_total{0000:05:00.0,replay}": 0,
        "nvlink_switch_errors_total{0000:05:00.0,crc}": 3,
        "nvlink_switch_link_errors_total{0000:05:00.0,2,crc}": 3,
        "host_cpu_power_watts{0}": 120.5,
        "host_module_power_watts{0}": 900,
    }


def activity(engine: HostEngine, collector: Dcgm, at: float, text: str) -> dict[str, float]:
    engine.set_script("gpus 0\nvalue 1 0 54 s GPU-a\n" + A100 + f"at {at}\n{text}\n")
    return series(collector.read())


def test_a_mean_counts_for_the_time_since_the_sample_before(engine: HostEngine) -> None:
    collector = engine.collector()
    assert activity(engine, collector, 1000, "value 1 0 1002 d 0.5") == {
        "flopwatch_profiling_paused{0,GPU-a}": 0,
        "gpu_profiled_seconds_total{0,GPU-a}": 0,
        "gpu_sm_active_seconds_total{0,GPU-a}": 0,
    }
    seconds = []
    for at, mean in ((1010, 0.5), (1010, 0.5), (1030, 0.25), (1500, 1), (1490, 1), (1510, 0)):
        samples = activity(engine, collector, at, f"value 1 0 1002 d {mean}")
        seconds.append(
            (samples["gpu_profiled_seconds_total{0,GPU-a}"], samples["gpu_sm_active_seconds_total{0,GPU-a}"])
        )
    # 470 s without a sample are a gap but for the ten seconds before it; a clock that went back adds nothing.
    assert seconds == [(10, 5), (10, 5), (30, 10), (40, 20), (40, 20), (50, 20)]


@pytest.mark.parametrize("how", ["paused", "status 1 0 1002 -54\nstatus 1 0 1004 -54"])
def test_paused_profiling_is_a_marked_gap(engine: HostEngine, how: str) -> None:
    collector = engine.collector()
    busy = "value 1 0 1002 d 0.5\nvalue 1 0 1004 d 0.25\n"
    activity(engine, collector, 1000, busy)
    reads = [
        activity(engine, collector, at, text)
        for at, text in ((1010, busy), (1020, busy + how), (1030, busy + how), (1040, busy), (1050, busy))
    ]
    assert [
        [
            samples[f"{name}{{0,GPU-a}}"]
            for name in (
                "flopwatch_profiling_paused",
                "gpu_profiled_seconds_total",
                "gpu_sm_active_seconds_total",
                "gpu_tensor_active_seconds_total",
            )
        ]
        for samples in reads
    ] == [[0, 10, 5, 2.5], [1, 10, 5, 2.5], [1, 10, 5, 2.5], [0, 10, 5, 2.5], [0, 20, 10, 5]]


def test_profiling_that_was_paused_from_the_start_is_reported_without_counters(engine: HostEngine) -> None:
    assert activity(engine, engine.collector(), 1000, "value 1 0 1002 d 0\npaused") == {
        "flopwatch_profiling_paused{0,GPU-a}": 1
    }


@pytest.mark.parametrize(
    "how",
    [
        "value 1 0 1002 d unsupported",
        "value 1 0 1002 d forbidden",
        "status 1 0 1002 -6",
        "status 1 0 1002 -17",
        "status 1 0 1002 -36",
        "return dcgmWatchFields:1002 -36",
        "",
    ],
)
def test_profiling_the_card_does_not_have_is_not_paused(engine: HostEngine, how: str) -> None:
    assert activity(engine, engine.collector(), 1000, how) == {}


def test_a_part_that_is_missing_for_once_makes_a_gap_of_all(engine: HostEngine) -> None:
    collector = engine.collector()
    both = "value 1 0 1002 d 0.5\nvalue 1 0 1005 d 0.5"
    activity(engine, collector, 1000, both)
    activity(engine, collector, 1010, both)
    samples = activity(engine, collector, 1020, "value 1 0 1002 d 0.5\nstatus 1 0 1005 -15")
    assert (samples["gpu_profiled_seconds_total{0,GPU-a}"], samples["gpu_sm_active_seconds_total{0,GPU-a}"]) == (10, 5)


def test_gpus_whose_activity_nvml_reports_are_not_profiled(engine: HostEngine) -> None:
    engine.set_script(GPUS + H100 + "value 1 0 63 i 0x80000\nat 1000\nvalue 1 -1 1002 d 0.5\nvalue 1 -1 153 i 40")
    assert series(engine.collector().read()) == {
        "gpu_temperature_margin_celsius{1,GPU-b}": 40,
        "flopwatch_profiling_paused{1,GPU-b}": 0,
        "gpu_profiled_seconds_total{1,GPU-b}": 0,
        "gpu_sm_active_seconds_total{1,GPU-b}": 0,
        "gpu_temperature_margin_celsius{0,GPU-a}": 40,
    }


def test_a_field_the_host_engine_refuses_does_not_cost_the_others(engine: HostEngine) -> None:
    engine.set_script(
        GPUS + A100 + "return dcgmWatchFields:572 -13\nreturn dcgmWatchFields:1012 -38\nat 1000\n"
        "value 1 0 153 i 40\nvalue 1 0 1004 d 0.5\nvalue 1 0 1012 i 7\nvalue 1 0 1013 d 0.5"
    )
    collector = engine.collector()
    assert series(collector.read()) == {
        "gpu_temperature_margin_celsius{1,GPU-b}": 40,
        "flopwatch_profiling_paused{1,GPU-b}": 0,
        "gpu_profiled_seconds_total{1,GPU-b}": 0,
        "gpu_tensor_active_seconds_total{1,GPU-b}": 0,
    }


@pytest.mark.parametrize(
    "how",
    [
        "status 1 0 153 -6",
        "status 1 0 153 -14",
        "status 1 0 153 -17",
        "value 1 0 153 i blank",
        "value 1 0 153 i unsupported",
        "value 1 0 153 i forbidden",
        "value 1 0 153 d blank",
        "value 1 0 153 d unsupported",
        "value 1 0 153 s text",
    ],
)
def test_what_is_blank_or_failed_is_absent_and_the_rest_is_there(engine: HostEngine, how: str) -> None:
    engine.set_script(GPUS + H100 + f"value 1 -1 153 i 40\n{how}\nvalue 1 0 572 s S\nvalue 1 0 573 i blank")
    assert series(engine.collector().read()) == {
        "gpu_chassis_info{1,GPU-b,S,,,}": 1,
        "gpu_temperature_margin_celsius{0,GPU-a}": 40,
    }


@pytest.mark.parametrize("code", [-18, -19, -67])
def test_a_lost_gpu_has_no_series_while_the_others_go_on(engine: HostEngine, code: int) -> None:
    script = GPUS + A100 + "at {}\nvalue 1 -1 153 i 40\nvalue 1 -1 1002 d 0.5\n"
    engine.set_script(script.format(1000))
    collector = engine.collector()
    collector.read()
    engine.set_script(script.format(1010) + f"status 1 0 -1 {code}")
    assert series(collector.read()) == {
        "gpu_temperature_margin_celsius{0,GPU-a}": 40,
        "flopwatch_profiling_paused{0,GPU-a}": 0,
        "gpu_profiled_seconds_total{0,GPU-a}": 10,
        "gpu_sm_active_seconds_total{0,GPU-a}": 5,
    }


def test_the_index_comes_from_nvml_where_the_inventory_does_not_have_the_gpu(engine: HostEngine) -> None:
    engine.set_script("gpus 0\n" + H100 + "value 1 0 54 s GPU-new\nvalue 1 0 52 i 7\nvalue 1 0 153 i 40")
    assert series(engine.collector().read()) == {"gpu_temperature_margin_celsius{7,GPU-new}": 40}


def test_switch_counters_only_rise_through_a_reset(engine: HostEngine) -> None:
    collector = engine.collector()
    script = SWITCH + "value 3 0 859 i 105\nlinks 0x103\n"
    counted = []
    for traffic, errors in ((80, "i 5"), (88, "i 6"), (8, "i 1"), (8, "i blank"), (16, "i 2")):
        engine.set_script(script + f"value 3 0 861 i {traffic}\nvalue 6 -1 785 {errors}")
        samples = series(collector.read())
        counted.append(
            (
                samples["nvlink_switch_transmit_bytes_total{0000:05:00.0}"] / (1 << 20),
                samples["nvlink_switch_errors_total{0000:05:00.0,recovery}"],
                samples["nvlink_switch_link_errors_total{0000:05:00.0,1,recovery}"],
            )
        )
    assert counted == [(10, 5, 5), (11, 6, 6), (12, 7, 7), (12, 7, 7), (13, 8, 8)]


def test_switch_traffic_without_a_documented_unit_is_left_out(engine: HostEngine) -> None:
    engine.set_script("switches 3\nvalue 3 3 858 i 60\nvalue 3 3 861 i 80\n")
    assert series(engine.collector().read()) == {"nvlink_switch_temperature_celsius{switch3}": 60}


def test_links_with_errors_are_bounded(engine: HostEngine) -> None:
    engine.set_script(
        SWITCH
        + "links "
        + " ".join(hex(number << 8 | 3) for number in range(64))
        + "\n"
        + "".join(f"value 6 {hex(number << 8 | 3)} 788 i {number}\n" for number in range(64))
    )
    samples = series(engine.collector().read())
    links = [name for name in samples if "link_errors" in name]
    assert samples["nvlink_switch_errors_total{0000:05:00.0,ecc}"] == sum(range(64))
    assert sorted(links) == sorted(f"nvlink_switch_link_errors_total{{0000:05:00.0,{n},ecc}}" for n in range(48, 64))


def test_one_kind_of_entity_that_fails_does_not_cost_the_others(engine: HostEngine) -> None:
    engine.set_script(GPUS + H100 + "return dcgmGetEntityGroupEntities -33\nvalue 1 -1 153 i 40")
    assert series(engine.collector().read()) == {
        "gpu_temperature_margin_celsius{1,GPU-b}": 40,
        "gpu_temperature_margin_celsius{0,GPU-a}": 40,
    }


def test_without_a_host_engine_the_error_names_the_remedy_and_the_next_try_waits(engine: HostEngine) -> None:
    engine.set_script("return dcgmConnect_v2 -21")
    collector = engine.collector()
    tries = []
    for now in (0, 0.5, 1, 2.5, 3, 6.5, 7):
        engine.now = now
        with pytest.raises(HostEngineError) as caught:
            collector.read()
        tries.append("dcgmConnect_v2 localhost:5555 1500 ms" in engine.calls())
    assert str(caught.value) == (
        "no DCGM host engine answers at localhost:5555: start one (systemctl start nvidia-dcgm) or correct --dcgm "
        "(dcgmConnect_v2: the connection to the host engine is gone (-21))"
    )
    assert tries == [True, False, True, False, True, False, True]


def test_a_lost_connection_is_opened_again_and_the_counters_go_on(engine: HostEngine) -> None:
    collector = engine.collector()
    activity(engine, collector, 1000, "value 1 0 1002 d 0.5")
    activity(engine, collector, 1010, "value 1 0 1002 d 0.5")
    engine.calls()
    with pytest.raises(HostEngineError):
        activity(engine, collector, 1020, "return dcgmEntitiesGetLatestValues -21")
    assert engine.calls()[-1] == "dcgmDisconnect"
    engine.now = 1
    assert activity(engine, collector, 1030, "value 1 0 1002 d 0.5")["gpu_sm_active_seconds_total{0,GPU-a}"] == 15
    assert engine.calls()[0] == "dcgmConnect_v2 localhost:5555 1500 ms"


def test_a_request_that_fails_as_a_whole_is_an_error_and_a_new_connection(engine: HostEngine) -> None:
    engine.set_script(GPUS + H100 + "return dcgmEntitiesGetLatestValues -57")
    with pytest.raises(HostEngineError, match=r"driver time-out \(-57\) \(host engine at localhost:5555\)"):
        engine.collector().read()


def test_a_host_engine_that_refuses_everything_is_an_error(engine: HostEngine) -> None:
    engine.set_script(GPUS + "return dcgmWatchFields -17")
    with pytest.raises(HostEngineError, match=r"dcgmWatchFields: no permission \(-17\)"):
        engine.collector().read()


def test_different_releases_on_both_sides_are_named(engine: HostEngine) -> None:
    engine.set_script("return dcgmConnect_v2 -12")
    with pytest.raises(HostEngineError, match="install the libdcgm of the host engine's release here"):
        engine.collector().read()


def test_without_libdcgm_the_source_is_not_supported(tmp_path: Path) -> None:
    collector = build("localhost:5555", str(tmp_path / "gpus.json"), "1004", str(tmp_path / "libdcgm.so.4"))
    with pytest.raises(Unsupported, match="install datacenter-gpu-manager-4-core, or leave out --dcgm"):
        collector.read()


def test_a_socket_is_distinguished_from_a_port(engine: HostEngine) -> None:
    for address in ("/tmp/nv-hostengine", "unix:/tmp/nv-hostengine", "gpu7:5555"):
        engine.set_script("")
        engine.collector(address).read()
    assert [call for call in engine.calls() if call.startswith("dcgmConnect")] == [
        "dcgmConnect_v2 unix /tmp/nv-hostengine 1500 ms",
        "dcgmConnect_v2 unix /tmp/nv-hostengine 1500 ms",
        "dcgmConnect_v2 gpu7:5555 1500 ms",
    ]


def test_closing_gives_everything_back_and_reading_on_connects_again(engine: HostEngine) -> None:
    engine.set_script("gpus 0\nvalue 1 0 54 s GPU-a\n" + H100)
    collector = engine.collector()
    collector.read()
    engine.calls()
    collector.close()
    assert engine.calls() == ["dcgmUnwatchFields", "dcgmFieldGroupDestroy", "dcgmGroupDestroy", "dcgmDisconnect"]
    collector.close()
    assert engine.calls() == []
    collector.read()
    assert engine.calls()[:4] == [
        "dcgmConnect_v2 localhost:5555 1500 ms",
        "dcgmGetAllDevices",
        "dcgmGetEntityGroupEntities",
        "dcgmGetEntityGroupEntities",
    ]


def test_a_call_that_hangs_costs_this_source_its_deadline(engine: HostEngine) -> None:
    engine.set_script(GPUS + H100 + "value 1 0 153 i 40\n")
    reader = Reader(
        "dcgm",
        Spec(
            "flopwatch.node.collectors.dcgm:build",
            {
                "address": "localhost:5555",
                "gpus": str(engine.gpus),
                "library": str(engine.library),
                "profiling": "1004",
            },
        ),
        driver=True,
        secondary=True,
    )
    try:
        assert series(reader.ask(30).samples) == {"gpu_temperature_margin_celsius{1,GPU-b}": 40}
        engine.set_script("hang dcgmEntitiesGetLatestValues")
        reading = reader.ask(0.3)
        assert (reading.ok, reading.kind, reading.samples) == (False, "deadline", [])
    finally:
        reader.close()


# As `dcgmi profile --list` prints it for Volta and Turing: of A.1, A.2 and A.3, one is counted at a time.
GROUPS = """
group 0 1 1002 1003 1004 1007
group 0 2 1006
group 0 3 1008
group 1 0 1005
group 2 0 1009 1010
group 3 0 1001
group 4 0 1011 1012
"""


def profiled(engine: HostEngine, ids: str) -> list[list[int]]:
    """Return the profiling fields in each watch of a collector of these."""
    engine.calls()
    engine.collector(ids=ids).read()
    watches = [call.partition(":")[2] for call in engine.calls() if call.startswith("dcgmWatchFields")]
    each = [[int(id) for id in watch.split()] for watch in watches]
    return [sorted(ids) for ids in each if ids[0] > 1000]


def test_only_fields_that_the_hardware_counts_in_one_pass_are_sampled(
    engine: HostEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.set_script(GPUS + A100 + GROUPS)
    one_pass = [*range(1001, 1006), *range(1009, 1013)]
    assert profiled(engine, DCGM_FIELDS) == [one_pass]
    assert caplog.messages == []
    assert profiled(engine, "1001-1016") == [sorted([*one_pass, 1007])]
    assert caplog.messages == [
        "2 GPUs need further passes for fields [1006, 1008, 1013, 1014, 1015, 1016], which are left out"
    ]
    assert profiled(engine, "1006,1008") == [[1008]], "the first of the table wins"


def test_a_host_engine_that_names_no_groups_is_asked_for_all_fields(engine: HostEngine) -> None:
    engine.set_script(GPUS + A100)
    assert profiled(engine, "1001-1016") == [list(range(1001, 1017))]
    assert profiled(engine, "1004") == [[1004]]
    engine.set_script(GPUS + A100 + GROUPS)
    assert profiled(engine, "1013") == [], "no group counts it"


def test_the_flag_takes_profiling_fields_only() -> None:
    assert dcgm_fields(DCGM_FIELDS) == {*range(1001, 1006), *range(1009, 1013)}
    for wrong in ("", "1000", "1004-", "1005-1004", "1017", "tensor", "1001,,1002"):
        with pytest.raises(SettingsError, match="write profiling fields from 1001 to 1016"):
            ExporterSettings(dcgm_fields=wrong)
