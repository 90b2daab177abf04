"""The tensor-parallel plan: the user's, else a plugin's, else the model's own, else one derived from the model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from torch import Tensor, nn

from drivetrain.api import UsageError
from drivetrain.api.engines import trees
from drivetrain.api.programs import get_registry
from drivetrain_megatron.planner.layout import collapsed
from drivetrain_megatron.tensor.derive import conditions, derive
from drivetrain_megatron.tensor.layout import Layout
from drivetrain_megatron.tensor.styles import matched_cuts, style_of
from drivetrain_megatron.tensor.trace import Trace, record, record_parts
from drivetrain_megatron.tensor.trial import Cut, Unit

logger = logging.getLogger(__name__)


@dataclass
class Plan:
    """A tensor-parallel plan.

    Args:
        source: where the plan comes from, in words.
        cuts: by the first name of each parameter; what is not here stays whole on every rank.
        uneven: names of those that need not divide: vocabularies.
        units: what the number of ranks must divide, each with the parameters that it comes from.
        used_in: for a parameter that is used outside of the module that holds it, the modules that use it.
    """

    source: str
    cuts: dict[str, Cut] = field(default_factory=dict)
    uneven: set[str] = field(default_factory=set)
    units: list[tuple[Unit, list[str]]] = field(default_factory=list)
    used_in: dict[str, set[str]] = field(default_factory=dict)


class Row(NamedTuple):
    """One parameter in the table of a plan.

    Args:
        name: its first name.
        style: how it is cut, in the words of ``tp_plan``.
        shape: whole.
        local_shapes: on each rank of the axis ``tp``.
    """

    name: str
    style: str
    shape: tuple[int, ...]
    local_shapes: list[tuple[int, ...]]


def make_plan(model: nn.Module, degree: int, written: Mapping[str, str] | None) -> Plan:
    """The plan of a model for so many ranks. Not collective; every rank finds the same one.

    Args:
        model: the user's module, nothing of it cut; its parameters may be on meta.
        degree: size of the axis ``tp``.
        written: ``megatron.tp_plan``.

    Raises:
        UsageError: a pattern or a style that does not exist, sizes that do not divide.
    """
    if written is not None:
        return _given(model, degree, written, "megatron.tp_plan")
    plugins = get_registry().tensor_parallel_plan(model, degree)
    if plugins is not None:
        return _given(model, degree, plugins, "the plan of a plugin")
    own = _own_plan(model)
    if own:
        return _given(model, degree, own, f"the plan of {type(model).__name__} itself", all_match=False)
    return _derived(model, degree)


def table(model: nn.Module, degree: int, written: Mapping[str, str] | None) -> tuple[str, list[Row]]:
    """Return the source of the plan, and a row for each parameter. Not collective. Raises as :func:`make_plan`."""
    plan = make_plan(model, degree, written)
    rows = []
    for name, parameter in model.named_parameters():
        shape, cut = tuple(parameter.shape), plan.cuts.get(name)
        if cut is None:
            rows.append(Row(name, "replicated", shape, [shape] * degree))
        else:
            layout = Layout(shape, cut.dim, cut.parts)
            style = style_of(model, name, cut)
            rows.append(Row(name, style, shape, [layout.local_shape(rank, degree) for rank in range(degree)]))
    return plan.source, rows


def _own_plan(model: nn.Module) -> Mapping[str, str]:
    """Return the plan of a Transformers model; ``tp_plan`` has the base model's plan under its prefix.

    A wrapper that forwards its model's attributes, as PEFT's does, has no plan of its own: the names would differ.
    """
    for attribute in ("tp_plan", "_tp_plan"):
        if inspect.getattr_static(model, attribute, None) is None:
            continue
        found = trees.attribute(model, attribute)
        if isinstance(found, Mapping) and found:
            return found
    return {}


def _given(model: nn.Module, degree: int, written: Mapping[str, str], source: str, *, all_match: bool = True) -> Plan:
    plan = Plan(source)
    plan.cuts, plan.uneven = matched_cuts(model, written, source, all_match=all_match)
    if not plan.cuts:
        raise UsageError(
            f"{source} shares no parameter of {type(model).__name__}: it names nothing but what stays whole",
            cure="Write megatron.tp_plan: {'layers.*.wq': colwise, ...}, or leave it out to have a plan derived.",
        )
    units: set[Unit] = set()
    try:
        trace = record(model)
    except UsageError as problem:
        logger.info("%s is not checked against the forward: %s", source, problem.what)
    else:
        numbers = {trace.parameters[name]: cut for name, cut in plan.cuts.items()}
        units, numbers = conditions(trace, numbers)
        names = {number: name for name, number in trace.parameters.items()}
        plan.cuts = {names[number]: cut for number, cut in numbers.items()}
        plan.used_in = _used_elsewhere(model, trace, plan.cuts)
    for name, cut in plan.cuts.items():
        if name not in plan.uneven:
            length = model.get_parameter(name).shape[cut.dim]
            units.update(Unit(part, part) for part in cut.parts or (length,))
    plan.units = [(unit, list(_of_length(model, plan.cuts, unit.length))) for unit in sorted(units)]
    _check(plan, degree)
    return plan


def _of_length(model: nn.Module, cuts: Mapping[str, Cut], length: int) -> Iterator[str]:
    for name, cut in cuts.items():
        if length in (cut.parts or (model.get_parameter(name).shape[cut.dim],)):
            yield name


def _derived(model: nn.Module, degree: int) -> Plan:
    plan = Plan("a plan derived from its forward")
    unfollowed = ""
    try:
        traces = {"": record(model)}
    except UsageError as problem:
        unfollowed = f" ({problem.what})"
        traces = record_parts(model)
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    for path, trace in traces.items():
        _add_groups(plan, model, path, trace, first)
    _check(plan, degree)
    if not plan.cuts:
        logger.warning(
            "No layer of %s can be shared over %s tensor-parallel ranks%s: each of them computes all of it.",
            type(model).__name__,
            degree,
            unfollowed,
        )
    elif unfollowed:
        logger.warning(
            "%s was not followed as a whole%s, but by its modules. Each of the %s tensor-parallel ranks computes all "
            "of: %s. A plan of your own (megatron.tp_plan) may share more.",
            type(model).__name__,
            unfollowed,
            degree,
            ", ".join(collapsed(_whole(plan, first.values()))) or "none of them",
        )
    return plan


def _whole(plan: Plan, names: Iterable[str]) -> list[str]:
    """Modules of which no parameter is cut, and parameters of the model itself that are not."""
    names = list(names)
    shared = {name.rpartition(".")[0] for name in plan.cuts}
    modules = {name: name.rpartition(".")[0] or name for name in names if name not in plan.cuts}
    return list(dict.fromkeys(module for module in modules.values() if module not in shared))


def _add_groups(plan: Plan, model: nn.Module, path: str, trace: Trace, first: Mapping[int, str]) -> None:
    """Cut what can be cut in one module, given a trace of it; other modules' parameters in it stay whole."""
    part = model.get_submodule(path)
    inside = {id(module) for module in part.modules()}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    own = {name: first[id(tensor)] for name, tensor in part.named_parameters()}
    taken = [trace.parameters[name] for name, tensor in part.named_parameters() if id(tensor) in elsewhere]
    names = {number: own[name] for name, number in trace.parameters.items()}
    before = set(plan.cuts)
    for group in derive(trace, taken=taken):
        cuts = {names[number]: cut for number, cut in group.cuts.items()}
        plan.cuts |= cuts
        if not group.units:
            plan.uneven |= set(cuts)
        plan.units += [(unit, list(_of_length(model, cuts, unit.length))) for unit in sorted(group.units)]
    local = {own[name]: name for name in own}
    used = _used_elsewhere(part, trace, [local[name] for name in plan.cuts if name not in before])
    prefix = f"{path}." if path else ""
    plan.used_in |= {own[name]: {f"{prefix}{scope}".rstrip(".") for scope in scopes} for name, scopes in used.items()}


def _check(plan: Plan, degree: int) -> None:
    """Raise :class:`UsageError` when the number of ranks does not divide every unit."""
    wrong = [(unit, names) for unit, names in plan.units if unit.count % degree]
    if not wrong:
        return
    # The most specific one: a parameter's own dim, in heads.
    (count, length), names = max(wrong, key=lambda each: (bool(each[1]), each[0].count < each[0].length))
    common = gcd(*(unit.count for unit, _ in plan.units))
    able = [each for each in range(1, common + 1) if common % each == 0]
    size = f"{length} features" if count == length else f"{length} features in {count} heads or groups"
    where = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    raise UsageError(
        f"tensor_parallel_size {degree} does not divide {where or 'a layer'}: {size}",
        whose=plan.source,
        cure=f"Degrees that work for this model: {', '.join(map(str, able))}.",
    )


def _used_elsewhere(model: nn.Module, trace: Trace, names: Iterable[str]) -> dict[str, set[str]]:
    """Parameters that a module uses which does not hold them, such as a table in the model's own forward."""
    wanted = {trace.parameters[name]: name for name in names}
    holders: dict[str, set[str]] = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        holders.setdefault(_first_name(model, tensor), set()).add(path.rpartition(".")[0])
    found: dict[str, set[str]] = {}
    for call in trace.calls:
        for number in call.inputs:
            name = wanted.get(number)
            if name is not None and call.scope not in holders[name]:
                found.setdefault(name, set()).add(call.scope)
    return found


def _first_name(model: nn.Module, tensor: Tensor) -> str:
    return next(name for name, each in model.named_parameters() if each is tensor)


__all__ = ["Plan", "Row", "make_plan", "table"]
