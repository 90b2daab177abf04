"""Reads the weights that ``save_pretrained`` wrote, by the names of a model that is prepared. Nothing is collective."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from transformers.utils.import_utils import is_peft_available

from drivetrain.api import CheckpointMismatchError, CheckpointNotFoundError

ADAPTER = "adapter_model.safetensors"


def has_adapter(model: Any) -> bool:
    """Whether the model is one of PEFT's, of which only the adapter is saved."""
    if not is_peft_available():
        return False
    from peft import PeftMixedModel, PeftModel

    return isinstance(model, PeftModel | PeftMixedModel)


@contextmanager
def names_alone(model: nn.Module, names: Collection[str] | None) -> Iterator[None]:
    """Context in which a module that PEFT trains whole (``modules_to_save``) has a state dict of names alone.

    PEFT takes tensors from the state dict that it is given, and asks these modules for nothing but names, on the
    process that writes; an engine that shards them would gather them for it, with all processes.

    Args:
        model: one of PEFT's, or any other, with which nothing is done.
        names: of the tensors in the state dict that PEFT is given; ``None`` if it makes one itself.
    """
    parts: dict[str, nn.Module] = {}
    if names is not None and has_adapter(model):
        from peft.utils import ModulesToSaveWrapper

        wrappers = {path: part for path, part in model.named_modules() if isinstance(part, ModulesToSaveWrapper)}
        parts = {
            f"{path}.modules_to_save.{adapter}.": part
            for path, wrapper in wrappers.items()
            for adapter, part in wrapper.modules_to_save.items()
        }
    for prefix, part in parts.items():
        own = [name.removeprefix(prefix) for name in names or () if name.startswith(prefix)]
        vars(part)["state_dict"] = partial(dict.fromkeys, own)
    try:
        yield
    finally:
        for part in parts.values():
            del vars(part)["state_dict"]


def read(model: nn.Module, folder: str) -> dict[str, Tensor]:
    """Tensors of a folder, on the CPU, by the model's names.

    Raises:
        CheckpointNotFoundError: no weights there.
        CheckpointMismatchError: names that are not the model's.
    """
    place = Path(folder)
    if has_adapter(model):
        return _adapter(model, place / ADAPTER)
    if (place / SAFE_WEIGHTS_NAME).is_file():
        found = load_file(place / SAFE_WEIGHTS_NAME)
    elif (place / SAFE_WEIGHTS_INDEX_NAME).is_file():
        index = json.loads((place / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))
        found = {}
        for name in sorted(set(index["weight_map"].values())):
            found |= load_file(place / name)
    elif (place / WEIGHTS_NAME).is_file():
        found = torch.load(place / WEIGHTS_NAME, map_location="cpu", weights_only=True)
    else:
        raise CheckpointNotFoundError(
            f"{folder} holds no weights: neither {SAFE_WEIGHTS_NAME} nor its index",
            cure="Give the folder of a checkpoint, checkpoint-500 for instance, that holds one of the two.",
        )
    return _known(found, model, folder)


def _adapter(model: Any, file: Path) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    if not file.is_file():
        raise CheckpointNotFoundError(
            f"{file.parent} holds no adapter: there is no {file.name}",
            cure="Give the folder of a checkpoint that was saved with this adapter.",
        )
    # PEFT's own words for each tensor, found by sending their numbers through it.
    names = [name for name, _ in model.named_parameters()]
    sent = {name: torch.tensor(index) for index, name in enumerate(names)}
    with names_alone(model, names):
        theirs = get_peft_model_state_dict(model, state_dict=sent, save_embedding_layers=False)
    known = {word: names[int(number)] for word, number in theirs.items()}
    found = load_file(file)
    strange = sorted(set(found) - set(known))
    if strange:
        raise CheckpointMismatchError(
            f"{file} holds tensors that are not this adapter's: {', '.join(strange[:4])}",
            cure=f"Make the model of that adapter: peft.PeftModel.from_pretrained(base, {str(file.parent)!r}, "
            "is_trainable=True). Or give the folder of a checkpoint of this one.",
        )
    return {known[word]: tensor for word, tensor in found.items()}


def _known(found: dict[str, Tensor], model: nn.Module, folder: str) -> dict[str, Tensor]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    strange = sorted(set(found) - names)
    if strange:
        raise CheckpointMismatchError(
            f"{folder} holds tensors that are not the model's: {', '.join(strange[:4])}",
            cure="Load it before training: Model.from_pretrained(folder) renames what older models named otherwise.",
        )
    return found
