"""``is_..._available()``: whether a package is installed, or a device or dtype can be used, by Accelerate's names."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.registry import known_extras

PACKAGES = {
    **{
        name: name
        for name in (
            *("aim", "amdsmi", "boto3", "clearml", "comet_ml", "datasets", "dvclive", "import_timer"),
            *("matplotlib", "mlflow", "msamp", "numpy", "pandas", "peft", "pynvml", "pytest", "rich", "sagemaker"),
            *("schedulefree", "swanlab", "tensorboard", "timm", "torchao", "torchdata", "torchvision", "tqdm"),
            *("trackio", "transformer_engine", "transformers", "triton", "wandb"),
        )
    },
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "bnb": "bitsandbytes",
    "lomo": "lomo_optim",
    "megatron_lm": "megatron.core",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
}
"""The word in ``is_<word>_available``, and the package that is looked for."""

DEVICES = ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu")
"""The same for device types."""


@functools.cache
def probe(name: str) -> Callable[..., bool]:
    """The function ``is_..._available`` of this name.

    Raises:
        AttributeError: there is none.
    """
    word = name.removeprefix("is_").removesuffix("_available")
    if word in PACKAGES or word in known_extras():
        package = PACKAGES.get(word, word)  # an engine has the name of its backend
        return _named(name, f"Whether the package {package} is installed.", lambda: _installed(package))
    if word in DEVICES:
        return _named(name, f"Whether this machine has an accelerator of type {word}.", lambda: _has(word))
    if word in _OTHERS:
        return _OTHERS[word]
    raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")


def _named(name: str, text: str, answer: Callable[..., bool]) -> Callable[..., bool]:
    def available(*_: Any, **__: Any) -> bool:
        # What Accelerate's arguments (check_device, min_version, ...) ask for is always checked.
        return answer()

    available.__name__ = available.__qualname__ = name
    available.__doc__ = text
    return available


def _installed(package: str) -> bool:
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the package around it is missing
        return False
    # A folder without __init__.py, such as the one that a tracker writes its runs into, is no package.
    return found is not None and found.origin is not None


def _has(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device_type


def _bf16(ignore_tpu: bool = False) -> bool:  # noqa: ARG001 - Accelerate's argument; a TPU computes in it
    """Whether this machine computes in bfloat16."""
    return not _has("cuda") or bool(torch.cuda.is_bf16_supported())


def _fp8() -> bool:
    """Whether ``mixed_precision="fp8"`` can be chosen: always ``False``."""
    return False


def _rocm() -> bool:
    """Whether the accelerator is one of AMD's."""
    return _has("cuda") and torch.version.hip is not None


def _torch_xla(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed, and ``PJRT_DEVICE`` names that device: asking its runtime would start it."""
    wanted = {"TPU"} if check_is_tpu else {"CUDA", "ROCM", "GPU"}
    named = os.environ.get("PJRT_DEVICE", "").upper() in wanted
    return _installed("torch_xla") and (named or not (check_is_tpu or check_is_gpu))


def _always() -> bool:
    """Always ``True``: part of every supported version of torch."""
    return True


_OTHERS: dict[str, Callable[..., bool]] = {
    "bf16": _bf16,
    "fp16": _always,
    "fp8": _fp8,
    "pippy": _always,
    "rocm": _rocm,
    "torch_distributed": dist.is_available,
    "torch_xla": _torch_xla,
    "weights_only": _always,
    "xccl": dist.is_xccl_available,
}
