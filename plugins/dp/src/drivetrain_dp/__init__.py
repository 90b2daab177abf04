"""Drivetrain's backend for ``torch.nn.DataParallel``."""
