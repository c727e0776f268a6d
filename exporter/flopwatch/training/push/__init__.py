"""Push thread of the hook and its OTLP encoding."""
