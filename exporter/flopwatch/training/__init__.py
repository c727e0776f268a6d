"""Training hook: `Run`. Imports only the standard library and opentelemetry, and torch only if the job uses it.

run = Run("llama-8b", model=model, flops_per_token=Transformer(...).flops_per_token(8192))
for batch in run.batches(loader):
    train_step(batch)
    run.step(tokens=batch.numel())
run.finish()
"""

from flopwatch.training.run import Run

__all__ = ["Run"]
