"""For code that has no accelerator at hand: the state of the newest one, under the names of Accelerate's singletons.

State lives on the accelerator, and several may coexist; what is here only finds the one that was made last.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

from drivetrain.errors import UsageError
from drivetrain.runtime.current import current_backend
from drivetrain.runtime.model import record_of
from drivetrain.runtime.placing import original_module

if TYPE_CHECKING:
    from drivetrain.runtime.facts import RunFacts

_made: list[weakref.ref[RunFacts]] = []


def remember(run: RunFacts) -> None:
    """Note a new accelerator; it is held weakly."""
    _made[:] = [each for each in _made if each() is not None]
    _made.append(weakref.ref(run))


def _newest() -> RunFacts | None:
    for each in reversed(_made):
        run = each()
        if run is not None:
            return run
    return None


def is_initialized() -> bool:
    """Whether there is an accelerator whose state ``AcceleratorState()`` would give."""
    return _newest() is not None


@final
class AcceleratorState:
    """``AcceleratorState()`` is the newest accelerator's ``state``.

    Raises:
        UsageError: there is no accelerator.
    """

    def __new__(cls) -> Any:
        """Find it."""
        run = _newest()
        if run is None:
            raise UsageError("there is no accelerator yet, so it has no state", cure="Create Accelerator() first.")
        return run.state

    @staticmethod
    def _reset_state() -> None:
        """Forget which accelerators there are; they themselves go on."""
        _made.clear()


@final
class GradientState:
    """``GradientState()`` is the newest accelerator's ``gradient_state``. Raises as :class:`AcceleratorState` does."""

    def __new__(cls) -> Any:
        """Find it."""
        return AcceleratorState().gradient_state


def wait_for_everyone() -> None:
    """Wait until every process is here. Collective over all ranks."""
    current_backend().barrier()


def extract_model_from_parallel(model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
    """The model itself: what ``prepare`` returns is the user's own object.

    Args:
        model: a prepared model, or its ``model.module``.
        keep_fp32_wrapper: accepted either way: there is no such wrapper.
        keep_torch_compile: keep the ``torch.compile`` wrapper that the script put around it.
    """
    del keep_fp32_wrapper
    record = record_of(model)
    model = model if record is None else record.source
    return model if keep_torch_compile else original_module(model)
