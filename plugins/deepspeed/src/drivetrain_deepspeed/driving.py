"""Drives one DeepSpeed engine by explicit accumulation boundaries, which the core sets, with divisor and clipping.

The engine runs with ``gradient_accumulation_steps`` 1, divides no loss, clips nothing and never steps by itself. The
uses of its private attributes are here and in ``gradients.py``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.api import StepResult, Topology, UnsupportedError, UsageError, collectives, multiply_gradients
from drivetrain.api.engines import is_taken
from drivetrain_deepspeed import quiet
from drivetrain_deepspeed.forward_writes import WatchedForwards
from drivetrain_deepspeed.gradients import Gradients, WholeGradients
from drivetrain_deepspeed.groups import FixedGroups
from drivetrain_deepspeed.guard import Guard
from drivetrain_deepspeed.linear_hooks import LinearHooks, try_accumulated
from drivetrain_deepspeed.loss_scale import LossScale
from drivetrain_deepspeed.parts import PartitionedGradients
from drivetrain_deepspeed.same_writes import SameWrites
from drivetrain_deepspeed.slices import SlicedGradients
from drivetrain_deepspeed.unused import Unused
from drivetrain_deepspeed.writes import Writes

_APPLIED = StepResult()


@final
class Driver:
    """One engine and the gradients of its open window.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        topology: the job.
        loss_scale: the run's, shared by all engines since one loss may reach several; ``None`` without loss scaling.
        optimizers: each of the script's with its parameters.
        guard: of the module's parameters.
        max_norm: clip to this norm in a window in which the script does not clip; 0: do not.
    """

    taken = False
    """Under stage 3, ``torch.autograd.grad`` has gone through a graph of this model since the last backward."""
    extra_hooks: list[Any]
    """Further handles of hooks that go with the engine."""
    _left: dict[int, nn.Parameter]
    """ZeRO: parameters with gradients of a backward before prepare, to which DeepSpeed adds those of the first."""

    def __init__(
        self,
        engine: Any,
        topology: Topology,
        loss_scale: LossScale | None,
        optimizers: Sequence[tuple[Optimizer, Sequence[nn.Parameter]]],
        guard: Guard,
        max_norm: float = 0.0,
    ) -> None:
        self.engine, self._topology, self._loss_scale = engine, topology, loss_scale
        self._guard, self._max_norm = guard, max_norm
        self._parameters = {id(optimizer): frozenset(map(id, held)) for optimizer, held in optimizers}
        self.stage = int(engine.zero_optimization_stage())
        self._groups = FixedGroups([optimizer for optimizer, _ in optimizers], guard, self.stage)
        self.zero: Any = engine.optimizer if self.stage else None
        # DeepSpeed's own scalers for autocast in float16 decide per rank and per parameter group.
        engine.torch_autocast_z0_gradscaler = None
        if self.zero is not None:
            self.zero.torch_autocast_gradscaler = None
        self.gradients = self._gradients()
        if self.zero is None:
            # It would drop parameter.grad with each step; the script does, with zero_grad.
            engine.zero_grad = _nothing
        efficient = self.stage == 3 and engine._config.zero_config.memory_efficient_linear  # noqa: SLF001
        self._linear = quiet.linear_of_stage_3 if efficient else nullcontext
        self.watched: WatchedForwards | None = None
        """Stage 3: runs forwards, and notices what they write to parameters."""
        # Stage 3 needs DeepSpeed's hooks in every forward. Else they would be in copies of the model.
        if self.stage < 3:
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.module_forward_pre_hook = engine.module_forward_post_hook = None
        self.is_running = False
        """A backward of the core is running."""
        self._reached = False
        """It has reached this engine."""
        self._prologue = engine._backward_prologue  # noqa: SLF001
        engine._backward_prologue = self._at_output  # noqa: SLF001
        # It would divide by the engine's accumulation steps, of which there are none.
        engine._backward_prologue_per_tensor = _unchanged  # noqa: SLF001
        held = {id(each): each for _, parameters in optimizers for each in parameters}
        self.writes = None if self.zero is None else Writes(engine.module, self.zero, self.stage, held.values(), guard)
        several, in_parts = topology.dp_size > 1, self.stage == 3
        self._same_writes = SameWrites(engine.module, topology, in_parts=in_parts) if several else None
        self._unused = None if self.zero is None else Unused(self.zero, guard.named)
        self._used: set[int] = set()
        """Parameters that have a gradient on one process: backwards have reached them since it was dropped."""
        self._stepped: set[int] = set()
        """ZeRO: those of them whose optimizer has stepped since, so that DeepSpeed has dropped their gradients."""
        self._their_hooks = {handle.id for handle in getattr(self.zero, "_grad_acc_hooks", ())}
        self._number_of_hooks = -1
        """Number of post-accumulate-grad hooks when all of them were DeepSpeed's and ours; -1 before any check."""
        self._straightened: dict[int, Any] = {}
        self._settled = False
        """The current backward is the core's, and the script has set no hooks to be checked."""
        self._hooks = self._watch(engine.module)
        self._scripts_hooks = LinearHooks(self._hooks, guard.named) if topology.dp_size > 1 else None
        self._kind = self._hooks[0][0], self._hooks[0][0].dtype
        self.extra_hooks = []
        self._waiting: set[int] = set()
        """Optimizers that have not stepped yet with the current gradients."""
        self._left = {} if self.zero is None else {key: one for key, one in held.items() if one.grad is not None}
        self._scale = 1.0
        """Loss scale of the accumulated gradients."""
        self._norm: Tensor | None = None
        """2-norm over all parameters of the pieces as they are, where it is known and finite."""
        self._refused: dict[int, Tensor] = {}
        """Non-finite norms by optimizer: its step is skipped."""
        self._overflowed: dict[int, Tensor] = {}
        """Stage 0: non-finite norms by optimizer after the last backward, which a script may have clamped since."""
        self._clipped, self._closed = False, True
        """The last backward reduced what its window has gathered."""
        guard.pending, guard.stepped, guard.dropped = lambda: bool(self._waiting), self._stepped, self._dropped

    def _gradients(self) -> Gradients:
        if self.stage == 0:
            return WholeGradients(self.engine.module)
        if self.stage == 3:
            return PartitionedGradients(self.zero, self._topology.device)
        return SlicedGradients(self.zero)

    # ---- which engines a backward reaches --------------------------------------------------------------------------

    def _watch(self, module: nn.Module) -> list[tuple[Any, Any]]:
        """Register a hook on each trained parameter, called before DeepSpeed's own, to detect backwards of this engine.

        DeepSpeed's hooks on the tensors that a forward returns cover only lists, tuples and dictionaries, and no calls
        of submodules.
        """
        trained: list[Any] = [each for each in module.parameters() if each.requires_grad]
        return [(each, each.register_hook(self._hook(each))) for each in trained]

    def _hook(self, parameter: Any) -> Callable[[Tensor], None]:
        number, used, contiguous = id(parameter), self._used.add, parameter.is_contiguous

        # Runs for each parameter in each backward; the slow checks run at the first gradient.
        def at(gradient: Tensor) -> None:
            if self._settled and contiguous():
                used(number)
            else:
                self._at_parameter(parameter, gradient)

        at.keeps_account = True  # type: ignore[attr-defined]
        return at

    def _check_hooks(self) -> None:
        """Raise where the script has set hooks that find no gradient, or one rank's of one micro-batch."""
        present = [hooks for each, _ in self._hooks if (hooks := each._post_accumulate_grad_hooks)]  # noqa: SLF001
        # A script can remove only what it has set, so hooks of its own are more of them.
        number = sum(map(len, present))
        if number == self._number_of_hooks:
            return
        for each, _ in self._hooks:
            hooks = each._post_accumulate_grad_hooks  # noqa: SLF001
            others = hooks.keys() - self._their_hooks if hooks else set()
            if others and self.stage == 0:
                if self._topology.dp_size > 1:
                    for other in others:
                        try_accumulated(hooks[other], each, self._guard.named(id(each)))
                self._their_hooks |= others
            elif others:
                raise UnsupportedError(
                    f"{self._guard.named(id(each))} has a hook by register_post_accumulate_grad_hook, and ZeRO "
                    f"stage {self.stage} takes gradients out of the parameters while backward runs",
                    cure="Use register_hook, which is given the gradient itself, or distributed_type: ddp.",
                )
        self._number_of_hooks = number

    def _at_output(self) -> None:
        """Handle the first gradient at the outputs of this engine's forward.

        Below stage 3 do nothing: if all parameters are frozen now, there is nothing to reduce.
        """
        if self.stage < 3:
            return
        if self.is_running:
            self._arrive()
        else:
            _refuse_second_derivatives()
            self.taken = True

    def refuse_second_derivatives_in_forward(self) -> None:
        """Let layers of stage 3 refuse a backward that a forward goes through to have a graph of it."""
        offload = self.zero.parameter_offload
        fetch = type(offload).pre_sub_module_backward_function
        # The engine is freed as soon as nothing else refers to it.
        driver, owner = weakref.ref(self), weakref.ref(offload)

        def check_and_fetch(layer: nn.Module) -> None:
            this = driver()
            if this is not None and not this.is_running:
                _refuse_second_derivatives()
            fetch(owner(), layer)

        offload.pre_sub_module_backward_function = check_and_fetch

    def _at_parameter(self, parameter: Any, gradient: Tensor) -> None:
        """Handle the gradient of a parameter, before DeepSpeed's hook."""
        if not self.is_running and is_taken(parameter):
            self._check_taken(parameter)
            return
        self._used.add(id(parameter))
        hooks = self._scripts_hooks
        if hooks is not None and id(parameter) in hooks.untried:
            hooks.check(parameter, gradient)
        if id(parameter) not in self._straightened and not parameter.is_contiguous():
            self._straighten(parameter)
        if self.is_running:
            if not self._reached:
                self._arrive()
            self._settled = hooks is None or not hooks.untried
        elif not self._guard.engine_at_work:
            raise UsageError(
                "loss.backward() was called on the loss of a model under DeepSpeed, whose gradients are reduced in "
                "accelerator.backward only",
                cure="Write accelerator.backward(loss).",
            )

    def _straighten(self, parameter: Any) -> None:
        """Make this parameter's gradients contiguous from now on, before DeepSpeed's hook takes them.

        They have the strides of the parameter, which ``model.to(memory_format=torch.channels_last)`` changes.
        """

        def make_contiguous(one: Tensor) -> None:
            assert one.grad is not None
            one.grad = one.grad.contiguous()

        make_contiguous.keeps_account = True  # type: ignore[attr-defined]
        handle = parameter.register_post_accumulate_grad_hook(make_contiguous)
        # Autograd runs them as they were inserted, and takes no notice of OrderedDict.move_to_end.
        others = parameter._post_accumulate_grad_hooks  # noqa: SLF001
        theirs = [(key, others.pop(key)) for key in list(others) if key != handle.id]
        others.update(theirs)
        self._their_hooks.add(handle.id)
        self._straightened[id(parameter)] = handle

    def _check_taken(self, parameter: Tensor) -> None:
        """Raise where ``torch.autograd.grad`` returns a gradient that the script expects to be that of all ranks."""
        alone = self._topology.dp_size == 1 or not self.engine.is_gradient_accumulation_boundary()
        if not alone:
            # In a backward, gradients are enabled only under create_graph=True.
            penalty = " For a penalty on the gradient of all ranks use one process." if torch.is_grad_enabled() else ""
            in_parameters = " zero_stage: 0 leaves gradients over all ranks in p.grad." if self.stage else ""
            raise UsageError(
                f"torch.autograd.grad was asked for the gradient of {self._guard.named(id(parameter))}, and would "
                "return that of this rank's samples alone",
                cure=f"Call accelerator.backward(loss) and optimizer.step().{in_parameters} Where this rank's own is "
                "meant, as in an inner step of meta-learning, write `with accelerator.no_sync(model):` around "
                f"torch.autograd.grad; accelerator.reduce(gradient, 'mean') averages it over ranks.{penalty}",
            )

    def _arrive(self) -> None:
        if not self._reached:
            self._reached = True
            self.before_backward()
            self._prologue()

    def release(self) -> None:
        """Take the hooks away."""
        self._groups.restore()
        for handle in (self.engine.module_forward_pre_hook, self.engine.module_forward_post_hook):
            if handle is not None:
                handle.remove()
        for handle in (*self.extra_hooks, *(handle for _, handle in self._hooks), *self._straightened.values()):
            handle.remove()

    # ---- forward and backward --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward, with gradients."""
        if self.watched is not None:
            with self._linear():
                return self.watched.run(self.engine, args, kwargs)
        args, kwargs = self.engine._forward_prologue(args, kwargs) or (args, kwargs)  # noqa: SLF001
        output = self.engine(*args, **kwargs)
        self.engine._forward_epilogue()  # noqa: SLF001
        return output

    @property
    def holds_unreduced(self) -> bool:
        """Whether gradients wait for a backward that reduces them."""
        return bool(self._waiting) and not self._closed

    def synchronise(self, enabled: bool) -> None:
        """Whether the next backward closes a window."""
        self.engine.set_gradient_accumulation_boundary(enabled)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark a backward of the core as running, which the engine must not end by itself."""
        # Parameters are checked while they are plain ones, whose attributes cost a tenth.
        with self._guard:
            self._check_unchanged()
            engine = self.engine
            engine._running_engine_backward_count += 1  # noqa: SLF001
            engine._running_engine_backward = self.is_running = True  # noqa: SLF001
            try:
                with self._linear():
                    yield
            finally:
                self._reached = self.is_running = self._settled = False
                engine._running_engine_backward_count -= 1  # noqa: SLF001
                engine._running_engine_backward = engine._running_engine_backward_count > 0  # noqa: SLF001

    def _check_unchanged(self) -> None:
        """Raise where the script has changed the model or its hooks to what DeepSpeed would not train."""
        parameter, dtype = self._kind
        if parameter.dtype != dtype:  # model.double(): of all, one is enough.
            raise UnsupportedError(
                f"{self._guard.named(id(parameter))} was {dtype} when it was prepared and is {parameter.dtype} now: "
                "DeepSpeed still reduces and steps it as it was",
                cure="Change dtypes before prepare, to float32, bfloat16 or float16; mixed_precision computes in a "
                "lower one. For float64 use distributed_type: ddp.",
            )
        self._groups.check()
        if self.writes is not None:
            self.writes.check_places()
        self._check_hooks()
        if self._scripts_hooks is not None:
            self._scripts_hooks.look()

    def before_backward(self) -> None:
        """Prepare for a backward that reaches this engine, before DeepSpeed gets its first gradient."""
        self._norm = None
        self._overflowed.clear()
        self._left.clear()
        if self._loss_scale is not None:
            # Without ZeRO, gradients stay after a step.
            if (self._waiting or self.zero is None) and self._scale != self._loss_scale.scale:
                self.gradients.multiply(self._loss_scale.scale / self._scale)
            self._scale = self._loss_scale.scale
        self.gradients.before_backward()

    def after_backward(self) -> None:
        """End a backward; if it reached this engine, reduce its gradients, which is collective."""
        if not self._reached:
            return
        self._closed = bool(self.engine.is_gradient_accumulation_boundary())
        if self.zero is None and self._closed:
            self._reduce_whole()
            if self._loss_scale is not None:
                self._show_gradients()
        else:
            self.engine._backward_epilogue()  # noqa: SLF001
        self.gradients.after_backward(self._closed)
        self._waiting.update(self._parameters)

    def _reduce_whole(self) -> None:
        """Stage 0: DeepSpeed gives zeros to parameters that no rank has used, by which optimizers would move them.

        Collective over the data-parallel ranks, which may have used different ones.
        """
        parameters = [each for each, _ in self._hooks]
        used = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32)
        self.engine._backward_epilogue()  # noqa: SLF001
        if self._topology.dp_size > 1:
            used = collectives.all_reduce(used.to(self._topology.device), "max", self._topology).cpu()
        for each, by_some in zip(parameters, used.tolist(), strict=True):
            if not by_some:
                each.grad = None

    def _show_gradients(self) -> None:
        """Stage 0: take the loss scale out, since scripts clip, edit and log ``parameter.grad``. Not collective."""
        self.unscale()
        alone = len(self._parameters) == 1
        for number, held in self._parameters.items():
            norm = self._raw_norm(None if alone else held, 2.0)
            if not math.isfinite(norm.item()):
                self._overflowed[number] = norm

    # ---- between backward and step ---------------------------------------------------------------------------------

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply all gradients."""
        self.gradients.multiply(factor)

    def unscale(self) -> None:
        """Take the loss scale out."""
        if self._scale != 1.0:
            self.gradients.multiply(1.0 / self._scale)
            self._scale = 1.0

    def clip_norm(self, wanted: frozenset[int] | None, max_norm: float, norm_type: float) -> Tensor:
        """Clip and return the norm before clipping; see :meth:`drivetrain.api.Trainable.clip_grad_norm`.

        Args:
            wanted: identities of the parameters; ``None`` for all.
            max_norm: limit.
            norm_type: 2 and all parameters cost one pass over the gradients, which the step is spared; else two.
        """
        self._clipped = True
        self._check_dropped(wanted, "clipping")
        self.unscale()
        raw = self._raw_norm(wanted, norm_type)
        norm = raw * self.gradients.factor
        value = norm.item()
        if not math.isfinite(value):
            for optimizer, held in self._parameters.items():
                if wanted is None or not wanted.isdisjoint(held):
                    self._refused[optimizer] = norm
            return norm
        if wanted is None and norm_type == 2.0:
            self._norm = raw
        if value > max_norm:
            ratio = max_norm / (value + 1e-6)
            if wanted is None and ratio > 0:
                self.gradients.multiply(ratio)
            else:
                self._norm = None
                multiply_gradients(self.gradients.pieces(wanted), ratio)
        return norm

    def clip_value(self, wanted: frozenset[int] | None, clip_value: float) -> None:
        """Clamp gradient elements."""
        self._check_dropped(wanted, "clipping")
        self.unscale()
        self.gradients.settle()
        self._norm = None
        for piece in self.gradients.pieces(wanted):
            piece.clamp_(-clip_value, clip_value)

    def _raw_norm(self, wanted: frozenset[int] | None, norm_type: float) -> Tensor:
        """Norm of the pieces of all ranks, as they are. Collective where they are parts."""
        norm = self.gradients.norm(wanted, norm_type).to(self._topology.device)
        if not self.gradients.partitioned:
            return norm
        if norm_type == math.inf:
            return collectives.all_reduce(norm, "max", self._topology)
        return collectives.all_reduce(norm**norm_type, "sum", self._topology) ** (1.0 / norm_type)

    # ---- step ------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer) -> StepResult:
        """One update by one of the optimizers, or none where gradients are not finite. Collective."""
        number = id(optimizer)
        self._before_step(optimizer)
        alone = len(self._parameters) == 1
        mine = None if alone else self._parameters[number]
        self.unscale()
        if self._max_norm and not self._clipped:
            self.clip_norm(None, self._max_norm, 2.0)
        known, refused = self._norm, self._refused.pop(number, self._overflowed.get(number))
        if refused is None and self._loss_scale is not None and known is None:
            raw = self._raw_norm(mine, 2.0)
            if not math.isfinite(raw.item()):
                refused = raw
            elif alone:
                self._norm = raw
        if refused is not None:
            if self._loss_scale is not None:
                self._loss_scale.note(overflow=True)
            self._drop_gathered(number)
            self._end_step(number)
            return StepResult(skipped=True, grad_norm=refused)
        self.engine.set_gradient_accumulation_boundary(True)
        if alone:
            self._step()
        else:
            self._step_one_of_several(optimizer)
        skipped = self.zero is not None and bool(self.zero.overflow)
        if self._loss_scale is not None:
            self._loss_scale.note(overflow=skipped)
        if self._unused is not None:
            self._unused.end(applied=not skipped)
        self._settle()
        self._end_step(number)
        self._waiting.discard(number)
        if not self._waiting:
            self.gradients.end_window()
            self._end_window()
        return StepResult(skipped=skipped, grad_norm=known) if skipped or known is not None else _APPLIED

    def check_replaceable(self) -> None:
        """Look whether another engine can take over from this one. Not collective.

        Raises:
            UsageError: gradients wait for a step.
            UnsupportedError: the engine knows more of the parameters than they hold.
        """
        if self._waiting:
            raise UsageError(
                f"an optimizer was prepared between a backward of {self._guard.model} and the step that uses its "
                "gradients: DeepSpeed makes new buffers for the parameters, and these gradients would be lost",
                cure="Prepare it after optimizer.step(), or call optimizer.zero_grad() first.",
            )
        wrapped = self.engine.optimizer is not self.engine.basic_optimizer
        if wrapped if self.writes is None else self.writes.rounds:
            raise UnsupportedError(
                f"DeepSpeed keeps values of {self._guard.model} in a higher precision beside its parameters, which a "
                "new optimizer's engine would round",
                cure="Use mixed_precision instead of the file's own bf16 or fp16 section, or prepare all optimizers "
                "together with the model.",
            )

    def take_over(self, before: Driver) -> None:
        """Take over another engine's record of pending gradients, and the step counts of optimizers that continue."""
        trained = {id(each) for each, _ in self._hooks}
        if self.zero is not None:
            self._stepped |= before._stepped & trained
        self._used |= before._used & trained
        if self._unused is not None:
            going_on = self._parameters.keys() & before._parameters.keys()
            held = frozenset().union(*(self._parameters[number] for number in going_on))
            self._unused.resume({number: own for number, own in before.behind.items() if number in held})

    @property
    def behind(self) -> dict[int, int]:
        """Step counts of parameters that have had fewer steps than others of their group, by identity; under ZeRO."""
        return {} if self._unused is None else self._unused.behind

    def loaded(self, behind: Mapping[int, int]) -> None:
        """Update the records after a checkpoint was loaded, with parameters and :attr:`behind`."""
        if self._unused is not None:
            self._unused.resume(behind)
        if self.writes is not None:
            self.writes.settle()

    def _settle(self) -> None:
        """Accept the current values as written by the engine, not by the script."""
        self._groups.settle()
        if self.writes is not None:
            self.writes.settle()
        if self._same_writes is not None:
            self._same_writes.settle()

    def _before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step that would not do what the script means, and take in what it wrote to parameters."""
        self._groups.check()
        if id(optimizer) not in self._waiting and not self._assigned(optimizer):
            assigned = " zero_stage: 0 steps with gradients that the script assigns to p.grad." if self.stage else ""
            raise UsageError(
                f"{type(optimizer).__name__}.step() found no gradients: there was no backward of its model since the "
                "last step() or zero_grad()",
                cure="Call accelerator.backward(loss), with a loss that depends on the model, before step(), and "
                f"zero_grad() after it.{assigned}",
            )
        self._check_dropped(self._parameters[id(optimizer)], f"{type(optimizer).__name__}.step()")
        if self._same_writes is not None:
            self._same_writes.check()
        if self.writes is not None:
            self.writes.check()
            self.writes.take_in()
        if self._unused is not None:
            self._unused.begin(optimizer, self._parameters[id(optimizer)], self._used)

    def _assigned(self, optimizer: Optimizer) -> bool:
        """Whether the script has assigned gradients to the parameters itself, which stage 0 steps with."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        held = self._parameters[id(optimizer)]
        return self.zero is None and any(id(each) in held and each.grad is not None for each in parameters)

    def _check_dropped(self, wanted: frozenset[int] | None, what: str) -> None:
        """Raise where gradients of these parameters are those of two steps on one process, and of one here."""
        if self._stepped and (wanted is None or not self._stepped.isdisjoint(wanted)):
            raise UsageError(
                f"{what} needs gradients of {self._guard.model} that were not dropped after an earlier step: on one "
                f"process those of the last backward are added to them, and ZeRO stage {self.stage} keeps none after a "
                "step",
                cure="Call optimizer.zero_grad() once for each step(), after it or before the next backward; "
                "zero_stage: 0 keeps gradients.",
            )

    def _end_step(self, number: int) -> None:
        """An optimizer has stepped, or not, since its gradients are not finite."""
        if self.zero is not None:
            self._stepped |= self._parameters[number] & self._used

    def _step(self) -> None:
        """The engine's step, which applies our factor in the pass in which it divides by the loss scale.

        A norm that is known already is not computed again.
        """
        zero, factor, norm = self.zero, self.gradients.factor, self._norm
        if zero is None:
            self.engine.step()
            return
        replaced = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        if norm is not None:
            zero.__dict__[replaced] = (lambda: [norm]) if self.stage == 3 else (lambda **_: norm)
        if isinstance(factor, Tensor) or factor != 1.0:
            zero.custom_loss_scaler, zero.external_loss_scale = True, 1.0 / factor
        try:
            self.engine.step()
        finally:
            zero.custom_loss_scaler, zero.external_loss_scale = False, None
            zero.__dict__.pop(replaced, None)

    def _step_one_of_several(self, optimizer: Optimizer) -> None:
        """Step one optimizer: groups of the others are not changed and keep their gradients."""
        self.gradients.settle()
        self._norm = None
        self.engine.basic_optimizer.stepping = optimizer
        kept = self.gradients.keep()
        self._step()
        self.gradients.give_back(kept)
        if self.zero is not None:
            self.gradients.forget(self._parameters[id(optimizer)])

    def drop(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Drop the gradients of one optimizer's parameters.

        Args:
            optimizer: the script's.
            set_to_none: else they are zero from now on, which steps like any other gradient.
        """
        number = id(optimizer)
        held = self._parameters[number]
        self._stepped -= held
        if set_to_none:
            self._used -= held
        if self.zero is None:
            optimizer.zero_grad(set_to_none)
        for key in held & self._left.keys():
            self._left.pop(key).grad = None
        self._drop_gathered(number)

    def _drop_gathered(self, number: int) -> None:
        """Drop one optimizer's gradients accumulated since the last step."""
        if number not in self._waiting:
            return
        self._waiting.discard(number)
        if not self._waiting:
            self.gradients.drop()
            self._end_window()
        elif self.zero is not None:
            self.gradients.forget(self._parameters[number])

    def _dropped(self, parameter: int) -> None:
        """The script has set ``parameter.grad`` to ``None`` after a step, where there was no gradient any more."""
        self._stepped.discard(parameter)
        self._used.discard(parameter)

    def _end_window(self) -> None:
        if self._refused and self._loss_scale is not None:
            # The script has clipped gradients that are not finite, and dropped them instead of a step.
            self._loss_scale.note(overflow=True)
        self._scale, self._norm, self._clipped = 1.0, None, False
        self._refused.clear()


def backward(
    loss: Tensor, drivers: Sequence[Driver], loss_scale: LossScale | None, *, retain_graph: bool = False
) -> None:
    """Back-propagate through every engine that the loss depends on. Collective.

    What ``engine.backward`` does, for several engines at once.
    """
    if loss_scale is not None:
        loss_scale.move()
        loss = loss * loss_scale.scale
    with ExitStack() as stack:
        for driver in drivers:
            stack.enter_context(driver.running())
        try:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise  # Scripts try a smaller batch then.
        except RuntimeError as error:
            if any(driver.taken for driver in drivers):
                raise UnsupportedError(
                    "ZeRO stage 3 went backward through a forward twice, by torch.autograd.grad and in this backward, "
                    "and its layers release their parameters as the first passes them",
                    cure="Call the model again for the second. zero_stage: 2 goes backward as often as it is asked.",
                ) from error
            if any(driver.stage == 3 for driver in drivers) and (name := _function_given_parts(loss)):
                raise UnsupportedError(
                    f"the autograd function {name} is given parameters of other modules than the one that calls it, "
                    "which ZeRO stage 3 holds in parts by then",
                    cure="Use zero_stage: 2.",
                ) from error
            raise
        for driver in drivers:
            driver.taken = False
            driver.after_backward()


def _function_given_parts(loss: Tensor) -> str:
    """Name of an autograd function of the script that was given parameters that stage 3 holds in parts, or empty."""
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inner = [each for each, _ in node.next_functions]
        pending += inner
        kind = getattr(node, "_forward_cls", None)
        if kind is None or kind.__module__.startswith("deepspeed."):
            continue
        leaves = [getattr(each, "variable", None) for each in inner]
        if any(each is not None and hasattr(each, "ds_id") and not each.numel() for each in leaves):
            return str(kind.__qualname__)
    return ""


def _refuse_second_derivatives() -> None:
    # In a backward, gradients are enabled only under create_graph=True.
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "torch.autograd.grad(..., create_graph=True) through a model under ZeRO stage 3 goes through its layers "
            "twice, and the second time their parameters are in parts",
            cure="Use zero_stage 0, 1 or 2 for gradient penalties, forces and other second derivatives.",
        )


def _unchanged(grad: Tensor) -> Tensor:
    return grad


def _nothing() -> None:
    return None
