"""Helpers for backends that shard parameters: optimizers, deferred initialization, checks over ranks."""

from drivetrain_sharding.assignment import AssignmentRefusal, refuse_assignment
from drivetrain_sharding.deferred_init import Recording, deferred, recording_of, temporary
from drivetrain_sharding.elementwise import (
    ELEMENTWISE,
    NEEDS_CLOSURE,
    check_elementwise,
    needs_closure,
    needs_owners,
    why_not_matrixwise,
)
from drivetrain_sharding.former import FormerParameters, successors
from drivetrain_sharding.forward_writes import refuse_max_norm, watch_forwards
from drivetrain_sharding.fully_sharded import (
    convert_gradients,
    gathered,
    hear_of_backwards,
    is_own,
    keep_class_name,
    keep_gathered_memory,
    parameter_groups,
    refuse_other_values,
    sharded_parameters,
)
from drivetrain_sharding.local_steps import (
    STEPPED_LOCALLY,
    check_step_hooks,
    laid_out_as,
    leaves_ranks_out,
    on_local_parts,
    step_hooks,
    step_on_parts,
    steps_locally,
)
from drivetrain_sharding.owners import OwnerSteps
from drivetrain_sharding.pickling import pickle_as_made
from drivetrain_sharding.plain_data import refuse_as_data
from drivetrain_sharding.private_names import check_private_names
from drivetrain_sharding.same_order import SameOrder
from drivetrain_sharding.state import joined_extra
from drivetrain_sharding.strides import has_other_strides, with_strides

__all__ = [
    "ELEMENTWISE",
    "NEEDS_CLOSURE",
    "STEPPED_LOCALLY",
    "AssignmentRefusal",
    "FormerParameters",
    "OwnerSteps",
    "Recording",
    "SameOrder",
    "check_elementwise",
    "check_private_names",
    "check_step_hooks",
    "convert_gradients",
    "deferred",
    "gathered",
    "has_other_strides",
    "hear_of_backwards",
    "is_own",
    "joined_extra",
    "keep_class_name",
    "keep_gathered_memory",
    "laid_out_as",
    "leaves_ranks_out",
    "needs_closure",
    "needs_owners",
    "on_local_parts",
    "parameter_groups",
    "pickle_as_made",
    "recording_of",
    "refuse_as_data",
    "refuse_assignment",
    "refuse_max_norm",
    "refuse_other_values",
    "sharded_parameters",
    "step_hooks",
    "step_on_parts",
    "steps_locally",
    "successors",
    "temporary",
    "watch_forwards",
    "why_not_matrixwise",
    "with_strides",
]
