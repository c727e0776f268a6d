"""node_exporter's names: which samples have one. tests/process compares them with the real node_exporter."""

from __future__ import annotations

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.node.scrape.node_names import NodeNames


def info(device: str, link_layer: str = "InfiniBand") -> Sample:
    labels = {"device": device, "port": "1", "board_id": "MT_1", "firmware_version": "28.4", "hca_type": "MT4129"}
    labels["link_layer"] = link_layer
    return m.INFINIBAND_INFO, tuple(labels.get(label, "") for label in m.INFINIBAND_INFO.labels), 1


def port(row: m.Metric, device: str, value: float) -> Sample:
    return row, (device, "1"), value


def rendered(samples: list[Sample]) -> list[str]:
    return [line for line in NodeNames().render(samples).splitlines() if line[0] != "#"]


def test_a_missing_port_has_no_series() -> None:
    samples = [info("mlx5_0"), info("mlx5_1"), port(m.INFINIBAND_PORT_PRESENT, "mlx5_1", 0)]
    samples += [port(m.INFINIBAND_PORT_STATE_ID, "mlx5_0", 4), port(m.INFINIBAND_LINK_FLAPS_TOTAL, "mlx5_0", 3)]
    assert rendered(samples) == [
        'node_infiniband_info{device="mlx5_0",board_id="MT_1",firmware_version="28.4",hca_type="MT4129"} 1.0',
        'node_infiniband_state_id{device="mlx5_0",port="1"} 4.0',
    ]


def test_a_host_without_ports_has_no_series() -> None:
    assert rendered([(m.GPU_TEMPERATURE_CELSIUS, ("0", "GPU-a"), 58)]) == []


def test_values_have_the_unit_of_the_name() -> None:
    assert rendered([port(m.INFINIBAND_PORT_RATE_BYTES_PER_SECOND, "mlx5_0", 400)]) == [
        'node_infiniband_rate_bytes_per_second{device="mlx5_0",port="1"} 50000000000.0'
    ]


def test_what_only_node_exporter_has_is_not_ours() -> None:
    quiet, absent = m.INFINIBAND_SLOW_RESTARTS_TOTAL, m.INFINIBAND_SYMBOL_ERRORS_TOTAL
    identities = [info("mlx5_0"), info("mlx5_1", "Ethernet")]
    ours = [port(quiet, "mlx5_0", 2), port(quiet, "mlx5_1", 1), port(absent, "mlx5_0", 0)]
    theirs = [port(quiet, "mlx5_2", 0), port(absent, "mlx5_1", 0), port(absent, "mlx5_1", 7)]
    assert NodeNames().own([*identities, *ours, *theirs]) == [*identities, *ours]


def test_every_name_is_there_once() -> None:
    names = [row.name for row in NodeNames().rows.values()]
    assert len(names) == len(set(names)) == 54
