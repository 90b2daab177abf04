"""Pipelines: a model cut along its depth without being rewritten, and the loop that stays as it is over it."""
