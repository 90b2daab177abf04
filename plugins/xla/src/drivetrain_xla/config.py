"""The config section ``xla:``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Cut = Literal["colwise", "rowwise", "replicate"]


class XLAConfig(BaseModel):
    """Settings of graph compilation, SPMD and batch placement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spmd: bool | None = Field(
        None,
        description="One process drives all devices as one mesh, along the axes of mesh: (dp_replicate, dp_shard, tp). "
        "null = where mesh: names a size above 1, or one process has several devices.",
    )
    tensor_parallel_plan: dict[str, Cut] = Field(
        default_factory=dict,
        description="For the axis tp: patterns of module names (* stands for one part) and colwise, rowwise or "
        "replicate. Without it a plugin's plan for the model, else each linear layer colwise.",
        json_schema_extra={"of_model": True},
    )
    min_shard_elements: int = Field(
        1024, ge=1, description="A parameter with fewer elements is kept whole by every device along dp_shard."
    )
    backward_barrier: bool = Field(
        True, description="Along dp_shard: keep the backward passes of blocks apart, which bounds memory."
    )
    compilation_cache: str | None = Field(
        None, description="Folder that keeps compiled graphs from run to run; XLA writes it on a CPU but does not read."
    )
    transfer_ahead: bool = Field(True, description="Copy the next batch to the device beside the current step.")
    fill_last_batch: bool = Field(
        False,
        description="Give the last batch of an epoch as many rows as the others, so that no graph is compiled for it; "
        "rows repeat with the label ignore_index, and metrics leave them out.",
    )
    ignore_index: int = Field(-100, description="The label that the loss ignores, for fill_last_batch.")
    warmup_steps: int = Field(20, ge=1, description="Optimizer steps in which compiling is expected.")
    max_recompiles: int = Field(
        10, ge=0, description="Graphs compiled after those steps before a warning names the shapes that change."
    )

    @model_validator(mode="after")
    def _mesh_is_spmd(self) -> XLAConfig:
        if self.spmd is False and self.tensor_parallel_plan:
            raise ValueError("tensor_parallel_plan needs spmd; leave spmd out")
        return self
