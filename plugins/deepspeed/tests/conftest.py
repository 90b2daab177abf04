"""DeepSpeed is slow to import: the fork server does it once for all ranks of these tests."""

from __future__ import annotations

from drivetrain_testing import preload

# The second is imported by the first engine of a process, and brings half of torch's compiler.
preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", opens_accelerators=True)
