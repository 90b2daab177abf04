"""What Trainer is expected to have, and a release of Transformers in which it is gone."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from accelerate import PartialState
from torch import nn

from drivetrain.api import BackendBlockedError
from drivetrain_transformers import Trainer, TrainingArguments, private_names
from drivetrain_transformers.trainer import StockTrainer

SENTENCE = r"which drivetrain-transformers needs of transformers \d"


def made(tmp_path: Any) -> Any:
    return Trainer(nn.Linear(1, 1), TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))


def test_a_method_that_is_no_longer_called_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert made(tmp_path).args.n_gpu == 0
    monkeypatch.delattr(StockTrainer, "_save_scaler")
    with pytest.raises(BackendBlockedError, match=rf"Trainer has no _save_scaler, {SENTENCE}"):
        made(tmp_path)


def test_an_attribute_of_a_trainer_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    theirs = StockTrainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        del self._loss_shifts_labels

    monkeypatch.setattr(StockTrainer, "__init__", init)
    with pytest.raises(BackendBlockedError, match=f"Trainer has no _loss_shifts_labels, {SENTENCE}"):
        made(tmp_path)


def test_a_number_of_devices_that_is_not_taken_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(BackendBlockedError, match=rf"no longer keeps n_gpu in _n_gpu, {SENTENCE}"):
        made(tmp_path)


def test_generation_that_would_not_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    private_names.generate_together(model)
    monkeypatch.setattr(private_names.generation, "is_fsdp_managed_module", lambda _model: False)
    with pytest.raises(BackendBlockedError, match=rf"no longer reads _is_fsdp_managed_module of a model, {SENTENCE}"):
        private_names.generate_together(model)


def test_a_state_of_accelerate_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PartialState, "_shared_state")
    with pytest.raises(BackendBlockedError, match=r"has no _shared_state, which .* needs of accelerate \d"):
        private_names.check()
