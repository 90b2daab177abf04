"""The config section ``dp:``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DPConfig(BaseModel):
    """Arguments of ``torch.nn.DataParallel``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device_ids: list[int] | None = Field(
        None, description="Indices of the devices that share each batch, the first holds the parameters; null = all."
    )
    dim: int = Field(0, description="The batch dim along which inputs are split and outputs joined.")
