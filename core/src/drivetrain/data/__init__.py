"""Which rank reads which sample: pure planning, no torch. The loaders are in ``drivetrain.runtime.loading``."""
