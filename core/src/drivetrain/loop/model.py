"""Prepared models: the user's own module object, whose ``__call__`` runs the engine's forward.

``prepare(model)`` replaces the class of the object that it is given by a subclass made for it, as torch's
``fully_shard`` does. Attributes, submodules, buffers, hooks and methods are therefore the model's own.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from threading import get_ident
from typing import Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules import module as registration

from drivetrain.backend import Trainable
from drivetrain.data.comparison import FirstInputs
from drivetrain.data.kept_batches import KeptBatches
from drivetrain.distributed.call_monitor import Current
from drivetrain.distributed.rank_numbers import ForwardNumbers
from drivetrain.distributed.watchdog import log_call, note_likely_cause
from drivetrain.errors import UnsupportedError, UsageError
from drivetrain.loop.backward_hooks import BackwardHooks
from drivetrain.loop.buffers import Buffers
from drivetrain.loop.former_memory import FormerMemory, check_readable
from drivetrain.loop.shared_memory import check_still_frozen
from drivetrain.loop.window import Window
from drivetrain.parameter_names import loaded_name, original_name

_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(eq=False, slots=True, weakref_slot=True)
class PreparedModel:
    """State of the training loop for one prepared model.

    Args:
        trainable: the engine's model.
        source: the object that the user gave to ``prepare``, ``torch.compile`` wrapper and all.
        index: its number in the order of ``prepare``, which is its number in a checkpoint.
        window: of its last micro-batch.
        held: inside ``no_sync``.
        reduces: the last argument of the engine's ``synchronise_gradients``.
        steps_alone: inside ``LocalSGD``: optimizers step on gradients of this rank.
        active: it has run a forward with gradients since the last backward.
        plain_class: the class of ``source`` before it was prepared.
        inside: identifiers of the threads in which the engine's forward runs.
        buffers: keeps them the same on all ranks; ``None`` where the engine does, or where there are none.
        idle_buffers: what ``buffers`` becomes when the script registers one.
        replicated: the backend's capability of that name.
        stay_frozen: names of parameters that must not be trained, see :meth:`SharedMemory.add`.
        taken_off: paths of the parts that were in torch's ``DataParallel`` or ``DistributedDataParallel``.
        inner: what ``model.module`` is; ``None`` where the user's class has such an attribute of its own.
        hooks_tried: up to which number of torch's hooks of parameters were tried, by cause.
        numbers: entered for each forward, so that it draws random numbers of this coordinate; ``None`` where there is
            one coordinate.
        evaluates_only: its engine was asked to leave out what gradients need.
        first_inputs: compares the inputs of the first forward in training; ``None`` where that has been done.
        called: numbers of the loop's models whose forwards communicate, in the order in which they are called; ``None``
            where this one's do not.
        former: the script's tensors in memory that its parameters have left; ``None`` where the engine moves none.
        backward_hooks: looks for hooks on what flows back, until the first loss; ``None`` after it, and where they are
            given what they are given on one process.
        kept: uneven batches that the script still holds; ``None`` where the weights of losses do not depend on them.
        meets_in_training: layers whose forwards communicate in training mode: batch norms over all ranks.
        parameters: those of which ranks compare which are trained, as the engine left them; ``None``: look again.
        trained: which of them required gradients at the last look.
    """

    trainable: Trainable
    source: nn.Module
    index: int
    window: Window
    held: bool = False
    reduces: bool = True
    steps_alone: bool = False
    active: bool = False
    plain_class: type[nn.Module] = nn.Module
    inside: set[int] = field(default_factory=set)
    buffers: Buffers | None = None
    idle_buffers: Buffers | None = None
    replicated: bool = True
    stay_frozen: Sequence[str] = ()
    taken_off: Sequence[str] = ()
    inner: nn.Module | None = None
    hooks_tried: dict[str, int] = field(default_factory=dict)
    numbers: ForwardNumbers | None = None
    evaluates_only: bool = False
    first_inputs: FirstInputs | None = None
    called: list[int] | None = None
    former: FormerMemory | None = None
    backward_hooks: BackwardHooks | None = None
    kept: KeptBatches | None = None
    meets_in_training: Sequence[nn.Module] = ()
    parameters: Sequence[nn.Parameter] | None = ()
    trained: Sequence[bool] = ()

    def watch_trained(self) -> None:
        """Begin to look which parameters are trained. Called where the engine holds them as it does between steps."""
        self.parameters = list(self.trainable.module.parameters())
        self.trained = [*map(_REQUIRES_GRAD, self.parameters)]

    def trains_others(self) -> bool:
        """Whether other parameters require gradients than at the last look. Runs in each step."""
        if self.parameters is None:
            self.parameters = list(self.trainable.module.parameters())
        if not self.parameters:
            return False
        trained = [*map(_REQUIRES_GRAD, self.parameters)]
        if trained == self.trained:
            return False
        self.trained = trained
        return True

    def record_forward(self) -> None:
        """Compare a forward in training mode, which all ranks make together, with their calls.

        Raises:
            CollectiveMismatchError: ranks are apart since an earlier call.
        """
        call = "forward in training mode"
        if Current.monitor is not None and any(layer.training for layer in self.meets_in_training):
            Current.monitor.record(call, log_call(call), None, (self.index,))

    def synchronise(self) -> None:
        """Switch the engine's gradient reduction on or off, if that has changed."""
        window = self.window  # `window.reduces`, inlined since it runs at each batch
        reduces = (window.closing or window.sync_each_batch or not window.open) and not self.held
        if reduces is not self.reduces:
            self.reduces = reduces
            self.trainable.synchronise_gradients(reduces)

    def check_reduced(self) -> None:
        """Raise where a step would use gradients that differ from rank to rank, unless the script keeps them so."""
        if self.former is not None:
            self.former.before_step()
        if not (self.held or self.steps_alone) and self.trainable.has_unreduced_gradients():
            raise UsageError(
                f"an optimizer of {self.plain_class.__name__} would step with gradients of this rank's samples alone: "
                "they came from loss.backward(), from a backward inside no_sync, or from a micro-batch before the last "
                "one of an accumulation window",
                cure="Call accelerator.backward(loss), and step the optimizer that accelerator.prepare returned, which "
                "waits for the end of a window.",
            )

    def check_clipped(self, call: str) -> None:
        """Raise where a script clips gradients that differ from rank to rank: clipped ones would not add up to any."""
        if not self.steps_alone and self.trainable.has_unreduced_gradients():
            raise UsageError(
                f"{call} was called while gradients of {self.plain_class.__name__} are those of this rank's samples "
                "alone, after a backward inside no_sync or loss.backward()",
                cure="Clip after the last backward of a step, which reduces them, or leave no_sync out: every backward "
                "reduces them then.",
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which a call in this thread runs the user's own forward with its hooks."""
        thread = get_ident()
        if thread in self.inside:
            yield
            return
        self.inside.add(thread)
        try:
            yield
        finally:
            self.inside.discard(thread)

    @contextmanager
    def no_sync(self, *, held: bool = True) -> Iterator[None]:
        """Context in which backward does not reduce gradients; a later backward outside of it does.

        With ``held=False`` backward reduces them inside an outer such context.
        """
        before, self.held = self.held, held
        self.synchronise()
        try:
            yield
        finally:
            self.held = before
            self.synchronise()


_ATTRIBUTE = "_drivetrain"
"""Name of the instance attribute that holds the :class:`PreparedModel`; not a parameter, buffer or submodule."""


class PreparedModule(nn.Module):
    """First base of the class of every prepared module, before the user's own class.

    It overrides only what must reach the engine: the call, ``forward``, ``zero_grad``, ``state_dict`` and copies.
    """

    _drivetrain: PreparedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: C901, PLR0912 (in one piece, since it runs in each forward)
        """Run the engine's forward under the run's precision policy. Collective where the engine's is.

        Where the engine's own forward calls the module, this is the call of the user's class, so that its hooks run
        once. A method of the model that calls ``self(...)`` runs the engine's forward.
        """
        prepared = self.__dict__[_ATTRIBUTE]
        thread = get_ident()
        if thread in prepared.inside:
            return super().__call__(*args, **kwargs)
        if not prepared.replicated:
            _refuse_transforms(self)
        if prepared.former is not None and prepared.former.moved_later:
            prepared.former.look()
        # First, so that a compiled step is not compiled anew when the others change.
        compiles = torch.compiler.is_compiling()
        with_gradients = torch.is_grad_enabled()
        looks = not compiles and with_gradients
        hooks = prepared.backward_hooks if looks and self.training else None
        kept = prepared.kept if looks else None
        over = kept.rows_of((args, kwargs)) if kept is not None and kept.held else None
        if with_gradients:
            if prepared.called is not None and not prepared.active and not compiles:
                prepared.called.append(prepared.index)
            prepared.active = True
            first = prepared.first_inputs
            if first is not None and self.training and not compiles and first.done(args, kwargs):
                prepared.first_inputs = None
            if prepared.stay_frozen:
                check_still_frozen(self, prepared.stay_frozen)
        if prepared.meets_in_training and not compiles:
            prepared.record_forward()
        if prepared.buffers is not None:
            prepared.buffers.before_forward()
        numbers = None if compiles else prepared.numbers
        if numbers is not None:
            numbers.__enter__()
        prepared.inside.add(thread)
        try:
            output = prepared.trainable.forward(*args, **kwargs)
        except RuntimeError as error:
            note_likely_cause(error)
            raise
        finally:
            prepared.inside.discard(thread)
            if numbers is not None:
                numbers.__exit__()
        if hooks is not None:
            hooks.note(output)
        if kept is not None and over is not None:
            kept.note(output, over)
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the module's gradients, those included that its engine keeps elsewhere than in the parameters."""
        prepared = self.__dict__[_ATTRIBUTE]
        trainable = prepared.trainable
        # First: while an engine has gradients elsewhere it may refuse that .grad is touched.
        for optimizer in trainable.optimizers:
            trainable.zero_grad(optimizer, set_to_none)
        super().zero_grad(set_to_none)
        prepared.window.forget_items(trainable.optimizers)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full state dict, as the user's class does, without prefixes of ``torch.compile``.

        Raises:
            UsageError: this rank holds shards of the model, which its engine does not gather here.
        """
        prepared = self.__dict__[_ATTRIBUTE]
        prepared.trainable.before_state_dict(replicated=prepared.replicated)
        found = super().state_dict(*args, **kwargs)
        if any(original_name(name) != name for name in found):
            # In place and in order, since the caller may have given the dictionary, and it has attributes.
            named = {original_name(name): value for name, value in found.items()}
            found.clear()
            found.update(named)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, as the user's class does. Names may have the prefixes of torch's wrappers or not."""
        check_readable("load_state_dict", state_dict.values())
        taken_off = self.__dict__[_ATTRIBUTE].taken_off
        if taken_off:
            parts = {f"{path}.module.".lstrip("."): f"{path}.".lstrip(".") for path in taken_off}
            state_dict = _renamed(state_dict, lambda name: _without_prefixes(name, parts))
        wrapped = [name for kind in (self.named_parameters, self.named_buffers) for name, _ in kind()]
        as_loaded = {original_name(name): loaded_name(name) for name in wrapped}
        if any(name in state_dict for name, own in as_loaded.items() if name != own):
            state_dict = _renamed(state_dict, lambda name: as_loaded.get(name, name))
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # What .to(), .double() and .half() call. Scripts write model.to(device) where the model is already.
        if recurse and _changes_nothing(fn, self):
            return self
        prepared = self.__dict__[_ATTRIBUTE]
        prepared.trainable.before_conversion()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _replicate_for_data_parallel(self) -> Any:
        """Return a replica for ``nn.DataParallel``, which only the engine calls, of the user's class."""
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.__class__ = self.__dict__[_ATTRIBUTE].plain_class
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the user's class that no engine trains, as for an average of weights.

        Raises:
            UnsupportedError: the engine does not hold the whole model on this rank.
        """
        prepared = self.__dict__[_ATTRIBUTE]
        prepared.trainable.before_copy()
        made = prepared.plain_class.__dict__.get("__deepcopy__") or getattr(super(), "__deepcopy__", None)
        if made is not None:
            with unprepared(self):
                return cast("nn.Module", deepcopy(self, memo))
        copied = prepared.plain_class.__new__(prepared.plain_class)
        memo[id(self)] = copied
        state = deepcopy(_plain_state(self), memo)
        if hasattr(copied, "__setstate__"):
            copied.__setstate__(state)
        else:
            copied.__dict__.update(state)
        return cast("nn.Module", copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the user's class, without the engine. Raises as a copy does."""
        prepared = self.__dict__[_ATTRIBUTE]
        prepared.trainable.before_copy()
        plain = prepared.plain_class
        if plain.__reduce__ is not object.__reduce__ or plain.__reduce_ex__ is not object.__reduce_ex__:
            with unprepared(self):
                return self.__reduce_ex__(protocol)
        # Not __newobj__, for which pickle insists on the class of the object; a file that needs no drivetrain to load.
        return copyreg._reconstructor, (plain, object, None), _plain_state(self)  # type: ignore[attr-defined]  # noqa: SLF001


def _renamed(state_dict: Mapping[str, Any], name_of: Callable[[str], str]) -> Mapping[str, Any]:
    # A shallow copy keeps the versions of modules, which torch's dictionaries have as an attribute.
    renamed: Any = copy(state_dict)
    renamed.clear()
    renamed.update((name_of(name), value) for name, value in state_dict.items())
    return cast("Mapping[str, Any]", renamed)


def _without_prefixes(name: str, parts: Mapping[str, str]) -> str:
    for wrapped, own in parts.items():
        if name.startswith(wrapped):
            name = own + name.removeprefix(wrapped)
    return name


def _changes_nothing(convert: Callable[..., Any], model: nn.Module) -> bool:
    """Whether a conversion, such as that of ``model.to(device)``, leaves the model's tensors unchanged.

    It is tried on a small tensor of each of their devices and dtypes, with four and five dimensions too, which
    ``memory_format`` lays out anew.
    """
    for dtype, device in {(each.dtype, each.device) for each in (*model.parameters(), *model.buffers())}:
        for num_dims in (1, 4, 5):
            probe = torch.zeros((2,) * num_dims, dtype=dtype, device=device)
            version = probe._version  # noqa: SLF001 (torch has no public name for it)
            # share_memory() returns the tensor too; on other devices all memory is shared.
            memory: Any = probe
            shares = device.type == "cpu" and not memory.is_shared()
            if convert(probe) is not probe or probe._version != version or (shares and memory.is_shared()):  # noqa: SLF001
                return False
    return True


def _refuse_transforms(model: nn.Module) -> None:
    """Raise inside of ``torch.func.vmap``, ``grad`` and the like, which see tensors without the ranks behind them."""
    if torch.compiler.is_compiling():
        # Tracing is not a transform of the script's.
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001 (torch has no public word for it)
        raise UnsupportedError(
            f"a transform of torch.func, such as vmap or grad, calls {type(model).__name__}, whose engine computes by "
            "hooks and collectives that such a transform does not support",
            cure="Use distributed_type: ddp, or compute without torch.func.",
        )


def _plain_state(model: nn.Module) -> dict[str, Any]:
    state = model.__getstate__()  # type: ignore[no-untyped-call]
    return {name: value for name, value in state.items() if name != _ATTRIBUTE}


def _forward(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a prepared model: a direct call runs the engine's forward too."""

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile traces the user's code only.
        if torch.compiler.is_compiling() or get_ident() in self.__dict__[_ATTRIBUTE].inside:
            return plain(self, *args, **kwargs)
        return self(*args, **kwargs)

    return forward


def _new_of(plain: type[nn.Module]) -> Callable[..., nn.Module]:
    """``type(model)(...)``, as slicing a ``Sequential`` does, makes an object of the user's class."""

    def __new__(_cls: type, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: N807
        return plain(*args, **kwargs)

    return __new__


def _inner_module(self: PreparedModule) -> Any:
    """The model without this attribute; behind ``torch.compile`` the module in it; a submodule of this name if any."""
    own = self.__dict__["_modules"].get("module")
    if own is not None:
        return own
    prepared: PreparedModel = self.__dict__[_ATTRIBUTE]
    if prepared.trainable.module is not self:
        return prepared.trainable.module
    inner = prepared.inner
    assert inner is not None, "made with the prepared model"
    # A script may have replaced it.
    object.__setattr__(inner, "__dict__", self.__dict__)
    return inner


def _is_same_model(self: Any, other: object) -> Any:
    """``model.module == model``: what is kept by module, such as torch's own state of it, is found by either."""
    return vars(self) is vars(other) if isinstance(other, nn.Module) else NotImplemented


def _make_inner(model: nn.Module, plain: type[nn.Module], bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    """A second object with the attributes of the model, all of them and always, and no ``module``.

    Scripts and libraries follow ``module`` until there is none. The call of this one runs the engine's forward too.
    """
    hash_of_model = object.__hash__(model)
    if plain.__eq__ is object.__eq__ and plain.__hash__ is object.__hash__:
        members = {**members, "__eq__": _is_same_model, "__hash__": lambda _: hash_of_model}
    inner: Any = object.__new__(type(plain.__name__, bases, members))
    object.__setattr__(inner, "__dict__", model.__dict__)
    return inner


def _has_slots(kind: type) -> bool:
    """Whether its objects keep attributes outside of their ``__dict__``."""
    return any(set(vars(one).get("__slots__", ())) - {"__dict__", "__weakref__"} for one in kind.__mro__)


def _no_sync(self: PreparedModule) -> AbstractContextManager[None]:
    """See ``accelerator.no_sync``."""
    prepared: PreparedModel = self.__dict__[_ATTRIBUTE]
    return prepared.no_sync()


def make_prepared(model: nn.Module, prepared: PreparedModel) -> nn.Module:
    """Make a model a prepared one, in place.

    Args:
        model: the object that the user gave to ``prepare``; its engine is made already.
        prepared: its state.

    Raises:
        UnsupportedError: the class of this object cannot be replaced.
    """
    current, plain = type(model), prepared.plain_class
    members: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "forward": _forward(current.forward),
        "__new__": _new_of(plain),
    }
    # Attributes of the user's class with these names are kept.
    if not hasattr(current, "no_sync") and "no_sync" not in vars(model):
        members["no_sync"] = _no_sync
    bases = (PreparedModule, current)
    try:
        if hasattr(current, "module") or "module" in vars(model) or _has_slots(current):
            made = type(plain.__name__, bases, members)
        else:
            prepared.inner = _make_inner(model, current, bases, members)
            made = type(plain.__name__, bases, {**members, "module": property(_inner_module)})
        model.__dict__[_ATTRIBUTE] = prepared
        model.__class__ = made
    except TypeError as error:
        model.__dict__.pop(_ATTRIBUTE, None)
        raise UnsupportedError(
            f"{plain.__name__} cannot be prepared: {error}",
            cure="Put it into a plain nn.Module and prepare that.",
        ) from error
    return model


def prepared_model(model: Any) -> PreparedModel | None:
    """The :class:`PreparedModel` of a prepared module; ``None`` for anything else."""
    return cast("PreparedModel", model.__dict__[_ATTRIBUTE]) if isinstance(model, PreparedModule) else None


def restore(model: nn.Module) -> None:
    """Restore the user's class of a prepared model."""
    prepared = prepared_model(model)
    if prepared is not None:
        forget_registrations(prepared)
        for one in (prepared.source, prepared.inner):
            if one is not None:
                one.__class__ = type(one).__bases__[1]
        del model.__dict__[_ATTRIBUTE]


@contextmanager
def unprepared(model: nn.Module) -> Iterator[None]:
    """Context in which a prepared model is an object of the user's class."""
    made, prepared = type(model), model.__dict__.pop(_ATTRIBUTE)
    model.__class__ = prepared.plain_class
    try:
        yield
    finally:
        model.__class__ = made
        model.__dict__[_ATTRIBUTE] = prepared


def call_plainly(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the user's module with its hooks and without its engine: for engines that run it outside of a forward."""
    prepared = prepared_model(model)
    if prepared is None:
        return model(*args, **kwargs)
    with prepared.running():
        return model(*args, **kwargs)


def plain_state_dict(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return this rank's state dict in the format of the user's class, for engines and checkpoints.

    Args:
        module: prepared or not, or a part of a model.
        keep_vars: as in ``nn.Module.state_dict``.
    """
    # The class after PreparedModule in the order of resolution is the one that there was before prepare.
    its: Any = super(PreparedModule, module) if isinstance(module, PreparedModule) else module
    found: dict[str, Any] = its.state_dict(keep_vars=keep_vars)
    return found


# ---- registrations on prepared models --------------------------------------------------------------------------------

_watched: WeakKeyDictionary[nn.Module, ReferenceType[PreparedModel]] = WeakKeyDictionary()
"""Every part of every prepared model."""


def watch_registrations(prepared: PreparedModel) -> None:
    """Call its trainable before the script registers anything on any part of this model."""
    _watched.update(dict.fromkeys(prepared.trainable.module.modules(), ref(prepared)))
    if not _handles:
        _handles.extend(
            (
                registration.register_module_module_registration_hook(_before_registration),
                registration.register_module_parameter_registration_hook(_before_registration),
                registration.register_module_buffer_registration_hook(_before_registration),
            )
        )


def forget_registrations(prepared: PreparedModel) -> None:
    """Undo :func:`watch_registrations`."""
    for part in [part for part, its in _watched.items() if its() in {prepared, None}]:
        del _watched[part]


_handles: list[Any] = []


def _before_registration(parent: nn.Module, name: str, value: Any) -> None:
    its = _watched.get(parent)
    prepared = None if its is None else its()
    if prepared is None:
        return
    prepared.trainable.before_registration(parent, name, value)
    if prepared.replicated and prepared.parameters and isinstance(value, nn.Module | nn.Parameter):
        prepared.parameters = None
    if prepared.idle_buffers is not None and not isinstance(value, nn.Parameter):
        prepared.buffers = prepared.idle_buffers
        prepared.buffers.registered()
    if isinstance(value, nn.Module):
        _watched.update(dict.fromkeys(value.modules(), ref(prepared)))
