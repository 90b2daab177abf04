"""Every test leaves the process as it found it: no environment variable, process group or thread stays behind."""

pytest_plugins = ["drivetrain_testing.plugin"]
