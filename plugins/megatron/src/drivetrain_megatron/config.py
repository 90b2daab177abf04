"""The config section ``megatron:``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from drivetrain.api.config import Integer, Names, Number

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"]
DataParallel = Literal["ddp", "zero1", "fsdp"]




class MegatronConfig(BaseModel):
    """Degrees of parallelism, how a model is cut, and in which order micro-batches run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["torch", "megatron_core"] = Field(
        "torch",
        description="What computes: torch's own DTensor and pipelining, any model; or Megatron-Core, for the language "
        "models that it knows.",
    )
    tensor_parallel_size: Integer | None = Field(
        None,
        ge=1,
        description="Ranks that share each layer's matrices; null = the axis tp of `mesh:`, else 1.",
        json_schema_extra={"mesh_axis": "tp"},
    )
    pipeline_parallel_size: Integer | None = Field(
        None,
        ge=1,
        description="Ranks that share the model's depth; null = the axis pp of `mesh:`, else 1.",
        json_schema_extra={"mesh_axis": "pp"},
    )
    data_parallel: DataParallel = Field(
        "ddp",
        description="What the remaining ranks hold: ddp whole replicas, zero1 the optimizer's state in shards, fsdp "
        "parameters in shards too.",
    )
    num_micro_batches: Integer | None = Field(
        None,
        ge=1,
        description="Parts into which a batch is cut to fill the pipeline; null = as many as the pipeline has stages, "
        "or 1 if the model or its loss needs the whole batch.",
    )
    schedule: Schedule = Field("1f1b", description="In which order a rank runs forwards and backwards of the parts.")
    stages_per_rank: Integer = Field(
        2,
        ge=1,
        description="Stages on each rank, for the schedules interleaved_1f1b and zero_bubble; others have 1 or 2.",
    )
    split_points: Names = Field(
        (),
        description="Names of the modules at which the second and each further stage begins, e.g. layers.6. Without "
        "it: a plugin's, else balanced over the model's blocks.",
        json_schema_extra={"of_model": True},
    )
    balance: Literal["bytes", "time"] = Field(
        "bytes",
        description="What stages shall have alike where nobody names split_points: bytes of parameters, or the time of "
        "a forward, measured with the first batch.",
    )
    whole_inputs: Names = Field(
        (),
        description="Keyword inputs that go whole to each micro-batch, though they are as long as the batch.",
        json_schema_extra={"of_model": True},
    )
    gradient_clipping: Number | None = Field(
        None,
        gt=0,
        description="Norm to which every step clips; null = the script says it, by clip_grad_norm_.",
    )
    sequence_parallel: bool = Field(
        False, description="Between the shared matrices, share the sequence too: norms and dropout hold a part each."
    )
    tp_plan: dict[str, str] | None = Field(
        None,
        description="How layers are shared over tp, by name with wildcards: {'layers.*.wq': colwise, ...}. Without it: "
        "a plugin's, the model's own, else derived from the model.",
        json_schema_extra={"of_model": True},
    )

    @model_validator(mode="after")
    def _one_way(self) -> MegatronConfig:
        repeated = sorted({name for name in self.split_points if self.split_points.count(name) > 1})
        if repeated:
            raise ValueError(f"split_points names {', '.join(repeated)} twice")
        return self
