"""Facts that each push carries as labels and resource attributes, from Run's arguments, FLOPWATCH_* or the launcher."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flopwatch.training.process import launcher
from flopwatch.training.process.identity import RankIdentity
from flopwatch.training.recorder import text_of
from flopwatch.training.totals import PackedFlops, Totals, positive


class Arguments:
    """Reader of a run's arguments and environment variables. It reports an invalid one to `failed` and ignores it."""

    def __init__(self, environ: Mapping[str, str], failed: Callable[[str, Exception], None]) -> None:
        self.environ = environ
        self._failed = failed

    def refuse(self, reason: str) -> None:
        """Report an invalid argument to `failed`."""
        self._failed("__init__", ValueError(reason))

    def text(self, argument: str | None, variable: str) -> str:
        """Return the argument as text or, if it is None, the environment variable's value, "" if that is not set."""
        return self.environ.get(variable, "") if argument is None else str(argument)

    def number(self, name: str, value: object) -> float | None:
        """Return the value of the argument `name` as a number above 0. None if it is None or invalid."""
        try:
            return None if value is None else positive(name, value)
        except ValueError as error:
            self._failed("__init__", error)
            return None

    def choice(self, name: str, value: object, choices: tuple[str, ...]) -> str | None:
        """Return the value of the argument `name` if it is a choice. Otherwise report it and return None."""
        if value in choices:
            return str(value)
        self.refuse(f"{name}={text_of(value)!r} is ignored; write {' or '.join(filter(len, choices))}")
        return None

    def unix_time(self, variable: str) -> float | None:
        """Return the environment variable's value as Unix time, None if it is missing or invalid."""
        text = self.environ.get(variable)
        try:
            return float(text) if text else None
        except ValueError:
            self.refuse(f"{variable}={text!r} is ignored; write Unix time, as date +%s prints it")
            return None


_UNKNOWN = RankIdentity("", "", 0, 1, 0)  # until the launcher has been asked


@dataclass(slots=True)
class RunInfo:
    """Declared facts of one rank: process, place in the job, host, GPU, tenant, owner, dtype and peak."""

    environ: Mapping[str, str]
    process: launcher.Process
    start_unix: float  # of the process
    launch: launcher.Launch
    host: str
    gpu_uuid: str
    tenant: str
    owner: str
    team: str
    page: str
    dtype: str  # of the matrix multiplications
    submitted_at: float | None  # Unix time
    peak: float | None = None  # FLOP/s of the rank's card
    peak_source: str = ""
    no_peak_because: str | None = None
    identity: RankIdentity = _UNKNOWN


def declare(
    given: Arguments, process: launcher.Process, start: float, dtype: str, submitted: float | None, **texts: str | None
) -> RunInfo:
    """Return this rank's facts, still without identity and peak. `texts` are tenant, gpu_uuid, owner, team and page."""
    host = given.text(None, "FLOPWATCH_HOST") or socket.gethostname()
    launch = launcher.launch(given.environ, host, process)
    submitted = given.unix_time("FLOPWATCH_SUBMITTED_AT") if submitted is None else submitted
    uuid = given.text(texts["gpu_uuid"], "FLOPWATCH_GPU_UUID")
    tenant, owner, team = (
        getattr(launch, name) if texts[name] is None else str(texts[name]) for name in ("tenant", "owner", "team")
    )
    page = given.choice("page", given.text(texts["page"], "FLOPWATCH_PAGE"), ("always", "")) or ""
    submitted = given.number("submitted_at", submitted)
    own = given.environ, process, start, launch, host
    return RunInfo(*own, uuid, launcher.clean(tenant), owner, team, page, dtype, submitted)


def declare_flops(
    arguments: Arguments, totals: Totals, per_token: float | PackedFlops | None, convention: str, hardware: float | None
) -> None:
    """Set model FLOPs per token, hardware FLOPs per token and the convention in `totals`, as far as they are valid."""
    totals.convention = arguments.choice("convention", convention, ("causal", "full", "palm")) or "unknown"
    if not hasattr(per_token, "flops"):
        totals.flops_per_token = arguments.number("flops_per_token", per_token)
    elif totals.convention != "unknown":  # a formula needs a known convention
        totals.packed_flops = per_token
    totals.hardware_flops_per_token = arguments.number("hardware_flops_per_token", hardware)


def declare_peak(arguments: Arguments, info: RunInfo, peak_flops: float | None, peak_source: str | None) -> None:
    """Set Run's peak_flops, in FLOP/s, and its peak_source in place of the card's peak in the data-sheet table."""
    info.peak = arguments.number("peak_flops", peak_flops)
    if info.peak is not None:
        info.peak_source = f"override: {peak_source}" if peak_source else "override"
    if peak_source is not None and peak_flops is None:
        arguments.refuse("peak_source= is ignored without peak_flops=")
