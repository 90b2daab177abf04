"""Drivetrain's backend for ``torch.nn.parallel.DistributedDataParallel``."""
