"""All rules of sharded tensors: importing this registers them."""

from drivetrain_megatron.tensor import attention, contractions, pointwise, reductions, views, vocabulary

__all__ = ["attention", "contractions", "pointwise", "reductions", "views", "vocabulary"]
