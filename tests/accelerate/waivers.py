"""Which checks of Accelerate's scripts need not pass here, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiver:
    """Checks that need not pass.

    Args:
        script: file name in ``accelerate/test_utils/scripts``.
        check: pattern of the call.
        reason: a difference that is meant, or an internal of Accelerate's.
        places: pattern of the places where it does not.
    """

    script: str
    check: str
    reason: str
    places: str = ".*"


_PARTIAL_WINDOW = (
    "a last, partial accumulation window is divided by its own length, as one big batch is, and not by "
    "gradient_accumulation_steps"
)
_NO_REPEATS = "ranks share an incomplete last batch out; none is filled up with repeated samples"
_JOIN = "join_uneven_inputs works on every device and for every loader, so that there is nothing to warn of"
_OTHERS_TYPE = "replaces the engine's name on a running accelerator, to see a warning"
_SETTINGS = "replaces the settings of an accelerator that is there; they are given when it is made"
_SAMPLER = (
    "SeedableRandomSampler stands in for an order that does not depend on the process: DataLoader(shuffle=True) has "
    "that here"
)

_OWN_SAMPLES = (
    "draws its samples without a seed, so that each process has others: no process trains on what one alone would, and "
    "prepare says so, with the seed to set"
)
_SEVERAL = r"(ddp|fsdp)-[234]"
_NOT_IN_THREE = "cuts batches of 8 and 16 into three, which Accelerate refuses too"

WAIVERS: tuple[Waiver, ...] = (
    Waiver("test_script.py", r"(central_)?dl_preparation_check\(\)", _NOT_IN_THREE, "ddp-3"),
    Waiver("external_deps/test_metrics.py", r"\(line \d+ of main\)", _NOT_IN_THREE, "ddp-3"),
    Waiver(
        "test_script.py", r"test_split_between_processes_tensor\(\)",
        "a process for which no input is left gets an empty share, and not the last input again", "ddp-[34]",
    ),
    Waiver(
        "test_sync.py", r"test_gradient_accumulation(_with_opt_and_scheduler)?\(.*",
        _PARTIAL_WINDOW, _SEVERAL,
    ),
    Waiver("external_deps/test_metrics.py", r"test_torch_metrics\(.*", _OWN_SAMPLES, _SEVERAL),
    Waiver("test_sync.py", r"test_(distributed_sync.*|dataloader_break)\(.*", _OWN_SAMPLES, _SEVERAL),
    Waiver(
        "test_script.py", r"training_check\(use_seedable_sampler=False\)",
        "moves the prepared model to the CPU, where FSDP's shards cannot follow; get_state_dict gives whole weights",
        "fsdp-2",
    ),
    Waiver(
        "test_distributed_data_loop.py", r"test_can_join_uneven_inputs\(\)",
        "joins uneven inputs, which Accelerate does under DDP alone, and FSDP cannot: refused in words", "fsdp-2",
    ),
    Waiver(
        "test_sync.py", r"test_distributed_sync.*",
        "asks that gradients of one process be out of step with those of the others", "ddp-1",
    ),
    Waiver("test_distributed_data_loop.py", r"test_default_ensures_even_batch_sizes\(.*", _NO_REPEATS),
    Waiver(
        "test_distributed_data_loop.py", r"test_join_can_override_(even_batches|for_mixed_type_dataloaders)\(.*",
        "looks for even_batches on the class that Accelerate puts into a loader's place",
    ),
    Waiver("test_distributed_data_loop.py", r"test_join_raises_warning_for_(iterable|non_ddp).*", _JOIN),
    Waiver("test_distributed_data_loop.py", r"\(line \d+ of main\)", _OTHERS_TYPE),
    Waiver(
        "test_distributed_data_loop.py", r"test_pickle_accelerator\(.*",
        "pickles a running accelerator, with loaders whose position belongs to this run; it raises, and says what to "
        "pickle",
    ),
    Waiver("test_distributed_data_loop.py", r"test_stateful_dataloader(_save_state)?\(.*", _SETTINGS),
    Waiver("test_script.py", r"check_seedable_sampler_in_batch_sampler_shard\(.*", _SAMPLER),
    Waiver("test_script.py", r"training_check\(use_seedable_sampler=True\)", _SAMPLER),
    Waiver(
        "test_script.py", r"test_reinstantiated_state\(\)",
        "an accelerator keeps working when the singletons are reset, since it has its own state",
    ),
    Waiver(
        "external_deps/test_metrics.py", r"test_gather_for_metrics_with_iterable_dataset\(\)",
        "asks for the class that sends batches from the main process; every rank reads its own share here",
    ),
    Waiver(
        "test_notebook.py", r"test_monitoring\(.*",
        "expects torch elastic's exception; ours names the process that failed first, and shows its traceback",
    ),
    Waiver(
        "test_merge_weights.py", r".*",
        "merges files that Accelerate's FSDP plugin writes, by Accelerate's own command; here it is "
        "`drivetrain checkpoint export`",
    ),
)  # fmt: skip

_NETWORK = "needs models and data from a network"

NOT_RUN: Mapping[str, str] = {
    "test_cli.py": "checks nothing: it prints how many accelerators there are",
    "test_ddp_comm_hook.py": "compares with DistributedDataParallel(device_ids=...), which needs accelerators",
    "external_deps/test_checkpointing.py": _NETWORK,
    "external_deps/test_ds_alst_ulysses_sp.py": _NETWORK,
    "external_deps/test_ds_multiple_model.py": _NETWORK,
    "external_deps/test_peak_memory_usage.py": _NETWORK,
    "external_deps/test_performance.py": _NETWORK,
    "external_deps/test_pippy.py": _NETWORK,
    "external_deps/test_zero3_integration.py": _NETWORK,
}
"""Scripts that no place of this suite can run."""
