"""Fleet simulator: jobs and faults of a cluster in virtual time, compared with what the ledger concludes."""
