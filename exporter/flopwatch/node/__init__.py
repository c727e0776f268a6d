"""Exporter: reads one host's hardware, receives pushes of its training processes, and serves `/metrics`."""
