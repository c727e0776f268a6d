"""Observability of GPU training: node exporter, training hook, ledger, report and command line."""

__version__ = "0.2.0"
