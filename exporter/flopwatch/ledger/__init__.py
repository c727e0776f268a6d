"""Ledger: it attributes every second of a run to a bucket, and every loss to an incident."""
