"""Selects the modules that FSDP gathers and frees as units, besides the root."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from importlib import import_module

from torch import nn

from drivetrain.api import UsageError
from drivetrain.api.engines import trees
from drivetrain_fsdp.config import FSDPConfig

logger = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Never called, so nothing would gather their parameters."""


def choose_units(model: nn.Module, config: FSDPConfig) -> list[nn.Module]:
    """The modules that become units beside the root, children before their parents.

    A parameter that modules of several units share cannot be in two of them: those units are merged into what is around
    them, with a warning.

    Raises:
        UsageError: the configuration names a class that the model does not have, or a function with an invalid result.
    """
    if config.wrap is not None:
        chosen = _by_function(model, config.wrap)
    elif config.transformer_layer_cls:
        chosen = _by_class(model, config.transformer_layer_cls, required=True)
    elif config.min_num_params is not None:
        chosen = _by_size(model, config.min_num_params)
    else:
        own = trees.attribute(model, "_no_split_modules") or ()
        chosen = _by_class(model, sorted(own), required=False) or _longest_list(model)
    wanted = {id(module) for module in chosen}
    units = [module for module in model.modules() if id(module) in wanted and module is not model]
    units = [unit for unit in units if any(True for _ in unit.parameters())]
    return _without_shared(model, units[::-1])


def _by_class(model: nn.Module, names: Sequence[str], *, required: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if type(module).__name__ in names]
    missing = set(names) - {type(module).__name__ for module in found}
    if missing and required:
        known = sorted({type(module).__name__ for module in model.modules()})
        guess = difflib.get_close_matches(min(missing), known, 1)
        raise UsageError(
            f"fsdp.transformer_layer_cls names {', '.join(sorted(missing))}, which {type(model).__name__} has not",
            cure=f"Did you mean {guess[0]}?" if guess else f"Its modules are of the classes {', '.join(known)}.",
        )
    return _called(found)


def _by_function(model: nn.Module, target: str) -> list[nn.Module]:
    module, _, name = target.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as problem:
        what = f"fsdp.wrap: {target} cannot be imported: {problem}"
        raise UsageError(what, cure="Write 'module:function'.") from problem
    chosen = list(function(model))
    inside = {id(each) for each in model.modules()}
    if not all(isinstance(each, nn.Module) and id(each) in inside for each in chosen):
        raise UsageError(
            f"fsdp.wrap: {target} must return modules of the model that it is given",
            cure="Return list(model.layers), for instance: the modules themselves, not their names or copies.",
        )
    return _called(chosen)


def _called(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Refuse containers, which are never called."""
    modules = list(modules)
    for module in modules:
        if isinstance(module, _CONTAINERS):
            raise UsageError(
                f"a {type(module).__name__} cannot be a unit, since it is never called",
                cure="Choose the modules in it.",
            )
    return modules


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    seen: set[int] = set()

    def left_over(module: nn.Module) -> int:
        """Parameters under this module that are in no unit yet."""
        count = sum(left_over(child) for child in module.children())
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                count += parameter.numel()
        if count >= least and not isinstance(module, _CONTAINERS):
            chosen.append(module)
            return 0
        return count

    left_over(model)
    return chosen


def _longest_list(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return []
    longest = max(lists, key=lambda each: (len(each), sum(one.numel() for one in each.parameters())))
    return [block for block in longest if not isinstance(block, _CONTAINERS)]


def _without_shared(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Take out units until every parameter is used inside one innermost unit only."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    while True:
        owner = owners(model, units)
        homes: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                homes.setdefault(id(parameter), set()).add(id(owner[id(module)]))
        torn = {key: found for key, found in homes.items() if len(found) > 1}
        if not torn:
            return units
        merged = set().union(*torn.values()) - {id(model)}
        shared = sorted(set().union(*(names[key] for key in torn)))
        logger.warning(
            "%s of the units share parameters (%s); they are gathered with the module around them instead.",
            len(merged),
            ", ".join(shared[:4]),
        )
        units = [unit for unit in units if id(unit) not in merged]


def owners(model: nn.Module, units: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """Return the innermost unit (or the root) around each module, by identity."""
    chosen = {id(unit) for unit in units}
    found: dict[int, nn.Module] = {}

    def walk(module: nn.Module, unit: nn.Module) -> None:
        if id(module) in found:
            return
        unit = module if id(module) in chosen else unit
        found[id(module)] = unit
        for child in module.children():
            walk(child, unit)

    walk(model, model)
    return found
