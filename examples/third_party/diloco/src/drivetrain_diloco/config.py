"""The config section ``diloco:``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DiLoCoConfig(BaseModel):
    """Rounds of local steps and the outer optimizer. The defaults are those of the paper's main experiments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    local_steps: int = Field(500, ge=1, description="Optimizer steps that each worker makes alone in one round.")
    synchronous_steps: int = Field(
        0,
        ge=0,
        description="Optimizer steps at the beginning in which gradients are averaged every time, as in ordinary data "
        "parallelism; rounds start after them.",
    )
    outer_lr: float = Field(0.7, gt=0, allow_inf_nan=False, description="Learning rate of the outer SGD.")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer SGD; 0 = plain SGD.")
    find_unused_parameters: bool = Field(
        False, description="In synchronous steps: let parameters stay without a gradient; costs time."
    )
