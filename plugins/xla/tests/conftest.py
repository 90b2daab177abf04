"""Where the tests of ``xla`` run: the real ones need torch_xla, in the environment that `make test-xla` builds."""

from __future__ import annotations

import os
from importlib.util import find_spec

from drivetrain_testing import preload

if find_spec("torch_xla") is not None:
    # Read by torch_xla when it is imported and when its runtime starts; a rank gets them from here.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # What is tested is which graphs are made and what they compute, not how fast: less than half the time.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    preload("torch_xla", "torch_xla.runtime", "torch_xla.distributed.spmd", "drivetrain_xla.backend")
