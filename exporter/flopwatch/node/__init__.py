"""Exporter: it reads one host's hardware and serves `/metrics`."""
