"""Prepares models, optimizers and schedulers, and assigns optimizers to models."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import combinations, count
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.backend import Backend, FileConfiguredBackend, name_of
from drivetrain.data.comparison import FirstInputs
from drivetrain.distributed.rank_numbers import ForwardNumbers
from drivetrain.distributed.trees import attribute
from drivetrain.distributed.watchdog import check_collective
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop import batch_norm
from drivetrain.loop.accumulation import TrainingLoop
from drivetrain.loop.backward_hooks import BackwardHooks
from drivetrain.loop.buffers import Buffers
from drivetrain.loop.former_memory import FormerMemory
from drivetrain.loop.left_on_parameters import LeftOnParameters
from drivetrain.loop.model import (
    PreparedModel,
    PreparedModule,
    make_prepared,
    prepared_model,
    restore,
    unprepared,
    watch_registrations,
)
from drivetrain.loop.optimizer import PreparedOptimizer, PreparedScheduler, watch_unprepared_steps
from drivetrain.loop.placeholders import DummyScheduler, refuse_without_engine, scheduler_without_engine
from drivetrain.loop.shared_memory import SharedMemory
from drivetrain.loop.wrappers import take_off_parallel

_NUMBERS = count()
"""Numbers the models of this process, alike on every rank, so that each is compared once, a later one too."""


@final
class Preparer:
    """Prepares models, optimizers and schedulers for one backend and remembers them in order.

    Args:
        backend: the started backend.
        loop: each model is added to it.
        step_with_optimizer: schedulers follow their optimizer's updates.
        moves_per_step: see :class:`PreparedScheduler`.
        compile_options: arguments of ``nn.Module.compile`` for every model, or ``None``.
    """

    def __init__(
        self,
        backend: Backend,
        loop: TrainingLoop,
        *,
        step_with_optimizer: bool = True,
        moves_per_step: int = 1,
        compile_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend, self._loop = backend, loop
        self._follow, self._moves, self._compile = step_with_optimizer, moves_per_step, compile_options
        self._memory = SharedMemory(name_of(backend), moves=not backend.capabilities.replicated)
        self.optimizers = loop.optimizers
        self.schedulers: list[PreparedScheduler] = []
        watch_unprepared_steps(loop)

    @property
    def models(self) -> list[nn.Module]:
        """The prepared modules."""
        return [model.source for model in self._loop.models]

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Prepare models, optimizers and schedulers, in the order given; other objects come back as they are.

        Collective over all ranks. If it raises, optimizers without a model are removed again.
        """
        before = list(self.optimizers)
        try:
            return self._prepare(objects, before)
        except BaseException:
            self.optimizers[:] = [each for each in self.optimizers if each.models or each in before]
            raise

    def _prepare(self, objects: Sequence[Any], before: Sequence[PreparedOptimizer]) -> list[Any]:
        # Optimizers are wrapped first, so that each model finds those that hold its parameters.
        results: list[Any] = [self.optimizer(each, before) if is_optimizer(each) else each for each in objects]
        models = [each for each in results if is_model(each)]
        self._check_memory(models)
        if not self._backend.capabilities.optimizer_spans_models:
            self._check_shared_parts([*self.models, *models])
        results = [self._model(each) if is_model(each) or _evaluates_only(each) else each for each in results]
        self._loop.find_loose()
        return [self.scheduler(each) if is_scheduler(each) else each for each in results]

    def _check_shared_parts(self, models: Sequence[nn.Module]) -> None:
        """Raise where an optimizer holds a parameter of two models, and the engine steps one model at a time."""
        held = {id(parameter) for optimizer in self.optimizers for parameter in _held(optimizer.source)}
        for first, second in combinations(dict.fromkeys(models), 2):
            names = {id(parameter): name for name, parameter in first.named_parameters() if id(parameter) in held}
            both = [names[id(parameter)] for parameter in second.parameters() if id(parameter) in names]
            if both:
                raise UnsupportedError(
                    f"{type(first).__name__} and {type(second).__name__} share parameters that are trained "
                    f"({', '.join(both[:3])}{', ...' if both[3:] else ''}), and {name_of(self._backend)} trains a "
                    "parameter as part of one model only",
                    cure="Make one nn.Module of both with one optimizer, and prepare that: its forward returns the "
                    "outputs of both, and one accelerator.backward(first + second) trains them.",
                )

    def model(self, module: nn.Module, *, training: bool = True) -> nn.Module:
        """Prepare one model together with the optimizers that hold its parameters. Collective over all ranks.

        A model that was prepared for evaluation alone, and is now to be trained, gets what its gradients need.
        """
        if prepared_model(module) is None:
            self._check_memory([module])
        return self._model(module, training=training)

    def _model(self, module: nn.Module, *, training: bool = True) -> nn.Module:
        """See :meth:`model`; called after the check for shared memory."""
        taken_off: Sequence[str] = ()
        if prepared_model(module) is None:
            module, taken_off = take_off_parallel(module)
        model = prepared_model(module)
        if model is not None:
            if model in self._loop.models:
                if training:
                    self._begin_training(model)
                return model.source
            # Another accelerator prepared it, and no longer trains it.
            restore(module)
        _refuse_kind(module, self._backend)
        capabilities = self._backend.capabilities
        check_collective("prepare")
        mine = [optimizer for optimizer in self.optimizers if _holds_some(optimizer.source, module)]
        training = training or bool(mine)
        for optimizer in mine:
            if optimizer.models and not capabilities.optimizer_spans_models:
                raise UnsupportedError(
                    f"this {type(optimizer.source).__name__} holds parameters of two models, and "
                    f"{name_of(self._backend)} steps each model by optimizers of its own",
                    cure="Make one optimizer for each model, and call step() of each.",
                )
        batch_norm.convert_or_warn(module, self._backend, training=training)
        if self._compile is not None:
            module.compile(**self._compile)
        plain_class = type(module)
        # An engine may free parameters or exchange them, so nothing else may refer to them.
        own = set(map(id, module.parameters()))
        for optimizer in mine:
            optimizer.given = [each for each in optimizer.given if id(each) not in own]
        held = [_names(optimizer.source, module) for optimizer in mine]
        frozen, shared = self._memory.add(module), self._memory.pairs(module)
        former = self._former_memory(module)
        left = LeftOnParameters(module)
        trainable = self._backend.prepare(module, [optimizer.optimizer for optimizer in mine], training=training)
        left.take_over()
        self._memory.check_kept(module, shared)
        if former is not None:
            former.refuse_those_left()
        topology = self._backend.topology
        model = PreparedModel(
            trainable,
            module,
            len(self._loop.models),
            self._loop.manual,
            plain_class=plain_class,
            replicated=capabilities.replicated,
            stay_frozen=frozen,
            taken_off=taken_off,
            numbers=ForwardNumbers(topology.dp_rank, topology.device) if topology.dp_size > 1 else None,
            evaluates_only=not training,
            first_inputs=(
                FirstInputs(self._backend, next(_NUMBERS), plain_class.__name__)
                if topology.dp_size > 1 and training
                else None
            ),
            called=self._loop.called if topology.world_size > 1 and trainable.communicates_in_forward else None,
            former=former,
            backward_hooks=(
                BackwardHooks(module)
                if training and topology.dp_size > 1 and not topology.rank and not capabilities.pipelined
                else None
            ),
            kept=self._loop.kept if topology.dp_size > 1 and not capabilities.pipelined else None,
            meets_in_training=batch_norm.synchronised_layers(module) if topology.dp_size > 1 else (),
        )
        if training:
            self._watch_buffers(model)
            self._watch_trained(model)
        make_prepared(module, model)
        self._loop.models.append(model)
        watch_registrations(model)
        for optimizer, engine_optimizer, names in zip(mine, trainable.optimizers, held, strict=True):
            optimizer.bind(model, engine_optimizer, names)
        return module

    def _former_memory(self, module: nn.Module) -> FormerMemory | None:
        capabilities = self._backend.capabilities
        if capabilities.replicated:
            return None
        return FormerMemory(name_of(self._backend), module, moved_later=capabilities.pipelined)

    def _watch_buffers(self, model: PreparedModel) -> None:
        if model.trainable.settles_buffers:
            return
        model.idle_buffers = Buffers(model.trainable.module, self._backend.topology)
        model.buffers = model.idle_buffers if model.idle_buffers.matter else None

    def _watch_trained(self, model: PreparedModel) -> None:
        # A pipeline frees parameters of other stages later.
        if self._backend.topology.world_size > 1 and not self._backend.capabilities.pipelined:
            model.watch_trained()

    def _begin_training(self, model: PreparedModel) -> None:
        """Switch a model that was prepared for evaluation only to training. Collective over all ranks."""
        if not model.evaluates_only:
            return
        check_collective("prepare")
        batch_norm.convert_or_warn(model.source, self._backend, training=True)
        model.meets_in_training = batch_norm.synchronised_layers(model.source)
        if self._backend.capabilities.replicated:
            # The module is as the script made it, and has no optimizer yet: the engine begins anew.
            with unprepared(model.source):
                model.trainable = self._backend.prepare(model.source, [], training=True)
        # An engine that moved the parameters adds the rest in ``add_optimizer``.
        self._watch_buffers(model)
        self._watch_trained(model)
        model.evaluates_only = False

    def optimizer(self, optimizer: Optimizer, before: Sequence[PreparedOptimizer] | None = None) -> PreparedOptimizer:
        """Wrap one optimizer and bind it to the models that are prepared already; later ones bind themselves.

        It replaces those of ``before``, by default all that were prepared earlier, that hold a parameter of it.
        Collective over all ranks where its model is prepared.
        """
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if not isinstance(self._backend, FileConfiguredBackend):
            refuse_without_engine(optimizer, name_of(self._backend))
        prepared = PreparedOptimizer(optimizer, self._loop)
        before = list(self.optimizers) if before is None else before
        for model in self._loop.models:
            if model.trainable.shares(_held(optimizer)):
                names = _names(optimizer, model.source)
                for one in before:
                    if one in self.optimizers and any(its is model and names & held for its, held in one.held):
                        self._replace(one)
                self._begin_training(model)
                model.trainable.add_optimizer(optimizer)
                prepared.bind(model, model.trainable.optimizers[-1], names)
        self.optimizers.append(prepared)
        for scheduler in self.schedulers:
            if attribute(scheduler.scheduler, "optimizer") is optimizer:
                scheduler.follow(prepared)
        return prepared

    def _replace(self, optimizer: PreparedOptimizer) -> None:
        """Remove an optimizer whose parameters a later one holds, and its schedulers, until the script steps it again.

        Its state is then freed with the script's own references, and checkpoints have only that of the later one.
        """
        for model in optimizer.models:
            model.trainable.remove_optimizer(optimizer.optimizer)
        schedulers = [each for each in self.schedulers if each.optimizers == [optimizer]]
        self.optimizers[:] = [each for each in self.optimizers if each is not optimizer]
        self.schedulers[:] = [each for each in self.schedulers if each not in schedulers]
        its, moving = weakref.ref(optimizer), [weakref.ref(each) for each in schedulers]

        def come_back() -> None:
            one = its()
            assert one is not None
            for model in one.models:
                model.trainable.add_optimizer(one.optimizer)
            one.come_back = None
            self.optimizers.append(one)
            self.schedulers += [each for ref in moving if (each := ref()) is not None]

        optimizer.come_back = come_back

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wrap one scheduler; it follows the prepared optimizer whose learning rate it sets."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        its = getattr(scheduler, "optimizer", None)
        followed = [each for each in self.optimizers if its is each or its is each.source]
        if followed and followed[0].optimizer is not followed[0].source:
            scheduler.optimizer = followed[0].optimizer
        theirs = None
        if isinstance(self._backend, FileConfiguredBackend):
            theirs = self._backend.file_scheduler(scheduler, [each.optimizer for each in followed])
        scheduler = scheduler_without_engine(scheduler, name_of(self._backend)) if theirs is None else theirs
        prepared = PreparedScheduler(
            scheduler, followed, self._backend, step_with_optimizer=self._follow, moves_per_step=self._moves
        )
        self.schedulers.append(prepared)
        return prepared

    def find(self, module: Any) -> PreparedModel:
        """The prepared model, given the prepared or the user's own object.

        Raises:
            UsageError: it was not prepared by this accelerator.
        """
        found = prepared_model(module)
        if found is not None and found in self._loop.models:
            return found
        for model in self._loop.models:
            # What torch.compile was put around, or puts around it now.
            if module is model.trainable.module or getattr(module, "_orig_mod", None) is model.source:
                return model
        raise UsageError(
            f"{type(module).__name__} was not prepared by this accelerator",
            cure="Pass what accelerator.prepare(model) returned.",
        )

    def clear(self) -> None:
        """Drop all prepared objects; models get their own classes back."""
        for model in self._loop.models:
            restore(model.source)
        self._loop.forget()
        self.schedulers.clear()
        self._memory.clear()

    def _check_memory(self, modules: Sequence[nn.Module]) -> None:
        if self._backend.capabilities.replicated:
            return
        theirs = {id(each) for module in modules for each in module.parameters()}
        given = [each for optimizer in self.optimizers for each in optimizer.given if id(each) not in theirs]
        trainables = [model.trainable for model in self._loop.models]
        self._memory.check(modules, [each for each in given if not any(one.shares([each]) for one in trainables)])


def is_model(value: Any) -> bool:
    """Whether this is an unprepared module with parameters or buffers, unlike a loss function."""
    if not isinstance(value, nn.Module) or isinstance(value, PreparedModule):
        return False
    return any(True for _ in value.parameters()) or any(True for _ in value.buffers())


def _evaluates_only(value: Any) -> bool:
    """Whether this was prepared for evaluation only."""
    model = prepared_model(value)
    return model is not None and model.evaluates_only


def is_optimizer(value: Any) -> bool:
    """Whether this is an optimizer that is not prepared yet."""
    return isinstance(value, Optimizer) and not isinstance(value, PreparedOptimizer)


def is_scheduler(value: Any) -> bool:
    """Whether this is a scheduler of torch, or of another library with the same interface."""
    if isinstance(value, PreparedScheduler | nn.Module | Optimizer):
        return False
    return isinstance(value, LRScheduler | DummyScheduler) or (
        isinstance(attribute(value, "optimizer"), Optimizer)
        and callable(attribute(value, "step"))
        and callable(attribute(value, "state_dict"))
    )


def _refuse_kind(module: nn.Module, backend: Backend) -> None:
    """Refuse a model that cannot be prepared, before an engine touches it."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            "a module of TorchScript is of a class that cannot be extended, and cannot be prepared",
            cure="Prepare the module that torch.jit was given, and call torch.compile or torch.jit on it after "
            "training; or put the TorchScript module into a plain nn.Module and prepare that.",
        )
    if backend.topology.world_size > 1 and any(map(is_lazy, module.parameters())):
        raise UsageError(
            f"{type(module).__name__} has lazy layers, whose parameters have no shape and no values yet",
            cure="Call the model once on a batch under torch.no_grad() before prepare.",
        )


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: Optimizer, module: nn.Module) -> frozenset[str]:
    """First names of the parameters of this module that the optimizer holds."""
    held = set(map(id, _held(optimizer)))
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in held)


def _holds_some(optimizer: Optimizer, module: nn.Module) -> bool:
    return not {id(each) for each in _held(optimizer)}.isdisjoint(map(id, module.parameters()))
