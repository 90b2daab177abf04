"""Combines several of the script's optimizers into the one that DeepSpeed accepts for a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

from torch.optim import Optimizer


@final
class SeveralOptimizers(Optimizer):
    """Has the groups of all members; a step is that of one member.

    DeepSpeed puts flat buffers into the groups and steps them one by one, by assigning :attr:`param_groups`.

    Args:
        members: the script's optimizers. Their state becomes one mapping.

    Attributes:
        stepping: the member whose groups a step updates; those of the others stay as they are.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # Not super().__init__(): that would register parameter groups of its own.
        self.members = list(members)
        self.param_groups = [group for member in members for group in member.param_groups]
        self.defaults: dict[str, Any] = {}
        self.state = defaultdict(dict)
        for member in members:
            self.state.update(member.state)
            member.state = self.state
        self._owners = {id(group): member for member in members for group in member.param_groups}
        self.stepping = self.members[0]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step those of the present groups that are the stepping member's."""
        member = self.stepping
        mine = [group for group in self.param_groups if self._owners[id(group)] is member]
        if not mine:
            return
        every, member.param_groups = member.param_groups, mine
        try:
            member.step()
        finally:
            member.param_groups = every

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Each member puts its own state into its present shape."""
        for member in self.members:
            member.__setstate__({"state": self.state, "param_groups": member.param_groups})
