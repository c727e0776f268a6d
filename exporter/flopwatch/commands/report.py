"""`flopwatch report`: write a page about one run with its MFU, goodput and losses."""

import argparse
import sys
import time
from pathlib import Path

from flopwatch.commands import Commands, command, flags, number, seconds
from flopwatch.settings import SettingsError

FORMATS = {".html": "html", ".md": "markdown", ".json": "json"}


def report(options: argparse.Namespace) -> None:
    """Query Prometheus, and the ledger if given, about one run and write the page. Raises SettingsError."""
    form = options.format or FORMATS.get(options.out.suffix if options.out is not None else ".html", "html")
    from flopwatch.ledger.client import LedgerClient
    from flopwatch.report.collect import collect
    from flopwatch.report.page import render
    from flopwatch.report.prometheus import PrometheusClient
    from flopwatch.report.queries import RunQueries

    ledger = None
    if options.ledger is not None:
        flags = ("--ledger", "--ledger-token-file")
        ledger = LedgerClient(options.ledger, options.ledger_token_file, flags, options.ledger_ca_file)
    prometheus = PrometheusClient(options.prometheus, options.token_file)
    now = time.time() if options.at is None else options.at
    queries = RunQueries(prometheus, options.run, options.tenant, now, options.lookback)
    text = render(collect(queries, options.price, ledger), form)
    if options.out is None:
        sys.stdout.write(text)
        return
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out {options.out}: {error.strerror}") from error
    print(f"wrote {options.out}", file=sys.stderr)


def _duration(text: str) -> float:
    """Parse a duration such as 90d, 12h or 30m and return its seconds, for argparse."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("m", 60.0)):
        if text.endswith(unit):
            return float(seconds(text.removesuffix(unit))) * size
    return float(seconds(text))


_price = number(float, lambda value: 0 <= value < 1e6, "a price of a GPU-hour")


def add(commands: Commands) -> None:
    """Register the command and its flags."""
    parser = command(commands, "report", report, "write a page about one run: MFU, goodput, losses and their causes")
    flags(parser, "report", types={"duration": _duration, "price": _price})
    add = parser.add_argument
    add("--format", choices=("html", "markdown", "json"), help="default: by the suffix of --out, else html")
    add("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    add("--out", type=Path, metavar="FILE", help="file to write (default standard output)")
