"""Fleet simulator: simulates jobs and faults of a cluster in virtual time and compares the ledger with the truth."""
