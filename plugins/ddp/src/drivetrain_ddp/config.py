"""The config section ``ddp:``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

CommunicationHook = Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]


class DDPConfig(BaseModel):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, under torch's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    broadcast_buffers: bool = Field(
        True, description="After each reduction of gradients, give every rank rank 0's buffers."
    )
    bucket_cap_mb: float | None = Field(
        None, gt=0, description="Size in MiB of the buckets in which gradients are reduced; null = torch's default, 25."
    )
    find_unused_parameters: bool = Field(
        False, description="Accepted either way: parameters that get no gradient are always found."
    )
    gradient_as_bucket_view: bool = Field(
        False, description="Let .grad point into the reduction buckets: saves one copy of the gradients in memory."
    )
    static_graph: bool = Field(False, description="Promise that every step uses the same parameters in the same order.")
    comm_hook: CommunicationHook = Field(
        "no", description="Compress gradients while they are reduced. Changes the numbers: lossy."
    )
    comm_wrapper: Literal["no", "fp16", "bf16"] = Field(
        "no", description="Cast around a power_sgd hook, which then works on less traffic still."
    )
    comm_state_option: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the power_sgd state, such as matrix_approximation_rank."
    )
