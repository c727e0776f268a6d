"""Model FLOPs counted from the operators that a training step runs."""
