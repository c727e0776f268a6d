"""Health of a host: its verdict, `flopwatch check` and `flopwatch doctor`."""
