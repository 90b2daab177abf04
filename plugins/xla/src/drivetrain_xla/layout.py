"""Assigns dims of parameters to mesh axes: names and sizes in, names out. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from drivetrain.api import UsageError

Spec = tuple[str | None, ...]
"""Mesh axis along which each dim of a tensor is sharded, ``None`` for none."""


def parameter_spec(
    shape: Sequence[int], sizes: Mapping[str, int], cut: str | None = None, *, min_elements: int = 1
) -> Spec:
    """Return the sharding of one parameter.

    Along ``tp`` a weight ``(out, in)`` is sharded as configured; along ``dp_shard`` the longest remaining dim that the
    axis divides. Dims that the axes do not divide are replicated: XLA would pad them, on every device.

    Args:
        shape: the parameter's.
        sizes: sizes of the axes ``dp_shard`` and ``tp``.
        cut: ``"colwise"`` cuts the output features (dim 0), ``"rowwise"`` the input features (dim 1); a vector is cut
            by ``"colwise"`` only, as the bias of such a layer is.
        min_elements: smaller parameters are not cut along ``dp_shard``.
    """
    axes: list[str | None] = [None] * len(shape)
    dim = {"colwise": 0, "rowwise": 1}.get(cut or "")
    if dim is not None and dim < len(shape) and sizes.get("tp", 1) > 1 and shape[dim] % sizes["tp"] == 0:
        axes[dim] = "tp"
    shards, elements = sizes.get("dp_shard", 1), 1
    for size in shape:
        elements *= size
    if shards > 1 and elements >= min_elements:
        free = [index for index, size in enumerate(shape) if axes[index] is None and size and size % shards == 0]
        if free:
            axes[max(free, key=lambda index: shape[index])] = "dp_shard"
    return tuple(axes)


def chosen_cuts(names: Sequence[str], plan: Mapping[str, str]) -> dict[str, str]:
    """The cut of each module that the plan names.

    Args:
        names: all modules' names.
        plan: patterns of names, ``*`` for one part between dots, and their cuts.

    Raises:
        UsageError: a pattern that fits no module.
    """
    cuts: dict[str, str] = {}
    for pattern, cut in plan.items():
        fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        found = [name for name in names if fits.fullmatch(name)]
        if not found:
            raise UsageError(
                f"tensor_parallel_plan: no module of the model is called {pattern!r}",
                cure=f"Its modules are, for example: {', '.join(name for name in names if name)[:200]}",
            )
        cuts.update(dict.fromkeys(found, cut))
    return cuts


def device_mesh_sizes(asked: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Sizes of the axes over all devices of the process; replicas take the devices that are left.

    Raises:
        UsageError: they do not fit the number of devices.
    """
    sizes = {axis: asked.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp")}
    product = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"]
    if "dp_replicate" not in asked and num_devices % product == 0:
        sizes["dp_replicate"] = num_devices // product
    elif product != num_devices:
        named = ", ".join(f"{axis}: {size}" for axis, size in asked.items() if size > 1) or "no axis"
        raise UsageError(
            f"mesh: ({named}) does not fit the {num_devices} devices of this process",
            cure="Under xla with one process, mesh: counts devices; leave dp_replicate out to use all of them. On a "
            "CPU the environment variable CPU_NUM_DEVICES says how many there are.",
        )
    return sizes
