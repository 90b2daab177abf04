"""Names of parameters and buffers in the user's own module, whatever wraps a part of it."""

from __future__ import annotations

import re

_COMPILED = "_orig_mod"  # What torch.compile adds to the names of a module.
_RECOMPUTED = "_checkpoint_wrapped_module"  # What torch's checkpoint_wrapper adds.


def _without(*parts: str) -> re.Pattern[str]:
    inner = f"(?:{'|'.join(parts)})"
    return re.compile(rf"^(?:{inner}(?:\.|$))+|\.{inner}(?=\.|$)")


_ANY, _RECOMPUTED_ONLY = _without(_COMPILED, _RECOMPUTED), _without(_RECOMPUTED)


def original_name(name: str) -> str:
    """The name of a parameter or buffer in the original module: ``a._orig_mod.weight`` is ``a.weight``."""
    return _ANY.sub("", name)


def loaded_name(name: str) -> str:
    """The name under which ``load_state_dict`` looks for it: torch's ``checkpoint_wrapper`` adds its own part there."""
    return _RECOMPUTED_ONLY.sub("", name)
