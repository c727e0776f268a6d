"""Ledger: attributes each second of a run to a bucket, such as productive or down, and each loss to an incident."""
