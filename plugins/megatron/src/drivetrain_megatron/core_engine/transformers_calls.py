"""Call signature of causal language models of Transformers."""

from __future__ import annotations

from typing import Any, final

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor, nn

from drivetrain.api import UnsupportedError
from drivetrain_megatron.core_engine import vocabulary
from drivetrain_megatron.core_engine.calls import OTHER_ENGINE
from drivetrain_megatron.core_engine.tokens import IGNORED, Tokens
from drivetrain_megatron.pipeline.values import leaves, rebuilt


@final
class TransformersCalls:
    """See :class:`drivetrain_megatron.core_engine.calls.Calls`.

    Args:
        module: the user's model.
        rows: of its vocabulary.
        output: class of its output.
        looked_up: positions have an embedding of their own.
    """

    def __init__(self, module: nn.Module, rows: int, output: type, *, looked_up: bool) -> None:
        self._module, self._rows, self._output, self._looked_up = module, rows, output, looked_up

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
        """One batch."""
        tokens = Tokens.of(self._module, args, kwargs, positions=self._looked_up)
        if tokens.labels is not None:
            _check_loss(self._module)
        return tokens

    def absent(self, batch: Tokens, device: torch.device) -> Any:
        """Logits, and the loss where there are labels."""
        logits = torch.empty(*batch.input_ids.shape, self._rows, device=device)
        loss = None if batch.labels is None else torch.empty((), device=device)
        if batch.as_tuple:
            return (logits,) if loss is None else (loss, logits)
        return self._output(loss=loss, logits=logits)

    def labels(self, model: Any, batch: Tokens, absent: Any, wanted: set[int]) -> Tensor | None:
        """The next tokens, where no logits are wanted."""
        if batch.labels is None or _places(absent)[-1] in wanted or not vocabulary.fits(model, self._rows):
            return None
        return batch.targets.clamp(min=0)  # Of what does not count, the loss counts nothing.

    def outputs(
        self,
        model: nn.Module,
        computed: Tensor,
        batch: Tokens,
        absent: Any,
        num_parts: int,
        wanted: set[int],
    ) -> Any:
        """Logits, and this part's share of the mean over the labels that count, times ``num_parts``."""
        found, places = leaves(absent), _places(absent)
        if places[-1] in wanted:
            found[places[-1]] = vocabulary.whole(computed, self._rows).to(found[places[-1]].dtype)
        if batch.labels is not None and places[0] in wanted:
            targets, losses = batch.targets, computed
            if computed.dim() == 3:
                columns = vocabulary.for_loss(computed, self._rows, keep=places[-1] in wanted)
                losses = vocab_parallel_cross_entropy(columns, targets.clamp(min=0))
            found[places[0]] = (losses * (targets != IGNORED)).sum() / batch.counted * num_parts
        return rebuilt(absent, found)


def _places(absent: Any) -> list[int]:
    """Return the positions of loss and logits among an output's leaves."""
    return [place for place, leaf in enumerate(leaves(absent)) if isinstance(leaf, Tensor)]


def _check_loss(model: nn.Module) -> None:
    """Whether the loss that a model computes from labels is the one that is computed here in its place.

    Raises:
        UnsupportedError: the script gave the model a loss of its own.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        raise UnsupportedError(
            f"the loss_function of {type(model).__name__} is not Transformers' own, which Megatron-Core computes",
            cure=f"Compute it from outputs.logits in the script. {OTHER_ENGINE}",
        )
