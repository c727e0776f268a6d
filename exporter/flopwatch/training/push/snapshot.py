"""Snapshots of a run: totals, gauges and declared facts as of one instant, ready for the OTLP encoder."""

import logging
import sys
import time

from flopwatch import catalogue as m
from flopwatch.catalogue import Metric
from flopwatch.catalogue.ranks import all_ranks_text
from flopwatch.training.process import flight_recorder, launcher
from flopwatch.training.process.parallel import Parallel
from flopwatch.training.process.stuck_frames import AFTER, AFTER_STEPS, StuckFrames
from flopwatch.training.recorder import Recorder, Snapshot
from flopwatch.training.run_info import RunInfo
from flopwatch.training.totals import DURATION_BOUNDS, Totals

IMPLAUSIBLE_MFU = 0.95  # above this, the peak or the FLOPs are wrong
# In steps. The FLOPs of the step that was open at the begin of the interval are counted too much, by 5 % at most.
CHECKED_SECONDS, CHECKED_STEPS = 60.0, 20
# Events added up at a time, in about a millisecond, and seconds between two slices, so that the loop's thread gets the
# interpreter's lock. A loop that records more than SLICE * MAX_SLICES events between two pushes does little else.
SLICE, MAX_SLICES, PAUSE = 300, 100, 0.001

log = logging.getLogger("flopwatch")

Points = dict[Metric, list[tuple[dict[str, str], float]]]


class Snapshots:
    """Maker of a run's snapshots from its recorder and its declared facts."""

    def __init__(self, recorder: Recorder, info: RunInfo) -> None:
        self._recorder, self._info = recorder, info
        self._stuck = StuckFrames()
        self._submission = launcher.Submission(info.environ)
        self._checked = (0.0, 0, 0.0)  # seconds in steps, steps and FLOPs up to which the MFU was plausible

    def take(self, *, last: bool = False) -> Snapshot:
        """Return the totals up to now. The `last` one calls no poll callbacks and does not wait for the device."""
        recorder, info = self._recorder, self._info
        for callback in () if last else tuple(recorder.polls):
            with recorder.reporting("poll"):
                callback()
        if info.submitted_at is None and recorder.rank == 0 and not last:
            info.submitted_at = self._submission()
        totals = recorder.totals
        for _ in range(0 if last else min(len(totals.events) // SLICE, MAX_SLICES)):
            with recorder.lock:
                totals.take(limit=SLICE)
            time.sleep(PAUSE)
        with recorder.lock:
            totals.take(all_of_them=last)
            recorder.choose_steps(totals.step_seconds)
            now = totals.instant(recorder.clock())
            points = self._points(totals, totals.timeline.seconds(now))
            if not last and (frame := self._stuck_frame(totals, now)) is not None:
                points[m.TRAINING_STUCK_FRAME_INFO] = [({"at": frame}, 1.0)]
            durations = (DURATION_BOUNDS, totals.durations.copy(), totals.duration_sum) if recorder.rank == 0 else None
            since, running = totals.last_step, (totals.loop_thread, totals.step_seconds)
            runs = since is not None and now - since <= max(AFTER, AFTER_STEPS * totals.step_seconds)
            return Snapshot(self._resource(totals, now), points, durations, running if runs else None)

    def _stuck_frame(self, totals: Totals, now: float) -> str | None:
        with self._recorder.reporting("snapshot"):
            return self._stuck.look(totals.loop_thread, *totals.timeline.open, now, totals.step_seconds)
        return None

    def _resource(self, totals: Totals, now: float) -> dict[str, str | int | float]:
        info, own, process = self._info, self._info.identity, self._info.process
        facts: dict[str, str | int | float | None] = {"schema": 1, "run": own.name, "tenant": info.tenant}
        facts |= {"attempt": own.attempt, "rank": own.rank, "host": info.host}
        facts |= {"pid": process.pid, "pid_namespace": process.pid_namespace, "start_unix": info.start_unix}
        facts |= {"pid_start_ticks": process.start_ticks, "submitted_unix": info.submitted_at}
        facts |= {
            "restored_step": totals.restored_step,
            "flight_recorder": flight_recorder.status(info.environ) or None,
        }
        facts |= {"open_step_seconds": totals.timeline.open_step_seconds(now), "gpu_uuid": info.gpu_uuid}
        return {f"flopwatch.{name}": value for name, value in facts.items() if value is not None}

    def _points(self, totals: Totals, seconds: dict[str, float]) -> Points:
        recorder, info = self._recorder, self._info
        stepping = seconds["step"] + seconds["data_stall"]
        self._check_mfu(totals, stepping)
        unlabelled = self._unlabelled(totals, stepping).items()
        points: Points = {metric: [({}, float(value))] for metric, value in unlabelled if value is not None}
        for metric, samples in totals.others.items():
            points[metric] = [(dict(labels), value) for labels, value in samples.items()]
        for (metric, labels), value in tuple(recorder.gauges.items()):
            points.setdefault(metric, []).append((dict(labels), value))
        if {ranks for _, ranks in totals.group_waits} - {all_ranks_text(recorder.totals.world_size)}:
            points[m.TRAINING_GROUP_WAIT_SECONDS_TOTAL] = [
                ({"group": kind, "ranks": ranks}, seconds) for (kind, ranks), seconds in totals.group_waits.items()
            ]
        points[m.TRAINING_PHASE_SECONDS_TOTAL] = [({"phase": name}, s) for name, s in totals.phases.items()]
        if self._reports_loss():
            points[m.TRAINING_NONFINITE_TOTAL] = [({"value": name}, float(n)) for name, n in totals.nonfinite.items()]
        points[m.TRAINING_ACTIVITY_SECONDS_TOTAL] = [({"activity": name}, s) for name, s in seconds.items()]
        reasons = (info.no_peak_because, totals.no_flops_because)
        points[m.TRAINING_MFU_UNAVAILABLE] = [({"reason": r}, 1.0) for r in reasons if r is not None]
        if recorder.no_wait_because is not None and not totals.measures_wait:
            points[m.TRAINING_COLLECTIVE_WAIT_UNAVAILABLE] = [({"reason": recorder.no_wait_because}, 1.0)]
        own = {"host": info.host, "uuid": info.gpu_uuid, "local_rank": str(info.identity.local_rank)}
        own |= {"attempt": info.identity.attempt, **(recorder.parallel or Parallel()).labels()}
        points[m.TRAINING_RANK_INFO] = [(own, 1.0)]
        if recorder.rank == 0:
            points[m.TRAINING_RUN_INFO] = [(self._run_labels(totals.convention), 1.0)]
            percentiles = totals.percentiles().items()
            points[m.TRAINING_STEP_PERCENTILE_SECONDS] = [({"percentile": str(p)}, s) for p, s in percentiles]
        return points

    def _check_mfu(self, totals: Totals, stepping: float) -> None:
        """Drop the peak for good if the MFU of a minute in steps is higher than any card reaches."""
        info, (since, steps, flops) = self._info, self._checked
        if info.peak is None or totals.no_flops_because is not None:
            return
        if stepping - since < CHECKED_SECONDS or totals.steps - steps < CHECKED_STEPS:
            return
        mfu = (totals.flops - flops) / (info.peak * (stepping - since))
        self._checked = (stepping, totals.steps, totals.flops)
        if mfu > IMPLAUSIBLE_MFU:
            info.peak, info.no_peak_because = None, "implausible"
            message = "no MFU: %.0f %% is more than any GPU reaches. Check dtype (%s), flops_per_token and peak_flops"
            log.warning(message, 100 * mfu, info.dtype)

    def _unlabelled(self, totals: Totals, stepping: float) -> dict[Metric, float | None]:
        """Return the values of the families without labels of their own, None where there is no sample."""
        recorder, info = self._recorder, self._info
        flops_known = totals.no_flops_because is None
        has_hardware_flops = flops_known and totals.hardware_flops_per_token is not None
        measures = totals.measures_wait or bool(totals.phases)
        weighs_waits = totals.measures_wait and totals.tokens_known
        last_step = None if totals.last_step is None else info.start_unix + totals.last_step - recorder.start
        values: dict[Metric, float | None] = {
            m.TRAINING_STEPS_TOTAL: totals.steps,
            m.TRAINING_TOKENS_TOTAL: totals.tokens if totals.tokens_known else None,
            m.TRAINING_SAMPLES_TOTAL: totals.samples if totals.samples_known else None,
            m.TRAINING_MODEL_FLOPS_TOTAL: totals.flops if flops_known else None,
            m.TRAINING_HARDWARE_FLOPS_TOTAL: totals.hardware_flops if has_hardware_flops else None,
            m.TRAINING_POSITION_STEPS: totals.position,
            m.TRAINING_POSITION_TOKENS: None if totals.position is None else totals.position_tokens,
            m.TRAINING_COMMITTED_STEPS: totals.committed,
            m.TRAINING_CHECKPOINT_BACKGROUND_SECONDS_TOTAL: totals.background if totals.saves_in_background else None,
            m.TRAINING_LAST_STEP_TIMESTAMP_SECONDS: last_step,
            m.TRAINING_HOOK_ERRORS_TOTAL: recorder.errors,
            m.TRAINING_PEAK_FLOPS_PER_SECOND: info.peak,
            m.TRAINING_CAPACITY_FLOPS_TOTAL: None if info.peak is None else info.peak * stepping,
            m.TRAINING_COLLECTIVE_WAIT_SECONDS_TOTAL: totals.wait if totals.measures_wait else None,
            m.TRAINING_MEASURED_STEP_SECONDS_TOTAL: totals.measured_seconds if measures else None,
            m.TRAINING_MEASURED_STEPS_TOTAL: totals.measured_steps if measures else None,
            m.TRAINING_COMPUTING_SQUARE_SECONDS_TOTAL: totals.computing_squares if totals.measures_wait else None,
            m.TRAINING_MEASURED_TOKENS_TOTAL: totals.measured_tokens if weighs_waits else None,
            m.TRAINING_WORLD_SIZE: recorder.totals.world_size if recorder.rank == 0 else None,
            m.TRAINING_SAMPLED_EVERY_STEPS: recorder.measure_every if measures and recorder.rank == 0 else None,
        }
        if self._reports_loss():
            values[m.TRAINING_LOSS], values[m.TRAINING_GRAD_NORM] = totals.loss, totals.grad_norm
            values[m.TRAINING_LOSS_SPIKES_TOTAL] = None if totals.spikes is None else totals.spikes.count
        return values

    def _reports_loss(self) -> bool:
        """Return whether this rank reports the run's loss: rank 0, or the first rank of a pipeline's last stage."""
        place = self._recorder.parallel
        if place is None or place.pp is None or place.pp[1] == 1:
            return self._recorder.rank == 0
        others = (place.dp, place.tp, place.cp)
        return place.pp[0] == place.pp[1] - 1 and not any(group and group[0] for group in others)

    def _run_labels(self, convention: str) -> dict[str, str]:
        info, recorder = self._info, self._recorder
        # Absent while another thread is importing torch.
        version = getattr(sys.modules.get("torch"), "__version__", "")
        labels = {"tenant": info.tenant, "attempt": info.identity.attempt, "convention": convention}
        labels |= {"dtype": info.dtype, "flops_source": recorder.flops_source, "peak_source": info.peak_source}
        labels |= {"step_source": recorder.step_source, "framework": f"torch {version}" if version else ""}
        labels |= {"owner": info.owner, "team": info.team, "page": info.page}
        return labels | {"external_id": launcher.external_id(info.environ, sys.modules)}
