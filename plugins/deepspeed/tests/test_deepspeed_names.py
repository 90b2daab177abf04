"""An attribute of DeepSpeed's that is gone ends in a sentence where the engine is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from drivetrain import Accelerator
from drivetrain.api import BackendBlockedError
from drivetrain_deepspeed import private_names
from drivetrain_testing import spawn

CLASSES = {0: DeepSpeedEngine, 2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}


def prepared(stage: int, lacks: str, folder: str) -> str:
    kind: Any = CLASSES[stage]
    theirs = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        delattr(self, lacks)

    if lacks:
        kind.__init__ = init
    path = Path(folder) / f"config-{os.environ['RANK']}.yaml"
    path.write_text(
        json.dumps({"distributed_type": "deepspeed", "use_cpu": True, "deepspeed": {"zero_stage": stage}}),
        encoding="utf-8",
    )
    accelerator = Accelerator(config=path)
    model = nn.Linear(2, 1)
    try:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    except BackendBlockedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "lacks"),
    [
        (0, "_running_engine_backward_count"),  # It is set, and read with a default nowhere.
        (2, "round_robin_bit16_padding"),  # It is read with a default.
        (3, "_offload_boundary_param_ids"),
    ],
)
def test_what_an_engine_lacks_is_named(stage: int, lacks: str, tmp_path: Path) -> None:
    (said,) = spawn(prepared, 1, stage, lacks, str(tmp_path))
    assert f"has no {lacks}, which drivetrain-deepspeed needs of deepspeed {deepspeed.__version__}" in said
    assert f"pip install deepspeed=={private_names.TESTED}" in said


def test_what_the_package_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    private_names.check_package(deepspeed)
    monkeypatch.delattr(deepspeed.zero.Init, "_zero_init_param")
    with pytest.raises(BackendBlockedError, match=r"Init has no _zero_init_param, which drivetrain-deepspeed needs"):
        private_names.check_package(deepspeed)
