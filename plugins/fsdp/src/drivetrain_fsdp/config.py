"""The config section ``fsdp:``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drivetrain.api.config import Integer, Names


class FSDPConfig(BaseModel):
    """Settings by which a model is cut into units, and of a unit in a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transformer_layer_cls: Names = Field(
        (),
        description="Class names of the modules that become units. Without it and the next two: the model's own "
        "_no_split_modules, else the blocks of its longest ModuleList.",
        json_schema_extra={"of_model": True},
    )
    min_num_params: Integer | None = Field(
        None, gt=0, description="Instead: a module becomes a unit when it holds this many parameters not in one yet."
    )
    wrap: str | None = Field(
        None,
        pattern=r"^[\w.]+:[\w.]+$",
        description="Instead: 'package.module:function', called with the model, gives the modules that become units.",
        json_schema_extra={"of_model": True},
    )
    reshard_after_forward: bool | int | None = Field(
        None,
        description="Free a unit's whole parameters after its forward: true saves memory, false saves the second "
        "all-gather, a number keeps them in shards over that many ranks; null = true, but false for the root.",
    )
    cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in CPU memory; copied for each unit's turn."
    )
    pin_memory: bool = Field(True, description="With cpu_offload: pin that memory, for copies that overlap.")
    activation_checkpointing: bool = Field(
        False, description="Recompute each unit's activations in backward instead of keeping them."
    )
    compile: bool | str = Field(
        False, description="torch.compile each unit: true, or the name of a compiler such as 'inductor'."
    )
    forward_prefetch: Integer = Field(
        0, ge=0, description="In forward, gather this many units ahead; 0 = torch's own overlap of one."
    )
    backward_prefetch: Integer | None = Field(
        None, ge=1, description="In backward, gather this many units ahead; null = torch's own, one."
    )
    accumulate_without_sync: bool = Field(
        True,
        description="No communication of gradients between the micro-batches of a window, at the price of whole "
        "gradients in memory on every rank; false reduces each micro-batch to shards.",
    )
    reduce_unused_parameters: bool = Field(
        False, description="Ranks may use different parameters in one step: unused ones count as zero."
    )
    broadcast_buffers: bool = Field(
        False,
        description="Before each training forward, give every rank rank 0's buffers; otherwise before evaluation and "
        "saves only.",
    )
    forward_methods: Names = Field(
        (),
        description="Methods of the model besides forward that scripts call, e.g. encode; they gather parameters. "
        "generate of an encoder-decoder of Transformers is one without being named.",
        json_schema_extra={"of_model": True},
    )
    weights: str | None = Field(
        None,
        description="A safetensors file, its index or their folder: where a model built under init_empty_weights gets "
        "its parameters from, each rank reading its shards only, instead of being initialised.",
        json_schema_extra={"of_model": True},
    )

    @model_validator(mode="after")
    def _one_way(self) -> FSDPConfig:
        given = [name for name in ("transformer_layer_cls", "min_num_params", "wrap") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both choose the units; keep one of them")
        return self
