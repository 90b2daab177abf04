"""Detects and removes torch's wrapper modules around a model or its submodules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from drivetrain.distributed.trees import attribute
from drivetrain.errors import UsageError
from drivetrain.loop.model import prepared_model

logger = logging.getLogger(__name__)

_PARALLEL = (DataParallel, DistributedDataParallel)


def take_off_parallel(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Take torch's ``DataParallel`` and ``DistributedDataParallel`` off a model and its parts, in place.

    The backend shares out the batch and averages gradients. Code that goes on to write ``self.encoder.module`` finds
    the part itself there.

    Returns:
        The model without them, and the paths at which they were, ``""`` for the model itself.

    Raises:
        UsageError: ``FullyShardedDataParallel`` is around a part, and has made one flat parameter of those in it; or a
            module of the script has an attribute by the name that ``torch.compile`` gives what it wraps.
    """
    sharded: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    found: list[str] = []
    done: dict[int, nn.Module] = {}

    def without(part: nn.Module, path: str) -> nn.Module:
        if id(part) in done:
            return done[id(part)]
        if "_orig_mod" in part._modules and attribute(part, "dynamo_ctx") is None:  # noqa: SLF001
            raise UsageError(
                f"{type(part).__name__} has a submodule by the name _orig_mod, which torch.compile gives the module "
                "that it wraps, so that the model would be taken for that submodule",
                cure="Give the submodule another name.",
            )
        if sharded is not None and isinstance(part, sharded.FullyShardedDataParallel):
            raise UsageError(
                f"{path or 'the model'} is in torch's FullyShardedDataParallel, whose flat parameter has no name of "
                "the model's own",
                cure="Pass the model without it to accelerator.prepare, and write distributed_type: fsdp.",
            )
        if isinstance(part, _PARALLEL):
            found.append(path)
            inner = done[id(part)] = without(part.module, path)
            if path and attribute(inner, "module") is None:  # a prepared model has one anyhow
                object.__setattr__(inner, "module", inner)
            return inner
        done[id(part)] = part
        changed = _exchange(part, lambda name, child: without(child, f"{path}.{name}".lstrip(".")))
        compiled = attribute(part, "dynamo_ctx")
        if changed and compiled is not None:
            # It calls what it was made with.
            done[id(part)] = type(part)(part._modules["_orig_mod"], compiled)  # noqa: SLF001
        return done[id(part)]

    own = without(model, "")
    if found:
        logger.warning(
            "torch's DataParallel or DistributedDataParallel was taken off %s: the backend averages gradients over "
            "processes; distributed_type: dp shares a batch out over the devices of one.",
            ", ".join(path or type(own).__name__ for path in found),
        )
    return own, found


def _exchange(part: nn.Module, by: Callable[[str, nn.Module], nn.Module]) -> bool:
    """Replace children by other modules. Returns whether any was replaced."""
    changed = False
    for name, child in part._modules.items():  # noqa: SLF001 (assigning by name asks for more)
        if child is not None and (new := by(name, child)) is not child:
            part._modules[name] = new  # noqa: SLF001
            changed = True
    return changed


def without_compile(model: nn.Module, plain_class: type[nn.Module]) -> nn.Module:
    """The model without what ``torch.compile`` and torch's ``checkpoint_wrapper`` have put around its parts.

    The same object where there is nothing to undo. Otherwise a copy of the modules around those parts, with the same
    parameters and buffers, of the user's class, which no engine trains; the model itself is left as it is.

    Args:
        model: prepared or not.
        plain_class: its class before it was prepared.
    """
    done: dict[int, nn.Module] = {}

    def undone(part: nn.Module) -> nn.Module:
        for name in ("_orig_mod", "_checkpoint_wrapped_module"):
            inner = part._modules.get(name)  # noqa: SLF001
            if inner is not None:
                return undone(inner)
        if id(part) in done:
            return done[id(part)]
        done[id(part)] = part
        children = {
            name: None if child is None else undone(child)
            for name, child in part._modules.items()  # noqa: SLF001
        }
        compiled = part._compiled_call_impl is not None  # noqa: SLF001 (module.compile())
        if compiled or any(new is not part._modules[name] for name, new in children.items()):  # noqa: SLF001
            copied: nn.Module = object.__new__(plain_class if part is model else type(part))
            object.__setattr__(copied, "__dict__", {**vars(part), "_modules": children})
            vars(copied).pop("_drivetrain", None)
            vars(copied).pop("_compiled_call_impl", None)
            done[id(part)] = copied
        return done[id(part)]

    return undone(model)


def original_module(model: nn.Module) -> nn.Module:
    """The user's module behind ``torch.compile``, whose parameters have the original names."""
    inner = attribute(model, "_orig_mod")
    return inner if isinstance(inner, nn.Module) else model


def extract_model_from_parallel(model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
    """The model itself: what ``prepare`` returns is the user's own object.

    Args:
        model: a prepared model, its ``model.module``, or one in a wrapper of torch that the script made.
        keep_fp32_wrapper: accepted either way: there is no such wrapper.
        keep_torch_compile: ``False`` takes off what ``torch.compile`` and torch's ``checkpoint_wrapper`` have put
            around it and its parts. Where there is such a part, the result is a copy of the modules around it, with
            the same parameters and buffers, that no engine trains; the model itself is left as it is.
    """
    del keep_fp32_wrapper
    prepared = prepared_model(model)
    model = model if prepared is None else prepared.source
    while isinstance(model, _PARALLEL):
        model = model.module
    if keep_torch_compile or not isinstance(model, nn.Module):
        return model
    own = original_module(model)
    prepared = prepared_model(own)
    return without_compile(own, type(own) if prepared is None else prepared.plain_class)
