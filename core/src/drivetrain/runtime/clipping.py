"""Norms and clipping of gradients that may be plain tensors, DTensors, or both on several meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together as a plain 0-d tensor. Collective over the meshes of DTensors.

    Tensors on different meshes cannot be stacked, so each mesh's norm is taken alone and the norms are combined.
    """
    if not grads:
        return torch.zeros(())
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm(group, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def multiply(grads: list[Tensor], factor: float | Tensor) -> None:
    """Multiply each gradient in place by a number or 0-d tensor, one kernel for each device, dtype and mesh."""
    alike: dict[object, list[Tensor]] = {}
    for grad in grads:
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        alike.setdefault((mesh, grad.device, grad.dtype), []).append(grad)
    for group in alike.values():
        torch._foreach_mul_(group, factor)


def clip_values(grads: list[Tensor], clip_value: float) -> None:
    """Clamp each gradient element to ``[-clip_value, clip_value]`` in place."""
    for grad in grads:
        grad.clamp_(-clip_value, clip_value)
