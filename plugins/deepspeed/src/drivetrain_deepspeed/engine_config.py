"""Builds the dictionary for ``deepspeed.initialize`` from the section, facts about the run and the core's settings.

Pure functions of the section and of facts about the run; no torch, no engine. A value that differs
between section and run raises an error that shows both, as soon as both are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, final

from drivetrain.api import ConfigError, PrecisionPolicy, UsageError
from drivetrain_deepspeed.config import MISSING, DeepSpeedConfig, leaves
from drivetrain_deepspeed.jsonfile import Keys
from drivetrain_deepspeed.vocabulary import without_requests
from drivetrain_deepspeed.written import Said, Written

_MICRO, _TOTAL, _STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_SCALER = {"init_scale": 65536.0, "growth_interval": 2000}
"""Torch's defaults, which hold if the script sets nothing."""
_FURTHER_SCALER = {
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_scale",
    "consecutive_hysteresis": "consecutive_hysteresis",
}
"""DeepSpeed's numbers that torch's scaler does not have, and ours."""


def implied(section: DeepSpeedConfig, origins: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return the core's keys that the section implies: ``mixed_precision`` and ``gradient_accumulation_steps``.

    Raises:
        ConfigError: it turns on two precisions.
    """
    written = Written(section, origins)
    try:
        precision = written.precision()
    except ValueError as error:
        raise ConfigError(str(error), cure="Turn one of them off.") from error
    found: dict[str, Said | None] = {"mixed_precision": precision, _STEPS: written.said(_STEPS)}
    return {key: (said.value, f"{said.name}, {said.where}") for key, said in found.items() if said}


@final
class EngineConfig:
    """One run's settings of the engine, and the agreement between them and the script.

    Args:
        section: the validated section.
        policy: the run's precision.
        dp_size: number of data-parallel ranks.
        origins: where each key of the section was written.

    Raises:
        UsageError: the section turns off the precision of the run.
    """

    def __init__(
        self,
        section: DeepSpeedConfig,
        policy: PrecisionPolicy,
        dp_size: int,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.written = Written(section, origins)
        self._policy, self._dp_size = policy, dp_size
        self._sizes: tuple[int, ...] = ()
        self._accumulation = 1
        self._check_precision()

    @property
    def stage(self) -> int:
        """ZeRO's stage."""
        return self.written.stage

    # ---- batches ------------------------------------------------------------------------------------------------

    def set_batches(self, sizes: Sequence[int], accumulation_steps: int) -> None:
        """Note how the script batches its data; see :meth:`check_batches`."""
        self._sizes, self._accumulation = tuple(sizes), accumulation_steps

    def check_batches(self) -> None:
        """Compare the section's batch sizes with the script's, as far as both are known.

        A script may prepare loaders of several batch sizes, so it is enough that one of them is the section's.

        Raises:
            UsageError: they differ; shows both and where they are from.
        """
        micro, total, steps = (self.written.said(key) for key in (_MICRO, _TOTAL, _STEPS))
        if steps is not None and steps.value != self._accumulation:
            raise _differ(steps, f"the run accumulates {self._accumulation} micro-batches", _STEPS)
        sizes = self._sizes
        if micro is not None and sizes and micro.value not in sizes:
            raise _differ(micro, f"the prepared loaders have {_numbers(sizes)} samples in a batch of one rank", _MICRO)
        if total is None:
            return
        if micro is not None:
            sizes = (micro.value,)
        products = [size * self._accumulation * self._dp_size for size in sizes]
        if products and total.value not in products:
            parts = f"{_numbers(sizes)} samples a rank x {self._accumulation} micro-batches x {self._dp_size} ranks"
            raise _differ(total, f"the run has {parts} = {_numbers(products)}", _TOTAL)

    def micro_batch_size(self) -> int:
        """Samples in a micro-batch of one rank: as said, else the smallest of the prepared loaders, else 1."""
        micro, total = self.written.said(_MICRO), self.written.said(_TOTAL)
        if micro is not None:
            return int(micro.value)
        if self._sizes:
            fitting = [
                size for size in self._sizes if total and size * self._accumulation * self._dp_size == total.value
            ]
            return min(fitting or self._sizes)
        return max(1, int(total.value) // (self._accumulation * self._dp_size)) if total else 1

    # ---- clipping -----------------------------------------------------------------------------------------------

    @property
    def clipping(self) -> float:
        """Norm to which every step clips according to the section; 0 if it sets none."""
        said = self.written.said("gradient_clipping")
        return 0.0 if said is None else float(said.value)

    def check_clipping(self, max_norm: float) -> None:
        """Compare the section's clipping norm with that of a call of ``clip_grad_norm_``.

        A call with an infinite norm only measures, and contradicts nothing.

        Raises:
            UsageError: they differ.
        """
        said = self.written.said("gradient_clipping")
        if said is not None and max_norm not in (float(said.value), float("inf")):
            raise _differ(said, f"the script calls clip_grad_norm_ with {max_norm:g}", "gradient_clipping")

    # ---- precision ----------------------------------------------------------------------------------------------

    def _check_precision(self) -> None:
        """The core has compared what the section turns on; here what it turns off."""
        name = self._policy.name
        parts = {"bf16": ("bf16",), "fp16": ("fp16",), "no": ()}[name]
        for part in parts:
            said = self.written.said(part, "enabled")
            if said is not None and not said.value and self.written.precision() is None:
                raise _differ(said, f"the run has mixed_precision: {name}", f"{part}.enabled")

    def loss_scaling(self) -> dict[str, Any]:
        """Numbers of the loss scaler, by the names of ``torch.amp.GradScaler``, and those of :data:`_FURTHER_SCALER`.

        Raises:
            UsageError: the section and ``GradScalerKwargs`` both say one, differently.
        """
        settings = dict(self._policy.scaler)
        power, window = (self.written.said("fp16", key) for key in ("initial_scale_power", "loss_scale_window"))
        static = self.written.said("fp16", "loss_scale")
        theirs = {
            "init_scale": (power, power and 2.0**power.value),
            "growth_interval": (window, window and window.value),
        }
        for key, (said, value) in theirs.items():
            if said is None:
                continue
            mine = settings.get(key, _SCALER[key])
            if mine not in (_SCALER[key], value):
                raise _differ(said, f"GradScalerKwargs has {key}={mine:g}", said.name)
            settings[key] = value
        if static is not None and static.value:
            settings.update(init_scale=float(static.value), growth_factor=1.0, backoff_factor=1.0)
        for key, name in _FURTHER_SCALER.items():
            said = self.written.said("fp16", key)
            if said is not None:
                settings[name] = said.value
        return settings

    # ---- the dictionary -----------------------------------------------------------------------------------------

    def dictionary(
        self, hidden_size: int | None = None, optimizer: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """The engine's configuration. The core owns windows, denominators and clipping, so all three are neutral here.

        Args:
            hidden_size: width of the model, from which buffer sizes left to ``"auto"`` follow; ``None``: not known.
            optimizer: type and parameters of the optimizer that the engine makes; ``None``: it is given one.

        Returns:
            The dictionary, and the names of keys left to ``"auto"`` that have DeepSpeed's own defaults for lack of
            ``hidden_size``.

        Raises:
            UsageError: ``"auto"`` where the run has nothing to fill in.
        """
        values = without_requests(deepcopy(self.written.values))
        for key in ("optimizer", "scheduler", "bf16", "fp16", "torch_autocast"):
            values.pop(key, None)
        open_keys = self._fill(values, hidden_size)
        micro = self.micro_batch_size()
        values.update(
            {
                _MICRO: micro,
                _TOTAL: micro * self._dp_size,
                _STEPS: 1,
                "gradient_clipping": 0.0,
            }
        )
        # DeepSpeed checks the class against a list of nine; `elementwise.check` has tested the optimizer itself, and
        # refused those that ZeRO would change. The section may turn on DeepSpeed's check too.
        values.setdefault("zero_allow_untested_optimizer", True)
        # It would forbid the script's own; `effects` warns of it.
        values["zero_force_ds_cpu_optimizer"] = False
        values.setdefault(_ZERO, {}).setdefault("stage", self.stage)
        values.setdefault("steps_per_print", None)
        if optimizer is not None:
            values["optimizer"] = dict(optimizer)
        if self._policy.compute is not None:
            values["torch_autocast"] = {
                "enabled": True,
                "dtype": self._policy.compute,
                # None: gradients are reduced in float32, as the precision policy requires.
                "lower_precision_safe_modules": [],
            }
        return values, open_keys

    def _fill(self, values: dict[str, Any], hidden_size: int | None) -> list[str]:
        """Replace ``"auto"`` by values of the run; keys of the core are overwritten later."""
        sizes = _sizes_of(hidden_size)
        open_keys: list[str] = []
        senseless: list[str] = []
        for keys in [keys for keys, value in leaves(values) if isinstance(value, str) and value == "auto"]:
            name = keys[-1]
            if keys in ((_MICRO,), (_TOTAL,), (_STEPS,), ("gradient_clipping",)):
                continue
            if keys in sizes:
                _set(values, keys, sizes[keys])
            elif keys[:-1] == (_ZERO,) or keys[:-2] == (_ZERO,) or keys in _FREE:
                # DeepSpeed reads its own default from an absent key.
                _set(values, keys, MISSING)
                if keys in _sizes_of(1):
                    open_keys.append(name)
            else:
                senseless.append(f"{'.'.join(keys)} ({self.written.where(keys)})")
        if senseless:
            raise UsageError(
                f'"auto" has nothing to be filled in from: {", ".join(senseless)}',
                cure="Write a value, or remove the key.",
            )
        return open_keys


_FREE: frozenset[Keys] = frozenset(
    {
        ("communication_data_type",),
        ("steps_per_print",),
        ("zero_allow_untested_optimizer",),
        ("zero_force_ds_cpu_optimizer",),
        ("wall_clock_breakdown",),
    }
)
"""Places outside of ``zero_optimization`` where ``"auto"`` may mean DeepSpeed's own default."""


def _sizes_of(hidden_size: int | None) -> dict[Keys, int]:
    """Buffer sizes that follow from a model's width, as Transformers and Accelerate derive them."""
    if hidden_size is None:
        return {}
    square = hidden_size * hidden_size
    return {
        (_ZERO, "reduce_bucket_size"): square,
        (_ZERO, "stage3_prefetch_bucket_size"): int(0.9 * square),
        (_ZERO, "stage3_param_persistence_threshold"): 10 * hidden_size,
    }


def hidden_size_of(model: Any) -> int | None:
    """``hidden_size`` of a Transformers model, its largest ``hidden_sizes``, or its text part's; else ``None``."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        size = getattr(part, "hidden_size", None)
        several = getattr(part, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if isinstance(several, Sequence) and several:
            return int(max(several))
    return None


def _set(values: dict[str, Any], keys: Keys, value: Any) -> None:
    here = values
    for key in keys[:-1]:
        here = here[key]
    if value is MISSING:
        del here[keys[-1]]
    else:
        here[keys[-1]] = value


def _numbers(values: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(set(values))))


def _differ(said: Said, other: str, key: str) -> UsageError:
    return UsageError(
        f"the section says {said}, but {other}",
        cure=f'Make them equal, or write "auto" for {key}.',
    )
