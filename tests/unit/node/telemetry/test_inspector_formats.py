"""What NCCL Inspector writes, in each of its formats, and which process group a communicator of it is."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1 import metrics_pb2 as wire

from flopwatch.catalogue.ranks import kind_of
from flopwatch.node.telemetry.inspector_formats import (
    COLLECTIVE,
    MAX_KINDS,
    MAX_SERIES,
    MEAN,
    OTHER,
    RECEIVE,
    SEND,
    SERIES_IDLE,
    Member,
    Otlp,
    TimedBatch,
    TimedOperation,
    is_inspector,
    of_line,
    of_textfile,
)
from flopwatch.node.telemetry.inspector_groups import group_of, owner, waits_of_receives
from flopwatch.verdicts.waits import Communicator
from tests.support.nccl_inspector import CAPTURES, Operation, identity
from tests.support.nccl_inspector import otlp as plugin
from tests.support.otlp_by_hand import attributes, counter, process

HASH, TENSOR = "0x7f8c496ae9f661", "TENSOR_MODEL_PARALLEL_GROUP:7"
AT = 1795496400.0


def lines(name: str) -> list[bytes]:
    return (CAPTURES / name).read_bytes().splitlines()


def rounded(line: bytes) -> TimedOperation:
    one = of_line(line)
    assert one is not None
    return one._replace(seconds=round(one.seconds, 9))


def test_a_line_of_2_28_has_no_name_of_the_communicator() -> None:
    (line,) = lines("inspector_2.28.3_coll.jsonl")
    assert rounded(line) == TimedOperation(Member(HASH, "", 2, 8), COLLECTIVE, -1, 0.061974, AT)


def test_lines_of_2_30_have_the_last_rank_with_the_shortest_operation() -> None:
    found = [rounded(line) for line in lines("inspector_2.30_tp4_last_arriver_rank1.jsonl")]
    assert {one.member for one in found} == {Member(HASH, TENSOR, rank, 4) for rank in range(4)}
    assert {one.seconds for one in found if one.member.rank == 1} == {0.0005}
    assert {one.seconds for one in found if one.member.rank != 1} == {0.001}


def test_verbose_lines_have_sends_and_receives_with_their_peer() -> None:
    send, receive = (rounded(line) for line in lines("inspector_2.30_p2p_verbose.jsonl"))
    assert send == TimedOperation(Member(HASH, "", 0, 2), SEND, 1, 0.001154, AT)
    assert receive == TimedOperation(Member(HASH, "", 1, 2), RECEIVE, 0, 0.004154, AT)


def test_a_textfile_of_2_29_has_an_operation_in_each_line() -> None:
    found = [of_textfile(line.decode(), AT) for line in lines("inspector_2.29.7.prom")]
    assert [one for one in found if one] == [
        TimedOperation(Member(HASH, "", 0, 4), COLLECTIVE, -1, 0.001, AT),
        TimedOperation(Member(HASH, "", 1, 4), COLLECTIVE, -1, 0.0005, AT),
    ]


def test_a_textfile_of_2_30_has_means_and_no_rank() -> None:
    found = [of_textfile(line.decode(), AT) for line in lines("inspector_2.30.prom")]
    assert [one and (one.kind, one.member) for one in found if one] == [
        (MEAN, Member("", TENSOR, -1, 4)),
        (MEAN, Member("", TENSOR, -1, 4)),
        (OTHER, Member("", "PIPELINE_MODEL_PARALLEL_GROUP:12", -1, 2)),
    ]


def test_lines_of_rccl_are_those_of_nccl() -> None:
    group, place = "0x9c1f2ab07d3e5511", "0x77aa01"
    assert [rounded(line) for line in lines("rccl_inspector.jsonl")] == [
        TimedOperation(Member(group, TENSOR, 0, 8), COLLECTIVE, -1, 0.00031, AT),
        TimedOperation(Member(group, TENSOR, 1, 8), COLLECTIVE, -1, 0.000305, AT),
        TimedOperation(Member("0x51d0", "", 0, 8), COLLECTIVE, -1, 0.00054, AT),
        TimedOperation(Member(place, "", 1, 2), RECEIVE, 0, 0.000412, AT),
    ]


def test_a_textfile_of_rccl_has_the_means_of_nccl_2_30() -> None:
    text = [line.decode() for line in lines("rccl_inspector.prom") if not line.startswith(b"#")]
    found = [of_textfile(line, AT) for line in text]
    assert [one and (one.kind, one.member, round(one.seconds, 9)) for one in found] == [
        None,
        (MEAN, Member("", TENSOR, -1, 8), 0.00031),
        None,
        (OTHER, Member("", TENSOR, -1, 8), 0.000412),
    ]


@pytest.mark.parametrize("function", ["Broadcast", "AllGatherV", "Reduce", "Gather", ""])
def test_an_operation_in_which_the_last_rank_need_not_wait_least_is_of_another_kind(function: str) -> None:
    line = lines("inspector_2.28.3_coll.jsonl")[0].replace(b"AllReduce", function.encode())
    assert rounded(line).kind == OTHER


@pytest.mark.parametrize("function", ["All2All", "AlltoAll", "AllGather", "ReduceScatter"])
def test_an_operation_that_ends_on_all_ranks_together_is_a_collective_under_each_name(function: str) -> None:
    line = lines("inspector_2.28.3_coll.jsonl")[0].replace(b"AllReduce", function.encode())
    assert rounded(line).kind == COLLECTIVE


def changed(**values: object) -> bytes:
    found = json.loads(lines("inspector_2.28.3_coll.jsonl")[0])
    for part in found.values():
        part |= {key: value for key, value in values.items() if key in part}
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        lines("inspector_2.28.3_coll.jsonl")[0][:200],
        b'{"header":' + b"[" * 100_000,
        b'{"header":' + b"9" * 10_000 + b"}",
        changed(coll_exec_time_us=-1),
        changed(coll_exec_time_us=10**30),
        changed(coll_exec_time_us=float("nan")),
        changed(coll_exec_time_us=True),
        changed(coll_exec_time_us={"us": 1}),
        changed(rank=8),
        changed(rank="2"),
        changed(n_ranks=10**15),
        changed(n_ranks=2.5),
        changed(dump_timestamp_us="soon"),
        changed(dump_timestamp_us=10**400),
    ],
)
def test_a_hostile_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="Inspector"):
        of_line(line)


def test_unknown_keys_and_hostile_texts_do_no_harm() -> None:
    found = json.loads(changed(id=7))
    found["header"] |= {"comm_name": "x" * 10_000, "field_notes": [None]}
    assert rounded(json.dumps(found).encode()).member == Member("", "", 2, 8)


@pytest.mark.parametrize(
    "line",
    [
        "nccl_collective_exec_time_microseconds 5",
        'nccl_collective_exec_time_microseconds{nranks="4",rank="9"} 5',
        'nccl_collective_exec_time_microseconds{nranks="x"} 5',
        'nccl_collective_exec_time_microseconds{nranks="4"} NaN',
        'nccl_collective_exec_time_microseconds{nranks="4"} 1e300',
        'nccl_collective_exec_time_microseconds{nranks="4"',
    ],
)
def test_a_hostile_sample_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        of_textfile(line, AT)


def otlp(*metrics: wire.Metric, **about: str) -> wire.ResourceMetrics:
    resource = wire.ResourceMetrics()
    resource.resource.attributes.extend(attributes({key.replace("_", "."): value for key, value in about.items()}))
    resource.scope_metrics.add().metrics.extend(metrics)
    return resource


def test_a_generic_otlp_metric_is_taken_in_its_unit() -> None:
    request = ExportMetricsServiceRequest()
    json_format.Parse((CAPTURES / "otlp_generic_metrics.json").read_bytes(), request)
    (batch,), *refused = Otlp().batches(request.resource_metrics[0])
    assert (batch.process, batch.at, refused) == (f"{TENSOR}#1", AT, [0, 0])
    assert dict(batch.sums) == {(Member("", TENSOR, 1, 0), MEAN, -1): [pytest.approx(0.0005), 1]}
    assert is_inspector(request.resource_metrics[0])
    assert not is_inspector(process(counter("training_steps_total", 1)))


def test_otlp_metrics_of_the_plugin_are_of_a_gpu_and_have_no_rank() -> None:
    tensor, pipeline = Communicator("tp", (2, 3)), Communicator("pp", (3, 7))
    resource = plugin([Operation(3, tensor, 1, 0.001), Operation(3, pipeline, 1, 0.002)], AT, 3)
    (batch,), *refused = Otlp().batches(resource)
    assert (batch.process, refused) == ("GPU3", [0, 0])
    assert dict(batch.sums) == {
        (Member(identity(tensor), TENSOR, -1, 2), COLLECTIVE, -1): [0.001, 1],
        (Member(identity(pipeline), "PIPELINE_MODEL_PARALLEL_GROUP:7", 0, 2), RECEIVE, 1): [0.002, 1],
    }
    for gauge in (metric.gauge for scope in resource.scope_metrics for metric in scope.metrics):
        for point in gauge.data_points:  # what the plugin writes without NCCL_INSPECTOR_OTEL_VERBOSE
            kept = [item for item in point.attributes if item.key not in ("comm_id", "coll_sn", "p2p_sn", "p2p_peer")]
            del point.attributes[:]
            point.attributes.extend(kept)
    (batch,), *_ = Otlp().batches(resource)
    assert [(member.id, kind) for member, kind, _ in batch.sums] == [("", MEAN), ("", OTHER)]
    del resource.scope_metrics[0].metrics[:]
    assert is_inspector(resource), "with no operation since the last push"


@pytest.mark.parametrize(("unit", "seconds"), [("ns", 5e-7), ("", 5e-4), ("ms", 0.5), ("s", 500.0)])
def test_an_otlp_metric_of_another_source_has_its_own_unit_and_names(unit: str, seconds: float) -> None:
    labels: dict[str, str] = {"comm_hash": HASH, "comm_id": "unknown", "rank": "1", "nranks": "2"}
    one = wire.Metric(name="nccl.coll.exec_time", unit=unit)
    one.gauge.data_points.add(as_double=500.0, attributes=attributes(labels | {"coll": "AllGather", "coll_sn": "7"}))
    (batch,), *_ = Otlp().batches(otlp(one))
    assert dict(batch.sums) == {(Member("", "", 1, 2), COLLECTIVE, -1): [pytest.approx(seconds), 1]}


def test_a_cumulative_otlp_metric_counts_by_its_increase_also_after_a_reset() -> None:
    translator, name, seconds = Otlp(), "nccl_collective_exec_time_seconds", []
    for value in (5.0, 7.0, 1.0):
        one = counter(name, value, collective="AllReduce", comm_name="tp", nranks="4", rank="1")
        (batch,), *_ = translator.batches(otlp(one, process_pid="41"))
        assert batch.process == "pid:41"
        seconds += [total[0] for total in batch.sums.values()]
    assert seconds == [0.0, 2.0, 1.0], "the first point has what was before"


def test_more_cumulative_otlp_series_than_are_kept_add_no_past_seconds_and_are_counted() -> None:
    now = [0.0]
    translator, refused = Otlp(lambda: now[0]), []

    def push(total: float, first: int = 0) -> float:
        numbers, added = range(first, first + MAX_SERIES + 352), 0.0
        for number in numbers:
            one = counter("nccl_collective_exec_time_seconds", total, collective="AllReduce", comm_name=f"tp{number}")
            found, malformed, beyond = translator.batches(otlp(one, process_pid="41"))
            refused.append((malformed, beyond))
            added += sum(seconds for batch in found for seconds, _ in batch.sums.values())
        return added

    assert push(1000.0) == 0
    assert push(1000.1) == pytest.approx(0.1 * MAX_SERIES)
    assert Counter(refused) == {(0, 0): 2 * MAX_SERIES, (0, 1): 704}
    now[0] += SERIES_IDLE
    assert push(5.0, first=10_000) == 0
    assert push(6.0, first=10_000) == pytest.approx(MAX_SERIES), "series that ended make room"


def test_otlp_points_with_hostile_values_are_refused() -> None:
    wrong = [
        counter("nccl_collective_exec_time", value, at=AT, collective="AllReduce", **labels)
        for value, labels in (
            (float("nan"), {"nranks": "4"}),
            (-1.0, {"nranks": "4"}),
            (1.0, {"nranks": "four"}),
            (1.0, {"nranks": "4", "rank": "4"}),
        )
    ]
    assert Otlp().batches(otlp(*wrong)) == ([], 4, 0)


def test_the_communicators_of_a_batch_are_bounded() -> None:
    batch = TimedBatch("pid:1")
    kept = [
        batch.add(TimedOperation(Member(f"0x{n:x}", "", 0, 2), COLLECTIVE, -1, 1.0, AT)) for n in range(MAX_KINDS + 9)
    ]
    assert (sum(kept), len(batch.sums)) == (MAX_KINDS, MAX_KINDS)


GROUPS = [("tp", "0-3"), ("dp", "0-12:4"), ("pp", "0-48:16")]
LOCAL = set(range(8))


def test_a_communicator_is_the_group_whose_ranks_of_this_host_are_its_known_members() -> None:
    member = Member(HASH, "", 0, 4)
    assert group_of(0, member, COLLECTIVE, GROUPS, {0: 0, 1: 1, 2: 2, 3: 3}, LOCAL) == ("tp", "0-3")
    assert group_of(0, member, COLLECTIVE, GROUPS, {0: 0, 1: 4}, LOCAL) == ("dp", "0-12:4")
    assert group_of(0, member, COLLECTIVE, GROUPS, {0: 0}, LOCAL) == ("pp", "0-48:16")
    assert group_of(0, member, COLLECTIVE, GROUPS, {0: 0, 1: 2}, LOCAL) is None


def test_without_a_hash_the_name_decides_between_groups_of_one_size() -> None:
    assert group_of(0, Member("", TENSOR, -1, 4), MEAN, GROUPS, {}, LOCAL) == ("tp", "0-3")
    assert group_of(0, Member("", "", -1, 4), MEAN, GROUPS, {}, LOCAL) is None
    assert group_of(0, Member("", "", -1, 4), MEAN, GROUPS[1:], {}, LOCAL) == ("dp", "0-12:4")


def test_a_communicator_of_two_is_a_pair_of_neighbours_in_a_pipeline() -> None:
    groups = [("tp", "16-19"), ("pp", "0-48:16")]
    assert group_of(16, Member(HASH, "", 1, 2), RECEIVE, groups, {1: 16}, range(16, 24)) == ("pp", "0,16")
    assert group_of(16, Member(HASH, "", 0, 2), RECEIVE, groups, {0: 16}, range(16, 24)) == ("pp", "16,32")


def test_a_communicator_larger_than_all_groups_is_the_whole_job() -> None:
    assert group_of(1, Member(HASH, "", 1, 64), COLLECTIVE, GROUPS, {0: 0, 1: 1}, LOCAL) == ("world", "0-63")
    assert group_of(1, Member(HASH, "", 3, 64), COLLECTIVE, GROUPS, {3: 1}, LOCAL) is None


def test_unreported_groups_are_known_by_their_members_on_one_host() -> None:
    assert group_of(1, Member(HASH, "", 1, 2), COLLECTIVE, [], {0: 5, 1: 1}, LOCAL) == ("group", "1,5")
    assert group_of(1, Member(HASH, TENSOR, 1, 2), COLLECTIVE, [], {0: 5, 1: 1}, LOCAL) == ("tp", "1,5")
    assert group_of(1, Member("", "", -1, 0), MEAN, [], {}, LOCAL) is None  # its size and members are unknown


@pytest.mark.parametrize(
    ("name", "kind"),
    [(TENSOR, "tp"), ("EXPERT_DATA_PARALLEL_GROUP:9", "dp"), ("mesh_dp_shard_cp:1", "dp"), ("unknown", ""), ("", "")],
)
def test_the_name_of_a_communicator_has_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_place_in_a_named_communicator_has_an_owner_if_one_rank_fits() -> None:
    reported = {0: [("tp", "0-1")], 1: [("tp", "0-1")]}
    assert owner(TENSOR, 1, reported) == 1
    assert owner(TENSOR, 1, reported | {2: [("tp", "2-3")], 3: [("tp", "2-3")]}) is None
    assert owner("DATA_PARALLEL_GROUP:1", 1, reported) is None


def test_receives_in_a_pipeline_are_of_pairs_and_in_an_all_to_all_of_the_whole_group() -> None:
    assert list(waits_of_receives(16, ("pp", "0-48:16"), {0: 2.0, 2: 3.0})) == [
        (("pp", "0,16"), 2.0),
        (("pp", "16,32"), 3.0),
    ]
    everyone = {0: 2.0, 1: 9.0, 2: 4.0, 3: 3.0}
    assert list(waits_of_receives(1, ("ep", "0-3"), everyone)) == [(("ep", "0-3"), 3.0)]
    assert list(waits_of_receives(1, ("world", "0-3"), everyone)) == [(("world", "0-3"), 3.0)]
    assert list(waits_of_receives(1, ("cp", "0-3"), {0: 2.0, 2: 0.0})) == [(("cp", "0-3"), 2.0)]
