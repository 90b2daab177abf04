"""Tensor parallelism: the plan of sharded parameters, and rules for a model's operations on shards."""
