"""Callbacks for training frameworks: one module per framework, imported by the training script."""
