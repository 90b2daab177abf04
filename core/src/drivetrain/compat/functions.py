"""Implements small functions that scripts import from ``accelerate.utils``."""

from __future__ import annotations

import json
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version, parse
from safetensors.torch import load_file
from torch import Tensor, nn

from drivetrain.backends.portable import tied_names
from drivetrain.data import loader
from drivetrain.distributed.current import has_accelerator, newest_accelerator
from drivetrain.errors import CheckpointMismatchError, CheckpointNotFoundError, UnsupportedError, UsageError
from drivetrain.loop.wrappers import extract_model_from_parallel

logger = logging.getLogger(__name__)

SAFE_WEIGHTS_NAME = "model.safetensors"
"""File name of a model that is saved in one piece."""

SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
"""File name of the index, of a model that is saved in several."""

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare an installed package's version, or a version itself, by ``"<"``, ``">="`` and their like.

    Args:
        library_or_version: a distribution's name, or a parsed version.
        operation: the comparison.
        requirement_version: what to compare with.

    Raises:
        UsageError: no such comparison.
        PackageNotFoundError: no such distribution is installed.
    """
    if operation not in _OPERATORS:
        raise UsageError(f"{operation!r} compares nothing", cure=f"Write one of {', '.join(_OPERATORS)}.")
    here = parse(version(library_or_version)) if isinstance(library_or_version, str) else library_or_version
    return _OPERATORS[operation](here, parse(requirement_version))


_OF_A_LOADER = {"split_batches", "dispatch_batches", "even_batches", "put_on_device", "slice_fn_for_dispatch"}
_OF_THE_RUN = {
    *("device", "num_processes", "process_index", "rng_types", "use_seedable_sampler", "data_seed", "non_blocking"),
    *("use_stateful_dataloader", "torch_device_mesh"),
}


def prepare_data_loader(dataloader: Any, *places: Any, **settings: Any) -> Any:
    """Prepare a loader with settings of its own, by the newest accelerator; no checkpoint holds its position.

    Collective over all ranks.

    Args:
        dataloader: as :meth:`drivetrain.Accelerator.prepare_data_loader` takes it.
        places: device, number of processes and index: accepted, they are the run's.
        settings: Accelerate's: ``split_batches``, ``dispatch_batches``, ``even_batches``, ``put_on_device`` and
            ``slice_fn_for_dispatch``; the others are accepted, what they say is the run's too.

    Raises:
        UsageError: there is no accelerator, or an argument is unknown.
    """
    del places
    unknown = sorted(settings.keys() - _OF_A_LOADER - _OF_THE_RUN)
    if unknown or not has_accelerator():
        raise UsageError(
            f"prepare_data_loader does not know {', '.join(unknown)}" if unknown else "there is no accelerator yet",
            cure="Write accelerator.prepare_data_loader(loader).",
        )
    context = newest_accelerator()._context  # noqa: SLF001 (the accelerator's other half)
    own = {name: settings[name] for name in _OF_A_LOADER & settings.keys()}
    place, cut = own.pop("put_on_device", False), own.pop("slice_fn_for_dispatch", None)
    context = replace(context, config=replace(context.config, **own))
    if loader.is_loader(dataloader):
        loader.compare_with_other_ranks([dataloader], context.config, context.backend)
    return loader.prepare_data_loader(
        dataloader,
        context,
        put_on_device=place,
        slice_fn_for_dispatch=cut,
    )


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, without what follows its ``+``."""
    return compare_versions(Version(parse(torch.__version__).base_version), operation, version)


def str_to_bool(value: str) -> int:
    """Return 1 for y, yes, t, true, on and 1, 0 for n, no, f, false, off and 0, in upper or lower case.

    Raises:
        ValueError: for anything else.
    """
    text = value.lower()
    if text in {"y", "yes", "t", "true", "on", "1"}:
        return 1
    if text in {"n", "no", "f", "false", "off", "0"}:
        return 0
    raise UsageError(f"{value!r} is neither true nor false", cure="Write yes or no, true or false, on or off, 1 or 0.")


def is_compiled_module(module: Any) -> bool:
    """Whether ``torch.compile`` made this module; a prepared model counts as what it was."""
    return isinstance(extract_model_from_parallel(module), torch._dynamo.eval_frame.OptimizedModule)  # noqa: SLF001


def is_peft_model(model: Any) -> bool:
    """Whether a model, prepared or not, is one of PEFT's. A model of PEFT cannot exist before PEFT is imported."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: str | Path, *places: Any, strict: bool = False, **settings: Any
) -> None:
    """Load the weights that ``Accelerator.save_model`` or ``save_pretrained`` wrote into a model, prepared or not.

    A prepared model keeps its layout: each process takes its part. Collective over all ranks where parameters are
    sharded, and the files must be there for every process. A process holds the tensors of one file at a time.

    Args:
        model: what is filled.
        checkpoint: a folder, a safetensors file, an index of several, or a ``.bin`` file of ``torch.save``, of which
            nothing but tensors is unpickled.
        strict: names that the model or the files lack are an error, and not a warning.
        settings: others of Accelerate's, which place a model that is not trained on several devices.

    Raises:
        CheckpointNotFoundError: there are no weights there.
        CheckpointMismatchError: with ``strict``, names differ.
        UnsupportedError: one of ``settings``.
        RuntimeError: a tensor has another shape, as ``load_state_dict`` says it.
    """
    given = [name for name, value in settings.items() if value is not None and value is not False]
    if places or given:
        what = ", ".join(given) or "a device_map"
        raise UnsupportedError(
            f"load_checkpoint_in_model does not take {what} here, which places a model on several devices",
            cure="Leave it out: a model keeps the device and the layout that prepare gave it.",
        )
    names = {*(name for name, _ in model.named_parameters(remove_duplicate=False)), *model.state_dict()}
    found: set[str] = set()
    for file in _weight_files(Path(checkpoint)):
        tensors: dict[str, Tensor] = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
        found |= tensors.keys()
        model.load_state_dict(tensors, strict=False)
    tied = tied_names(model)
    missing = sorted(name for name in names - found if tied.get(name, name) not in found)
    sentences = [
        f"{len(some)} tensor(s) {where}, such as {', '.join(some[:3])}"
        for where, some in (
            ("of the model are not in the files", missing),
            ("in the files are not the model's", sorted(found - names)),
        )
        if some
    ]
    if sentences and strict:
        raise CheckpointMismatchError(
            "; ".join(sentences),
            whose=str(checkpoint),
            cure="Build the model as the one that was saved, or load what fits with strict=False.",
        )
    if sentences:
        logger.warning("%s: %s.", checkpoint, "; ".join(sentences))


def _weight_files(place: Path) -> list[Path]:
    if place.is_dir():
        named = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, "pytorch_model.bin.index.json", "pytorch_model.bin")
        inside = next((place / name for name in named if (place / name).is_file()), None)
        if inside is None:
            raise CheckpointNotFoundError(
                f"{place} holds no weights: none of {', '.join(named)}",
                cure="Give a folder that accelerator.save_model(model, folder) wrote; accelerator.load_state(folder) "
                "reads what save_state wrote.",
            )
        place = inside
    if not place.is_file():
        raise CheckpointNotFoundError(
            f"{place} does not exist",
            cure="Give a file of weights, or a folder that accelerator.save_model(model, folder) wrote.",
        )
    if place.suffix == ".json":
        return [place.parent / name for name in sorted(set(json.loads(place.read_text())["weight_map"].values()))]
    return [place]


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Context in which a model is constructed without memory for its parameters.

    Between the construction of an ``Accelerator`` and its ``end_training()`` it is
    :meth:`Accelerator.init_empty_weights`: ``prepare`` gives the model its ordinary initial values. Before and after,
    parameters are on torch's meta device and stay there until the script loads values.

    Args:
        include_buffers: leave buffers without memory too.
    """
    if not has_accelerator() or newest_accelerator()._closed:  # noqa: SLF001 (the accelerator's other half)
        return init_on_device(torch.device("meta"), include_buffers)
    context: AbstractContextManager[Any] = newest_accelerator().init_empty_weights()
    return context


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False) -> Iterator[None]:
    """Context in which parameters of new modules are made on a device.

    Args:
        device: as torch names it; ``"meta"`` has no memory.
        include_buffers: make buffers and other tensors there too.
    """
    if include_buffers:
        with torch.device(device):
            yield
        return
    kind: Any = nn.Module
    plain = kind.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(module, name, param)
        if param is not None:
            made = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
            module._parameters[name] = made  # noqa: SLF001 (assignment would register it anew)

    kind.register_parameter = register
    try:
        yield
    finally:
        kind.register_parameter = plain
