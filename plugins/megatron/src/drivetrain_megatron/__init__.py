"""Drivetrain's backend for tensor and pipeline parallelism, with data parallelism around them."""
