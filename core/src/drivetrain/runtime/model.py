"""What ``prepare(model)`` returns: the user's module with its own names, whose call runs the engine's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from drivetrain.backend import Trainable
from drivetrain.runtime.records import Record


@final
class PreparedModel(nn.Module):
    """A prepared model.

    Parameter names, ``state_dict`` keys and attributes are those of the user's module under every backend: no
    ``module.`` prefix, and ``model.config`` still works.

    Args:
        record: the trainable and what the core knows about it.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        # Past nn.Module's registration, which would put a prefix before every name.
        object.__setattr__(self, "_record", record)
        object.__setattr__(self, "_run", record.trainable.forward)
        self.training = record.trainable.module.training

    _record: Record
    _run: Callable[..., Any]

    @property
    def module(self) -> nn.Module:
        """The user's own module (parameters may be sharded)."""
        return self._record.trainable.module

    @property
    def record(self) -> Record:
        """What the core remembers about it."""
        return self._record

    @property
    def trainable(self) -> Trainable:
        """The engine's side of this model."""
        return self._record.trainable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's forward under the run's precision policy. Collective where the engine's is.

        Past ``nn.Module.__call__``, whose hooks are the inner module's: running both would cost twice.
        """
        if torch.is_grad_enabled():
            self._record.active = True
        return self._run(*args, **kwargs)

    forward = __call__

    def no_sync(self) -> AbstractContextManager[None]:
        """As ``accelerator.no_sync(model)``."""
        return self._record.no_sync()

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """On the user's module, which every forward runs."""
        return self.module.register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """On the user's module, which every forward runs."""
        return self.module.register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """On the user's module, which every backward runs."""
        return self.module.register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """On the user's module, which every backward runs."""
        return self.module.register_full_backward_hook(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in {"_record", "_run"}:
            raise AttributeError(name)
        return getattr(self._record.trainable.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def train(self, mode: bool = True) -> PreparedModel:
        """Set training mode, as on the module itself."""
        self.training = mode
        self.module.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the module's gradients, those included that its engine keeps elsewhere than in the parameters."""
        super().zero_grad(set_to_none)
        for optimizer in self.trainable.optimizers:
            self.trainable.zero_grad(optimizer, set_to_none)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's own."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's own."""
        return self.module.named_children()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The module's own."""
        modules: Iterator[tuple[str, nn.Module]] = self.module.named_modules(memo, prefix, remove_duplicate)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, as this rank holds it; ``accelerator.get_state_dict(model)`` gathers it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PreparedModel:
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]  # noqa: SLF001 (what .to() calls)
        return self

    def extra_repr(self) -> str:
        return f"backend={type(self.trainable).__name__}"
