"""Request for a rank's stacks in the exporter's answer to a push (docs/otlp.md), and the longest text that is kept."""

SEND_STACKS = "flopwatch: send stacks"
MAX_STACKS = 8192  # characters
