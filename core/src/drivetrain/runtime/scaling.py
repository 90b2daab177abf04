"""Torch's loss scaler for gradients that may be plain tensors, DTensors, or both on several meshes."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@final
class LossScaler(torch.amp.GradScaler):
    """Takes the scale out of what this rank holds of each gradient.

    Torch's own does not take plain tensors beside DTensors. Whether another rank's part overflowed is the caller's to
    ask.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = parameter.grad
                    if grad is None:
                        continue
                    if grad.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    if grad.is_sparse:
                        # Duplicates in a sparse gradient may overflow only once they are added up.
                        parameter.grad = grad = grad.coalesce()
                        grad = grad._values()  # noqa: SLF001 (torch's documented name)
                    local = grad.to_local() if isinstance(grad, DTensor) else grad
                    alike.setdefault((local.device, local.dtype), []).append(local)
            flags: dict[torch.device, Tensor] = {}
            for (device, _), grads in alike.items():
                flag = flags.setdefault(device, found_inf.to(device, copy=True))
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
        return flags
