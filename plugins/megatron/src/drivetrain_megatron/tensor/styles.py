"""Styles of a tensor-parallel plan, including those of Transformers, and the parameters that each shards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from torch import nn

from drivetrain.api import UsageError
from drivetrain_megatron.tensor.trial import Cut

_COLUMN, _PACKED, _ROW, _TABLE, _WHOLE = "column", "packed", "row", "table", "whole"

_STYLES = {
    "colwise": _COLUMN,
    "rowwise": _ROW,
    "packed_colwise": _PACKED,
    "vocabulary": _TABLE,
    "replicated": _WHOLE,
    # Transformers' further words. Whether an output is gathered, an input cut or a gradient added up follows from what
    # meets what when the model runs, so several of its words are one of ours.
    "colwise_gather_output": _TABLE,
    "colwise_rep": _TABLE,
    "embedding_rowwise": _TABLE,
    "embedding_colwise": _COLUMN,
    "rowwise_rep": _ROW,
    "rowwise_split_input": _ROW,
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "sequence_parallel": _WHOLE,
    "moe_tp_experts": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "all_reduce": _WHOLE,
}
UNEVEN = _TABLE
"""The kind whose parts need not be equal."""

_PARTS = 2
"""Default number of parts of a packed layer: Transformers packs the gate and the up projection of a gated unit."""


def matched_cuts(
    model: nn.Module, plan: Mapping[str, str], source: str, *, all_match: bool
) -> tuple[dict[str, Cut], set[str]]:
    """The cuts that a plan's patterns make.

    Args:
        model: the user's module.
        plan: style by pattern; ``*`` stands for one component of a name, of a module or of a parameter.
        source: where the plan comes from.
        all_match: refuse a pattern without a match; without it, only a plan in which none matches.

    Returns:
        Cuts by the parameters' first names, and the names of those that need not divide.

    Raises:
        UsageError: a style that does not exist, a pattern that matches nothing, or one that matches what has no matrix.
    """
    if not plan:
        raise UsageError(
            f"{source} is empty",
            cure="Name layers, {'layers.*.wq': colwise, ...}, or leave it out to have a plan derived.",
        )
    for pattern, style in plan.items():
        if style not in _STYLES:
            near = difflib.get_close_matches(str(style), _STYLES, 1)
            raise UsageError(
                f"{source} says {style!r} of {pattern}, which is no style",
                cure=(f"Did you mean {near[0]!r}? " if near else "") + f"There are {', '.join(sorted(_STYLES))}.",
            )
    cuts: dict[str, Cut] = {}
    uneven: set[str] = set()
    missing: list[str] = []
    first = {id(tensor): name for name, tensor in reversed(list(model.named_parameters()))}
    for pattern, style in plan.items():
        kind, matches = _STYLES[style], list(_matches(model, pattern))
        if not matches:
            missing.append(pattern)
        for name in matches:
            for path, cut in _cuts_of(model, name, kind, source):
                own = first[id(model.get_parameter(path))]
                if cuts.setdefault(own, cut) != cut:
                    raise UsageError(
                        f"{source} cuts {own} along dim {cuts[own].dim} and, as {path}, along dim {cut.dim}",
                        cure="Tied parameters are one; give both modules the style vocabulary.",
                    )
                if kind == _TABLE:
                    uneven.add(own)
    if missing and (all_match or len(missing) == len(plan)):
        raise UsageError(
            f"{source} names {', '.join(missing)}, which {type(model).__name__} has not",
            cure=_nearest(model, missing[0]),
        )
    return cuts, uneven


def _matches(model: nn.Module, pattern: str) -> Iterator[str]:
    """Names of modules, else of parameters."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name and expression.fullmatch(name)]
    if modules:
        return iter(modules)
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return (name for name in parameters if expression.fullmatch(name))


def _nearest(model: nn.Module, pattern: str) -> str:
    modules = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    known = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in modules})
    near = difflib.get_close_matches(pattern, known, 3, cutoff=0.4) or known[:3]
    return f"Near it are {', '.join(near)}." if near else "It has no module with parameters of its own."


def _cuts_of(model: nn.Module, name: str, kind: str, source: str) -> Iterator[tuple[str, Cut]]:
    """The cuts of one match, by name of the parameter."""
    if kind == _WHOLE:
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name in parameters:
        yield name, _cut_of_parameter(model, name, kind)
        return
    module = model.get_submodule(name)
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or weight.dim() != 2:
        raise UsageError(
            f"{source} names {name}, a {type(module).__name__} without a matrix called weight",
            cure=f"Name the modules in it, or its parameters: {', '.join(own) or 'it has none of its own'}.",
        )
    written, read = _written_and_read(module)
    if kind == _ROW or (kind == _TABLE and isinstance(module, nn.Embedding)):
        yield f"{name}.weight", Cut(0 if kind == _TABLE else read)
        return
    parts = (weight.shape[written] // _PARTS,) * _PARTS if kind == _PACKED else None
    yield f"{name}.weight", Cut(written, parts)
    if own.get("bias") is not None:
        yield f"{name}.bias", Cut(0, parts)


def _cut_of_parameter(model: nn.Module, name: str, kind: str) -> Cut:
    """Return the cut of a parameter named in the plan: matrices ``(..., out, in)``, as of experts, or a vector."""
    tensor = model.get_parameter(name)
    if tensor.dim() == 1:
        return Cut(0)
    owner = model.get_submodule(name.rpartition(".")[0])
    written, read = tensor.dim() - 2, tensor.dim() - 1
    if getattr(owner, "is_transposed", False):  # Transformers' word for experts that keep (..., in, out).
        written, read = read, written
    if kind == _ROW:
        return Cut(read)
    length = tensor.shape[written]
    return Cut(written, (length // _PARTS,) * _PARTS if kind == _PACKED else None)


def _written_and_read(module: nn.Module) -> tuple[int, int]:
    """Return the output dim and the input dim of a module's weight."""
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":  # Transformers' transposed linear layer.
        return 1, 0
    return 0, 1


def style_of(model: nn.Module, name: str, cut: Cut) -> str:
    """Return the name of a cut's style."""
    module = model.get_submodule(name.rpartition(".")[0])
    tensor = model.get_parameter(name)
    if isinstance(module, nn.Embedding):
        return "vocabulary" if cut.dim == 0 else "colwise"
    if cut.parts:
        return f"packed_colwise ({len(cut.parts)} parts)"
    if tensor.dim() == 1:
        return "colwise"
    written, _ = _written_and_read(module) if tensor.dim() == 2 else (tensor.dim() - 2, 0)
    return "colwise" if cut.dim == written else "rowwise"
