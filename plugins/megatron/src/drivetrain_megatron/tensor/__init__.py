"""Tensor parallelism: which parameters are cut over ``tp``, and what a model's operations do with the parts."""
