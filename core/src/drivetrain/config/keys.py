"""Reserved names of configuration files, which no backend may have. Imports no pydantic."""

from __future__ import annotations

from drivetrain.config.accelerate_rules import RULES, SECTIONS

CORE_KEYS = frozenset(
    {
        "accelerator_ids",
        "count_items",
        "dataloader",
        "debug",
        "desync_watchdog",
        "device_order",
        "distributed_type",
        "gradient_accumulation_steps",
        "log_with",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "max_restarts",
        "mesh",
        "mixed_precision",
        "monitor_interval",
        "num_machines",
        "num_processes",
        "output",
        "output_dtype",
        "plan",
        "process_group",
        "project_dir",
        "rank_monitor",
        "rdzv_backend",
        "rendezvous",
        "save_on_interrupt",
        "scheduler",
        "sync_batch_norm",
        "use_cpu",
    }
)
"""Every top-level key that is not the section of a backend; the fields of :class:`drivetrain.config.schema.Config`."""


AUTO = "auto"
"""The value of ``distributed_type`` that a planner replaces before anything starts; no backend's name."""


def may_be_foreign(key: str) -> bool:
    """Whether this top-level key is one of Accelerate's only, or looks like the section of an engine."""
    return key not in CORE_KEYS and (key in RULES or key in SECTIONS or key.endswith("_config"))
