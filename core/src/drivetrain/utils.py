"""Re-exports the public names, for scripts that import them from ``accelerate.utils``.

``from drivetrain.utils import set_seed`` and ``from drivetrain import set_seed`` are the same function.
"""

from drivetrain import __all__, __dir__, __getattr__  # noqa: F401 (what `import *` and names resolve by)

