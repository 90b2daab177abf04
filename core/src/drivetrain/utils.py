"""Re-exports the public names, for scripts that import them from ``accelerate.utils``.

``from drivetrain.utils import set_seed`` and ``from drivetrain import set_seed`` are the same function. The modules
below this one (``drivetrain.utils.operations``) are in :mod:`drivetrain.compat.paths`.
"""

from importlib import import_module

from drivetrain import __all__, __dir__, __getattr__  # noqa: F401 (what `import *` and names resolve by)

__path__: list[str] = []

# The first import of a module binds it to its name here, where the name is that of the function.
import_module("drivetrain.utils.tqdm")
del globals()["tqdm"]
