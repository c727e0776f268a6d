"""Facts about the training process: launcher, identity, parallelism, exit reason and stacks."""
