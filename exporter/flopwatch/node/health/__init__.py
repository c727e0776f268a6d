"""What is wrong with a node: its verdict, `flopwatch check` and `flopwatch doctor`."""
