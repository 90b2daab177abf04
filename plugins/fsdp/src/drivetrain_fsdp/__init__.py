"""Drivetrain's backend for ``torch.distributed.fsdp.fully_shard`` (FSDP2)."""
