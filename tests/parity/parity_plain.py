"""What the calls of a script mean on one process of plain torch: the reference that every backend is compared with.

Nothing of Drivetrain is imported here. Objects come back from ``prepare`` as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Plain:
    """Stands where a script expects its accelerator."""

    device = torch.device("cpu")
    num_processes = data_parallel_size = 1
    process_index = 0
    is_main_process = True
    sync_gradients = True

    def __init__(self, project_dir: str) -> None:
        self.project_dir = project_dir

    def prepare(self, *objects: Any) -> Any:
        return objects[0] if len(objects) == 1 else objects

    def backward(self, loss: Tensor, num_items: Any = None, **kwargs: Any) -> None:
        (loss if num_items is None else loss / num_items).backward(**kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        # Names are those of the script's own module; the wrapper of ``torch.compile`` puts a prefix before them.
        return {name.removeprefix("_orig_mod."): value for name, value in model.state_dict().items()}

    _flag = False

    def set_trigger(self) -> None:
        self._flag = True

    def check_trigger(self) -> bool:
        seen, self._flag = self._flag, False
        return seen

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor

    def gather(self, tensor: Any, *, gradients: bool = False) -> Any:
        if isinstance(tensor, tuple):
            return tuple(map(self.gather, tensor))
        return tensor if tensor.ndim else tensor[None]

    gather_for_metrics = gather

    def save(self, what: Any, path: str) -> None:
        torch.save(what, path)

    def wait_for_everyone(self) -> None:
        return None

    def end_training(self) -> None:
        return None
