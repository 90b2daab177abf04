"""Assigns losses of deferred outputs to calls, and defers an accumulation window of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.api import Trainable, UnsupportedError, UsageError
from drivetrain_megatron.pipeline.calls import ModelCall
from drivetrain_megatron.pipeline.deferred import Deferred, Node, refuse_read
from drivetrain_megatron.pipeline.values import leaves


def deferred_loss(loss: Tensor) -> tuple[ModelCall[Any, Any], Node]:
    """The call that a loss was recorded from, and the loss.

    Raises:
        UsageError: it is no deferred number.
    """
    node = loss.node if isinstance(loss, Deferred) else None
    call = None if node is None else node.call
    if node is None or not isinstance(call, ModelCall):
        raise _refused(loss, node)
    if not node.trains:
        raise UsageError(
            "this loss of a pipelined model has no gradient: it was computed under torch.no_grad, or from outputs that "
            "were detached",
            cure="Compute it with gradients enabled, from the outputs themselves.",
        )
    if node.absent.dim():
        raise UsageError("backward needs one number, this loss has several", cure="Reduce it: .mean() or .sum().")
    return call, node


def _refused(loss: Tensor, node: Node | None) -> UsageError:
    """Why a loss cannot go backward through a pipeline, from what it was computed from."""
    if node is not None:
        what = "accelerator.backward was called a second time for one call of a pipelined model"
        return UsageError(what, cure="Add up the losses of one call, or call the model again for the second.")
    refuse_read(loss)
    beside = "is no function of an output of the pipelined model"
    if loss.grad_fn is None:
        return UsageError(
            f"this loss {beside} in training mode, whose values are known only after backward",
            cure="Call the model in training mode with gradients enabled. To train with dropout or batch norm off, "
            "write model.train() and then part.eval() for those modules of it, such as every part in model.children().",
        )
    return UsageError(
        f"this loss {beside}, but of parameters or of another model",
        cure="Put it into the model's forward, so that its stage computes it; use weight_decay in the optimizer for a "
        "penalty on weights.",
    )


def run_window(
    trainable: Trainable,
    forward: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    train: Callable[[ModelCall[Any, Any], Node], None],
    micro_batches: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    device: str,
) -> Tensor:
    """See :meth:`drivetrain.api.Trainable.forward_backward`. Each batch is cut further, into parts for the stages.

    A loss that can be recorded is computed as in the loop; any other is called with each micro-batch's outputs and its
    part of the batch, and must be a sum or a mean over samples.

    Args:
        trainable: notified when gradients are reduced.
        forward: gives a deferred output.
        train: runs the schedule for a call and its loss.
        micro_batches: of the window.
        loss_fn: ``loss_fn(output, batch)``.
        device: of this rank.
    """
    total = torch.zeros((), device=device)
    for index, (args, kwargs, batch) in enumerate(micro_batches):
        trainable.synchronise_gradients(index == len(micro_batches) - 1)
        output = forward(args, kwargs)
        call = next(leaf.node.call for leaf in leaves(output) if isinstance(leaf, Deferred))
        assert isinstance(call, ModelCall), "a call gives its own outputs"
        call.recorded_only = True
        try:
            recorded: Any = loss_fn(output, batch)
            node = recorded.node if isinstance(recorded, Deferred) else call.loss(loss_fn, output, batch)
            train(call, node)
        except UnsupportedError:
            node = call.loss(loss_fn, output, batch)
            train(call, node)
        total = total + node.value
    return total
