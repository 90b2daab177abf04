"""Re-exports ``PartialState``, for scripts that import it from ``accelerate.state``."""

from drivetrain import __all__, __dir__, __getattr__  # noqa: F401 (what `import *` and names resolve by)

