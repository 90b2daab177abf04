from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import timedelta

import pytest

from drivetrain.config import Config
from drivetrain.errors import UsageError
from drivetrain.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)

DEFAULTS = {
    DataLoaderConfiguration: {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
    },
    ProjectConfiguration: {
        "project_dir": None,
        "logging_dir": None,
        "automatic_checkpoint_naming": False,
        "total_limit": None,
        "iteration": 0,
        "save_on_each_node": False,
    },
    DistributedDataParallelKwargs: {
        "dim": 0,
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        "find_unused_parameters": False,
        "check_reduction": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "comm_hook": "no",
        "comm_wrapper": "no",
        "comm_state_option": {},
    },
    InitProcessGroupKwargs: {"backend": None, "init_method": None, "timeout": None},
    GradScalerKwargs: {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    AutocastKwargs: {"enabled": True, "cache_enabled": None},
    ProfileKwargs: {
        "activities": None,
        "schedule_option": None,
        "on_trace_ready": None,
        "record_shapes": False,
        "profile_memory": False,
        "with_stack": False,
        "with_flops": False,
        "with_modules": False,
        "output_trace_dir": None,
    },
}


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_fields_and_defaults_are_frozen(kind):
    made = {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
    assert made == DEFAULTS[kind]
    assert list(made) == list(DEFAULTS[kind])  # some people pass by position


def test_the_accumulation_plugin():
    plugin = GradientAccumulationPlugin(4)
    assert plugin.to_dict() == {
        "num_steps": 4,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    }
    assert plugin.to_kwargs() == {"num_steps": 4}
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="num_steps"):
            GradientAccumulationPlugin(wrong)


def test_only_what_differs_is_handed_on():
    assert DistributedDataParallelKwargs().to_kwargs() == {}
    handler = DistributedDataParallelKwargs(static_graph=True, comm_hook=DDPCommunicationHookType.BF16)
    assert handler.to_kwargs() == {"static_graph": True, "comm_hook": "bf16"}
    timeout = timedelta(seconds=5)
    assert InitProcessGroupKwargs(timeout=timeout).to_kwargs() == {"timeout": timeout}
    with_state = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 2})
    assert with_state.to_kwargs()["comm_state_option"] == {"start_powerSGD_iter": 2}


def test_members_of_other_enums_are_hooks_too():
    class Hook:
        value = "FP16"

    assert DistributedDataParallelKwargs(comm_hook=Hook()).comm_hook == "fp16"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DistributedDataParallelKwargs(comm_hook="fp8"), "unknown comm_hook 'fp8'"),
        (lambda: DistributedDataParallelKwargs(comm_wrapper="power_sgd"), "unknown comm_wrapper"),
        (lambda: DistributedDataParallelKwargs(dim=1), "dim=1"),
        (lambda: DistributedDataParallelKwargs(bucket_cap_mb=0), "bucket_cap_mb"),
        (lambda: InitProcessGroupKwargs(timeout=30), "datetime.timedelta"),
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), "positive"),
        (lambda: GradScalerKwargs(init_scale=0), "init_scale"),
        (lambda: GradScalerKwargs(growth_factor=1), "growth_factor"),
        (lambda: GradScalerKwargs(backoff_factor=1), "backoff_factor"),
        (lambda: GradScalerKwargs(growth_interval=0), "growth_interval"),
        (lambda: ProfileKwargs(activities=["gpu"]), "unknown activity 'gpu'"),
        (lambda: ProfileKwargs(schedule_option={"wait": 1, "hot": 2}), "unknown schedule_option 'hot'"),
        (lambda: ProfileKwargs(schedule_option={"wait": 1}), "needs wait, warmup and active"),
        (lambda: ProjectConfiguration(total_limit=0), "total_limit"),
        (lambda: ProjectConfiguration(iteration=-1), "iteration"),
        (lambda: DataLoaderConfiguration(data_seed="x"), "data_seed"),
    ],
)
def test_what_cannot_be_honoured_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientAccumulationPlugin(2, adjust_scheduler=False), "adjust_scheduler=False changes nothing"),
        (lambda: DistributedDataParallelKwargs(check_reduction=True), "check_reduction=True changes nothing"),
        (lambda: DistributedDataParallelKwargs(comm_state_option={"a": 1}), "only PowerSGD has a state"),
    ],
)
def test_what_changes_nothing_is_said(make, message):
    with pytest.warns(UserWarning, match=message) as caught:
        make()
    assert caught[0].filename == __file__


def test_directories():
    assert ProjectConfiguration("a").logging_dir == "a"
    project = ProjectConfiguration("a", logging_dir="logs")
    project.set_directories("b")
    assert (project.project_dir, project.logging_dir) == ("b", "logs")
    late = ProjectConfiguration()
    late.set_directories("c")
    assert (late.project_dir, late.logging_dir) == ("c", "c")


def test_the_configuration_file_makes_a_loader_configuration():
    assert DataLoaderConfiguration(**Config().dataloader.model_dump()) == DataLoaderConfiguration()


def test_handlers_need_no_torch():
    code = (
        "import sys, drivetrain.kwargs, drivetrain.logging, drivetrain.tracking, drivetrain.progress\n"
        "print([m for m in ('torch', 'pydantic', 'yaml', 'wandb', 'tqdm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"
