"""A model under DeepSpeed: forwards the core's calls to the driver of its engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import (
    GradientHook,
    PortableState,
    StepResult,
    TensorSpec,
    Trainable,
    UnsupportedError,
    UsageError,
    hooks_of,
    original_module,
)
from drivetrain.api.accelerate import DummyOptim
from drivetrain_deepspeed import quiet
from drivetrain_deepspeed.driving import Driver
from drivetrain_deepspeed.guard import Guard, in_parts
from drivetrain_deepspeed.loading import plain_loads
from drivetrain_deepspeed.own_schedules import STATE as SCHEDULES
from drivetrain_deepspeed.own_schedules import OwnSchedules
from drivetrain_deepspeed.state import Carried, EngineState
from drivetrain_sharding import check_step_hooks

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend

LOSS_SCALE = "loss_scaler"
"""Name of the loss scale in a portable checkpoint, as every backend writes it."""


@final
class DeepSpeedTrainable(Trainable):
    """A module in a DeepSpeed engine. The engine is made once the module's optimizers are known, else at first use.

    Where a script finds gradients between backward and step: stage 0, in ``parameter.grad``; stages 1 to 3, nowhere in
    the parameters, where DeepSpeed has taken them away: reading ``parameter.grad`` raises then.
    """

    def __init__(self, backend: DeepSpeedBackend, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._backend, self._model = backend, model
        self.communicates_in_forward = backend.config.stage == 3
        self.module, self.optimizers = original_module(model), list(optimizers)
        self.schedules = OwnSchedules(backend.config.written)
        self._driver: Driver | None = None
        self._state: EngineState | None = None
        self._all: frozenset[int] = frozenset()
        self._ownerless: frozenset[int] = frozenset()
        self._guard: Guard | None = None
        self._known: frozenset[int] = frozenset()
        self._replaced: WeakSet[Optimizer] = WeakSet()
        """Optimizers of the script that later ones have replaced."""
        self._refusing: list[Any] = []
        """Hooks that refuse gradients of a model without an optimizer."""
        self._before: Driver | None = None
        """Driver of the engine that is about to be replaced."""
        self._carried: list[Carried] = []
        """State of the optimizers that go on in that one."""
        self._step_hooks: set[int] = set()
        """Hooks on steps that were tried."""
        if optimizers:
            self._start()

    @property
    def driver(self) -> Driver | None:
        """The engine's, when it has been made and trains."""
        return self._driver

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            # Parameters gathered in inference mode could never be trained.
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.forward(*args, **kwargs)
        if self._state is None:
            self._start()
        with self._engine():
            if self._driver is None or not torch.is_grad_enabled():
                return self._backend.precision.forward(self._model, args, kwargs)
            return self._backend.precision.forward(self._driver.forward, args, kwargs)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        if self._state is None:
            self._start()
        self._backend.backward(loss, scale)

    def retaining_graph(self) -> AbstractContextManager[Any]:
        if self._backend.config.stage == 3:
            raise UnsupportedError(
                "backward() does not take retain_graph under ZeRO stage 3, whose layers release their parameters as a "
                "backward passes them",
                cure="Add up the losses of one forward: accelerator.backward(first + second). zero_stage: 2 takes it.",
            )
        return self._backend.precision.retaining_graph()

    def synchronise_gradients(self, enabled: bool) -> None:
        if self._driver is not None:
            self._driver.synchronise(enabled)

    def has_unreduced_gradients(self) -> bool:
        return self._driver is not None and self._driver.holds_unreduced

    def scale_gradients(self, factor: float | Tensor) -> None:
        with self._engine():
            self._trained.multiply(factor)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        self._backend.config.check_clipping(max_norm)
        with self._engine():
            return self._trained.clip_norm(self._wanted(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        with self._engine():
            self._trained.clip_value(self._wanted(parameters), clip_value)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        with self._engine():
            self._trained.unscale()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        if closure is not None:
            raise UnsupportedError(
                "step() was given a closure, and the step of DeepSpeed takes none",
                cure="Call accelerator.backward(loss) first, and step() without arguments.",
            )
        if self._driver is not None and self._driver.zero is not None:
            check_step_hooks(optimizer, self._step_hooks, "this rank's parts of the parameters by ZeRO")
        with self._engine():
            return self.schedules.step(optimizer, self._trained.step)

    def gradient_hooks(self) -> Iterable[GradientHook]:
        with self._engine():
            found = [] if self._driver is None else list(hooks_of(self.module))
        # DeepSpeed's take gradients out of the parameters.
        return [one for one in found if not str(getattr(one.hook, "__module__", "")).startswith("deepspeed.")]

    def before_unprepared_step(self, optimizer: Optimizer) -> None:
        """Handle a step of an unprepared optimizer that holds some of the engine's parameters."""
        why = ""
        if self._driver is None:
            why = "DeepSpeed reduces no gradients of a model that was prepared without an optimizer"
        elif self._driver.zero is not None:
            why = "ZeRO takes gradients out of the parameters"
        elif self._backend.loss_scale is not None:
            why = "the loss scale is still in the gradients"
        if why:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on parameters of {type(self.module).__name__}, and was "
                f"not prepared with it: {why}",
                cure="Prepare a model together with all of its optimizers, and call step() of those that prepare "
                "returned.",
            )

    def before_registration(self, parent: nn.Module, name: str, value: Any) -> None:
        if self._driver is None or self._driver.zero is None:
            return
        if isinstance(value, nn.Module):
            new = any(each.requires_grad and id(each) not in self._known for each in value.parameters())
        else:
            new = isinstance(value, nn.Parameter) and value is not getattr(parent, name, None)
        if new:
            raise UnsupportedError(
                f"{name} of {type(parent).__name__} was set after {type(self.module).__name__} was prepared, and has "
                "parameters that ZeRO would not train",
                cure="Build the whole model before prepare. To change values, write them into the parameters that the "
                "model has (`p.copy_(values)`, load_state_dict without assign=True).",
            )

    def before_copy(self) -> None:
        if self._guard is None or not self._backend.config.stage:
            return
        name = type(self.module).__name__
        cure = (
            "Save accelerator.get_state_dict(model); or load it, on the main process, where it is whole, into a second "
            "model that is built like the first."
        )
        if self._backend.config.stage == 3:
            raise UnsupportedError(f"{name} cannot be copied: ZeRO stage 3 shares it out over ranks", cure=cure)
        if sys._getframe(1).f_code.co_name == "__reduce_ex__":  # noqa: SLF001
            raise UnsupportedError(f"{name} cannot be pickled: DeepSpeed keeps process groups in it", cure=cure)

    def before_state_dict(self, *, replicated: bool) -> None:
        # Below stage 3 every rank has all parameters; in stage 3, unpartitioned and gathered ones.
        super().before_state_dict(replicated=not any(map(in_parts, self.module.parameters())))

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        self._check_replaced(optimizer)
        if self._driver is not None:
            with self._engine():
                self._driver.drop(optimizer, set_to_none=set_to_none)
        elif not isinstance(optimizer, DummyOptim):
            # Of a backward before prepare, which the engine would take over when it starts.
            optimizer.zero_grad(set_to_none)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._check_replaced(optimizer)
        if self._driver is None and self._guard is not None:
            raise UsageError(
                f"{type(self.module).__name__} was prepared without an optimizer, and ZeRO stage 3 has shared it out "
                "for evaluation",
                cure="Prepare a model together with an optimizer.",
            )
        if self._state is not None:
            self._dissolve()
            self.optimizers.append(optimizer)
            self._start()
            return
        self.optimizers.append(optimizer)
        if isinstance(optimizer, DummyOptim):
            self._start()

    def remove_optimizer(self, optimizer: Optimizer) -> None:
        if self._driver is not None:
            self._driver.check_replaceable()
        super().remove_optimizer(optimizer)
        self._replaced.add(optimizer)
        self.schedules.forget(optimizer)

    def _check_replaced(self, optimizer: Optimizer) -> None:
        if optimizer in self._replaced:
            raise UsageError(
                f"this {type(optimizer).__name__} steps no more, since another optimizer was prepared later: that one "
                f"holds the same parameters of {type(self.module).__name__}, or all parameters of this one were frozen "
                "then",
                cure="Step the later one, or prepare a new optimizer of these parameters.",
            )

    def _dissolve(self) -> None:
        """Take the engine apart, so that another can be made of the same parameters. Collective over all ranks.

        Optimizers that go on keep their state, and those of which all parameters are frozen go.
        """
        assert self._state is not None
        before, state = self._driver, self._state
        if before is not None:
            before.check_replaceable()
            for optimizer in [each for each in self.optimizers if not state.trains(each)]:
                self.remove_optimizer(optimizer)
        with self._engine():
            self._take_in()
            self._carried = [state.carry(each) for each in self.optimizers]
            state.dissolve()
        self._destroy()
        self._before = before

    def portable_state(self) -> PortableState:
        saved = self._saved
        with self._engine():
            self._take_in()
            if self._driver is not None:
                saved.behind = self._driver.behind
            state = saved.portable_state()
        if self._backend.loss_scale is not None:
            state.extra[LOSS_SCALE] = self._backend.loss_scale.state()
        if moved := self.schedules.state():
            state.extra[SCHEDULES] = moved
        return state

    def live_tensors(self) -> dict[str, Any]:
        saved = self._saved
        with self._engine():
            self._take_in()
            return saved.live_tensors()

    def portable_template(self, saved: Mapping[str, TensorSpec]) -> PortableState:
        here = self._saved
        with self._engine():
            return here.portable_template(saved)

    def load_portable_state(self, state: PortableState) -> None:
        here = self._saved
        with self._engine():
            here.load_portable_state(state)
            if self._driver is not None:
                self._driver.loaded(here.behind)
        if self._backend.loss_scale is not None and state.extra.get(LOSS_SCALE):
            self._backend.loss_scale.load_state(state.extra[LOSS_SCALE])
        self.schedules.load(state.extra.get(SCHEDULES, ()))

    def full_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        saved = self._saved
        with self._engine():
            self._take_in()
        tensors = saved.full_tensors()
        while True:
            with self._engine():
                found = next(tensors, None)
            if found is None:
                return
            yield found

    def release(self) -> None:
        """Destroy the engine; a module of stage 3 stays in parts, since no rank may have room for all of it."""
        self._destroy()
        self._backend.forget(self)

    def _destroy(self) -> None:
        for handle in self._refusing:
            handle.remove()
        self._refusing = []
        if self._guard is not None:
            self._guard.release()
            plain_loads(self.module)
        if self._driver is not None:
            self._driver.release()
            self._driver.engine.destroy()
        self._driver = self._state = self._guard = None
        quiet.forget_modules()

    def _start(self) -> None:
        """Make the engine. Collective over all ranks."""
        trained = {id(each) for each in self.module.parameters() if each.requires_grad}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        held = {id(each) for group in groups for each in group["params"]}
        self._all, self._ownerless = frozenset(trained & held), frozenset(trained - held)
        engine = self._backend.engine(self._model, self.optimizers)
        self.optimizers, self._driver, self._state = engine.optimizers, engine.driver, engine.state
        self._guard = engine.guard
        self._known = frozenset(map(id, self.module.parameters()))
        if self._driver is None and self._backend.topology.dp_size > 1:
            for each in self.module.parameters():
                if each.requires_grad:
                    handle = each.register_post_accumulate_grad_hook(self._refuse_gradient)  # type: ignore[no-untyped-call]
                    self._refusing.append(handle)
        for carried in self._carried:
            self._state.take_over(carried)
        before, self._before, self._carried = self._before, None, []
        if before is not None and self._driver is not None:
            self._driver.take_over(before)

    def _refuse_gradient(self, _: Tensor) -> None:
        raise UsageError(
            f"a backward computed gradients of {type(self.module).__name__}, which was prepared without an optimizer: "
            "DeepSpeed does not reduce them, and each rank would have those of its own samples",
            cure="Prepare the model together with its optimizer: model, optimizer = accelerator.prepare(model, "
            "optimizer). A model that does not train is frozen by model.requires_grad_(False).",
        )

    def _take_in(self) -> None:
        """Copy the script's writes to parameters into the engine's copies."""
        if self._driver is not None and self._driver.writes is not None:
            self._driver.writes.take_in()

    def _engine(self) -> AbstractContextManager[None]:
        """While the engine works, parameters are plain."""
        return nullcontext() if self._guard is None else self._guard

    @property
    def _saved(self) -> EngineState:
        if self._state is None:
            self._start()
        assert self._state is not None
        return self._state

    @property
    def _trained(self) -> Driver:
        if self._driver is None:
            raise UsageError(
                f"{type(self.module).__name__} was prepared without an optimizer, and cannot train",
                cure="Prepare both: model, optimizer = accelerator.prepare(model, optimizer).",
            )
        return self._driver

    def _wanted(self, parameters: Sequence[Tensor]) -> frozenset[int] | None:
        """``None`` when these are all that are trained."""
        given = frozenset(map(id, parameters))
        if not given.isdisjoint(self._ownerless):
            raise UnsupportedError(
                f"{len(self._ownerless)} trained parameter(s) of {type(self.module).__name__} are in no optimizer, and "
                "DeepSpeed does not reduce their gradients",
                cure="Freeze them with requires_grad_(False), or give them to an optimizer.",
            )
        return None if given.issuperset(self._all) else given
