"""Re-exports ``skip_first_batches``, for scripts that import it from ``accelerate.data_loader``."""

from drivetrain import __all__, __dir__, __getattr__  # noqa: F401 (what `import *` and names resolve by)
