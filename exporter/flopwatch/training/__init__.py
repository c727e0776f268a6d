"""Training hook: `Run` pushes a training loop's metrics to the node's exporter. Imports torch only if the job does.

run = Run("llama-8b", model=model, flops_per_token=Transformer(...).flops_per_token(8192))
for batch in run.batches(loader):
    train_step(batch)
    run.step(tokens=batch.numel())
run.finish()
"""

from flopwatch.training.run import Run

__all__ = ["Run"]
