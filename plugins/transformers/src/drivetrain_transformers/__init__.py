"""Transformers' ``Trainer`` on every backend of Drivetrain: ``distributed_type`` of the configuration chooses it.

``Trainer``, ``Seq2SeqTrainer`` and ``TrainingArguments`` take the place of Transformers' own in an import;
``on_drivetrain`` makes such a class of any other subclass of ``Trainer``, and ``drivetrain launch --trainer`` of those
in a script that is left as it is. Names are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_transformers.arguments import Seq2SeqTrainingArguments, TrainingArguments
    from drivetrain_transformers.trainer import Seq2SeqTrainer, Trainer, on_drivetrain

_HOME = {
    "Seq2SeqTrainer": "trainer",
    "Seq2SeqTrainingArguments": "arguments",
    "Trainer": "trainer",
    "TrainingArguments": "arguments",
    "on_drivetrain": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments", "on_drivetrain"]
