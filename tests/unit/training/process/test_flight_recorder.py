"""Last operations of PyTorch's flight recorder, from dumps in its format and from real gloo ranks."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flopwatch.training.process import flight_recorder
from tests.support import TESTS, ranks

NOW = 1795496412.0
OPTED_IN = {"FLOPWATCH_FLIGHT_RECORDER": "1"}


class Library:
    """NCCL's dump of a PyTorch with CUDA. It keeps how it was asked."""

    def __init__(self, capture: str) -> None:
        self._dump = json.loads((TESTS / "captures" / "nccl" / f"{capture}.json").read_text())
        self.asked: list[bool] = []

    def _dump_nccl_trace_json(self, **options: bool) -> bytes:
        self.asked.append(options["includeCollectives"])
        dump = self._dump if self.asked[-1] else {**self._dump, "entries": []}
        return json.dumps(dump).encode()


def shown(capture: str, **environ: str) -> list[str]:
    return flight_recorder.text(environ, Library(capture), NOW).splitlines()


def test_the_last_operations_are_shown_with_their_group_number_state_and_sizes() -> None:
    operation, group = "nccl:all_reduce", "TENSOR_MODEL_PARALLEL_GROUP 7"
    assert shown("torch2.13_nccl_fr_waiting_rank", **OPTED_IN) == [
        "flight recorder",
        f"  {operation} 515 in {group}: scheduled, 12.0 s ago, 4096x4096, 4096x4096",
        f"  {operation} 514 in {group}: scheduled, 12.0 s ago, 4096x4096, 4096x4096",
        f"  {operation} 513 in {group}: started, 12.0 s ago, 4096x4096, 4096x4096",
        f"  {operation} 512 in {group}: completed, 12.0 s ago, 4096x4096, 4096x4096",
    ]
    assert shown("torch2.5_nccl_fr", **OPTED_IN)[1].startswith("  nccl:all_reduce 3 in default_pg 0: scheduled")


def test_nccl_s_operations_are_read_only_if_the_job_allows_it() -> None:
    library = Library("torch2.13_nccl_fr_waiting_rank")
    numbers = "  group 1: last enqueued 515, started 513, completed 512"
    assert numbers in flight_recorder.text({}, library, NOW)
    assert library.asked == [False]
    assert shown("torch2.13_nccl_pgstatus_only")[2] == numbers
    assert flight_recorder.text({"FLOPWATCH_FLIGHT_RECORDER": "0"}, library, NOW) == ""
    assert flight_recorder.text({**OPTED_IN, "TORCH_FR_BUFFER_SIZE": "10001"}, library, NOW) == ""
    assert library.asked == [False]


def test_without_operations_there_is_no_text_and_a_malformed_dump_is_named() -> None:
    assert shown("torch2.13_gloo_fr_disabled", **OPTED_IN) == []
    assert flight_recorder.text({}, SimpleNamespace(), NOW) == ""
    broken: Any = SimpleNamespace(_dump_fr_trace_json=lambda **_: b'{"entries": [{}]}')
    assert flight_recorder.text({}, broken, NOW) == "flight recorder: KeyError('process_group')"
    many: Any = SimpleNamespace(_dump_fr_trace_json=lambda **_: json.dumps({"entries": 500 * entry()}))
    lines = flight_recorder.text({}, many, NOW).splitlines()
    assert len(lines) == 1 + flight_recorder.SHOWN


def entry() -> list[Any]:
    """Return the entries of a dump."""
    dump: dict[str, list[Any]] = json.loads((TESTS / "captures" / "nccl" / "torch2.5_nccl_fr.json").read_text())
    return dump["entries"]


@pytest.mark.parametrize(
    ("environ", "release", "expected"),
    [
        ({}, "2.13.0+cpu", "on"),
        ({}, "2.5.1", "unknown"),
        ({}, None, "unknown"),  # while it is being imported
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, "2.5.1", "on"),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, "2.13.0", "off"),
    ],
)
def test_the_status_follows_the_variables_and_the_release(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], release: str | None, expected: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**({"__version__": release} if release else {})))
    assert flight_recorder.status(environ) == expected


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_real_gloo_ranks_show_their_last_collectives() -> None:
    code = """
import torch, torch.distributed as dist
from flopwatch.training.process import flight_recorder, stacks
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(2, 4))
dist.barrier()
print(stacks.text(flight_recorder.text()))
dist.destroy_process_group()
"""
    processes = ranks.start(["-c", code], 2)
    for process in processes:
        printed = process.communicate(timeout=100)[0]
        assert process.returncode == 0
        stack, _, operations = printed.partition("\n\nflight recorder\n")
        assert stack.startswith("thread MainThread")
        assert [line.split(" in ")[0] for line in operations.splitlines()] == [
            "  gloo:barrier 4",
            "  gloo:all_reduce 3",
            "  gloo:all_reduce 2",
            "  gloo:all_reduce 1",
        ]
        assert operations.splitlines()[1].endswith(" s ago, 2x4, 2x4")
