"""Instruments of a run: its card, its parallel groups and what is measured inside PyTorch.

Nothing here imports torch before the job has: modules are looked up in sys.modules, or imported inside methods.
"""

import itertools
import logging
import sys
from typing import Any

from flopwatch.flops import peaks
from flopwatch.training.process import parallel
from flopwatch.training.recorder import Recorder
from flopwatch.training.run_info import RunInfo

log = logging.getLogger("flopwatch")


class Instruments:
    """Instruments of one run, attached to PyTorch as soon as the job uses it."""

    def __init__(self, recorder: Recorder, info: RunInfo) -> None:
        self._recorder, self._info = recorder, info
        self._general: tuple[Any, ...] = ()  # with remove(); of all models together
        self._models: dict[int, tuple[Any, ...]] = {}  # the same, by the model's id

    def find_card(self, expected: bool) -> None:
        """Look up UUID and peak of the current CUDA device; without one the peak is unknown if a card is expected."""
        info, card = self._info, None
        try:
            if "torch" in sys.modules:
                from flopwatch.training import torch as torch_hook

                card = torch_hook.card()
            if card is not None and not info.gpu_uuid:
                info.gpu_uuid = card.uuid
            if info.peak is None and (card is not None or expected):
                if card is None:
                    raise peaks.UnknownPeak("no CUDA device is in use")
                peak = peaks.peak(card.name, info.dtype)
                info.peak, info.peak_source = peak.flops_per_second, peak.source
        except peaks.UnknownPeak as error:
            info.no_peak_because = "unknown_peak"
            # Every rank has the series; one line per node is enough, because nodes may have different cards.
            level = logging.WARNING if info.identity.local_rank == 0 else logging.DEBUG
            by_command = self._recorder.step_source == "optimizer"
            advice = "--peak-flops and --peak-source" if by_command else "Run(peak_flops=..., peak_source=...)"
            log.log(level, "no MFU: %s; pass %s", error, advice)
        except Exception as error:
            info.no_peak_because = "unknown_peak" if info.peak is None else None
            self._recorder.failed("step", error)

    def find_parallel(self, given: object) -> None:
        """Set this rank's coordinates: the given ones, else Megatron's once it has set them up."""
        recorder = self._recorder
        if given is None:
            given = parallel.megatron() if recorder.parallel is None else None
            if given is None:
                return
        try:
            recorder.parallel = parallel.parallel(given, recorder.world_size)
        except Exception as error:
            recorder.failed("parallel", error)
            return
        if recorder.totals.replica_ranks is None:
            recorder.totals.replica_ranks = recorder.parallel.replica_ranks

    def follow_device(self) -> None:
        """Take marks from CUDA events once CUDA is in use."""
        recorder = self._recorder
        if "torch" in sys.modules and recorder.mark is recorder.clock:
            from flopwatch.training.torch import device

            if (moments := device.moments(recorder.clock, recorder.failed)) is not None:
                recorder.mark = moments.mark

    def first_step(self) -> None:
        """Look for what exists only once the job trains: card, Megatron's groups, CUDA, optimizers."""
        self.find_card(expected=True)
        self.find_parallel(None)
        self.follow_device()
        if self._recorder.pushing:
            self.attach(None)

    def attach(self, model: object) -> None:
        """Measure the phases of a model and of all optimizers and, once, compilation, memory and collectives."""
        if "torch" not in sys.modules or self._recorder.finished:
            return
        from flopwatch.training.torch import collectives, phases, runtime

        if model is not None or not self._general:
            measured = phases.attach(self._recorder, model)
            if not self._general:
                self._general = (measured, runtime.attach(self._recorder))
                collectives.watch(self._recorder)

    def watch(self, model: object) -> None:
        """Measure a model's waits and phases, and count its FLOPs unless they are declared."""
        from flopwatch.training import torch as torch_hook

        recorder = self._recorder
        if recorder.totals.replica_ranks is None:
            recorder.totals.replica_ranks = torch_hook.replica_ranks(model)
        self._remove(self._models.get(id(model), ()))
        self._models[id(model)] = (torch_hook.watch(recorder, model),)
        recorder.watched = True
        self.attach(model)
        if recorder.parallel is not None and recorder.parallel.cp is not None and recorder.parallel.cp[1] > 1:
            recorder.uncountable("each rank has a part of the sequence, and attention reaches beyond it")
        elif not recorder.has_flops and isinstance(model, sys.modules["torch"].nn.Module):
            from flopwatch.training.flop_counter import count

            self._models[id(model)] += (count.attach(recorder, model),)

    def remove(self) -> None:
        """Remove everything that was attached to PyTorch."""
        self._remove((*self._general, *itertools.chain.from_iterable(self._models.values())))

    def _remove(self, instruments: tuple[Any, ...]) -> None:
        for instrument in instruments:
            try:
                instrument.remove()
            except Exception as error:
                self._recorder.failed("remove", error)
