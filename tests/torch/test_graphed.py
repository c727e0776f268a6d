"""Test modules captured into CUDA graphs while their hooks are off. The check is torch's, CUDA's graphs are fake."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flopwatch.training import Run
from flopwatch.training.autolog.loop import LoopState, Settings
from flopwatch.training.autolog.models import ModelFinder
from flopwatch.training.torch import graphed
from tests.support.hook import silent

pytestmark = pytest.mark.torch

SAMPLE = (torch.ones(2, 4),)


class Graph:
    """CUDA graph that captures nothing, and whose replays are counted."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: (0, 1))


@pytest.fixture
def run() -> Iterator[Run]:
    made = silent()
    yield made
    made.finish()


def hooks(model: torch.nn.Module) -> list[list[tuple[int, Any]]]:
    return [list(found.items()) for found in (model._forward_pre_hooks, model._forward_hooks)]


def make(model: Any) -> Any:
    return torch.cuda.make_graphed_callables(model, SAMPLE)


def test_a_watched_module_is_captured_and_keeps_its_hooks(run: Run) -> None:
    model, original = torch.nn.Linear(4, 4), torch.cuda.make_graphed_callables
    run.watch(model)
    assert torch.cuda.make_graphed_callables is not original
    before = hooks(model)
    assert list(map(len, before)) == [1, 2]  # phases, and FLOPs of the forward
    assert make(model) is model
    assert hooks(model) == before
    model(torch.ones(2, 4))
    assert Graph.replays == 1
    run.finish()
    assert hooks(model) == [[], []]
    assert torch.cuda.make_graphed_callables is torch.cuda.graphs.make_graphed_callables is original


def test_the_scripts_own_hooks_are_still_refused(run: Run) -> None:
    model = torch.nn.Linear(4, 4)
    run.watch(model)
    model.register_forward_hook(lambda *_: None)
    before = hooks(model)
    with pytest.raises(AssertionError, match="must not have hooks"):
        make(model)
    assert hooks(model) == before


def test_a_function_that_a_script_imported_by_name_is_replaced_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script: Any = types.ModuleType("train")
    exec("from torch.cuda import make_graphed_callables", vars(script))
    original = script.make_graphed_callables
    monkeypatch.setitem(sys.modules, "train", script)
    model = torch.nn.Linear(4, 4)
    run.watch(model)
    script.make_graphed_callables(callables=(model,), sample_args=(SAMPLE,))
    run.finish()
    assert script.make_graphed_callables is original


def test_passes_that_warm_up_are_not_training(run: Run) -> None:
    inner = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(inner)
    run.watch(inner)
    seen: list[bool] = []
    inner.register_forward_hook(lambda *_: seen.append(len(inner._forward_hooks) == 1 and graphed.making()))
    make(model)
    assert seen == [True] * 4  # three to warm up, one to capture
    assert len(inner._forward_hooks) == 3
    assert not graphed.making()


def test_flopwatch_run_takes_no_module_that_is_captured_for_a_model_of_the_loop(run: Run) -> None:
    loop = LoopState(Settings(), None, lambda: None)  # type: ignore[arg-type]
    loop.run = run
    run.recorder.pushing = True
    run.watch(torch.nn.Linear(1, 1))
    finder = ModelFinder(loop, lambda _: None)
    finder.look()
    try:
        model = make(torch.nn.Linear(4, 4))
        assert hooks(model) == [[], []]
        model(torch.ones(2, 4))
        assert list(map(len, hooks(model))) == [1, 2]
    finally:
        finder.look_no_more()


def test_counting_the_flops_of_a_captured_model_replays_no_graph(run: Run) -> None:
    counted: list[float] = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    make(model[0])
    run.watch(model)
    run.recorder.pushing = True
    run.recorder.counted = counted.append  # type: ignore[method-assign, assignment]
    model(torch.ones(2, 4)).sum().backward()
    assert counted == [2 * 2 * 4 * 4, 2 * (2 * 2 * 4 * 4)]
    assert Graph.replays == 2


class TransformerEngine:
    """Finder of a package with a function of the same name and check."""

    SOURCE = """
def make_graphed_callables(modules, sample_args, **options):
    if modules._forward_hooks or modules._forward_pre_hooks:
        raise RuntimeError("Modules must not have hooks registered at the time they are passed.")
    return modules
"""


def test_transformer_engines_function_is_replaced_once_it_is_imported(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("from .graph import make_graphed_callables\n")
    (package / "graph.py").write_text(TransformerEngine.SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    model = torch.nn.Linear(4, 4)
    run.watch(model)
    before = hooks(model)
    script: dict[str, Any] = {}
    try:
        exec("from transformer_engine.pytorch import make_graphed_callables", script)
        assert script["make_graphed_callables"](model, SAMPLE, fp8_enabled=True) is model
        assert hooks(model) == before
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]
