"""Pushes of the training hook, evidence about ranks and records for the ledger."""
