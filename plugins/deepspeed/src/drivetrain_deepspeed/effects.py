"""Keys of DeepSpeed's dictionary that have no effect in a run, each with the reason. No torch, no engine."""

from __future__ import annotations

from drivetrain.api import UnsupportedError
from drivetrain_deepspeed.jsonfile import Keys
from drivetrain_deepspeed.vocabulary import COMMENTS, KNOWN, is_on
from drivetrain_deepspeed.written import Written

_ZERO = "zero_optimization"

_STAGES_1_2 = frozenset(
    {
        *("allgather_partitions", "allgather_bucket_size", "round_robin_gradients", "parameter_alignment"),
        *("ignore_unused_parameters", "use_multi_rank_bucket_allreduce"),
    }
)
_STAGE_3 = frozenset(
    {
        *("offload_param", "sub_group_size", "memory_efficient_linear", "leaf_module", "zero_hpz_partition_size"),
        *("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
        *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    }
)
_QUANTISED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")

_OF_ITS_OWN_CHECKPOINT = "it is for DeepSpeed's own save_checkpoint, and accelerator.save_state writes another format"
_NOWHERE = {
    ("activation_checkpointing",): "it is for deepspeed.checkpointing.configure, which is the script's to call",
    ("zero_force_ds_cpu_optimizer",): "the script's optimizer steps, offloaded too; DummyOptim leaves it to DeepSpeed",
    ("checkpoint",): _OF_ITS_OWN_CHECKPOINT,
    (_ZERO, "elastic_checkpoint"): _OF_ITS_OWN_CHECKPOINT,
}


def without_effect(written: Written) -> list[str]:
    """Return a sentence for each key that is set and has no effect; DeepSpeed ignores them silently."""
    found: dict[Keys, str] = {}
    for keys, why in _NOWHERE.items():
        said = written.said(*keys)
        if said is not None and is_on(said.value):
            found[keys] = why
    for key in written.values:
        if key not in KNOWN and not key.startswith(COMMENTS):
            found[key,] = "DeepSpeed has no such key"
    stage, zero = written.stage, written.values.get(_ZERO, {})
    for key, value in zero.items():
        if not _asks(value):
            continue
        if key in _STAGES_1_2 and stage not in (1, 2):
            found[_ZERO, key] = f"it is of stages 1 and 2, and the stage is {stage}"
        elif key in _STAGE_3 and stage != 3:
            found[_ZERO, key] = f"it is of stage 3, and the stage is {stage}"
        elif key == "offload_optimizer" and stage == 0:
            found[_ZERO, key] = "stage 0 offloads nothing"
    if stage in (1, 2) and written.get(_ZERO, "offload_optimizer", "device") == "nvme":
        found[_ZERO, "offload_optimizer", "device"] = f"NVMe is of stage 3; stage {stage} keeps its optimizer in memory"
    return [f"{'.'.join(keys)} ({written.where(keys)}): {why}" for keys, why in found.items()]


def check(written: Written, device_type: str) -> None:
    """Raise :class:`UnsupportedError` for what DeepSpeed would do wrongly, or not at all on this kind of device."""
    for key in ("offload_optimizer", "offload_param") if written.stage == 3 else ():
        said = written.said(_ZERO, key, "device")
        if said is not None and said.value == "nvme":
            raise UnsupportedError(
                f"{said} would train to other numbers: of float32 parameters DeepSpeed 0.19.8 reads back from NVMe "
                "something else than it wrote",
                cure=f"Set {key}: cpu.",
            )
    for key in _QUANTISED if written.stage == 3 and device_type == "cpu" else ():
        said = written.said(_ZERO, key)
        if said is not None and is_on(said.value):
            raise UnsupportedError(
                f"{said} needs an accelerator: DeepSpeed quantises nothing on a CPU",
                cure="Remove it, or set it to false.",
            )


def _asks(value: object) -> bool:
    """Whether a value is set: false switches and the device ``none`` are not, every number is."""
    if isinstance(value, dict):
        return value.get("device", "cpu") not in (None, "none")
    return is_on(value) or (isinstance(value, int | float) and not isinstance(value, bool))
