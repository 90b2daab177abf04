"""Specifications of the plugin hooks: when and on which rank each is called, and what an exception does.

A plugin implements some of them in one module, with ``drivetrain.api.hookimpl``, and announces them by entry points: in
the group ``drivetrain`` the name of its backend stands for ``drivetrain_backends``, in the group ``drivetrain.hooks``
each other hook stands under its own name without ``drivetrain_``. The module is imported when its backend is chosen, or
when a hook that it announces is due; to implement a hook and not announce it is an error. None runs once per training
step unless somebody implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import click
    from torch import nn

    from drivetrain.backend import BackendInfo
    from drivetrain.config.resolved import ResolvedConfig
    from drivetrain.launch.plan import LaunchPlan

GROUP = "drivetrain"
"""Group of entry points that name the modules that bring backends."""

HOOK_GROUP = "drivetrain.hooks"
"""Group of entry points named after hooks: ``step_ended = "my_plugin.plugin"``."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def drivetrain_backends() -> list[BackendInfo]:
    """Say which backends this plugin brings.

    Called when a backend is looked up or listed, in every process, possibly twice; the module that implements it must
    import neither torch nor an engine. An exception marks the plugin as broken: it is shown by ``drivetrain backends``,
    raised when one of its names is asked for, and harmless to the others.

    .. versionadded:: 0.1
    """
    raise AssertionError


@hookspec(firstresult=True)
def drivetrain_tensor_parallel_plan(model: nn.Module, degree: int) -> Mapping[str, str] | None:
    """Say how a model is split along the tensor-parallel axis, or ``None`` when this plugin does not know it.

    Called by a tensor-parallel backend in ``prepare``, on every rank; the first answer wins, after the user's own plan
    and before the default. An exception stops ``prepare``.

    Args:
        model: the user's module, before anything is sharded.
        degree: size of the axis ``tp``.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def drivetrain_pipeline_split(model: nn.Module, num_stages: int) -> Sequence[str] | None:
    """Name the modules at which a pipeline stage begins, or ``None`` when this plugin does not know the model.

    Called by a pipelined backend in ``prepare``, on every rank; the first answer wins, after the user's own split
    points and before the default. An exception stops ``prepare``.

    Args:
        model: the user's module, before it is cut.
        num_stages: number of stages; the answer holds ``num_stages - 1`` names.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def drivetrain_choose(resolved: ResolvedConfig) -> Mapping[str, Any] | None:
    """Choose what to train with where a configuration says ``distributed_type: auto``.

    Called by ``drivetrain launch`` in its own process, before anything starts. The first answer wins. An exception
    stops the launch.

    Args:
        resolved: the configuration as it was loaded; ``resolved.config.plan`` says what is trained.

    Returns:
        Keys and values that replace those of the configuration, ``distributed_type`` among them, by dotted key or
        nested.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def drivetrain_predict(resolved: ResolvedConfig, plan: LaunchPlan) -> Mapping[str, Any] | None:
    """Predict what the layout that a configuration describes holds, where it says ``plan: {check: true}``.

    Called by ``drivetrain launch`` in its own process, on every machine, before anything starts. The first answer wins.
    An exception stops the launch.

    Args:
        resolved: the configuration that trains; ``resolved.config.plan`` says what is trained.
        plan: how many processes there are, and the name of the backend.

    Returns:
        The prediction, as JSON knows it: :func:`drivetrain_check_plan` is given it on every rank.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def drivetrain_check_plan(accelerator: Any, predicted: Mapping[str, Any]) -> Any | None:
    """Begin to compare a run with what was predicted for it.

    Called on every rank when an ``Accelerator`` has been made, if the configuration says ``plan: {check: true}``. The
    first answer wins. An exception stops the script.

    Args:
        accelerator: the user's accelerator.
        predicted: the answer of :func:`drivetrain_predict`.

    Returns:
        An object with ``step_ended(step, skipped)``, called on every rank after each optimizer step, and ``close()``,
        called when the accelerator ends. An exception of the first stops the script.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def drivetrain_out_of_memory(resolved: ResolvedConfig, plan: LaunchPlan) -> str | None:
    """Say what a run could change after ``torch.OutOfMemoryError`` has ended one of its ranks.

    Called by ``drivetrain launch`` in its own process, after the report of the failure, on each machine that had such a
    rank. The first answer wins, and is printed. An exception is said instead of it.

    Args:
        resolved: the configuration that trained.
        plan: how many processes there were, and the name of the backend.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_prepared(accelerator: Any, objects: tuple[Any, ...]) -> None:
    """Observe that ``prepare`` returned.

    Called on every rank, once per call of ``prepare``. An exception is reported with the plugin's name and training
    goes on.

    Args:
        accelerator: the user's :class:`drivetrain.Accelerator`.
        objects: what ``prepare`` is about to return, in order.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_step_ended(accelerator: Any, step: int, skipped: bool) -> None:
    """Observe the end of an optimizer step.

    Called on every rank after each optimizer step; costs nothing when no plugin implements it. An exception is reported
    with the plugin's name and training goes on.

    Args:
        accelerator: the user's accelerator.
        step: number of optimizer steps so far, this one included, skipped ones too.
        skipped: this one left the parameters untouched.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_checkpoint_saved(accelerator: Any, path: Path) -> None:
    """Observe that a checkpoint is complete on disk, or on the storage that it was written to.

    Called on every rank after the rename, or the manifest, that completes it. An exception is reported with the
    plugin's name and training goes on.

    Args:
        accelerator: the user's accelerator.
        path: the checkpoint's folder. On a remote storage no ``Path`` but ``drivetrain.checkpoint.RemoteFolder``, whose
            ``str`` is the address.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_checkpoint_loaded(accelerator: Any, path: Path) -> None:
    """Observe that a checkpoint was loaded. As :func:`drivetrain_checkpoint_saved`.

    Args:
        accelerator: the user's accelerator.
        path: the checkpoint's folder.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_failed(accelerator: Any, error: BaseException) -> None:
    """Observe that the script is ending with an exception.

    Called on the rank that failed, before its process ends. An exception here is reported and ignored.

    Args:
        accelerator: the user's accelerator.
        error: what was raised.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_closed(accelerator: Any) -> None:
    """Observe ``end_training`` (or the end of the process, whichever is first), once per accelerator and rank.

    An exception is reported with the plugin's name and the shutdown goes on.

    Args:
        accelerator: the user's accelerator.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_commands(group: click.Group) -> None:
    """Add subcommands to ``drivetrain``.

    Called when the command line needs to know all commands (an unknown subcommand, or ``--help``). The module must
    stay light. An exception is reported with the plugin's name; the other commands work.

    Args:
        group: the click group to add to.

    .. versionadded:: 0.1
    """


@hookspec
def drivetrain_trackers() -> Mapping[str, str]:
    """Name experiment trackers.

    Called when ``log_with`` names a tracker, on every rank. Returns ``{"name": "package.module:Class"}``, where the
    class follows :class:`drivetrain.tracking.GeneralTracker`. An exception marks the plugin as broken.

    .. versionadded:: 0.1
    """
    raise AssertionError


@hookspec
def drivetrain_devices() -> Sequence[Mapping[str, str]]:
    """Describe device kinds beyond those torch knows.

    Called when a device is chosen. Each answer has ``type``, ``visibility`` (the environment variable that hides
    devices) and ``communication_backend``. An exception marks the plugin as broken.

    .. versionadded:: 0.1
    """
    raise AssertionError
