"""Two stages of a model whose output has logits, as those of Transformers do."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Accelerator


@dataclass
class Output:
    """What the model returns."""

    logits: Tensor


class Model(nn.Module):
    """Words in, scores of the next word out."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scores = nn.Linear(8, 16)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return Output(self.scores(x))


torch.manual_seed(0)
engine = {"pipeline_parallel_size": 2, "num_micro_batches": 4}
accelerator = Accelerator(cpu=True, distributed_type="megatron", megatron_lm_plugin=engine)
model = Model()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
labels = torch.arange(32).view(8, 4) % 16
batch = {"words": labels.roll(1)}
