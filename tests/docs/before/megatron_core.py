"""A run of Megatron-Core over two tensor-parallel ranks, and batches of tokens."""

import functools
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain

# Megatron-Core says which of its kernels and defaults it does without.
warnings.simplefilter("ignore")
section = {"megatron.engine": "megatron_core", "megatron.tensor_parallel_size": 2}
overrides = {"distributed_type": "megatron", "use_cpu": True} | section
Accelerator = functools.partial(drivetrain.Accelerator, config=drivetrain.load_config(overrides=overrides, environ={}))
torch.manual_seed(0)
words = torch.randint(1000, (8, 17))
loader = DataLoader(TensorDataset(words[:, :-1], words[:, 1:], words[:, 1:] > 10), batch_size=4)
positions = torch.arange(16).expand(4, 16)
