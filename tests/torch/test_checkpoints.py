"""Test which checkpoints are noticed, and when they count as committed, with PyTorch's own functions on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.hook_server import HookServer, Push
from tests.support.loops import SECONDS, Seen, Slow, flat, fresh, seen_by
from tests.support.machine import PATIENCE, reserved_port

BACKGROUND = "training_checkpoint_background_seconds_total"
ROUNDING = 1e-6  # seconds, of sums of differences

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Return what was recorded of each scenario. One process runs all, because importing torch takes seconds."""
    return seen_by(__file__, tmp_path_factory.mktemp("checkpoints"))


def saving(seen: Seen) -> float:
    return float(seen[f"{SECONDS}{{activity=checkpoint_save}}"])


def in_the_calls(seconds: float, seen: Seen, slept: float) -> bool:
    """Return whether `seconds` is at least the time slept in the calls, and at most the time that the calls took."""
    return bool(slept - ROUNDING <= seconds <= seen["spent"] + ROUNDING)


# Each scenario makes 5 steps and saves. It returns the committed step at once, after the next batch, and after another
# step.


def test_files_saved_between_two_steps_are_one_checkpoint_and_committed_once_training_goes_on(
    seen: dict[str, Seen],
) -> None:
    assert seen["files"]["truth"] == [None, 5, 5]
    assert in_the_calls(saving(seen["files"]), seen["files"], 0.1)


@pytest.mark.parametrize("how", ["an_open_file", "safetensors", "a_module"])
def test_what_goes_to_a_file_is_a_checkpoint(seen: dict[str, Seen], how: str) -> None:
    assert seen[how]["truth"] == [None, 5, 5]
    assert saving(seen[how]) > 0


@pytest.mark.parametrize("how", ["a_buffer", "a_tensor", "a_save_that_fails"])
def test_a_buffer_a_bare_tensor_and_a_failed_save_are_not_checkpoints(seen: dict[str, Seen], how: str) -> None:
    assert seen[how]["truth"] == [None, None, None]


def test_what_is_saved_before_the_first_step_commits_nothing(seen: dict[str, Seen]) -> None:
    assert seen["before_the_first_step"]["truth"] is None


def test_a_distributed_checkpoint_is_committed_when_save_returns(seen: dict[str, Seen]) -> None:
    assert seen["distributed"]["truth"] == [5, 5, 5]
    assert saving(seen["distributed"]) > 0


def test_an_async_one_is_committed_when_its_future_is_done(seen: dict[str, Seen]) -> None:
    in_background = seen["distributed_async"]
    assert in_background["truth"] == [None, None, None, 5]  # saved while two more steps were made
    least, most = in_background["background"]
    assert 0.3 <= least - ROUNDING <= in_background[BACKGROUND] <= most + ROUNDING
    assert saving(in_background) <= in_background["spent"] + ROUNDING  # in the call, which did not wait for the disk


def test_an_async_one_with_a_stager_of_its_own_has_two_futures(seen: dict[str, Seen]) -> None:
    assert seen["distributed_staged"]["truth"] == [None, None, None, 5]


def test_an_async_one_that_fails_commits_nothing(seen: dict[str, Seen]) -> None:
    assert seen["distributed_failing"]["truth"] == [None, None, None, None]


def test_a_save_on_another_thread_is_of_the_step_it_names(seen: dict[str, Seen]) -> None:
    assert seen["another_thread"]["truth"] == [4, None]
    assert in_the_calls(seen["another_thread"][BACKGROUND], seen["another_thread"], 0.05)
    assert saving(seen["another_thread"]) == 0


def test_checkpoints_of_a_script_with_its_own_run_are_recorded_too(seen: dict[str, Seen]) -> None:
    assert seen["own_run"]["truth"] == [None, 5, 5]
    assert in_the_calls(saving(seen["own_run"]), seen["own_run"], 0.1)
    # the script's own run if it failed, otherwise the attachment's
    assert seen["own_run_that_ends"]["truth"] == [None, 5]


def test_loading_before_the_first_step_is_restoring(seen: dict[str, Seen]) -> None:
    restoring = seen["loading"][f"{SECONDS}{{activity=checkpoint_restore}}"]
    # A file and a distributed checkpoint count. Samples, a buffer, and a file after the first step do not.
    assert in_the_calls(restoring, seen["loading"], 0.15)
    assert seen["loading"]["truth"] == [restoring] * 3


# Under `flopwatch run`, by two ranks and then by one.


@pytest.mark.long
def test_a_run_resumed_by_fewer_ranks_goes_on_where_it_was(tmp_path: Path) -> None:
    with HookServer() as server:
        first = ranks(2, server, tmp_path, 4)
        second = ranks(1, server, tmp_path, 7)
    assert {push.resource["flopwatch.rank"] for push in first} == {0, 1}
    for push in first:
        assert last_state(push) == {"steps": 4, "position": 4, "committed": 4, "restored": 0, "status": "completed"}
        assert push.samples["training_hook_errors_total"] == 0
    (push,) = second
    assert last_state(push) == {"steps": 3, "position": 7, "committed": 7, "restored": 4, "status": "completed"}
    assert push.samples[f"{SECONDS}{{activity=checkpoint_restore}}"] > 0
    assert push.samples[BACKGROUND] > 0
    assert first[0].resource["flopwatch.attempt"] == first[1].resource["flopwatch.attempt"]
    assert first[0].resource["flopwatch.attempt"] != push.resource["flopwatch.attempt"]


def last_state(push: Push) -> dict[str, object]:
    return {
        **{
            name: push.samples.get(f"training_{key}")
            for name, key in (
                ("steps", "steps_total"),
                ("position", "position_steps"),
                ("committed", "committed_steps"),
            )
        },
        "restored": push.resource.get("flopwatch.restored_step"),
        "status": push.resource.get("flopwatch.status"),
    }


def ranks(count: int, server: HookServer, folder: Path, until: int) -> list[Push]:
    """Run the sharded script with this many ranks and return the last push of each."""
    before = len(server.pushes)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("FLOPWATCH_", "TORCHELASTIC_"))}
    with reserved_port() as port:
        # torchrun for many ranks. A single rank gets the variables that torchrun would set.
        torchrun = (
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(count),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
        )
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = subprocess.run(
            [
                sys.executable,
                *(torchrun if count > 1 else ()),
                "-m",
                "flopwatch",
                "run",
                "--name",
                "sharded",
                str(ROOT / "tests/scripts/sharded.py"),
                str(folder / "checkpoint"),
                str(until),
            ],
            capture_output=True,
            text=True,
            timeout=140,
            check=False,
            env={
                **environ,
                "PYTHONPATH": str(ROOT / "exporter"),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "FLOPWATCH_ENDPOINT": server.url,
                **(alone if count == 1 else {}),
            },
        )
    assert process.returncode == 0, process.stderr
    last = {push.resource["flopwatch.rank"]: push for push in server.pushes[before:]}
    return [last[rank] for rank in range(count)]


# The process in which the scenarios run.


def main() -> None:
    import contextlib
    import importlib
    import io
    import threading
    import warnings
    from collections.abc import Callable

    import torch
    from torch.utils.data import DataLoader, Dataset

    from flopwatch.training import Run

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    attachment: Any = None

    class Loop:
        """Training loop that a scenario advances batch by batch and step by step."""

        def __init__(self, dataset: Any = None, run: Any = None) -> None:
            self.model = torch.nn.Linear(4, 4)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            samples: Any = list(torch.randn(100, 4)) if dataset is None else dataset
            self.batches = iter(DataLoader(samples, batch_size=2))
            self.own = run

        @property
        def run(self) -> Any:
            return attachment.run if self.own is None else self.own

        def batch(self) -> None:
            self.now = next(self.batches)

        def step(self) -> None:
            self.model(self.now).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.own is not None:
                self.own.step()

        def steps(self, count: int) -> None:
            for _ in range(count):
                self.batch()
                self.step()

        def committed(self) -> float | None:
            for poll in () if self.own is None else self.own.recorder.polls:
                poll()  # as the pushing thread does
            return flat(self.run).get("training_committed_steps")

        def continue_training(self) -> list[float | None]:
            commits = [self.committed()]
            self.batch()
            if self.own is not None:
                self.step()  # without hooks in the loop only a step shows that training continues
            commits.append(self.committed())
            self.step()
            return [*commits, self.committed()]

    def timed(call: Callable[[], Any]) -> Any:
        """Make a call, and add its duration to the scenario's total for such calls."""
        measured.setdefault("spent", 0.0)
        began = time.monotonic()
        result = call()
        measured["spent"] += time.monotonic() - began
        return result

    def saved(save: Any) -> list[float | None]:
        loop = Loop()
        loop.steps(5)
        save(loop)
        return loop.continue_training()

    def files() -> Any:
        def save(loop: Loop) -> None:
            Path("files").mkdir()
            timed(lambda: torch.save({"model": loop.model.state_dict(), "slow": Slow()}, Path("files/model.pt")))
            timed(lambda: torch.save({"optimizer": loop.optimizer.state_dict(), "slow": Slow()}, "files/optimizer.pt"))

        return saved(save)

    def an_open_file() -> Any:
        def save(loop: Loop) -> None:
            with Path("draft").open("wb") as file:
                torch.save(loop.model.state_dict(), file)
            Path("draft").replace("whole.pt")

        return saved(save)

    def safetensors() -> Any:
        save_file: Any = importlib.import_module("safetensors.torch").save_file
        return saved(lambda loop: save_file(loop.model.state_dict(), "model.safetensors"))

    def a_module() -> Any:
        return saved(lambda loop: torch.save(loop.model, "module.pt"))

    def a_buffer() -> Any:
        return saved(lambda loop: torch.save(loop.model.state_dict(), io.BytesIO()))

    def a_tensor() -> Any:
        return saved(lambda loop: torch.save(torch.zeros(3), "tensor.pt"))

    def a_save_that_fails() -> Any:
        def save(loop: Loop) -> None:
            with contextlib.suppress(RuntimeError):
                torch.save(loop.model.state_dict(), "no/such/folder.pt")

        return saved(save)

    def before_the_first_step() -> Any:
        loop = Loop()
        torch.save(loop.model.state_dict(), "first.pt")
        loop.steps(1)
        return loop.committed()

    def distributed() -> Any:
        return saved(lambda loop: dcp.save({"model": loop.model.state_dict()}, checkpoint_id="distributed"))

    released = threading.Event()

    class SlowWriter(dcp.FileSystemWriter):  # type: ignore[misc]
        """Writer to a disk that takes the given time, or fails."""

        def __init__(self, path: str, fails: bool = False) -> None:
            super().__init__(path)
            self.fails = fails

        def write_data(self, *args: Any) -> Any:
            released.wait(PATIENCE)
            if self.fails:
                raise OSError("disk full")
            return super().write_data(*args)

    def saved_async(**how: Any) -> list[float | None]:
        import torch.distributed as dist

        store: Any = dist
        dist.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
        loop = Loop()
        loop.steps(5)
        released.clear()
        began = time.monotonic()
        response = timed(lambda: dcp.async_save({"model": loop.model.state_dict()}, **how))
        returned, done = time.monotonic(), threading.Event()
        # runs after our own callback
        getattr(response, "upload_completion", response).add_done_callback(lambda _: done.set())
        commits = loop.continue_training()
        time.sleep(0.3 + ROUNDING)
        least = time.monotonic() - returned
        released.set()
        assert done.wait(PATIENCE)
        measured["background"] = least, time.monotonic() - began
        commits.append(loop.committed())
        dist.destroy_process_group()
        return commits

    def distributed_async() -> Any:
        return saved_async(storage_writer=SlowWriter("async"))

    def distributed_staged() -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(False, False, True, False))
        try:
            return saved_async(storage_writer=SlowWriter("staged"), async_stager=stager)
        finally:
            stager.close()

    def distributed_failing() -> Any:
        return saved_async(storage_writer=SlowWriter("failing", fails=True))

    def another_thread() -> Any:
        commits = []
        for state in ({"step": 4}, {}):
            again()
            loop = Loop()
            loop.steps(5)
            writing = threading.Thread(
                target=torch.save, args=({"model": loop.model.state_dict(), "slow": Slow(), **state}, "thread.pt")
            )
            measured.clear()

            def write(loop: Loop = loop, writing: threading.Thread = writing) -> None:
                writing.start()
                loop.steps(2)
                writing.join()

            timed(write)
            commits.append(loop.committed())
        return commits

    def own_run() -> Any:
        loop = Loop(run=new_run())
        loop.steps(5)
        timed(lambda: torch.save({"model": loop.model.state_dict(), "slow": Slow()}, "own.pt"))
        timed(lambda: torch.save({"optimizer": loop.optimizer.state_dict(), "slow": Slow()}, "own2.pt"))
        commits = loop.continue_training()
        known["own_run"] = flat(loop.run)
        return commits

    def own_run_that_ends() -> Any:
        commits = []
        for status in ("failed", "completed"):
            loop = Loop(run=new_run())
            loop.steps(5)
            torch.save({"model": loop.model.state_dict()}, "own.pt")
            loop.run.finish(status)
            commits.append(loop.committed())
        return commits

    def new_run() -> Run:
        run = Run("own")
        run.watch_checkpoints()
        return run

    class Files(Dataset[Any]):
        """Dataset whose samples are files that take long to load."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            torch.load("slow.pt", weights_only=False)
            return torch.zeros(4)

    def loading() -> Any:
        torch.save({"slow": Slow()}, "slow.pt")
        dcp.save({"slow": Slow()}, checkpoint_id="slow")
        buffer = io.BytesIO()
        torch.save({"slow": Slow()}, buffer)

        def restored() -> float:
            return flat(attachment.run)[f"{SECONDS}{{activity=checkpoint_restore}}"]

        timed(lambda: torch.load("slow.pt", weights_only=False))  # before there is an optimizer, and therefore a run
        loop = Loop(Files())
        timed(lambda: torch.load("slow.pt", weights_only=False))
        timed(lambda: dcp.load({"slow": Slow()}, checkpoint_id="slow"))
        restores = [restored()]
        buffer.seek(0)
        torch.load(buffer, weights_only=False)
        loop.batch()
        restores.append(restored())
        loop.step()
        torch.load("slow.pt", weights_only=False)
        return [*restores, restored()]

    def again(**settings: Any) -> None:
        nonlocal attachment
        attachment = fresh(attachment, **settings)

    results: dict[str, Any] = {}
    known: dict[str, dict[str, float]] = {}
    measured: dict[str, Any] = {}
    for scenario in (
        files,
        an_open_file,
        safetensors,
        a_module,
        a_buffer,
        a_tensor,
        a_save_that_fails,
        before_the_first_step,
        distributed,
        distributed_async,
        distributed_staged,
        distributed_failing,
        another_thread,
        own_run,
        own_run_that_ends,
        loading,
    ):
        if len(sys.argv) > 1 and scenario.__name__ not in sys.argv[1:]:
            continue
        again()
        measured.clear()
        truth = scenario()
        samples = known.get(scenario.__name__) or ({} if attachment.run is None else flat(attachment.run))
        results[scenario.__name__] = {**samples, **measured, "truth": truth}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
