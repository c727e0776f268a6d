"""Hooks that `flopwatch run` attaches to a training script that does not call flopwatch itself."""
