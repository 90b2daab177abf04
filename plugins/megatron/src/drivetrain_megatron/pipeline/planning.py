"""Plans the stages of a model and the boundary activations, without values, once per signature of inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.api import DrivetrainError, TorchEngine, UnsupportedError, UsageError, dtype_of
from drivetrain.api.engines import call_plainly
from drivetrain.api.programs import get_registry
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.module_state import same_randomness, unchanged, without_gradients
from drivetrain_megatron.pipeline.cutting import Cut, balanced, cut_at, parameter_bytes
from drivetrain_megatron.pipeline.hooks import ModuleHooks, TensorHooks, left_out
from drivetrain_megatron.pipeline.passage import Passage, Survey, stubs_of, whole_output
from drivetrain_megatron.pipeline.reductions import Counting, Reduction
from drivetrain_megatron.pipeline.running import EVERYTHING, Interception, StageRun, keeps_tensors
from drivetrain_megatron.pipeline.skeleton import NO_VALUE, Skeleton, is_absent, trained
from drivetrain_megatron.pipeline.timeline import Timeline, record
from drivetrain_megatron.pipeline.timing import seconds
from drivetrain_megatron.pipeline.values import leaves, signature

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""A model's positional and keyword arguments."""

_MOST_PASSAGES = 256
"""Cached signatures; a script whose batches all differ in shape must not fill the memory."""


@final
class Planner:
    """Plans where a model is cut, and the activations that are sent between stages.

    Args:
        module: the user's module, unsharded, so that shapes in the plan are those in the user's forward.
        engine: precision.
        section: the configuration.
        num_stages: how many stages.
        device: of this rank.
    """

    def __init__(
        self, module: nn.Module, engine: TorchEngine, section: MegatronConfig, num_stages: int, device: torch.device
    ) -> None:
        self._module, self._engine, self._section, self._device = module, engine, section, device
        self.num_stages = num_stages
        self.skeleton = Skeleton(module, device)
        self.cut: Cut | None = None
        self._passages: dict[Any, Passage] = {}
        self._counts: dict[int, list[Reduction | Tensor]] = {}
        self._parameters = list(module.parameters())
        self.trained = trained(self._parameters)
        """Whether each parameter required gradients at the last check."""
        self._attributes: dict[tuple[int, str], tuple[Any, Any]] = {}
        """Plain values that the script wrote, by module and name, with what they held then."""
        self._changes = 0
        self._versions: dict[Any, int] = {self._state(): 0}
        self.version = self._last_version = 0
        """Number of a state of the module's attributes, frozen parameters and hooks, on which the control flow of
        forward may depend. A state that recurs has the same number again, such as an adapter that is switched off for a
        reference model and on again."""
        self._followed = 0
        self.hooks = ModuleHooks(module, self.skeleton.module)
        self.interception = Interception(module, self._written, self.hooks.registered)
        self.interception.install([name for name, _ in module.named_modules()])
        self._bare = Interception(self.skeleton.module)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of the forward, if it differs from that of the parameters."""
        compute = self._engine.policy.compute
        if compute is not None:
            return dtype_of(compute)
        return next((one.dtype for one in self._module.parameters() if one.is_floating_point()), None)

    def _written(self, module: nn.Module, attribute: str, value: Any) -> None:
        place = id(module), attribute
        try:
            self._attributes[place] = value, _content(value)
        except _NotPlainError:
            # Such a value cannot be compared with that of an earlier state.
            self._attributes.pop(place, None)
            self._changes += 1

    def _state(self) -> Any:
        for place, (value, content) in list(self._attributes.items()):
            if not _is_still(value, content):
                # A list that was filled since it was written, which a forward may do at each call.
                del self._attributes[place]
                self._changes += 1
        return self._changes, self.trained, tuple((place, it) for place, (_, it) in self._attributes.items())

    def look(self, *, replaced: bool = False) -> None:
        """Take note of what the script has frozen or unfrozen, of the attributes it has written and of its hooks.

        Args:
            replaced: the module has other parameters than at the last look.
        """
        if replaced:
            self._parameters = list(self._module.parameters())
        self.trained = self.trained_now()
        hooked = self.hooks.changed()
        self._changes += hooked
        state = self._state()
        if state not in self._versions:
            if len(self._versions) >= _MOST_PASSAGES:
                self._versions.clear()
            self._last_version += 1
            self._versions[state] = self._last_version
        self.version = self._versions[state]
        if hooked:
            self._follow()

    def trained_now(self) -> tuple[bool, ...]:
        """Return for each parameter whether it requires gradients."""
        return trained(self._parameters)

    def _follow(self) -> None:
        self.hooks.follow(self.skeleton.follow(self._module))
        self._followed = self.version

    def passage(self, arguments: Arguments) -> Passage:
        """The way of these inputs through the model.

        The first call decides where it is cut; under ``balance: time`` that call is collective over all ranks.
        """
        told = (signature(arguments), torch.is_grad_enabled(), self._module.training, self.version)
        found = self._passages.get(told)
        if found is None:
            timeline = self._trace(arguments)
            if self.cut is None:
                points, whose = self._points(timeline, arguments)
                self.cut = cut_at(self.skeleton.module, timeline, points, whose)
                logger.info("%s is cut at %s (%s).", type(self._module).__name__, ", ".join(points), whose)
            if len(self._passages) >= _MOST_PASSAGES:
                self._passages.clear()
                self._counts.clear()
            found = self._passages[told] = self._passage(timeline, arguments, self.cut.points)
        return found

    def _passage(self, timeline: Timeline, arguments: Arguments, points: Sequence[str]) -> Passage:
        stubs = stubs_of(timeline, points)
        for interception in (self.interception, self._bare):
            interception.install([*points, *stubs])
        existing = [*leaves(arguments), *self.skeleton.module.buffers()]
        survey = Survey(points, stubs, self.skeleton.is_written, existing)
        args, kwargs = arguments
        whole = whole_output(self.skeleton, timeline)
        derivatives = _Derivatives()
        try:
            with unchanged(self.skeleton.module, self._device), derivatives:
                output = self._engine.forward(
                    lambda: self._bare.run(survey, lambda: self.skeleton.module(*args, **kwargs)), (), {}
                )
        except DrivetrainError:
            raise
        except Exception as problem:
            if derivatives.taken:
                raise UnsupportedError(
                    f"{type(self._module).__name__} cannot be cut into pipeline stages: its forward calls "
                    "torch.autograd.grad, which goes back through the layers of all stages",
                    cure="Use pipeline_parallel_size: 1; with tensor_parallel_size such a model trains.",
                ) from problem
            raise self._left_behind(f" ({type(problem).__name__}: {problem})") from problem
        if len(leaves(output)) != len(leaves(whole)):
            raise self._left_behind("")
        return Passage(survey.crossings(output), stubs, whole)

    def _left_behind(self, how: str) -> UnsupportedError:
        """Return the error for a model whose full forward runs, but fails if layers of other stages are skipped."""
        return UnsupportedError(
            f"{type(self._module).__name__} cannot be cut into pipeline stages: its forward asks for more than what "
            f"layers return, such as router logits or hidden states that are recorded inside of them{how}",
            cure="Leave that out (output_router_logits=False, output_hidden_states=False), or use "
            "pipeline_parallel_size: 1.",
        )

    def counts(self, arguments: Arguments, way: Passage) -> list[Reduction | Tensor]:
        """Return the counts of the model's own losses over a full batch. Not collective.

        Labels are real, so they can be counted without the outputs; where only shapes count, once is enough.
        """
        found = self._counts.get(id(way))
        if found is None:
            if self._followed != self.version:
                self._follow()
            args, kwargs = arguments
            counting = Counting()
            run = StageRun(EVERYTHING, way)
            with self.without_randomness(), counting, without_gradients():
                self._bare.run(run, lambda: self._engine.forward(self.skeleton.module, args, kwargs))
            found = counting.found
            if all(isinstance(one, Reduction) and one.kind != "counted" for one in found):
                self._counts[id(way)] = found
        return found

    def _trace(self, arguments: Arguments) -> Timeline:
        self._follow()
        args, kwargs = arguments
        with unchanged(self.skeleton.module, self._device) as state, TensorHooks():
            try:
                timeline = record(self.skeleton, lambda forward: self._engine.forward(forward, (), {}), *args, **kwargs)
            except NO_VALUE as unknown:
                if _is_of_distributions(unknown):
                    raise UnsupportedError(
                        f"{type(self._module).__name__} cannot be cut into pipeline stages: a distribution that its "
                        "forward makes looks at the values of its parameters, and a pipeline plans its stages from the "
                        "shapes of the inputs alone",
                        cure="Make it with validate_args=False, such as torch.distributions.Normal(mean, deviation, "
                        "validate_args=False), or use pipeline_parallel_size: 1.",
                    ) from unknown
                raise UnsupportedError(
                    f"{type(self._module).__name__} cannot be cut into pipeline stages: in its forward "
                    f"{getattr(unknown, 'func', 'an operation')} decides by values, and a pipeline plans its stages "
                    "from the shapes of the inputs alone",
                    cure="Write masks and torch.where instead of selecting rows by their values, or use "
                    "pipeline_parallel_size: 1.",
                ) from unknown
            for given in (*args, *kwargs.values()):
                if any(is_absent(leaf) for leaf in leaves(given)):
                    raise keeps_tensors(type(given).__name__)
            for place, change in state.changes().items():
                if change.tensors and not place.buffer:
                    self.interception.guard(place.path, place.name)
        return timeline

    def without_randomness(self) -> Any:
        """A context in which drawing random numbers leaves no trace."""
        return same_randomness(self._device)

    def _points(self, timeline: Timeline, arguments: Arguments) -> tuple[Sequence[str], str]:
        by_time = self._section.balance == "time"
        costs = partial(self._seconds, arguments) if by_time else partial(self._bytes, timeline)
        return points_of(self.skeleton, timeline, self._section, self.num_stages, costs)

    def _bytes(self, timeline: Timeline, candidates: Sequence[str]) -> Sequence[float]:
        return parameter_bytes(self.skeleton.module, timeline, candidates)

    def _seconds(self, arguments: Arguments, candidates: Sequence[str]) -> Sequence[float]:
        args, kwargs = arguments
        with unchanged(self._module, self._device), self.interception.plain(), left_out((self._module,)):
            return seconds(
                self._module,
                lambda: self._engine.forward(partial(call_plainly, self._module), args, kwargs),
                candidates,
                self._device,
            )

    def release(self) -> None:
        """Give the module back as it was. May be called twice."""
        self.interception.remove()


class _Derivatives(TorchFunctionMode):
    """Notes whether a forward calls :func:`torch.autograd.grad`."""

    taken = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.taken |= function is torch.autograd.grad
        return function(*args, **(kwargs or {}))


class _NotPlainError(Exception):
    """Raised for a value whose content cannot be compared over time."""


def _is_of_distributions(problem: BaseException) -> bool:
    """Whether it was raised in :mod:`torch.distributions`, whose constructors check their arguments by value."""
    place = problem.__traceback__
    while place is not None:
        if place.tb_frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            return True
        place = place.tb_next
    return False


def _content(value: Any) -> Any:
    """A plain value as a key of a dictionary: two that are equal here lead forward the same way.

    Raises:
        _NotPlainError: it is no number, string or the like, and no list or tuple of such.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_content, value))
    raise _NotPlainError


def _is_still(value: Any, content: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return True
    try:
        return bool(_content(value) == content)
    except _NotPlainError:
        return False


def points_of(
    skeleton: Skeleton,
    timeline: Timeline,
    section: MegatronConfig,
    num_stages: int,
    costs: Callable[[Sequence[str]], Sequence[float]],
) -> tuple[Sequence[str], str]:
    """Return the first modules of all stages but the first, and their source: the user, a plugin, or the balance.

    Args:
        skeleton: of the model.
        timeline: one forward of the skeleton.
        section: the configuration.
        num_stages: how many stages.
        costs: as :func:`~drivetrain_megatron.pipeline.cutting.balanced` asks for them.

    Raises:
        UsageError: too many or too few are named, or there are not enough places to cut.
    """
    named: Sequence[str] | None = section.split_points
    whose = "megatron.split_points"
    if not named:
        # Of the class that the user wrote, which the module itself has no more.
        named, whose = get_registry().pipeline_split(skeleton.module, num_stages), "a plugin"
    if not named:
        return balanced(skeleton.module, timeline, num_stages, costs), f"balance of {section.balance}"
    if len(named) != num_stages - 1:
        raise UsageError(
            f"{whose} names {len(named)} module(s), {num_stages} stages need {num_stages - 1}",
            cure=f"Name {num_stages - 1} in megatron.split_points: where the second and each further stage begins.",
        )
    return named, whose
