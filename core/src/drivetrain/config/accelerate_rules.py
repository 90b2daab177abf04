"""Converts the keys of Accelerate's configuration files by rules; those of an engine are in its plugin."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from drivetrain.errors import UsageError
from drivetrain.wording import closest, cut

if TYPE_CHECKING:
    from pydantic import BaseModel

# ---- Rules

Model = TypeVar("Model", bound="BaseModel")
Pile = Literal["carried over", "no meaning here", "not supported"]

PILES: tuple[Pile, ...] = get_args(Pile)

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that ``accelerate config`` writes for skipped questions."""


@dataclass(frozen=True)
class Rule:
    """Rule that converts one key. Exactly one of ``to``, ``into``, ``why`` and ``instead`` applies to ordinary values.

    Args:
        to: our dotted key, such as ``"mesh.tp"``: the value is carried over.
        into: gives our dotted keys and their values, for a value that says several things; may be empty. Raises
            ``ValueError`` with what to write instead, as :func:`flag`, :func:`number` and :func:`whole` do.
        convert: turns the value into ours, with ``to``. Raises ``ValueError`` with what to write instead.
        why: the key has no meaning here, for this reason.
        instead: the value is not supported; what to write or do.
        nothing: values that have no effect; the key then has no meaning here.
        changes_results: a run that goes on without an unsupported value would give other numbers; the launch stops.
    """

    to: str = ""
    into: Callable[[Any], Mapping[str, Any]] | None = None
    convert: Callable[[Any], Any] | None = None
    why: str = ""
    instead: str = ""
    nothing: tuple[Any, ...] = ()
    changes_results: bool = True


@dataclass(frozen=True)
class Verdict:
    """The result of converting one key of a file.

    Args:
        key: as it stands in the file, dotted.
        value: what it holds there.
        pile: one of :data:`PILES`.
        says: our keys with their values, why it has no meaning, or what to do instead.
        carried: our dotted keys and values; empty in the other piles.
        stops: the launch must not go on.
    """

    key: str
    value: Any
    pile: Pile
    says: str
    carried: Mapping[str, Any] | None = None
    stops: bool = False


def judge(key: str, value: Any, rule: Rule) -> Verdict:
    """Apply one rule to one value."""
    # `==` alone would take 0 for False and 1 for True.
    if any(value == each and type(value) is type(each) for each in (*EMPTY, *rule.nothing)):
        return Verdict(key, value, "no meaning here", rule.why or "says nothing special")
    if rule.why:
        return Verdict(key, value, "no meaning here", rule.why)
    if rule.instead:
        return Verdict(key, value, "not supported", rule.instead, stops=rule.changes_results)
    try:
        if rule.into is not None:
            carried = dict(rule.into(value))
        else:
            carried = {rule.to: value if rule.convert is None else rule.convert(value)}
    except Exception as error:  # noqa: BLE001 - said at the key; a rule that expects a number may meet a list
        raised = cut(f"{type(error).__name__}: {error}", 200)
        says = str(error) if isinstance(error, ValueError) else f"no such value is known here ({raised})"
        return Verdict(key, value, "not supported", says, stops=rule.changes_results)
    if not carried:
        return Verdict(key, value, "no meaning here", "it is what happens anyway")
    return Verdict(key, value, "carried over", "", carried)


def judge_section(name: str, values: Any, rules: Mapping[str, Rule]) -> Iterator[Verdict]:
    """Apply rules to every key of a section; a key without a rule is not supported."""
    if not isinstance(values, Mapping):
        if values not in EMPTY:
            yield Verdict(name, values, "not supported", "expected keys and values", stops=True)
        return
    for key, value in values.items():
        # Accelerate takes `version` for `fsdp_version`, and so for its other sections.
        rule = rules.get(key) or rules.get(f"{name.removesuffix('_config')}_{key}")
        if rule is None:
            guess = closest(str(key), rules)
            says = f"there is no such key{f'; did you mean {guess!r}?' if guess else ''}"
            yield Verdict(f"{name}.{key}", value, "not supported", says, stops=True)
        else:
            yield judge(f"{name}.{key}", value, rule)


def section_from_arguments(
    who: str, given: Mapping[str, Any], rules: Mapping[str, Rule], section: str, model: type[Model]
) -> Model:
    """A backend's section from the arguments of a class of Accelerate's, by the rules for its file.

    Args:
        who: the class, for messages.
        given: by argument; ``None`` = not given.
        rules: by argument.
        section: the backend's name.
        model: of the section.

    Raises:
        UsageError: arguments that are unknown, unsupported or refused by the section, all at once.
    """
    carried: dict[str, Any] = {}
    wrong: list[str] = []
    for name, value in given.items():
        if name not in rules:
            guess = closest(name, rules)
            wrong.append(f"it has no argument {name!r}{f'; did you mean {guess!r}?' if guess else ''}")
            continue
        verdict = judge(name, value, rules[name])
        if verdict.stops:
            wrong.append(f"{name}={value!r} is not supported; {verdict.says}")
        elif verdict.pile == "not supported":
            # user -> the class -> here
            warnings.warn(f"{who}({name}={value!r}) changes nothing: {verdict.says}", UserWarning, stacklevel=3)
        for key, ours in (verdict.carried or {}).items():
            inside, _, last = key.partition(".")
            if inside == section:
                carried[last] = ours
            else:
                wrong.append(f"{name}={value!r} is no setting of the backend; write {key}: {ours} in the configuration")
    if wrong:
        raise UsageError(f"{who}: {'; '.join(wrong)}", cure=f"Leave it out of {who}.")
    from pydantic import ValidationError

    try:
        return model.model_validate(carried)
    except ValidationError as error:
        found = (each["msg"].removeprefix("Value error, ") for each in error.errors(include_url=False))
        raise UsageError(f"{who}: {'; '.join(found)}", cure=f"Change the arguments of {who}.") from error


def whole(value: Any) -> int:
    """Convert an integer of Accelerate's files: ``2``, ``'2'``, ``1e6``. Raises ``ValueError`` for the rest."""
    if type(value) is int:
        return value
    read = number(value)
    if not read.is_integer():
        raise ValueError("write a whole number")
    return int(read)


def number(value: Any) -> float:
    """A number as Accelerate's files hold it: ``1``, ``0.5``, ``'1.0'``. Raises ``ValueError`` for the rest."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(read := float(value)):
                return read
    raise ValueError("write a number")


def flag(value: Any) -> bool:
    """A boolean as Accelerate's files hold it: ``true``, ``'yes'``, ``'False'``. Raises ``ValueError`` for the rest."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError("write true or false")


# ---- Rules for Accelerate's keys

def _only_yes(instead: str, *, changes_results: bool = False) -> Rule:
    """A switch that has no effect while it is off."""
    return Rule(instead=instead, nothing=(False, "no", "No", "false", "False"), changes_results=changes_results)


def _precision_of_fp16(value: Any) -> Mapping[str, Any]:
    return {"mixed_precision": "fp16"} if flag(value) else {}


def _one(value: Any) -> Mapping[str, Any]:
    if value == 1:
        return {}
    raise ValueError("sequence parallelism has no axis of its own; leave it at 1, or use mesh.cp")


_CLOUD = Rule(instead="start the job by the cloud's own tools, with `drivetrain launch` inside")
_POD = Rule(instead="start `drivetrain launch` on every TPU host", changes_results=False)
_NO_CP = "mesh.cp alone says how many ranks share a sequence; the backend chooses how"
_COMPILE = Rule(
    instead="call torch.compile in the script", nothing=("NO", "no", False, "default"), changes_results=False
)

RULES: Mapping[str, Rule] = {
    "compute_environment": Rule(instead="only LOCAL_MACHINE has a meaning", nothing=("LOCAL_MACHINE",)),
    "main_training_function": Rule(why="`drivetrain launch` runs the whole script"),
    "same_network": Rule(why="main_process_ip has to be an address that every machine reaches, whatever the network"),
    "gpu_ids": Rule(to="accelerator_ids", nothing=("all",)),
    "fp16": Rule(into=_precision_of_fp16),
    "enable_cpu_affinity": _only_yes("start the launcher under numactl or taskset"),
    "num_cpu_threads_per_process": Rule(
        instead="set the environment variable OMP_NUM_THREADS", nothing=(0, 1), changes_results=False
    ),
    "downcast_bf16": _only_yes("set mixed_precision: bf16", changes_results=True),
    "command": _POD,
    "command_file": _POD,
    "commands": _POD,
    "tpu_env": Rule(instead="export these variables before `drivetrain launch`"),
    "tpu_name": _POD,
    "tpu_zone": _POD,
    "tpu_vm": _POD,
    "tpu_use_cluster": _only_yes(_POD.instead),
    "tpu_use_sudo": _only_yes(_POD.instead),
    "dynamo_backend": _COMPILE,
    "sagemaker_inputs_file": _CLOUD,
    "sagemaker_metrics_file": _CLOUD,
    "additional_args": _CLOUD,
    "base_job_name": _CLOUD,
    "ec2_instance_type": _CLOUD,
    "iam_role_name": _CLOUD,
    "image_uri": _CLOUD,
    "profile": _CLOUD,
    "py_version": _CLOUD,
    "pytorch_version": _CLOUD,
    "region": _CLOUD,
    "transformers_version": _CLOUD,
}
"""Keys at the top of the file that are not ours; those that are keep their meaning."""

_AXIS = "parallelism_config_"
_FP8 = Rule(why="it has a meaning only with mixed_precision: fp8, which is not supported")
_MPI = Rule(why="`mpirun python script.py` is started as it stands; the launcher is not part of it")
_IPEX = Rule(why="torch itself supports Intel devices")
_SP = Rule(why="it has a meaning only with parallelism_config_sp_size")

SECTIONS: Mapping[str, Mapping[str, Rule]] = {
    "parallelism_config": {
        f"{_AXIS}dp_replicate_size": Rule(to="mesh.dp_replicate"),
        f"{_AXIS}dp_shard_size": Rule(to="mesh.dp_shard"),
        f"{_AXIS}tp_size": Rule(to="mesh.tp"),
        f"{_AXIS}cp_size": Rule(to="mesh.cp"),
        f"{_AXIS}cp_backend": Rule(why=_NO_CP),
        f"{_AXIS}cp_comm_strategy": Rule(why=_NO_CP),
        f"{_AXIS}sp_size": Rule(into=_one),
        f"{_AXIS}sp_backend": _SP,
        f"{_AXIS}sp_seq_length": _SP,
        f"{_AXIS}sp_seq_length_is_variable": _SP,
        f"{_AXIS}sp_attn_implementation": _SP,
    },
    "fp8_config": {
        f"fp8_{name}": _FP8
        for name in (
            *("backend", "format", "interval", "margin", "override_linear_precision", "use_autocast_during_eval"),
            *("amax_history_len", "amax_history_length", "amax_compute_algo", "amax_compute_algorithm"),
            *("opt_level", "optimization_level", "enable_fsdp_float8_all_gather", "pad_inner_dim"),
        )
    },
    "ipex_config": {"ipex": _IPEX, "use_xpu": _IPEX, "ipex_fusion_enabled": _IPEX},
    "mpirun_config": {"mpirun_hostfile": _MPI, "mpirun_ccl": _MPI},
    "dynamo_config": {
        f"dynamo_{name}": _COMPILE
        for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    },
}
"""Sections that belong to no engine."""
