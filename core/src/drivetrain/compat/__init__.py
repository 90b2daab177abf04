"""Everything that exists only for scripts and configuration files written for Accelerate."""
