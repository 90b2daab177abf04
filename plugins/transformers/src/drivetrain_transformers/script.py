"""Runs a script whose Trainer is Drivetrain's: what ``drivetrain launch --trainer`` starts in each worker.

Called as ``python -m drivetrain_transformers.script [-m] SCRIPT [ARGUMENT ...]``. Before the script is executed as the
main program ``transformers.Trainer`` becomes :class:`drivetrain_transformers.Trainer`, so that ``Seq2SeqTrainer``, the
trainers of TRL and those of the script inherit from it.
"""

from __future__ import annotations

import runpy
import sys
from functools import cached_property
from pathlib import Path

import transformers
from transformers import trainer as trainer_module
from transformers import trainer_seq2seq

from drivetrain.api import UsageError


def take_over() -> None:
    """Make Drivetrain's classes those that ``transformers`` exports. To be called before anything inherits from them.

    Raises:
        UsageError: too late: a class inherits from Transformers' own Trainer already.
    """
    from drivetrain_transformers import trainer
    from drivetrain_transformers.arguments import set_up

    late = [
        each.__name__
        for each in trainer.StockTrainer.__subclasses__()
        if each.__module__.partition(".")[0] not in ("transformers", "drivetrain_transformers")
    ]
    if late:
        raise UsageError(
            f"{', '.join(late)} inherits from transformers.Trainer already, which can no longer be replaced",
            cure="Call take_over() before it is imported, or write on_drivetrain(TheClass).",
        )
    # The package replaces itself in sys.modules while it is imported, so that there are two objects of its name.
    for package in (transformers, sys.modules["transformers"]):
        vars(package).update(Trainer=trainer.Trainer, Seq2SeqTrainer=trainer.Seq2SeqTrainer)
    vars(trainer_module).update(Trainer=trainer.Trainer)
    vars(trainer_seq2seq).update(Seq2SeqTrainer=trainer.Seq2SeqTrainer)
    # In place, since arguments are pickled by the name of their class.
    device = cached_property(set_up)
    device.__set_name__(transformers.TrainingArguments, "_setup_devices")
    setattr(transformers.TrainingArguments, "_setup_devices", device)  # noqa: B010 (its type is that of a method)


def main(arguments: list[str]) -> None:
    """Execute the script, or the module after ``-m``, with the arguments that follow it."""
    take_over()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
