"""Instruments of a run: lookup of GPU and parallel groups, and hooks in PyTorch. Only methods import torch."""

import itertools
import logging
import sys
import weakref
from typing import Any

from flopwatch import catalogue as m
from flopwatch.catalogue.ranks import all_ranks_text
from flopwatch.flops import peaks
from flopwatch.training.process import parallel
from flopwatch.training.recorder import Recorder
from flopwatch.training.run_info import RunInfo
from flopwatch.training.totals import WHOLE_JOB, Group

log = logging.getLogger("flopwatch")


class Instruments:
    """Lookup of one run's GPU and parallel groups, and its hooks in PyTorch, added once the job has imported torch."""

    def __init__(self, recorder: Recorder, info: RunInfo) -> None:
        self._recorder, self._info = recorder, info
        self._card: Any = None  # of the loop's thread, because each thread has a device of its own
        self._general: tuple[Any, ...] = ()  # objects with remove(), for all models together
        self._groups: Any = None
        self._whole: Group | None = None
        self._models: dict[int, tuple[Any, ...]] = {}  # objects with remove(), by the model's id

    def find_card(self, expected: bool) -> None:
        """Set UUID and peak FLOP/s of torch's CUDA device, unless given. A missing device is logged if `expected`."""
        info = self._info
        try:
            if "torch" in sys.modules and self._card is None:
                from flopwatch.training import torch as torch_hook

                self._card = torch_hook.card()
            if (card := self._card) is not None and not info.gpu_uuid:
                info.gpu_uuid = card.uuid
            if info.peak is None and (card is not None or expected):
                if card is None:
                    raise peaks.UnknownPeak("no CUDA device is in use")
                peak = peaks.peak(card.name, info.dtype)
                info.peak, info.peak_source = peak.flops_per_second, peak.source
        except peaks.UnknownPeak as error:
            info.no_peak_because = "unknown_peak"
            # Every rank has the series. One log line per node is enough, because cards may differ between nodes.
            level = logging.WARNING if info.identity.local_rank == 0 else logging.DEBUG
            by_command = self._recorder.step_source == "optimizer"
            advice = "--peak-flops and --peak-source" if by_command else "Run(peak_flops=..., peak_source=...)"
            log.log(level, "no MFU: %s; pass %s", error, advice)
        except Exception as error:
            info.no_peak_because = "unknown_peak" if info.peak is None else None
            self._recorder.failed("step", error)

    def find_parallel(self, given: object) -> None:
        """Set this rank's parallel coordinates from Run's argument or, if it is None, from Megatron's state."""
        recorder = self._recorder
        if given is None:
            given = parallel.megatron() if recorder.parallel is None else None
            if given is None:
                return
        with recorder.reporting("parallel"):
            recorder.parallel = parallel.parallel(given, recorder.totals.world_size)
            recorder.process_groups = parallel.process_groups(given)
            if recorder.totals.replica_ranks is None:
                recorder.totals.replica_ranks = recorder.parallel.replica_ranks

    def follow_device(self) -> None:
        """Time steps and phases with CUDA events instead of the host's clock, if CUDA is in use."""
        recorder = self._recorder
        if "torch" in sys.modules and recorder.mark is recorder.clock:
            from flopwatch.training.torch import device

            if (moments := device.moments(recorder.clock, recorder.failed)) is not None:
                recorder.follow(moments)

                def report() -> None:
                    if moments.missed:
                        recorder.set(m.TRAINING_MISSED_MARKS_TOTAL, moments.missed)

                recorder.poll(report)

    def first_step(self) -> None:
        """Look up what exists only once the job trains: GPU, Megatron's groups, CUDA. Then attach the hooks."""
        self.find_card(expected=True)
        self.find_parallel(None)
        self.follow_device()
        if self._recorder.pushing:
            self.attach(None)

    def attach(self, model: object) -> None:
        """Measure the phases of optimizers and of a model. The first call adds compilation, memory and collectives."""
        if "torch" not in sys.modules or self._recorder.finished:
            return
        from flopwatch.training.torch import graphed, phases, runtime

        if model is not None or not self._general:
            measured = phases.attach(self._recorder, model)
            if not self._general:
                self._general = (measured, runtime.attach(self._recorder), graphed.attach(self._recorder))
                runtime.watch_collectives(self._recorder)

    def watch(self, model: object) -> None:
        """Measure a model's waits for other ranks and its phases, and count its FLOPs unless they are declared."""
        from flopwatch.training import torch as torch_hook

        recorder = self._recorder
        if recorder.totals.replica_ranks is None:
            recorder.totals.replica_ranks = torch_hook.replica_ranks(model)
        self._remove(self._models.get(id(model), ()))
        self._models[id(model)] = (torch_hook.watch(recorder, model),)
        recorder.watched = True
        self._follow_quantization(model)
        self.attach(model)
        if recorder.parallel is not None and recorder.parallel.cp is not None and recorder.parallel.cp[1] > 1:
            recorder.uncountable("each rank has a part of the sequence, and attention reaches beyond it")
        elif not recorder.has_flops and isinstance(model, sys.modules["torch"].nn.Module):
            from flopwatch.training.flop_counter import count

            self._models[id(model)] += (count.attach(recorder, model),)

    def _follow_quantization(self, model: object) -> None:
        """Take the peak of fp8 or fp4 once layers of the model multiply in it, so that MFU is never too high.

        A peak passed to Run is kept. https://github.com/pytorch/ao/tree/main/torchao/float8
        """
        modules: Any = getattr(model, "modules", tuple)()
        layers = weakref.WeakSet(module for module in modules if _matmul_dtype(module) is not None)

        def look() -> None:
            info, dtypes = self._info, {dtype for layer in layers if (dtype := _matmul_dtype(layer))}
            if dtypes and info.dtype in ("fp16", "bf16", "tf32") and not info.peak_source.startswith("override"):
                fastest = min(dtypes)  # fp4 before fp8
                log.info("layers of the model are in %s, so that is the run's dtype, not %s", fastest, info.dtype)
                info.dtype, info.peak, info.no_peak_because = fastest, None, None
                self.find_card(expected=False)

        if layers:
            look()
            self._recorder.poll(look)

    def of_group(self, group: Any) -> Group | None:
        """Return kind and ranks of a process group, of all ranks if it is None. None if its ranks have no text."""
        if group is None:
            if self._whole is None:  # once, because a call in each step costs time
                self._whole = WHOLE_JOB, all_ranks_text(self._recorder.totals.world_size)
            return self._whole
        if self._groups is None:
            from flopwatch.training.torch.groups import Groups

            self._groups = Groups(self._recorder)
        found: Group | None = self._groups.of_group(group)
        return found

    def remove(self) -> None:
        """Remove all hooks of this run from PyTorch."""
        self._remove((*self._general, *itertools.chain.from_iterable(self._models.values())))

    def _remove(self, instruments: tuple[Any, ...]) -> None:
        for instrument in instruments:
            with self._recorder.reporting("remove"):
                instrument.remove()


def _matmul_dtype(module: Any) -> str | None:
    """Return the dtype of a layer of torchao or Transformer Engine, "" if neither fp8 nor fp4. None for other modules.

    https://github.com/NVIDIA/TransformerEngine/blob/v2.9/transformer_engine/pytorch/module/base.py
    """
    if type(module).__name__ == "Float8Linear":
        return "fp8"
    meta = getattr(module, "__dict__", {}).get("fp8_meta")
    if meta is None or not module.fp8:  # both are set in a forward pass under Transformer Engine's autocast
        return None if meta is None else ""
    return "fp4" if type(meta.get("recipe")).__name__ == "NVFP4BlockScaling" else "fp8"
