"""Merges the section into one DeepSpeed dictionary, with the origin of each value. No torch, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

from drivetrain_deepspeed.aliases import read_settled
from drivetrain_deepspeed.config import AUTO, MISSING, TYPED, DeepSpeedConfig, leaves, look_up, show
from drivetrain_deepspeed.jsonfile import JsonFile, Keys

_PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}


@dataclass(frozen=True)
class Said:
    """One value of the dictionary.

    Args:
        name: its key, dotted, as it was written.
        value: not ``"auto"``.
        where: ``ds.json:12``, ``train.yaml:8:3``.
    """

    name: str
    value: Any
    where: str

    def __str__(self) -> str:
        return f"{self.name}: {show(self.value)} ({self.where})"


@final
class Written:
    """Merged values of file, inline dictionary and typed keys. The section has checked that they agree.

    Args:
        section: the validated section.
        origins: where each of its keys was written, by dotted key; ``RunSettings.origins``.
    """

    def __init__(self, section: DeepSpeedConfig, origins: Mapping[str, str] | None = None) -> None:
        self._origins = dict(origins or {})
        self._file = read_settled(section.config_file) if section.config_file is not None else JsonFile("", {})
        self._inline = section.config or {}
        self._typed = {keys: key for key, keys in TYPED.items() if getattr(section, key) is not None}
        self.values: dict[str, Any] = deepcopy(self._file.values)
        for keys, value in leaves(self._inline):
            _put(self.values, keys, value)
        for keys, key in self._typed.items():
            _put(self.values, keys, getattr(section, key))
        if section.zero_stage is None and not self._file.values and not self._inline:
            _put(self.values, TYPED["zero_stage"], 2)

    def get(self, *keys: str) -> Any:
        """The value at a place, ``"auto"`` included, or :data:`~drivetrain_deepspeed.config.MISSING`."""
        return look_up(self.values, keys)

    def is_auto(self, *keys: str) -> bool:
        """Whether the value is left to the run."""
        return isinstance(self.get(*keys), str) and self.get(*keys) == AUTO

    def said(self, *keys: str) -> Said | None:
        """The value at a place with where it was written; ``None`` when there is none, or ``"auto"``."""
        value = self.get(*keys)
        if value is MISSING or self.is_auto(*keys):
            return None
        return Said(self._typed.get(keys, ".".join(keys)), value, self.where(keys))

    def where(self, keys: Keys) -> str:
        """Describe where a value was written."""
        if keys in self._typed:
            return self._origin(self._typed[keys])
        if look_up(self._inline, keys) is not MISSING:
            return self._origin(".".join(("config", *keys)))
        return self._file.where(keys)

    def autos(self) -> list[Keys]:
        """Places that are left to the run."""
        return [keys for keys, value in leaves(self.values) if isinstance(value, str) and value == AUTO]

    @property
    def stage(self) -> int:
        """ZeRO's stage; DeepSpeed's own default of 0 if a dictionary does not set it."""
        said = self.said("zero_optimization", "stage")
        return 0 if said is None else int(said.value)

    def precision(self) -> Said | None:
        """``bf16`` or ``fp16`` where the dictionary turns one on. Raises ``ValueError`` when it turns on two."""
        found: dict[str, Said] = {}
        for part, name in (("bf16", "bf16"), ("fp16", "fp16")):
            said = self.said(part, "enabled")
            if said is not None and said.value:
                found[name] = Said(said.name, name, said.where)
        said = self.said("torch_autocast", "enabled")
        if said is not None and said.value:
            dtype = str(self._file_or("torch_autocast", "dtype", default="bfloat16")).removeprefix("torch.")
            if dtype not in _PRECISIONS:
                raise ValueError(f'torch_autocast.dtype: "{dtype}" ({said.where}) is neither bfloat16 nor float16')
            found.setdefault(_PRECISIONS[dtype], Said("torch_autocast.enabled", _PRECISIONS[dtype], said.where))
        if len(found) > 1:
            raise ValueError(" contradicts ".join(f"{each.name} ({each.where})" for each in found.values()))
        return next(iter(found.values()), None)

    def _file_or(self, *keys: str, default: Any) -> Any:
        said = self.said(*keys)
        return default if said is None else said.value

    def _origin(self, key: str) -> str:
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return "the section `deepspeed:`"


def _put(values: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set one value; ``"auto"`` does not cover what is there."""
    here = values
    for key in keys[:-1]:
        below = here.get(key)
        if not isinstance(below, dict):
            below = here[key] = {}
        here = below
    if not (isinstance(value, str) and value == AUTO and keys[-1] in here):
        here[keys[-1]] = value
