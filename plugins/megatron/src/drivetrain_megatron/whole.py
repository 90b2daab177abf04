"""Makes ``state_dict()`` and ``load_state_dict()`` of a sharded module return and accept the full state dict.

``accelerator.get_state_dict`` and ``save_model`` gather tensor by tensor; scripts also call the module itself:
``unwrapped.save_pretrained(folder)``, ``accelerator.save(unwrapped.state_dict(), file)``, the best weights so far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.api import UnsupportedError, UsageError, plain_state_dict
from drivetrain_megatron.meeting import Meeting
from drivetrain_megatron.pipeline.skeleton import is_absent
from drivetrain_megatron.state import is_extra

Gather = Callable[[Mapping[str, Tensor]], Iterable[tuple[str, Tensor]]]
"""Function that gathers tensors, given by first name, one at a time. Collective over all ranks."""


def refuse_pickling(module: nn.Module) -> None:
    """Raise where ``Trainable.before_copy``, which calls this, was called because the model is pickled.

    A copy in memory has parts as the model has them; one in a file would have this rank's, beside hooks of the engine.
    """
    if sys._getframe(2).f_code.co_name == "__reduce_ex__":  # noqa: SLF001
        raise UnsupportedError(
            f"{type(module).__name__} cannot be pickled: this rank holds parts of it, and megatron hooks in it",
            cure="On every rank write accelerator.save(accelerator.get_state_dict(model), path), or "
            "accelerator.save_model(model, folder).",
        )


@final
class WholeState:
    """Hooks on a module, and on each module in it, while its parameters are parts.

    Args:
        module: the user's module.
        gather: gathers tensors.
        part: ``part(name, whole, parameter)``: what this rank holds of a whole tensor, laid out as its parameter is.
        meeting: the ranks of the job.
        number: of the model; the same on every rank.
        loaded: called when values were loaded past the backend.
    """

    def __init__(
        self,
        module: nn.Module,
        gather: Gather,
        part: Callable[[str, Tensor, Tensor], Tensor],
        meeting: Meeting,
        number: int,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._gather, self._part, self._loaded = module, gather, part, loaded
        self._meeting, self._number = meeting, number
        self._raw = False
        self._handles: list[Any] = []
        self._fresh: list[tuple[str, Tensor, int]] = []
        """Copies in state dicts of the script's since the last forward, with the writes that torch had counted then."""
        self._given: list[tuple[str, ReferenceType[Tensor], int]] = []
        """Those of before, which the script may have dropped."""
        names: dict[int, str] = {}
        for name, one in self._entries(module).items():
            names.setdefault(id(one), name)
        self._first = {name: names[id(one)] for name, one in self._entries(module).items()}
        for path, part_of_it in module.named_modules():
            self._install(path, part_of_it)

    def _install(self, path: str, module: nn.Module) -> None:
        # Functions, since torch puts marks on them that bound methods do not take.
        def give(module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
            # A module's own hook has no effect on the full state dict.
            if not self._raw and not (path and prefix):
                self._give(module, path, found, prefix)

        def take(module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
            if not (path and prefix):
                self._take(module, path, given, prefix)

        self._handles.append(module.register_state_dict_post_hook(give))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_load_state_dict_pre_hook(take))  # type: ignore[no-untyped-call]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the state dict in full, one at a time; tied ones are one. Collective over all ranks.

        Raises:
            UsageError: not all ranks take part; raised at once, not when the first tensor is gathered.
        """
        call = "get_state_dict or save_model"
        self._meeting.come(
            call, f"{self._number}", "Call it on all processes, before `if accelerator.is_main_process:`.", alone=False
        )
        return self._each()

    def _each(self) -> Iterator[tuple[str, Tensor]]:
        entries = self._state(self._module)
        tied = {first for name, first in self._first.items() if name != first}
        kept: dict[str, Tensor] = {}
        for name, tensor in entries.items():
            if is_extra(name):
                yield from self._gather({name: tensor})
                continue
            first = self._first.get(name, name)
            if first in kept:
                yield name, kept[first]
                continue
            for _, whole in self._gather({first: tensor}):
                if first in tied:
                    kept[first] = whole
                yield name, whole
                del whole

    def check_given(self) -> None:
        """Raise where the script has written to a tensor of a state dict, which is a copy here. Not collective."""
        fresh, self._fresh = self._fresh, []
        self._given += [(name, ref(tensor), writes) for name, tensor, writes in fresh]
        for name, kept, writes in self._given:
            tensor = kept()
            if tensor is not None and tensor._version != writes:  # noqa: SLF001 (what autograd itself goes by)
                raise UsageError(
                    f"the script wrote to {name!r} in a state_dict() of {type(self._module).__name__}: under megatron "
                    "that is a copy of what lies on several ranks, and the model would not have it",
                    cure="Write to the parameter itself (`with torch.no_grad(): p.copy_(values)`), or call "
                    "model.load_state_dict(state) after the write, on every rank.",
                )
        self._given = [each for each in self._given if each[1]() is not None]

    def join(self, path: str) -> None:
        """Take part in another rank's ``state_dict()`` of the module of this name. Collective over all ranks."""
        for _ in self._gather(self._wanted(self._module.get_submodule(path), path)):
            pass

    def remove(self) -> None:
        """Take the hooks off again. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _state(self, module: nn.Module) -> dict[str, Any]:
        """The state dict as this rank holds it, the live tensors, and what ``get_extra_state`` returns."""
        self._raw = True
        try:
            return plain_state_dict(module, keep_vars=True)
        finally:
            self._raw = False

    def _entries(self, module: nn.Module) -> dict[str, Tensor]:
        """The live tensors of the state dict as this rank holds it."""
        return {name: one for name, one in self._state(module).items() if not is_extra(name)}

    def _wanted(self, module: nn.Module, path: str) -> dict[str, Tensor]:
        """Return the tensors to gather for this module's state dict, by first name in the full model, each once."""
        scope = f"{path}." if path else ""
        named = ((self._first.get(scope + name), one) for name, one in self._entries(module).items())
        return {first: one for first, one in named if first is not None}

    @torch.no_grad()
    def _give(self, module: nn.Module, path: str, found: dict[str, Any], prefix: str) -> None:
        """Put gathered tensors in host memory into a state dict. Collective over all ranks."""
        call = f"state_dict() of {type(module).__name__}"
        cure = (
            "Call it on all processes, before `if accelerator.is_main_process:`; so are "
            "accelerator.get_state_dict(model) and accelerator.save_model(model, folder), which writes on the main one."
        )
        self._meeting.come(call, f"{self._number}:{path}", cure)
        whole = {name: one.cpu() for name, one in self._gather(self._wanted(module, path))}
        scope = f"{path}." if path else ""
        for key, value in found.items():
            first = self._first.get(scope + key.removeprefix(prefix))
            if first in whole and isinstance(value, Tensor):
                found[key] = copied = whole[first]
                if isinstance(value, DTensor) or not (is_absent(value) or value.data_ptr() == copied.data_ptr()):
                    self._fresh.append((key, copied, copied._version))  # noqa: SLF001

    @torch.no_grad()
    def _take(self, module: nn.Module, path: str, given: dict[str, Any], prefix: str) -> None:
        """Replace full tensors that a script loads by this rank's shards. Not collective."""
        scope = f"{path}." if path else ""
        loaded = set(map(id, given.values()))
        self._fresh = [each for each in self._fresh if id(each[1]) not in loaded]
        self._given = [each for each in self._given if id(each[1]()) not in loaded]
        for name, live in self._entries(module).items():
            value = given.get(prefix + name)
            if not isinstance(value, Tensor) or value.shape != live.shape:
                # Torch's own error names it.
                continue
            if is_absent(live):
                given[prefix + name] = live.detach()
            elif isinstance(live, DTensor) and not isinstance(value, DTensor):
                first = self._first.get(scope + name, scope + name)
                given[prefix + name] = self._part(first, value.to(live.dtype), live)
        self._loaded()
