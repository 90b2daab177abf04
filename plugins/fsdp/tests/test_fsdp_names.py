"""An attribute of FSDP's that is gone ends in a sentence where the model is prepared or first gathered."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator
from drivetrain.api import BackendBlockedError
from drivetrain_sharding import check_private_names
from drivetrain_testing import spawn

CLASSES = {"group": FSDPParamGroup, "parameter": FSDPParam}


def trained(owner: str, lacks: str) -> str:
    kind: Any = CLASSES[owner]
    if lacks == "_unsharded_param":
        theirs = kind.init_unsharded_param

        def gather(self: Any) -> None:
            theirs(self)
            del self._unsharded_param

        kind.init_unsharded_param = gather
    else:
        theirs = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            theirs(self, *args, **kwargs)
            delattr(self, lacks)

        kind.__init__ = init
    accelerator = Accelerator(cpu=True, distributed_type="fsdp")
    model = nn.Linear(2, 1)
    try:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(4, 2))
    except BackendBlockedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("owner", "lacks", "what"),
    [
        ("group", "_partial_reduce_output", "FSDPParamGroup has no _partial_reduce_output"),
        ("parameter", "_unsharded_param", "FSDPParam has no _unsharded_param"),
    ],
)
def test_what_fsdp_lacks_is_named(owner: str, lacks: str, what: str) -> None:
    for said in spawn(trained, 2, owner, lacks):
        assert f"{what}, which drivetrain-fsdp needs of torch {metadata.version('torch')}" in said
        assert "pip install torch==" in said


def test_what_a_dtensor_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_private_names("drivetrain-fsdp")
    monkeypatch.delattr(DTensor, "_op_dispatcher")
    with pytest.raises(BackendBlockedError, match=r"DTensor has no _op_dispatcher, which drivetrain-fsdp needs"):
        check_private_names("drivetrain-fsdp")
