"""Which rank reads which sample, and the loaders that do it."""
