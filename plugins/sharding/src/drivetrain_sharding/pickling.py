"""Pickles parameters as the script made them, without the attributes that an engine has set on them.

``torch.save`` writes the attributes of a parameter beside its values. An engine keeps process groups, hooks and buffers
in such attributes, which no file can hold, and which a reader without the engine could not use.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn


@final
class _AsMade:
    """``__reduce_ex__`` of one parameter, which ``pickle`` finds on the object before it looks at the class."""

    def __init__(self, parameter: nn.Parameter, of_engine: frozenset[str]) -> None:
        self._parameter = weakref.ref(parameter)
        self.of_engine = of_engine

    def __call__(self, protocol: int) -> Any:
        parameter = self._parameter()
        assert parameter is not None, "an attribute of the parameter outlived it"
        # The class of a guarded parameter would refuse to be read.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            values = parameter.detach()
            if values.untyped_storage().nbytes() > values.nbytes:
                values = values.clone()  # a view of the engine's buffer, which would be written whole
            written = nn.Parameter(values, parameter.requires_grad)
            vars(written).update({name: its for name, its in vars(parameter).items() if name not in self.of_engine})
            return written.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def pickle_as_made(parameter: nn.Parameter, of_engine: Iterable[str]) -> None:
    """Make ``torch.save``, ``pickle`` and object collectives write a whole parameter as the script made it.

    Attributes that the script sets, before or after, are written. A parameter of a subclass with a ``__reduce_ex__`` of
    its own stays as it is. Not collective.

    Args:
        parameter: whole on this rank. Its attribute ``__reduce_ex__`` is set; deleting it ends this.
        of_engine: names of the attributes that are left out.
    """
    if type(parameter).__reduce_ex__ is nn.Parameter.__reduce_ex__:
        before = vars(parameter).get("__reduce_ex__")
        already = before.of_engine if isinstance(before, _AsMade) else ()
        made = _AsMade(parameter, frozenset({*already, *of_engine, "__reduce_ex__"}))
        parameter.__reduce_ex__ = made  # type: ignore[method-assign]
