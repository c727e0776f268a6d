"""Trainers that tell a Run what their loop does: a module per framework, imported by whoever uses it."""
