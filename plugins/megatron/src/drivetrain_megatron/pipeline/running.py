"""Runs one stage of a model by the model's own forward, which skips the modules of other stages.

The forward runs from its beginning on every stage. Modules of earlier stages return tensors without values at once; at
the call where this stage begins they are filled with the received values; at the call where the next stage begins,
forward is left. Masks, positions and whatever else does not depend on parameters is computed on each stage from the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.pipeline import hooks
from drivetrain_megatron.pipeline.passage import Between, Crossing, Key, Passage, fresh, writable
from drivetrain_megatron.pipeline.skeleton import is_absent, known_elsewhere
from drivetrain_megatron.pipeline.values import leaves, rebuilt
from drivetrain_megatron.tensor.sharded import full_tensor
from drivetrain_megatron.tensor_parallel import parameters_come_back

EVERYTHING = -1
"""The stage of a run in which every module is passed over: only what lies between them is computed."""

_FILLED = "_drivetrain_value"
"""The attribute under which a tensor of an earlier stage carries the value that was received for it."""


class _Leave(BaseException):
    """Ends a forward where the next stage begins. Not an ``Exception``: a model's own handlers shall not see it."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class Run(Protocol):
    """Decides what the calls of modules do."""

    between: Between
    waits: bool
    """Forward begins with what belongs to other stages."""

    def skips(self, name: str) -> bool:
        """Whether a module lies in one stage, and is passed over as a whole by the others."""

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a module's call."""

    def end(self) -> None:
        """The model has returned."""


def _uncompiled(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the call of a module of which a stage runs a part, which torch.compile must not trace."""
    # Torch has no public name for what __call__ does without the compiler.
    return nn.Module._call_impl if kind.__call__ is nn.Module.__call__ else kind.__call__  # noqa: SLF001


def filled(tree: Any) -> Any:
    """The tree with values in place of the tensors for which one was received."""
    found = leaves(tree)
    values = [vars(leaf).get(_FILLED, leaf) if isinstance(leaf, Tensor) else leaf for leaf in found]
    return tree if all(one is other for one, other in zip(found, values, strict=True)) else rebuilt(tree, values)


@final
class StageRun:
    """One run of one stage.

    Args:
        stage: which one.
        passage: how inputs of this signature go through the model.
        received: values from the stage before.
        outside_losses: entered around modules in which no loss is computed.
    """

    def __init__(
        self,
        stage: int,
        passage: Passage,
        received: Sequence[Tensor] = (),
        outside_losses: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.between = Between(self._before, self._made)
        self.received, self.waits = received, stage > 0
        self._stage, self._passage, self._outside_losses = stage, passage, outside_losses
        self._entry = passage.crossings[stage - 1] if stage > 0 else None
        self._exit = passage.crossings[stage] if 0 <= stage < len(passage.crossings) else None
        self._wanted: set[Key] = {key for one in (self._entry, self._exit) if one is not None for key in one.keys}
        self._values: dict[Key, Tensor] = {}
        self._began = self._inside = False
        self._grad = torch.is_grad_enabled()

    def skips(self, name: str) -> bool:
        """Whether a module lies in one stage, or is called by one that does."""
        return self._inside or name in self._passage.stubs

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a module's call."""
        if self._inside:
            return forward(*args, **kwargs)
        if self._exit is not None and name == self._exit.point:
            raise _Leave(self._leaving(self._exit))
        if self._entry is not None and name == self._entry.point:
            self._enter(self._entry)
        args, kwargs = self._before((args, kwargs))
        stub = self._passage.stubs.get(name)
        if stub is None:
            return forward(*args, **kwargs)
        if stub.stage != self._stage and not (self._stage == EVERYTHING and stub.loss):
            with self.between.off():
                following = self.between.calls + 1
                output = fresh(stub.output, [leaf for event, leaf in self._wanted if event == following])
        elif stub.loss:
            # Its losses are adjusted, so it is looked into; it counts as one call all the same.
            before = self.between.calls
            output = forward(*args, **kwargs)
            self.between.calls = before
        else:
            self._inside = True
            try:
                with self.between.off(), self._outside_losses():
                    output = forward(*args, **kwargs)
            finally:
                self._inside = False
        self.between.made(output)
        return output

    def end(self) -> None:
        """Release the activations: this object and its interception refer to each other."""
        self.between.end()

    def _before(self, arguments: Any) -> Any:
        return filled(arguments) if self._began else arguments

    def _made(self, number: int, result: Any) -> None:
        for index, leaf in enumerate(leaves(result)):
            if (number, index) in self._wanted:
                self._values[number, index] = leaf

    def _same_way(self, crossing: Crossing) -> None:
        if self.between.calls != crossing.calls:
            raise UsageError(
                f"before {crossing.point!r}, where a pipeline stage begins, forward called other modules than with an "
                "earlier batch of the same shapes: it decides by values of its inputs",
                cure="Compute both branches and choose with torch.where, or name split_points after the branch.",
            )

    def _enter(self, crossing: Crossing) -> None:
        self._same_way(crossing)
        self._began = True
        torch.set_grad_enabled(self._grad)
        self.received = [writable(one) for one in self.received]
        self.between.depend(self.received)
        for key, value in zip(crossing.keys, self.received, strict=True):
            setattr(self._values[key], _FILLED, value)
            self._values[key] = value

    def _leaving(self, crossing: Crossing) -> tuple[Tensor, ...]:
        self._same_way(crossing)
        # A sequence that is sharded over tp is gathered before it is sent, since stages start unsharded.
        values = tuple(full_tensor(self._values[key]) for key in crossing.keys)
        for value, meta in zip(values, crossing.metas, strict=True):
            if is_absent(value):
                raise keeps_tensors("an object that is given to it")
            if tuple(value.shape) != meta.shape or value.dtype != meta.dtype:
                raise UsageError(
                    f"a value that {crossing.point!r} needs is {value.dtype} of {list(value.shape)}, and the shapes of "
                    f"the inputs made it {meta.dtype} of {list(meta.shape)}: forward decides shapes by values",
                    cure="Let the shapes in forward depend on the shapes of the inputs alone, or use "
                    "pipeline_parallel_size: 1.",
                )
        return values


@final
class Interception:
    """Intercepts the calls of one model's modules.

    Each module gets a subclass of its class, whose ``__call__`` goes through the active run.

    Args:
        module: the model.
        written: called when the script writes a Python attribute of a module, with both and the value.
        hooked: called when the script sets a hook on a module, with both.
    """

    def __init__(
        self,
        module: nn.Module,
        written: Callable[[nn.Module, str, Any], None] = lambda *_: None,
        hooked: Callable[[nn.Module, Any], None] = lambda *_: None,
    ) -> None:
        self._module, self.written, self._hooked = module, written, hooked
        self._changed: dict[str, tuple[nn.Module, type[nn.Module], type[nn.Module]]] = {}
        self._active: Run | None = None
        self._outside: Callable[..., Any] | None = None
        self._plain = 0

    def route(self, outside: Callable[..., Any]) -> None:
        """A call of the module itself, outside of a run, goes here, and calls of its parts are refused."""
        self._outside = outside

    def install(self, names: Sequence[str]) -> None:
        """Take note of some modules."""
        for name in names:
            if name not in self._changed:
                part = self._module.get_submodule(name)
                original = type(part)
                part.__class__ = self._class_for(original, name)
                self._changed[name] = (part, original, type(part))

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Disable the interception."""
        self._plain += 1
        try:
            with known_elsewhere():
                yield
        finally:
            self._plain -= 1

    @property
    def running(self) -> bool:
        """Modules are called by us, or by autograd, which computes activations again."""
        return self._active is not None or self._plain > 0 or torch._C._current_graph_task_id() != -1  # noqa: SLF001

    def guard(self, path: str, name: str) -> None:
        """Refuse that the script reads an attribute which forward writes: forward has not run, or ran on a part."""
        if path not in self._changed:
            return
        made = self._changed[path][2]
        if name in vars(made):
            return
        told = f"{path}.{name}" if path else name

        def read(module: nn.Module) -> Any:
            if not self.running:
                raise UsageError(
                    f"{told} is written by the forward of a pipelined model, which runs on micro-batches in "
                    "accelerator.backward, on the stage that computes it",
                    cure=f"Return it from forward beside the output, and use it in the loss: {name} = output[1].",
                )
            try:
                return vars(module)[name]
            except KeyError:
                raise AttributeError(name) from None

        def write(module: nn.Module, value: Any) -> None:
            vars(module)[name] = value

        setattr(made, name, property(read, write))

    def _class_for(self, original: type[nn.Module], name: str) -> type[nn.Module]:
        interception = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = interception._active
            if not name:
                return interception._whole(module, original, args, kwargs)
            if run is None:
                interception._check_alone(module, original, name)
                # In backward, where activations are computed again from what was kept.
                args, kwargs = filled((args, kwargs))
                return original.__call__(module, *args, **kwargs)
            forward = original.__call__ if run.skips(name) else _uncompiled(original)
            return run.call(name, partial(forward, module), args, kwargs)

        def set_attribute(module: nn.Module, attribute: str, value: Any) -> None:
            if not interception.running and attribute != "training" and not isinstance(value, (nn.Module, Tensor)):
                interception.written(module, attribute, value)
            original.__setattr__(module, attribute, value)

        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            with known_elsewhere():
                original.zero_grad(module, set_to_none)

        def registration(method: str) -> Callable[..., Any]:
            def register(module: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
                if not interception.running:
                    interception._hooked(module, hook)
                return getattr(original, method)(module, hook, *args, **kwargs)

            return register

        members: dict[str, Any] = {"__call__": call, "__setattr__": set_attribute, "zero_grad": zero_grad}
        members |= {method: registration(method) for method in hooks.REGISTRATIONS}
        made = type(original.__name__, (original,), {**members, "__module__": original.__module__})
        made.__qualname__ = original.__qualname__
        return made

    def _check_alone(self, module: nn.Module, original: type[nn.Module], name: str) -> None:
        if self._outside is None or self.running:
            return
        if self._changed[name][0] is not module:
            raise UsageError(
                f"a copy of a part of a pipelined model, {original.__name__}, was called, which has the layers of this "
                "rank's stages only",
                cure="Copy the model before prepare, and prepare the copy too.",
            )
        raise UsageError(
            f"{name!r} of a pipelined {type(self._module).__name__} was called outside of the model's forward, and "
            "only one stage has its parameters",
            cure="Call the model, whose forward can take an argument for what to compute: model(x, part='encode').",
        )

    def _whole(self, module: nn.Module, original: type[nn.Module], args: Any, kwargs: Any) -> Any:
        if self._outside is None or self.running:
            forward = original.__call__ if self._active is None else _uncompiled(original)
            return forward(module, *args, **kwargs)
        if module is not self._module:
            raise UsageError(
                f"a copy of a pipelined {original.__name__} was called, which has the layers of this rank's stages "
                "only",
                cure="Copy the model before prepare, and prepare the copy too.",
            )
        return self._outside(*args, **kwargs)

    def run(self, run: Run, forward: Callable[[], Any]) -> Any:
        """Call the model under a run.

        Args:
            run: what decides.
            forward: calls the model.

        Returns:
            What the model returned, or, of a stage before the last, a tuple of what leaves it.
        """
        with self._running(run):
            try:
                with run.between, parameters_come_back():
                    output = forward()
                return filled(output)
            except _Leave as leave:
                received = {id(one) for one in run.received} if isinstance(run, StageRun) else set()
                # A value that only passes through must not be the leaf itself, which has no function to go back by, and
                # torch's zero-bubble schedules detach what leaves in place, which a view refuses.
                return tuple(
                    one.clone() if id(one) in received or one._is_view() else one  # noqa: SLF001 (torch's word for it)
                    for one in leave.values
                )
            finally:
                run.end()

    @contextmanager
    def _running(self, run: Run) -> Iterator[None]:
        before, self._active = self._active, run
        grad = torch.is_grad_enabled()
        try:
            # Nothing is trained before a stage begins, though other stages of this rank may have parameters there.
            torch.set_grad_enabled(grad and not run.waits)
            with known_elsewhere():
                yield
        finally:
            torch.set_grad_enabled(grad)
            self._active = before

    def remove(self) -> None:
        """Give every module its class back. May be called twice."""
        for part, original, made in self._changed.values():
            # One that was derived further since then (fully_shard does so) stays: without a run it does nothing.
            if type(part) is made:
                part.__class__ = original
        self._changed.clear()
        self._outside = None


def keeps_tensors(holder: str) -> UnsupportedError:
    """Refuses an argument in which layers leave tensors for later layers: it does not travel between stages."""
    return UnsupportedError(
        f"layers leave tensors for later layers in an argument of the model's forward ({holder}), as in a cache of "
        "keys and values; what an argument keeps does not travel from one pipeline stage to the next",
        cure="Pass use_cache=False if it is a cache; else hand its tensors from module to module.",
    )
