"""Make what scripts log plain: numbers, text, lists and mappings that JSON knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it, nothing lost but exactness of type.

    Tensors and arrays become numbers or nested lists (a 0-d tensor a number; waits for the device). ``nan`` and the
    infinities, which JSON has no word for, become ``"nan"``, ``"inf"``, ``"-inf"``. Anything else becomes text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    as_list = getattr(value, "tolist", None)  # tensors and arrays, without importing either library
    if callable(as_list):
        return plain(as_list())
    if isinstance(value, (Sequence, AbstractSet)):
        return [plain(each) for each in value]
    return str(value)
