"""Runs module hooks under pipeline parallelism, where a module is on one stage and gets one micro-batch at a time.

A hook that only computes from its arguments gives the same on micro-batches. One with side effects (it counts, keeps
activations, adds up a loss) would have them once per micro-batch, on one process, and after the script has read them.
So each hook is called once on fake tensors, and raises if it changes anything outside of its module. Hooks of the model
itself are called around the full forward, as in one process.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from drivetrain.api import UnsupportedError, UsageError
from drivetrain_megatron.module_state import OF_TORCH
from drivetrain_megatron.pipeline.skeleton import NO_VALUE, is_absent

REGISTRATIONS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_backward_hook",
)
"""Methods of modules that set hooks which forward or backward calls."""

_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

_LIBRARIES = ("torch", "drivetrain", "drivetrain_megatron", "logging")

_MOST_ITEMS, _MOST_BYTES = 256, 1 << 20
"""Number of items and bytes of a container or array that are compared: hooks may refer to whole datasets."""

_CURE = (
    "Return what it keeps from forward beside the output, and use it in the loss: "
    "accelerator.backward knows it then for the whole batch; or use pipeline_parallel_size: 1."
)


def of_library(hook: Any) -> bool:
    """Whether torch or Drivetrain set a hook; those of ``weight_norm`` and ``prune`` only write to their module."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return str(name).partition(".")[0] in _LIBRARIES


def has_hooks(module: nn.Module, which: Sequence[str] = (*_FORWARD, *_BACKWARD)) -> bool:
    """Whether a script has set some on this module."""
    return any(not of_library(hook) for kind in which for hook in vars(module)[kind].values())


@final
class ModuleHooks:
    """The hooks of one model's modules, except those around the model's own forward.

    Args:
        module: the user's module.
        skeleton: the same without values.
    """

    def __init__(self, module: nn.Module, skeleton: nn.Module) -> None:
        self._root = module
        self._counterparts = {
            ours: (name, theirs)
            for (name, ours), theirs in zip(module.named_modules(), skeleton.modules(), strict=True)
        }
        self._hooked = [one for one in self._counterparts if has_hooks(one)]
        self._seen = self._now()
        self._tried: set[int] = set()
        for kind in (*_FORWARD, *_OPTIONS):
            vars(skeleton)[kind] = OrderedDict()

    def registered(self, module: nn.Module, hook: Any) -> None:
        """The script sets one."""
        if module in self._counterparts and module not in self._hooked and not of_library(hook):
            self._hooked.append(module)

    def _now(self) -> tuple[Any, ...]:
        kinds = (*_FORWARD, *_BACKWARD)
        return tuple(
            tuple(vars(one)[kind]) for one in self._hooked for kind in (_BACKWARD if one is self._root else kinds)
        )

    def changed(self) -> bool:
        """Whether some were set or removed since :meth:`follow`."""
        return bool(self._hooked) and self._now() != self._seen

    def follow(self, memo: dict[int, Any]) -> None:
        """Give the skeleton the hooks that there are now.

        Args:
            memo: of the copy, in which what the skeleton keeps stands for what the module keeps.
        """
        self._seen = self._now()
        # What modules keep by themselves is looked at where forwards are tried.
        own = frozenset(map(id, memo.values()))
        for ours in self._hooked:
            name, theirs = self._counterparts[ours]
            if ours is self._root:
                vars(theirs)["_forward_hooks"] = OrderedDict()
            else:
                for kind in _OPTIONS:
                    vars(theirs)[kind] = OrderedDict(vars(ours)[kind])
                for kind in _FORWARD:
                    vars(theirs)[kind] = OrderedDict(
                        (key, self._without_values(name, key, copied(hook, memo), own))
                        for key, hook in vars(ours)[kind].items()
                    )
            found = [(kind, key, hook) for kind in _BACKWARD for key, hook in vars(ours)[kind].items()]
            for kind in _BACKWARD:
                vars(theirs)[kind] = OrderedDict()
            if found:
                theirs.register_forward_hook(functools.partial(self._try_backward, name, found))

    def _without_values(
        self, name: str, key: int, hook: Callable[..., Any], own: Collection[int]
    ) -> Callable[..., Any]:
        if of_library(hook):
            return hook

        def called(*given: Any) -> Any:
            if key in self._tried:
                return tried(hook, given, f"a hook on {name!r}")
            with without_effects(hook, f"a hook on {name!r}", own):
                result = tried(hook, given, f"a hook on {name!r}")
            self._tried.add(key)
            return result

        return called

    def _try_backward(
        self, name: str, hooks: Sequence[tuple[str, int, Any]], module: nn.Module, args: Any, output: Any
    ) -> None:
        def gradients(tree: Any) -> tuple[Any, ...]:
            several = tree if isinstance(tree, (tuple, list)) else (tree,)
            return tuple(torch.empty_like(one) if isinstance(one, Tensor) else None for one in several)

        for kind, key, hook in hooks:
            if key in self._tried or of_library(hook):
                continue
            given = (gradients(output),) if kind == "_backward_pre_hooks" else (gradients(args), gradients(output))
            with without_effects(hook, f"a hook on {name!r}"):
                tried(hook, (module, *given), f"a hook on {name!r}")
            self._tried.add(key)


@final
class TensorHooks(TorchFunctionMode):
    """Tries hooks that forward sets on tensors of its own, ``hidden.register_hook(hook)``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and is_absent(args[0]):
            hook = args[1] if len(args) > 1 else (kwargs or {})["hook"]
            if not of_library(hook):
                with without_effects(hook, "a hook that forward sets on a tensor"):
                    tried(hook, (torch.empty_like(args[0]),), "a hook that forward sets on a tensor")
        return func(*args, **(kwargs or {}))


def check_global_hooks() -> None:
    """Raise :class:`UnsupportedError` for hooks on all modules of the process."""
    # Torch has no public way to list them.
    if not torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]  # noqa: SLF001
        return
    for kind in (*_FORWARD, *_BACKWARD):
        for hook in getattr(torch_module, f"_global{kind}").values():
            if not of_library(hook):
                raise UnsupportedError(
                    f"{told(hook)} is a hook on all modules (torch.nn.modules.module.register_module_..._hook), and "
                    "those of a pipelined model are called on one process each, once for each micro-batch",
                    cure="Set it on the model itself, model.register_forward_hook(hook), or remove it.",
                )


# ---- hooks of the model itself ---------------------------------------------------------------------------------------


def around(modules: Sequence[nn.Module], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the forward of a whole model with the hooks of its own object.

    Args:
        modules: what the script calls, outermost first.
        forward: runs over all stages; its output may be deferred.
        args: of the model.
        kwargs: likewise.
    """
    for module in modules:
        for key, hook in _of_script(module, "_forward_pre_hooks"):
            if key in vars(module)["_forward_pre_hooks_with_kwargs"]:
                changed = hook(module, args, kwargs)
                args, kwargs = (args, kwargs) if changed is None else changed
            else:
                changed = hook(module, args)
                args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
    output = forward(*args, **kwargs)
    for module in reversed(modules):
        for key, hook in _of_script(module, "_forward_hooks"):
            with_kwargs = key in vars(module)["_forward_hooks_with_kwargs"]
            changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
            output = output if changed is None else changed
    return output


@contextmanager
def left_out(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disable the forward hooks of these modules, which :func:`around` has called."""
    with ExitStack() as stack:
        for module in modules:
            for kind in _FORWARD:
                if _of_script(module, kind):
                    before = vars(module)[kind]
                    stack.callback(vars(module).__setitem__, kind, before)
                    vars(module)[kind] = OrderedDict((key, hook) for key, hook in before.items() if of_library(hook))
        yield


def _of_script(module: nn.Module, kind: str) -> list[tuple[int, Callable[..., Any]]]:
    return [(key, hook) for key, hook in vars(module)[kind].items() if not of_library(hook)]


# ---- what a hook does ------------------------------------------------------------------------------------------------


def copied(hook: Any, memo: dict[int, Any]) -> Any:
    """The hook for a skeleton; itself where it cannot be copied."""
    try:
        return copy.deepcopy(hook, memo)
    except Exception:  # noqa: BLE001 (a user's own __deepcopy__ raises anything)
        return hook


def told(hook: Any) -> str:
    """Return the name of a hook."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def tried(hook: Callable[..., Any], given: Sequence[Any], what: str) -> Any:
    """Call a hook on fake tensors, or on zeros if it reads values."""
    try:
        return hook(*given)
    except NO_VALUE as problem:
        zeros = tree_map(lambda one: torch.zeros(one.shape, dtype=one.dtype) if is_absent(one) else one, given)
        if hook(*zeros) is not None:
            raise UnsupportedError(
                f"{what}, {told(hook)}, decides by values what it returns, and a pipelined model shows it one "
                "micro-batch at a time",
                cure="Compute both and choose with torch.where, or put it into the model's forward.",
            ) from problem
        return None


@contextmanager
def without_effects(hook: Any, what: str, own: Collection[int] = ()) -> Iterator[None]:
    """Raise :class:`UnsupportedError` where a hook that is called in here changes what lies outside of its module.

    Args:
        hook: is called.
        what: it is, for the error.
        own: identities of what it may change.
    """
    state = _Captured(hook, own)
    yield
    changed = state.changed()
    if changed:
        raise UnsupportedError(
            f"{what} of a pipelined model, {told(hook)}, changes {changed}: it is called for each micro-batch, on the "
            "process that has this stage, while accelerator.backward runs",
            cure=_CURE,
        )


@final
class _Captured:
    """State that a function can change: its closure, globals that it names, its object and their content."""

    def __init__(self, hook: Any, own: Collection[int]) -> None:
        self._own = own
        self._places: list[tuple[str, Callable[[], Any]]] = []
        self._functions: set[int] = set()
        self._kept: list[Any] = []
        """Objects stay alive, so that no other gets their identity."""
        self._find(hook, 4)
        self._before = [self._content(get(), 6) for _, get in self._places]

    def changed(self) -> str:
        """The name of the first thing that is otherwise now; nothing where all is the same."""
        for (name, get), before in zip(self._places, self._before, strict=True):
            if self._content(get(), 6) != before:
                return name
        return ""

    def _find(self, hook: Any, depth: int) -> None:
        if id(hook) in self._functions or depth == 0:
            return
        self._functions.add(id(hook))
        self._kept.append(hook)
        if isinstance(hook, functools.partial):
            self._find(hook.func, depth)
            self._note("its arguments", lambda: (hook.args, hook.keywords), depth)
        elif isinstance(hook, types.MethodType):
            self._note(f"its {type(hook.__self__).__name__}", lambda: hook.__self__, depth)
            self._find(hook.__func__, depth)
        elif isinstance(hook, types.FunctionType):
            if of_library(hook):
                return
            for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True):
                self._note(f"{name!r}", functools.partial(_content_of, cell), depth)
            for name in _names(hook.__code__):
                if name in hook.__globals__:
                    self._note(f"{name!r}", functools.partial(hook.__globals__.get, name), depth)
            self._note("its defaults", lambda: (hook.__defaults__, hook.__kwdefaults__), depth)
        elif not isinstance(hook, (type, types.BuiltinFunctionType)) and hasattr(hook, "__dict__"):
            self._note(f"its {type(hook).__name__}", lambda: hook, depth)
            self._find(type(hook).__call__, depth)
        elif isinstance(hook, types.BuiltinMethodType):
            # Such as the ``append`` of a list.
            self._note(f"its {type(hook.__self__).__name__}", lambda: hook.__self__, depth)

    def _note(self, name: str, get: Callable[[], Any], depth: int) -> None:
        self._places.append((name, get))
        value = get()
        if callable(value) and not isinstance(value, (type, nn.Module)):
            self._find(value, depth - 1)

    def _content(self, value: Any, depth: int) -> Any:
        """Return a key that is equal while the value and its content are unchanged."""
        if isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
            return value
        self._kept.append(value)
        if id(value) in self._own:
            return id(value)
        if isinstance(value, Tensor):
            return id(value), 0 if value.is_inference() else value._version  # noqa: SLF001 (torch counts writes)
        if isinstance(value, np.ndarray):
            return id(value), value.tobytes() if value.nbytes <= _MOST_BYTES else b""
        if depth == 0 or isinstance(value, types.ModuleType) or of_library(value):
            return self._of_module(value) if isinstance(value, nn.Module) and depth else id(value)
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, dict):
            some = itertools.islice(value.items(), _MOST_ITEMS)
            return id(value), len(value), tuple((key, self._content(one, depth - 1)) for key, one in some)
        if isinstance(value, (list, tuple, deque)):
            # What grows, grows at its end, and has another length.
            few = itertools.islice(value, _MOST_ITEMS)
            own = 0 if isinstance(value, tuple) else id(value)
            return own, len(value), tuple(self._content(one, depth - 1) for one in few)
        if isinstance(value, (set, frozenset)):
            return id(value), len(value)
        if isinstance(value, type):
            return tuple((name, self._content(one, 2)) for name, one in vars(value).items() if not callable(one))
        if hasattr(value, "__dict__") and not isinstance(value, types.FunctionType):
            return id(value), tuple((name, self._content(one, depth - 1)) for name, one in vars(value).items())
        return id(value)

    def _of_module(self, module: nn.Module) -> Any:
        parts = list(module.modules())
        self._kept.extend(parts)
        return tuple(
            (
                tuple((name, self._content(value, 3)) for name, value in vars(part).items() if name not in OF_TORCH),
                tuple((name, self._content(value, 1)) for name, value in part._buffers.items()),  # noqa: SLF001
            )
            for part in parts
        )


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def changed_between() -> UsageError:
    """The error for hooks that were set or removed after the call that they are for."""
    return UsageError(
        "hooks on modules of a pipelined model were set or removed between its forward and accelerator.backward(loss), "
        "where the forward runs",
        cure="Set them before the forward, and remove them after backward.",
    )
