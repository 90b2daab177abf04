"""Module paths of Accelerate, such as ``utils.operations``, under which scripts import names. Imports no torch.

Each is an empty module that looks names up in ``drivetrain``, as ``drivetrain.utils`` does. A new name is public under
all of them at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

_PATHS = frozenset(
    {
        *("big_modeling", "data_loader", "hooks", "inference", "launchers", "local_sgd", "memory_utils", "optimizer"),
        *("parallelism_config", "scheduler", "state"),
        *("utils.bnb", "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.environment"),
        *("utils.fsdp_utils", "utils.imports", "utils.megatron_lm", "utils.memory", "utils.modeling", "utils.offload"),
        *("utils.operations", "utils.other", "utils.random", "utils.torch_xla", "utils.tqdm", "utils.versions"),
    }
)
"""Below ``drivetrain``. A file of that name would come first."""

ATTRIBUTES = frozenset({"logging", "tracking", "utils"} | {path for path in _PATHS if "." not in path})
"""Modules that are there after ``import accelerate`` alone: scripts write ``accelerate.utils.set_seed(0)``."""


@final
class _Names(Loader):
    """Fills a module with the package's own lookup."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Python's default."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Share the lookup of the package."""
        package: Any = sys.modules["drivetrain"]
        vars(module).update(
            __doc__="Re-exports the public names, for scripts that import them from Accelerate's module of this name.",
            __all__=package.__all__,
            __dir__=package.__dir__,
            __getattr__=package.__getattr__,
        )


@final
class AcceleratePaths(MetaPathFinder):
    """Finds the modules that scripts written for Accelerate import names from."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the description of one of these modules; ``None`` for any other."""
        package, _, rest = fullname.partition(".")
        return ModuleSpec(fullname, _Names()) if package == "drivetrain" and rest in _PATHS else None
