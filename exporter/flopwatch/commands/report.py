"""`flopwatch report`: one run's MFU, goodput and losses, on a page of its own."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from flopwatch.commands import Commands, command, seconds
from flopwatch.settings import SettingsError

FORMATS = {".html": "html", ".md": "markdown", ".json": "json"}


def report(options: argparse.Namespace) -> None:
    """Ask, and write the page. Raises SettingsError."""
    form = options.format or FORMATS.get(options.out.suffix if options.out is not None else ".html", "html")
    try:
        from flopwatch.report import page
    except ImportError as error:
        raise SettingsError(f"report: {error}; install it with pip install 'flopwatch[report]'") from None
    from flopwatch.ledger.client import Client
    from flopwatch.report.collect import gather
    from flopwatch.report.prometheus import Prometheus

    found = gather(
        Prometheus(options.prometheus, options.token_file),
        options.run,
        tenant=options.tenant,
        at=time.time() if options.at is None else options.at,
        lookback=options.lookback,
        price=options.price,
        ledger=None
        if options.ledger is None
        else Client(
            options.ledger, options.ledger_token_file, ("--ledger", "--ledger-token-file"), options.ledger_ca_file
        ),
    )
    text = {"html": page.as_html, "markdown": page.as_markdown, "json": page.as_json}[form](found)
    if options.out is None:
        sys.stdout.write(text)
        return
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--out {options.out}: {error.strerror}") from error
    print(f"wrote {options.out}", file=sys.stderr)


def _days(text: str) -> float:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("m", 60.0)):
        if text.endswith(unit):
            return seconds(text.removesuffix(unit)) * size
    return seconds(text)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no price of a GPU-hour")
    return price


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = command(commands, "report", report, "write a page on one run: MFU, goodput, what was lost and to what")
    add = parser.add_argument
    add("run", metavar="RUN")
    add("--prometheus", required=True, metavar="URL", help="which scrapes the ledger and evaluates the rules")
    add("--token-file", type=Path, metavar="FILE", help="bearer token for it")
    add("--ledger", metavar="URL", help="the ledger, to tell of each loss with its cause, host, GPU and port")
    add("--ledger-token-file", type=Path, metavar="FILE", help="bearer token for that")
    add("--ledger-ca-file", type=Path, metavar="FILE", help="who signed its certificate, for an https URL")
    add("--tenant", metavar="TENANT", help="whose run, if several have one of this name")
    add("--at", type=float, metavar="UNIX_TIME", help="as of then (default now)")
    add("--lookback", type=_days, default=90 * 86_400.0, metavar="TIME", help="how far back to look (default 90d)")
    add("--price", type=_price, metavar="X", help="of a GPU-hour, to say losses in money")
    add("--format", choices=("html", "markdown", "json"), help="default: by the ending of --out, else html")
    add("--out", type=Path, metavar="FILE", help="where to write (default standard output)")
