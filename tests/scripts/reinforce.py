"""Policy gradient on a bandit: no data loader, experience gathered over the processes, numbered checkpoints."""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.utils import ProjectConfiguration, broadcast, gather_object, set_seed


class Baseline:
    """Running statistics as scripts keep them: NumPy values, tuples, counts by arm."""

    def __init__(self):
        self.best_score, self.history, self.pulls, self.shape = np.float64(-1.0), (), {}, np.zeros(2, dtype=np.int64)

    def update(self, reward, actions):
        self.best_score = max(self.best_score, np.float64(reward))
        self.history += (float(reward),)
        for action in actions:
            self.pulls[action] = self.pulls.get(action, 0) + 1

    def state_dict(self):
        return self.__dict__

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(3, 4)
        self.critic = nn.Linear(3, 1)

    def forward(self, states):
        return self.actor(states), self.critic(states).squeeze(-1)

    @torch.no_grad()
    def act(self, states):
        return torch.distributions.Categorical(logits=self.actor(states)).sample()


def main(args):
    accelerator = Accelerator(
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=args.total_limit
        )
    )
    set_seed(args.seed, device_specific=True)
    policy = Policy()
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-2)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    baseline = Baseline()
    accelerator.register_for_checkpointing(baseline)
    start = 0
    if args.resume:
        accelerator.load_state()
        start = len(baseline.history)
    best = torch.zeros((), device=accelerator.device)
    for step in range(start, args.num_steps):
        states = torch.randn(16, 3, device=accelerator.device)
        actions = accelerator.unwrap_model(policy).act(states)
        rewards = (actions == states.argmax(dim=1)).float()
        everyone = accelerator.gather((rewards, actions))
        mean = everyone[0].mean()
        logits, values = policy(states)
        log_probs = torch.distributions.Categorical(logits=logits).log_prob(actions)
        loss = -((rewards - values.detach()) * log_probs).mean() + (rewards - values).pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        baseline.update(mean.item(), everyone[1].tolist())
        best = broadcast(torch.maximum(best, mean), from_process=0)
        if (step + 1) % args.save_every == 0:
            accelerator.save_state()
    drawn = gather_object([torch.rand(()).item()])
    folder = os.path.join(args.output_dir, "checkpoints")
    result = {
        "history": list(baseline.history),
        "best": float(baseline.best_score),
        "pulls": sum(baseline.pulls.values()),
        "types": [type(baseline.best_score).__name__, type(baseline.history).__name__, type(baseline.shape).__name__],
        "keys": sorted({type(key).__name__ for key in baseline.pulls}),
        "weights": accelerator.unwrap_model(policy).actor.weight.detach().flatten().tolist(),
        "distinct": len(set(drawn)),
        "checkpoints": sorted(os.listdir(folder)),
        "iteration": accelerator.save_iteration,
    }
    accelerator.end_training()
    return result


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="bandit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num_steps", type=int, default=12)
    parser.add_argument("--save_every", type=int, default=3)
    parser.add_argument("--total_limit", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
