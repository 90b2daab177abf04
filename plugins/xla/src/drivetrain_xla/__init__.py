"""Drivetrain's backend for TPUs: ``torch_xla``, and the description of TorchTPU's device."""
