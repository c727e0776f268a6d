"""State files that several processes read at each scrape."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwatch.node import collectors
from flopwatch.node.collectors import load_objects, read_runtime, replace_file


def test_a_state_file_is_parsed_again_only_after_a_change(tmp_path: Path) -> None:
    file = tmp_path / "gpus.json"
    assert load_objects(file) == {}
    replace_file(file, '{"GPU-a": {"gpu": "0"}, "GPU-b": 3}')
    first = load_objects(file)
    assert first == {"GPU-a": {"gpu": "0"}}
    assert load_objects(file) is first
    replace_file(file, '{"GPU-a": {"gpu": "1"}}')
    assert load_objects(file) == {"GPU-a": {"gpu": "1"}}
    file.unlink()
    assert load_objects(file) == {}


def test_a_state_file_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpus.json"
    replace_file(file, '{"GPU-a": {"gpu": "0"}}')
    with monkeypatch.context() as patch:
        patch.setattr(collectors.StateFile, "load", lambda self: {})  # as without a free file descriptor
        assert load_objects(file) == {}
    assert load_objects(file) == {"GPU-a": {"gpu": "0"}}


def test_invalid_entries_of_the_runtime_file_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "runtime.json"
    replace_file(file, '{"GPU-a": {"mig": [{"uuid": "MIG-a"}, 3], "pids": [7, "8"], "links": "all"}, "GPU-b": 3}')
    assert read_runtime(file) == {"GPU-a": {"mig": [{"uuid": "MIG-a"}], "pids": [7], "links": []}}
    read_runtime(file)["GPU-a"]["mig"][0]["uuid"] = "changed"
    assert read_runtime(file)["GPU-a"]["mig"] == [{"uuid": "MIG-a"}]
