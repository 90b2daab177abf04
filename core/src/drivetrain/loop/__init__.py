"""The training step: prepared models, gradient accumulation, loss, optimizers and schedulers."""
