"""What happens in one training step: the prepared model, the accumulation window, the optimizer."""
