"""Counts the labels of batches, and detects whether a model normalises its loss by a given number."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_KEEPS = {"to", "clone", "detach", "contiguous", "long", "int", "cuda", "cpu", "expand", "unsqueeze", "squeeze", "view"}
"""Methods whose result is still the number that was given."""

_ASKS = {"__get__", "__repr__", "dim", "element_size", "is_complex", "is_floating_point", "numel", "size", "type"}
"""Functions that ask about a tensor and not for its value."""


class ObservedNumber(Tensor):
    """A 0-d tensor that records whether anything was computed with it."""

    uses: list[str]

    @classmethod
    def of(cls, value: Tensor) -> ObservedNumber:
        """An observed copy of a number."""
        made = value.detach().clone().as_subclass(cls)
        made.uses = []
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function on plain tensors, and record it."""
        observed = next((one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)), None)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's documented way)
            result = func(*args, **dict(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _KEEPS and isinstance(result, Tensor) and observed is not None:
            again = result.as_subclass(cls)
            again.uses = observed.uses
            return again
        if name not in _ASKS and observed is not None:
            observed.uses.append(name)
        return result


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled, by ``torch.compile`` or by its method.

    What a compiled forward computes with is traced, and what it is given at run time no longer sees the operations.
    """
    return any(
        part._compiled_call_impl is not None  # noqa: SLF001 (torch has no public word)
        or "_orig_mod" in part._modules  # noqa: SLF001 (of torch.compile(module))
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in model.modules()
    )


def seems_to_use_number(model: nn.Module) -> bool:
    """Whether the source of the model, or of a model in it, hands ``num_items_in_batch`` to its loss.

    For a model whose forward is compiled, or run in parts after the loss was taken, so that the number cannot be
    observed.
    """
    for part in model.modules():
        forward = getattr(type(part), "forward", None)
        try:
            source = inspect.getsource(inspect.unwrap(forward)) if forward is not None else ""
        except (OSError, TypeError):
            continue
        if "num_items_in_batch" in source or "self.loss_function(" in source:
            return True
    return False


def num_labels(inputs: Any, names: list[str], *, shifted: bool, rows: int) -> Tensor | int:
    """Return the number of labels in the mean loss over this batch.

    Args:
        inputs: the batch.
        names: its labels.
        shifted: the first label of each row is no target.
        rows: samples in the batch, for labels that are not class indices.
    """
    labels = inputs.get("labels") if len(names) == 1 and names[0] == "labels" and isinstance(inputs, Mapping) else None
    if "shift_labels" in inputs and isinstance(inputs["shift_labels"], Tensor):
        labels, shifted = inputs["shift_labels"], False
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return rows
    if shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return labels.ne(-100).sum()
