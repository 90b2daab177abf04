"""Share prompts out among processes, answer each once, and collect the answers in order."""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn

from drivetrain import PartialState
from drivetrain.logging import get_logger
from drivetrain.utils import gather, gather_object, pad_across_processes, set_seed

logger = get_logger(__name__)


def main(args):
    start = time.time()
    distributed_state = PartialState()
    logger.info(f"state: {distributed_state}", main_process_only=True)
    set_seed(0)
    model = nn.Embedding(50, 3).to(distributed_state.device)
    prompts = [f"prompt {i}" for i in range(args.num_prompts)]
    with distributed_state.split_between_processes(prompts) as mine:
        answers = []
        for prompt in mine:
            number = int(prompt.split()[-1])
            vector = model(torch.tensor(number, device=distributed_state.device))
            answers.append({"prompt": prompt, "value": round(vector.sum().item(), 6)})
    everything = gather_object(answers)
    with distributed_state.split_between_processes(torch.arange(args.num_prompts), apply_padding=True) as mine:
        numbers = gather(mine.to(distributed_state.device))[: args.num_prompts]
    lengths = torch.arange(distributed_state.process_index + 1) + 1
    ragged = gather(pad_across_processes(lengths[None], dim=1, pad_index=-1))

    @distributed_state.on_main_process
    def write():
        with open(args.output, "w") as f:
            json.dump(everything, f)
        return "written"

    written = write()
    distributed_state.wait_for_everyone()
    with open(args.output) as f:
        found = json.load(f)
    distributed_state.print(f"{len(found)} answers in {time.time() - start:.1f} s")
    shape = list(ragged.shape)
    state = {"main": distributed_state.is_main_process, "last": distributed_state.is_last_process}
    distributed_state.destroy_process_group()
    return {
        "answers": found,
        "numbers": numbers.tolist(),
        "share": len(answers),
        "written": written,
        "ragged": shape,
        **state,
    }


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_prompts", type=int, default=7)
    parser.add_argument("--output", default="answers.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
