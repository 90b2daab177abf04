"""DiLoCo for Drivetrain: decoupled data parallelism with an outer optimizer (arXiv 2311.08105)."""
