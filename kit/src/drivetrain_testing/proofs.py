"""Which case proves which capability: one where the flag is declared, one where it is not."""

from __future__ import annotations

PER_RUN = frozenset({"pipelined", "sharded_save"})
"""Flags that say what settings may ask for, so that a started backend may switch them off."""

PROOFS: dict[str, tuple[str, str]] = {
    "multi_process": ("gradients.dense", "honesty.one_process_only"),
    "mesh_axes": ("mesh.", "honesty.unlisted_mesh_axes"),
    "devices": ("honesty.devices_are_listed", ""),
    "precisions": ("precision.bf16_policy", "honesty.unlisted_precisions"),
    "pipelined": ("deferred.unrecordable_is_refused", "honesty.pipelined_means_deferred"),
    "replicated": ("honesty.replicas_are_whole_and_equal", "honesty.no_training_alone"),
    "optimizer_spans_models": ("gradients.one_loss_through_two_models", "honesty.one_optimizer_per_model"),
    "sharded_save": ("honesty.every_rank_saves_its_part", "honesty.every_rank_could_save_all"),
    "async_save": ("honesty.saves_beside_training", "honesty.no_saving_beside_training"),
    "join_uneven_inputs": ("honesty.joins_uneven_inputs", "honesty.no_uneven_inputs"),
    "handlers": ("honesty.unlisted_handlers", "honesty.unlisted_handlers"),
}
"""By capability: the case that holds where it is declared, and the one where it is not. A name that ends in a dot is a
room. Empty: a device that is not declared is not there to be tried.
"""
