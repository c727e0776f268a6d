"""`flopwatch run`: run an unchanged training script and watch it through PyTorch's hooks.

The script runs in this process as Python would run it (https://docs.python.org/3/using/cmdline.html). It is __main__
and has its own sys.argv and sys.path[0]. Exit status, exceptions and Ctrl-C work as usual. This module does not import
PyTorch: training/autolog attaches its hooks once the script has.
"""

import argparse
import builtins
import io
import json
import os
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from flopwatch.commands import Commands, command, flags, number
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    from flopwatch.training.autolog.attach import Attachment


def run(options: argparse.Namespace) -> int:
    """Run the script or module and return the exit status. Raises the script's exceptions."""
    try:
        if not options.script:
            raise SettingsError("run: name a script, or a module after -m")
        watching = _Watching(options)
    except SettingsError as error:
        print(f"flopwatch: {error}", file=sys.stderr)
        return 1
    name, *arguments = options.script
    try:
        status = _run_module(name, arguments) if options.module else _run_script(name, arguments)
    except SystemExit as end:
        asked = _asked_to_leave(end.__traceback__)
        watching.ends(asked or ("completed" if end.code in (None, 0) else "failed"), end)
        raise
    except BaseException as error:
        watching.ends("stopped" if isinstance(error, KeyboardInterrupt) else "failed", error)
        _show_without_us(error)
        raise
    watching.ends("completed" if status == 0 else "failed")
    return status


def _asked_to_leave(trace: TracebackType | None) -> str | None:
    """Return stopped or preempted if a signal handler (SIGINT or another) raised this SystemExit, else None."""
    handlers = {getattr(signal.getsignal(number), "__code__", None): number for number in signal.valid_signals()}
    while trace is not None:
        number = handlers.get(trace.tb_frame.f_code)
        if number is not None:
            return "stopped" if number == signal.SIGINT else "preempted"
        trace = trace.tb_next
    return None


class _Watching:
    """Attachment of flopwatch's hooks to the script, made once the script has imported torch."""

    def __init__(self, options: argparse.Namespace) -> None:
        from flopwatch.training.import_hook import when_imported

        same = ("name", "tokens_from", "tokens_per_step", "step_from", "dtype", "peak_flops", "peak_source", "top")
        self._settings = {**{flag: getattr(options, flag) for flag in same}, **_flops(options)}
        self._attachment: Attachment | None = None
        when_imported("torch", self._attach)

    def _attach(self) -> None:
        from flopwatch.training.autolog.attach import to_process
        from flopwatch.training.autolog.loop import Settings

        self._attachment = to_process(Settings(**self._settings))

    def ends(self, status: str, error: BaseException | None = None) -> None:
        """Set the attempt's status and the exception behind it, which the hook reports at the interpreter's exit."""
        from flopwatch.training.process.exit_reason import ended_by

        if self._attachment is not None:
            self._attachment.status, self._attachment.ended_by = status, ended_by(error)


def _flops(options: argparse.Namespace) -> dict[str, Any]:
    """Return the hook's settings flops_per_token and convention from the flags. Raises SettingsError."""
    if options.peak_source is not None and options.peak_flops is None:
        raise SettingsError("run: --peak-source goes with --peak-flops")
    if options.config is None:
        if options.seq_len is not None:
            raise SettingsError("run: --seq-len goes with --config")
        return {"flops_per_token": options.flops_per_token, "convention": options.convention}
    if options.flops_per_token is not None:
        raise SettingsError("run: give --config or --flops-per-token, not both")
    from flopwatch.flops import from_config

    try:
        model = from_config(json.loads(options.config.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"run: --config {options.config}: {error}") from None
    flops = model if options.seq_len is None else model.flops_per_token(options.seq_len, options.convention)
    return {"flops_per_token": flops, "convention": options.convention}


def _run_script(name: str, arguments: list[str]) -> int:
    path = os.path.abspath(name)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        # The same message and status as Python's.
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        return 2
    main = _new_main(os.path.dirname(os.path.realpath(path)), [name, *arguments])
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    return 0


def _run_module(name: str, arguments: list[str]) -> int:
    _new_main(os.getcwd(), ["-m", *arguments])
    # `python -m` calls this too; the public run_module() would remove its __main__ at the end.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    return 0


def _new_main(folder: str, argv: list[str]) -> ModuleType:
    """Replace __main__, sys.argv and sys.path[0] by those of the script. Return the new __main__."""
    ours, main = sys.modules["__main__"], ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    # Further names depend on the release of Python.
    for key, value in (("__cached__", None), ("__annotations__", {})):
        if key in ours.__dict__:
            main.__dict__[key] = value
    sys.modules["__main__"] = main
    sys.argv[:] = argv
    # With -P or PYTHONSAFEPATH, sys.path has no such entry: https://docs.python.org/3/using/cmdline.html#cmdoption-P
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    return main


def _show_without_us(error: BaseException) -> None:
    """Make the interpreter print this exception without the frames of flopwatch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = shown
        shown(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def _whole_if_possible(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


_positive = number(_whole_if_possible, lambda value: 0 < value < float("inf"), "a positive number")


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "run", run, "run a training script unchanged and watch it through PyTorch's hooks")
    parser.usage = "flopwatch run [flags] train.py [arguments ...]\n"
    parser.usage += "       flopwatch run [flags] -m module [arguments ...]"
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    flags(parser, "run", types={"positive": _positive})
