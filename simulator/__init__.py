"""A cluster that does not exist, in virtual time: its jobs, its faults, the truth, and what the ledger makes of it."""
