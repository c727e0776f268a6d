"""What `flopwatch run` attaches to a training script that does not call the hook itself."""
