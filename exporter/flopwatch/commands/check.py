"""`flopwatch check`: report whether this node is fit for training."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from flopwatch.commands import Commands, command, flags, given, sources
from flopwatch.settings import ExporterSettings, SettingsError

if TYPE_CHECKING:
    from flopwatch.catalogue import Sample
    from flopwatch.node.health.check import Look

URL = "http://127.0.0.1:9450/metrics"
FORMATS = ("nagios", "text", "json", "npd")
UNKNOWN = 3


def run(options: argparse.Namespace) -> int:
    """Print the node's verdict and return the exit status. If the check itself fails, the verdict is unknown."""
    from flopwatch.node.health.check import CheckError, NotListening, failed

    try:
        settings = ExporterSettings(**given(options, ExporterSettings))
        with looks(options, settings) as look:
            output, status = _judged(options, settings, look)
    except (SettingsError, CheckError, NotListening) as error:
        output, status = failed(str(error), options.format)
    except Exception as error:
        # A traceback would exit with status 1, which means a degraded node.
        output, status = failed(f"{type(error).__name__}: {error}", options.format)
    print(output)
    return status


@contextmanager
def looks(options: argparse.Namespace, settings: ExporterSettings) -> "Iterator[Look]":
    """Yield a function that returns the node's samples. With --url, raises NotListening if no exporter listens there.

    Without --url, the samples are from the exporter at URL if one listens, else from the hardware. With --direct,
    --simulate or --sysfs and no --url, they are always from the hardware.
    """
    from flopwatch.http.client import client_tls
    from flopwatch.node.health import check

    pointed = options.direct or options.simulate is not None or options.sysfs is not None
    if not pointed or options.url is not None:
        url = options.url or URL
        files = (options.ca_file, options.cert_file, options.key_file)
        tls = client_tls(*files) if url.startswith("https:") else None
        try:
            password = "" if options.password_file is None else options.password_file.read_text().rstrip("\r\n")
        except OSError as error:
            raise SettingsError(f"--password-file {options.password_file}: {error.strerror}") from None

        def look() -> "list[Sample]":
            return check.ask(url, options.deadline, tls, options.user or "", password)

        try:
            first = [look()]
        except check.NotListening:
            if options.url is not None:
                raise
        else:
            yield lambda: first.pop() if first else look()
            return
    with check.here(settings, options.deadline, sources(settings)) as look_here:
        yield look_here


def _judged(options: argparse.Namespace, settings: ExporterSettings, look: "Look") -> tuple[str, int]:
    from flopwatch.node.health import check
    from flopwatch.node.health.expectations import load
    from flopwatch.node.health.verdict import Verdict
    from flopwatch.node.scrape.reader import gpu_inventory

    if options.record:
        return _record(options, settings, look())
    verdict = Verdict(load(settings.expect, gpu_inventory(settings).parent))
    first = look()
    if options.seconds is None:
        judgement = verdict.judge(first)
    else:
        began = time.monotonic()
        time.sleep(options.seconds)
        judgement = verdict.judge_twice(first, look(), time.monotonic() - began)
    if not (judgement.reasons or judgement.gpus or judgement.ports):
        raise check.CheckError(
            "there is neither a GPU nor an active port; if there should be, flopwatch doctor shows "
            "why, and --expect FILE makes their absence bad"
        )
    if options.format == "npd":
        return check.npd(judgement, options.fail_on)
    if options.format == "nagios":
        return check.nagios(judgement, options.verbose)
    return check.as_json(judgement) if options.format == "json" else check.text(judgement)


def _record(options: argparse.Namespace, settings: ExporterSettings, samples: "list[Sample]") -> tuple[str, int]:
    from flopwatch.node.collectors import StateFile
    from flopwatch.node.health import check
    from flopwatch.node.health.expectations import Expectations, learnt_file
    from flopwatch.node.health.rules import BAD
    from flopwatch.node.health.verdict import Verdict, learn
    from flopwatch.node.scrape.reader import gpu_inventory

    judgement = Verdict(Expectations()).judge(samples)
    if judgement.verdict in (BAD, "unknown") and not options.force:
        raise check.CheckError(
            f"not recorded, the node is {judgement.verdict}: {check.sentence(judgement)}; --force records it as it is"
        )
    shape = learn(samples).content()
    file = settings.expect or learnt_file(gpu_inventory(settings).parent)
    if not shape:
        raise check.CheckError("not recorded: this node has neither GPUs nor active ports")
    if not StateFile(file.absolute()).save(shape):
        raise SettingsError(f"{file} cannot be written; choose another --state DIR or --expect FILE")
    return f"recorded in {file}: {shape}; an exporter takes it at its start, from its --state or --expect", 0


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "check", run, "report whether this node is fit for training, and what to do if not")
    _make_wrong_flags_unknown(parser)
    add = parser.add_argument
    text = "nagios (default; exit status 0 ok, 1 degraded, 2 bad, 3 unknown), text, json, or npd "
    text += "(node-problem-detector: 0 ok, 1 problem, 2 unknown)"
    add("--format", choices=FORMATS, default="nagios", help=text)
    add("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    flags(parser, "check")
    flags(parser, "samples", ExporterSettings())


def _make_wrong_flags_unknown(parser: Any) -> None:
    """Make a wrong flag exit with status 3 (unknown), because argparse's status 2 would mean a bad node."""
    parse = parser.parse_known_args

    def error(message: str) -> NoReturn:
        print(f"UNKNOWN - {message}")
        parser.print_usage(sys.stderr)
        sys.exit(UNKNOWN)

    def parse_known_args(*arguments: Any) -> tuple[argparse.Namespace, list[str]]:
        options, unknown = parse(*arguments)
        if unknown:
            error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    parser.error, parser.parse_known_args = error, parse_known_args
