"""How the processes of a launch find each other, on one machine or over several, for torch's agent. Imports torch."""

from __future__ import annotations

import uuid
from typing import final

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from drivetrain.launch.machines import Fate, Rules
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.rendezvous.hosting import LOOPBACK, port_taken
from drivetrain.launch.rendezvous.keeping import Address
from drivetrain.launch.rendezvous.meeting import Meeting

NAME = "drivetrain"
"""Our name in torch's registry of rendezvous."""


@final
class OneMachine(RendezvousHandler):
    """All workers are here: every round has one member. The store is new in each, since keys of dead workers mislead.

    Args:
        port: where the workers meet; 0 takes a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._store: TCPStore | None = None
        self._run_id = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store. Raises :class:`LaunchError` when the port is taken."""
        self._store = None  # gives the port back
        try:
            self._store = TCPStore(LOOPBACK, self._port, is_master=True, wait_for_workers=False)
            # The agent keeps what it is given, and the store itself would then keep the port.
            agents = TCPStore(LOOPBACK, self._store.port, is_master=False)
        except DistError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise port_taken(self._port) from None
        return RendezvousInfo(PrefixStore("agents", agents), 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def num_nodes_waiting(self) -> int:
        """Nobody can join."""
        return 0

    def leave(self, fate: Fate, why: str = "") -> list[str]:
        """There is nobody to tell."""
        return []

    def verdict(self) -> str:
        """There is nobody else to fail."""
        return ""

    def get_backend(self) -> str:
        """The name in torch's registry."""
        return NAME

    def get_run_id(self) -> str:
        """Another one for each launch."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the launcher's store."""
        return True

    def is_closed(self) -> bool:
        """Never: the agent alone ends the run."""
        return False

    def set_closed(self) -> None:
        """Nobody would read it."""

    def shutdown(self) -> bool:
        """Give the port back."""
        self._store = None
        return True


def rendezvous_of(plan: LaunchPlan) -> OneMachine | Meeting:
    """How the processes of a plan find each other. Nothing is opened yet."""
    host, _, port = plan.rdzv_endpoint.rpartition(":")
    if plan.num_machines == 1:
        return OneMachine(int(port))
    patience = plan.rendezvous
    rules = Rules(
        minimum=plan.fewest_machines or plan.num_machines,
        maximum=plan.num_machines,
        max_restarts=plan.max_restarts,
        timeout=patience.timeout_seconds,
        last_call=patience.last_call_seconds,
        lost_after=patience.lost_after_seconds,
    )
    return Meeting(Address(plan.machine_rank, host, int(port)), rules)


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.config["handler"]
    return handler


rendezvous_handler_registry.register(NAME, _handler)
