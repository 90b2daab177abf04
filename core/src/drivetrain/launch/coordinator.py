"""Coordinates the rendezvous of nodes: when workers start, with which ranks, and at which address.

Workers run in *rounds*. On one node a round begins whenever the launcher starts its workers. On several nodes the
launcher of node 0 runs a coordinator at ``main_process_ip:main_process_port``. A launcher sends its identity; one of
another run is refused (:class:`RunIdentity`). Then it sends the status of its node once a second and gets the state of
the job in return. A round begins when all nodes are ready or, where fewer suffice, when no other has joined for a
while. It ends when a node is lost, when workers of a node fail, or when a node joins; all workers are then started
again, and the script resumes from its last checkpoint.

Only the coordinator decides, so that nodes cannot disagree. It measures all times on its own clock. torch is imported
in a thread, when workers need a store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, final

from drivetrain.errors import LaunchError
from drivetrain.launch.environment import patch_environment

if TYPE_CHECKING:
    from drivetrain.launch.plan import LaunchPlan

LOOPBACK = "127.0.0.1"
"""Address of a single node: a container's own host name often does not resolve."""

_HEARTBEAT = 1.0
"""Seconds between two messages of a node while nothing happens."""

_POLL = 0.1
"""Seconds between two looks at the state while something is awaited."""

_GREETING_SECONDS = 20.0
"""Within which a coordinator answers a connection that it has accepted."""

_STOP_SECONDS = 40.0
"""Time for which node 0 waits for nodes that must leave: their launchers give workers 30 s to end."""

_GREETING = "drivetrain launch\n"
_LONGEST_MESSAGE = 1 << 20
_LONGEST_HELLO = 1 << 16
_LOOK_THERE = "Look at what that machine prints: it has ended, or is not reachable any more."
_BACKLOG = 4096
"""Connections that wait until torch's store is there; the system lowers it to its own limit."""

TOKEN = "DRIVETRAIN_RENDEZVOUS_TOKEN"  # noqa: S105 - the name of a variable
"""Variable with a shared secret of all launchers of a run; optional."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Without it gloo takes the address of the machine's host name, which on many systems is a loopback address."""

_CPP_LOG = "TORCH_CPP_LOG_LEVEL"
_SIOCGIFADDR = 0x8915  # Linux, netdevice(7): address of an interface


@final
class WorkerStore:
    """The port and store of one round's workers. The port is open at once; the store serves it once torch is loaded.

    Workers import torch while the launcher does; faster ones wait in the socket's queue. Each round has its own store,
    since keys of dead workers would mislead the next ones.

    Args:
        port: 0 takes a free one.
        address: to listen at; empty = all addresses of this node.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, port: int = 0, address: str = LOOPBACK) -> None:
        self._socket = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._closed = False
        self._store: Any = None
        self._error: Exception | None = None

    def serve(self) -> None:
        """Import torch and open the store, in a thread. Python cannot end before it has imported torch."""
        threading.Thread(target=self._serve, name="drivetrain-store").start()

    def check(self) -> None:
        """Raise the error that kept the store from opening: the workers would wait for it in vain."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the port. May be called twice, and while torch is still being imported."""
        with self._lock:
            self._closed, self._store = True, None
            self._socket.close()

    def _serve(self) -> None:
        try:
            # Torch's stores warn about host names without a reverse entry; it reads the variable once.
            with patch_environment(**{_CPP_LOG: os.environ.get(_CPP_LOG, "ERROR")}):
                from torch.distributed import TCPStore  # type: ignore[attr-defined]
            with self._lock:
                if not self._closed:
                    listening = self._socket.detach()  # the store's from here on
                    self._store = TCPStore(
                        LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening
                    )
        except Exception as error:  # noqa: BLE001 - raised by check(), in the main thread
            self._error = error


def listen(
    address: str, port: int, *, so_that: str = "", cure: str = "Write another main_process_port, or 0 for a free one."
) -> socket.socket:
    """A socket that accepts connections at this port; with an empty address at all addresses, IPv6 ones included.

    Raises:
        LaunchError: the port is taken.
    """
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise LaunchError(f"port {port} of this machine is taken{so_that}", cure=cure) from None


@dataclass(frozen=True)
class Round:
    """One start of the workers of this node.

    Args:
        node_rank: index of this node among those that take part.
        num_nodes: how many take part.
        master_addr, master_port: address of the workers' store.
        restart_count: failures so far.
        store: the workers' store, on the node that hosts it.
        variables: further environment variables for the workers.
    """

    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    store: WorkerStore | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class Rendezvous(ABC):
    """Interface through which a launcher learns when to start workers, and reports how they ended."""

    @abstractmethod
    def next_round(self) -> Round:
        """Wait until the next round begins.

        Raises:
            LaunchError: nodes did not come in time (the message says which), a port or this node's rank is taken, or
                the job is over.
        """

    @abstractmethod
    def must_restart(self) -> bool:
        """Whether this node has to stop its workers and prepare for the next round. Raises as :meth:`next_round`."""

    @abstractmethod
    def may_restart(self, why: str) -> bool:
        """Whether the workers may be restarted after one failed. Called once they are stopped.

        Args:
            why: ``rank 1 failed: ...``.
        """

    @abstractmethod
    def leave(self, how: Departure, why: str = "") -> list[str]:
        """Report to the other nodes that this one leaves, and why.

        Returns:
            A sentence for each other node that was lost or failed, the cause of the others last.

        Raises:
            LaunchError: this node's workers finished, but the job failed on another node.
        """


@final
class SingleNode(Rendezvous):
    """The rendezvous of a job on one node."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._port = int(plan.rdzv_endpoint.rpartition(":")[2])
        self._max_restarts, self._failures = plan.max_restarts, 0

    def next_round(self) -> Round:
        store = WorkerStore(self._port)
        return Round(0, 1, LOOPBACK, store.port, self._failures, store)

    def must_restart(self) -> bool:
        return False

    def may_restart(self, why: str) -> bool:
        self._failures += 1
        return self._failures <= self._max_restarts

    def leave(self, how: Departure, why: str = "") -> list[str]:
        return []


@dataclass(frozen=True)
class RunIdentity:
    """Identity shared by the launchers of one run, by which other programs and launchers of other runs are refused.

    Args:
        run_id: name of the run; empty when nothing names it.
        given: the user has named it, so that equal names suffice.
        facts: digests of the configuration's keys and of the command, by what they are of.
        token: shared secret of all launchers of the run; empty when none is set. It is never sent.
    """

    run_id: str = ""
    given: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    token: str = ""

    def difference(self, other: RunIdentity) -> str:
        """Why another launcher is of another run; empty when it is of this one."""
        if self.run_id != other.run_id and (self.given or other.given or (self.run_id and other.run_id)):
            return f"its run is {other.run_id or 'without a name'}, this one {self.run_id or 'without a name'}"
        if self.given and other.given:
            return ""
        names = [name for name in sorted({*self.facts, *other.facts}) if self.facts.get(name) != other.facts.get(name)]
        return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not the same" if names else ""

    def proof(self, role: str, *nonces: str) -> str:
        """Return a digest of the token, two random numbers and this identity, which proves knowledge of the token."""
        said = json.dumps([role, *nonces, self.run_id, self.given, sorted(self.facts.items())])
        return hmac.new(self.token.encode(), said.encode(), hashlib.sha256).hexdigest()


def make_rendezvous(plan: LaunchPlan, identity: RunIdentity) -> Rendezvous:
    """The rendezvous of a plan. Nothing is opened yet."""
    return SingleNode(plan) if plan.num_machines == 1 else Node(plan, identity)


Departure = Literal["finished", "failed", "interrupted", "stopped"]
"""Reasons why a node left: its workers finished; they failed; it was interrupted; the job ended for all nodes."""


@dataclass(frozen=True)
class NodeStatus:
    """Status of a node, sent to the coordinator.

    Args:
        node: its ``machine_rank``.
        id: differs between launchers.
        host: its name.
        address: its address on the way to node 0; of node 0, where it is reached.
        ready: the round that it is ready for; its workers run in an earlier one, or in none.
        why: why its workers failed, or why it left.
        left: how it left; ``None`` while it is there.
        done: it left and needs no further replies.
    """

    node: int
    id: str
    host: str
    address: str
    ready: int = 0
    why: str = ""
    left: Departure | None = None
    done: bool = False

    def __str__(self) -> str:
        return f"machine {self.node} ({self.host}, {self.address})"


@dataclass(frozen=True)
class JobState:
    """State of the job as the coordinator decided it, the same for all nodes.

    Args:
        round: the last round that began; 0 before the first.
        members: the nodes that take part in it, by ``machine_rank``.
        port: of the workers' store of this round, on node 0.
        next_round: the round that nodes have to prepare for; the same as ``round`` while that goes on.
        failures: rounds that ended because workers failed or a node was lost.
        departures: a sentence for each node that was lost or left, empty for one that finished or was stopped.
        present: nodes that are connected, or still wait for news of the others.
        over: why no further round will begin; ``None`` while the job goes on.
    """

    round: int = 0
    members: tuple[NodeStatus, ...] = ()
    port: int = 0
    next_round: int = 1
    failures: int = 0
    departures: Mapping[int, str] = field(default_factory=dict)
    present: tuple[int, ...] = ()
    over: str | None = None

    def index_of(self, id: str) -> int | None:  # noqa: A002 - the field's name
        """Index among the members; ``None`` when this launcher is not one of them."""
        return next((index for index, member in enumerate(self.members) if member.id == id), None)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> JobState:
        """Build from the JSON of ``asdict``."""
        members = tuple(NodeStatus(**member) for member in fields.pop("members"))
        departures = {int(node): sentence for node, sentence in fields.pop("departures").items()}
        return cls(members=members, departures=departures, present=tuple(fields.pop("present")), **fields)


@dataclass
class _Heard:
    """The last status of a node, and when it was received."""

    status: NodeStatus
    at: float


class Coordinator:
    """Decides from the nodes' messages which of them take part in which round. Uses neither network nor clock.

    Call ``hear`` for each message, then ``update``; :attr:`state` is sent to all nodes.

    Args:
        plan: how many nodes and restarts, and how long to wait; the same on all nodes.
        now: seconds, on the clock of all later calls.
    """

    def __init__(self, plan: LaunchPlan, now: float) -> None:
        self._max_nodes, self._max_restarts = plan.num_machines, plan.max_restarts
        self._min_nodes = plan.fewest_machines or plan.num_machines
        self._timeouts = plan.rendezvous
        self.state = JobState()
        self._heard: dict[int, _Heard] = {}
        self._waiting_since = self._ready_since = now
        self._ready: tuple[str, ...] = ()

    def hear(self, status: NodeStatus, now: float) -> None:
        """Process a message of a node."""
        self._heard[status.node] = _Heard(status, now)

    def rival(self, status: NodeStatus, now: float) -> tuple[NodeStatus, float] | None:
        """Another launcher with the same rank, unless it has left or was lost, and when its last message arrived."""
        heard = self._heard.get(status.node)
        if heard is None or heard.status.id == status.id or self._absence(heard, now) is not None:
            return None
        return heard.status, heard.at

    def update(self, now: float) -> bool:
        """Update the state. ``True``: the nodes of the next round are complete, and it may :meth:`begin`."""
        absences = {node: self._absence(heard, now) for node, heard in sorted(self._heard.items())}
        departures = {node: sentence for node, sentence in absences.items() if sentence is not None}
        present = (node for node, it in self._heard.items() if not (it.status.done or self._is_silent(it, now)))
        self.state = replace(self.state, departures=departures, present=tuple(sorted(present)))
        if self.state.over is not None:
            return False
        failed = next((heard.status for heard in self._heard.values() if heard.status.left == "failed"), None)
        if failed is not None:
            self._end(f"{failed}: {failed.why}")
        elif self.state.next_round == self.state.round:
            self._check_round(now)
        else:
            return self._is_complete(now)
        return False

    def begin(self, port: int) -> None:
        """Begin the next round with the nodes that are ready; this is the port of the workers' store."""
        ready = (heard.status for heard in self._heard.values() if heard.status.id in self._ready)
        members = tuple(sorted(ready, key=attrgetter("node")))
        self.state = replace(self.state, round=self.state.next_round, members=members, port=port)

    def _check_round(self, now: float) -> None:
        """End the round if a member was lost, workers failed, or another node is waiting to join."""
        current = [self._heard[member.node].status for member in self.state.members]
        finished = [status for status in current if status.left == "finished"]
        trouble = [sentence for member in self.state.members if (sentence := self._trouble(member, now))]
        if trouble:
            self.state = replace(self.state, failures=self.state.failures + 1)
            if finished:
                self._end(f"{trouble[0]}; {finished[0]} had finished, so that the others cannot start again")
            elif self.state.failures > self._max_restarts:
                self._end(trouble[0])
            else:
                self._call(now)
        elif any(self.state.index_of(status.id) is None for status in self._living(now)) and not finished:
            self._call(now)

    def _trouble(self, member: NodeStatus, now: float) -> str | None:
        """Why a member cannot go on in its round; ``None`` when it can."""
        heard = self._heard[member.node]
        if heard.status.id != member.id:
            return f"{member} was started again"
        if heard.status.left != "finished" and (sentence := self._absence(heard, now)):
            return sentence
        return f"{member}: {heard.status.why}" if heard.status.ready > self.state.round else None

    def _is_complete(self, now: float) -> bool:
        """Whether all nodes of the next round are ready, or enough of them and no other has joined for a while."""
        living = self._living(now)
        ready = [status for status in living if status.ready >= self.state.next_round]
        if (ids := tuple(status.id for status in ready)) != self._ready:
            self._ready, self._ready_since = ids, now
        late = [status for status in living if status not in ready and self.state.index_of(status.id) is not None]
        finished = [heard.status for heard in self._heard.values() if heard.status.left == "finished"]
        if finished:
            self._end(f"{finished[0]} had finished, so that the others cannot start again")
        elif len(ready) == self._max_nodes:
            return True
        elif len(ready) >= self._min_nodes and not late:
            return now - self._ready_since >= self._timeouts.last_call_seconds
        elif now - self._waiting_since > self._timeouts.timeout_seconds:
            self._end(self._missing(ready))
        return False

    def _missing(self, ready: list[NodeStatus]) -> str:
        here = {status.node for status in ready}
        absent = [str(node) for node in range(self._max_nodes) if node not in here]
        came = ", ".join(map(str, ready)) or "no machine"
        many = "machines" if len(absent) > 1 else "machine"
        needed = "" if self._min_nodes == self._max_nodes else f" (at least {self._min_nodes} are needed)"
        seconds = f"{self._timeouts.timeout_seconds:g} seconds"
        return f"after {seconds} {came} came, {many} {', '.join(absent)} did not{needed}"

    def _call(self, now: float) -> None:
        """Request all nodes to prepare for the next round."""
        self.state = replace(self.state, next_round=self.state.round + 1)
        self._waiting_since, self._ready, self._ready_since = now, (), now

    def _end(self, why: str) -> None:
        self.state = replace(self.state, over=why)

    def _living(self, now: float) -> list[NodeStatus]:
        """Nodes that are present, by ``machine_rank``."""
        return [heard.status for _, heard in sorted(self._heard.items()) if self._absence(heard, now) is None]

    def _absence(self, heard: _Heard, now: float) -> str | None:
        """Why a node is absent; empty when it finished or was stopped, ``None`` when it is present."""
        status = heard.status
        if status.left is not None:
            return f"{status}: {status.why}" if status.left in ("failed", "interrupted") else ""
        if self._is_silent(heard, now):
            return f"{status} was lost: no sign of life for {self._timeouts.lost_after_seconds:g} seconds"
        return None

    def _is_silent(self, heard: _Heard, now: float) -> bool:
        return now - heard.at > self._timeouts.lost_after_seconds


@final
class _Server:
    """The coordinator's server on node 0, with a thread for each connection and one for timeouts.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, plan: LaunchPlan, identity: RunIdentity) -> None:
        self._identity = identity
        self._refused: set[str] = set()
        port = int(plan.rdzv_endpoint.rpartition(":")[2])
        self._socket = listen(
            *("", port),
            so_that=", and the machines of the run would connect to it",
            cure="Write another --main_process_port, the same on every machine.",
        )
        self._lost_after = plan.rendezvous.lost_after_seconds
        self._coordinator = Coordinator(plan, time.monotonic())
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.store: WorkerStore | None = None
        """Store of the rendezvous of the current round's workers."""
        for name, target in (("accept", self._accept), ("clock", self._clock)):
            threading.Thread(target=target, name=f"drivetrain-{name}", daemon=True).start()

    def exchange(self, status: NodeStatus) -> JobState:
        """Process a message, and return the state of the job."""
        with self._lock:
            self._coordinator.hear(status, time.monotonic())
            return self._update()

    def close(self) -> None:
        """End the coordinator."""
        self._closed.set()
        # Closing alone would not wake the thread that waits in accept().
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _update(self) -> JobState:
        if self._coordinator.update(time.monotonic()):
            self.store = WorkerStore(address="")
            self._coordinator.begin(self.store.port)
        return self._coordinator.state

    def _clock(self) -> None:
        while not self._closed.wait(_POLL):
            with self._lock:
                self._update()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the messages of one connection. Anything else than a launcher's message closes it."""
        ends = contextlib.suppress(OSError, ValueError, TypeError, KeyError)
        with ends, connection, connection.makefile("rw", encoding="utf-8") as stream:
            if not self._admit(connection, stream):
                return
            while line := stream.readline(_LONGEST_MESSAGE):
                status = NodeStatus(**json.loads(line))
                rival = self._rival(status)
                answer = asdict(self.exchange(status)) if rival is None else {"rival": str(rival)}
                stream.write(json.dumps(answer) + "\n")
                stream.flush()
                if rival is not None:
                    return

    def _admit(self, connection: socket.socket, stream: Any) -> bool:
        """Check a launcher's identity, and reply whether it may join. Raises ``ValueError`` for another program."""
        nonce = secrets.token_hex(16)
        stream.write(f"{_GREETING}{nonce}\n")
        stream.flush()
        connection.settimeout(_GREETING_SECONDS)
        hello = json.loads(stream.readline(_LONGEST_HELLO))
        connection.settimeout(None)
        run_id, given, facts, theirs, proof = (hello[key] for key in ("run_id", "given", "facts", "nonce", "proof"))
        other = RunIdentity(str(run_id), bool(given), dict(facts), self._identity.token)
        if not hmac.compare_digest(other.proof("launcher", nonce, str(theirs)), str(proof)):
            why = "its token is another one, or only one of the two has a token"
        else:
            why = self._identity.difference(other)
        answer = {"refused": why} if why else {"proof": other.proof("coordinator", nonce, str(theirs))}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        if why:
            self._report(connection.getpeername()[0].removeprefix("::ffff:"), why)
        return not why

    def _report(self, address: str, why: str) -> None:
        """Warn on this node of a launcher that was refused, once for each address and reason."""
        said = f"refused a launcher of another run from {address}: {why}\n"
        with self._lock:
            if said not in self._refused:
                self._refused.add(said)
                sys.stderr.write(said)

    def _rival(self, status: NodeStatus) -> NodeStatus | None:
        """Another live launcher of this rank. Waits until its next message arrives, or it is lost."""
        first: float | None = None
        while True:
            with self._lock:
                found = self._coordinator.rival(status, time.monotonic())
            if found is None or (first is not None and found[1] != first):
                return None if found is None else found[0]
            first = found[1]
            time.sleep(_POLL)


@final
class _Client:
    """The connection of another node to the coordinator.

    Raises:
        LaunchError: nothing answers in time, another program answers, or a launcher of another run.
    """

    def __init__(self, host: str, port: int, plan: LaunchPlan, identity: RunIdentity) -> None:
        seconds = plan.rendezvous.timeout_seconds
        end = time.monotonic() + seconds
        while True:
            try:
                left = max(0.1, min(3.0, end - time.monotonic()))
                self._connection = socket.create_connection((host, port), timeout=left)
                break
            except OSError as error:
                if time.monotonic() + _POLL >= end:
                    reason = error.strerror or str(error) or type(error).__name__
                    raise LaunchError(
                        f"machine 0 did not answer at {host}, port {port}, within {seconds:g} seconds ({reason})",
                        cure="Start it with --machine_rank 0 and the same port, and check that this machine reaches"
                        " it.",
                    ) from None
                time.sleep(_POLL)
        self._stream = self._connection.makefile("rw", encoding="utf-8")
        try:
            self._connection.settimeout(min(seconds, _GREETING_SECONDS))
            self._introduce(host, port, identity)
        except LaunchError:
            self.close()
            raise
        # The first answer may take until it is certain that another launcher of this rank is lost.
        self._connection.settimeout(plan.rendezvous.lost_after_seconds + _HEARTBEAT)

    def _introduce(self, host: str, port: int, identity: RunIdentity) -> None:
        """Send this launcher's identity, and check that the peer is a coordinator of the same run."""
        where, nonce = f"machine 0 at {host}, port {port}", secrets.token_hex(16)
        try:
            greeting = self._stream.readline(len(_GREETING))
        except (OSError, ValueError):
            greeting = ""
        if greeting != _GREETING:
            raise LaunchError(
                f"what answers at {host}, port {port}, is no `drivetrain launch`",
                cure="Another program has this port: write another --main_process_port, the same on every machine.",
            )
        try:
            theirs = self._stream.readline(_LONGEST_HELLO).strip()
            hello = {"run_id": identity.run_id, "given": identity.given, "facts": dict(identity.facts), "nonce": nonce}
            hello["proof"] = identity.proof("launcher", theirs, nonce)
            self._stream.write(json.dumps(hello) + "\n")
            self._stream.flush()
            answer = json.loads(self._stream.readline(_LONGEST_HELLO))
        except (OSError, ValueError):
            raise LaunchError(f"{where} closed the connection", cure=_LOOK_THERE) from None
        if "refused" in answer:
            raise LaunchError(
                f"{where} is of another run: {answer['refused']}",
                cure="End the launchers that an earlier run has left over, and give each run its own"
                " --main_process_port. Machines that differ on purpose say that they belong together by the same"
                f" --set rendezvous.run_id=NAME; a token is set by {TOKEN} on all of them, or on none.",
            )
        if not hmac.compare_digest(identity.proof("coordinator", theirs, nonce), str(answer.get("proof", ""))):
            # Only with a token: the coordinator has compared everything else.
            raise LaunchError(f"{where} does not know the token of {TOKEN}", cure="Set the same on every machine.")

    def exchange(self, status: NodeStatus) -> JobState:
        """Send a message, and return the state of the job.

        Raises:
            OSError: the connection is dead.
            LaunchError: another launcher has this node's rank.
        """
        self._stream.write(json.dumps(asdict(status)) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise ConnectionError("the connection was closed")
        answer = json.loads(line)
        if "rival" in answer:
            raise LaunchError(
                f"{answer['rival']} is already there",
                cure="Give each machine its own --machine_rank, and each run its own --main_process_port.",
            )
        return JobState.from_dict(answer)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._connection.close()


@final
class Node(Rendezvous):
    """The rendezvous of one of several nodes. A thread exchanges messages with the coordinator, which runs on node 0.

    The launcher's main thread never waits for the network: a dead link would hold it for many minutes.
    """

    def __init__(self, plan: LaunchPlan, identity: RunIdentity) -> None:
        self._identity = identity
        host, _, port = plan.rdzv_endpoint.rpartition(":")
        self._plan, self._host, self._port = plan, host, int(port)
        self._is_first = plan.machine_rank == 0
        self._coordinator = f"machine 0 at {host}, port {port}"
        own = host if self._is_first else _route_to(host)  # node 0's address is the one at which the others reach it
        self._status = NodeStatus(plan.machine_rank, uuid.uuid4().hex, socket.gethostname(), own)
        self._sent: NodeStatus | None = None
        self._state = JobState()
        self._round = 0
        self._lost = ""
        self._link: _Server | _Client | None = None
        self._hurry, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="drivetrain-heartbeat", daemon=True)

    def next_round(self) -> Round:
        timeouts = self._plan.rendezvous
        if self._link is None:
            link: _Server | _Client
            if self._is_first:
                link = _Server(self._plan, self._identity)
            else:
                link = _Client(self._host, self._port, self._plan, self._identity)
            self._status = replace(self._status, ready=1)
            try:
                self._state = link.exchange(self._status)
            except LaunchError:
                link.close()
                raise
            except OSError:
                link.close()
                raise LaunchError(f"{self._coordinator} closed the connection", cure=_LOOK_THERE) from None
            self._link = link
            self._thread.start()
        # The coordinator knows which node is missing; wait for its message before this node gives up by itself.
        end = time.monotonic() + timeouts.timeout_seconds + timeouts.last_call_seconds + 3 * timeouts.lost_after_seconds
        index: int | None = None
        while index is None:
            self._check()
            if time.monotonic() > end:
                raise LaunchError(
                    f"{self._coordinator} began no round within {timeouts.timeout_seconds:g} seconds",
                    cure=f"{_LOOK_THERE} rendezvous.timeout_seconds is how long machines wait for each other.",
                )
            state = self._state
            if state.round > self._round:
                self._round, index = state.round, state.index_of(self._status.id)
            elif self._status.ready <= self._round:
                self._say(ready=self._round + 1, why="")
            else:
                time.sleep(_POLL)
        self._hurry.clear()
        store = self._link.store if isinstance(self._link, _Server) else None
        others = [member.address for member in state.members if member.id != self._status.id]
        interface = _interface_of(_route_to(others[0])) if others and _INTERFACE not in os.environ else ""
        variables = {_INTERFACE: interface} if interface else {}
        return Round(index, len(state.members), self._host, state.port, state.failures, store, variables)

    def must_restart(self) -> bool:
        self._check()
        return self._state.next_round > self._round

    def may_restart(self, why: str) -> bool:
        self._say(ready=self._round + 1, why=why)
        self._wait(lambda: self._state.over is not None or self._state.next_round > self._round, float("inf"))
        return self._state.over is None and not self._lost

    def leave(self, how: Departure, why: str = "") -> list[str]:
        if self._link is None:
            return []
        # A node that failed waits for news of the others; node 0 has to serve them until then.
        lost_after = self._plan.rendezvous.lost_after_seconds
        patience = lost_after + (_STOP_SECONDS if self._is_first else 2 * _HEARTBEAT)
        self._say(left=how, why=why, done=how != "failed")
        self._wait(self._may_go, float("inf") if how == "finished" else patience)
        self._say(done=True)
        self._wait(self._is_sent, _HEARTBEAT)
        self._stop.set()
        self._hurry.set()
        self._thread.join(_HEARTBEAT)
        self._link.close()
        if how == "finished" and self._state.over:
            raise LaunchError(self._state.over)
        others = [it for node, it in self._state.departures.items() if it and node != self._plan.machine_rank]
        others.sort(key=lambda sentence: " was lost: " in sentence)
        return [it for it in (*others, self._lost) if it]

    def _run(self) -> None:
        """Body of the thread: exchange messages until no node depends on it."""
        assert self._link is not None
        while not self._stop.is_set():
            status = self._status
            try:
                state = self._link.exchange(status)
            except TimeoutError:
                seconds = f"{self._plan.rendezvous.lost_after_seconds:g} seconds"
                self._lost = f"{self._coordinator}, which coordinates the run, was lost: no answer for {seconds}"
                return
            except OSError:
                self._lost = f"{self._coordinator}, which coordinates the run, was lost: it closed the connection"
                return
            self._state = state
            self._sent = status  # last: from here on the state is no older than this message
            if self._hurry.is_set() or state.next_round > state.round or state.over is not None:
                self._stop.wait(_POLL)
            else:
                self._hurry.wait(_HEARTBEAT)

    def _say(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._hurry.set()

    def _check(self) -> None:
        """Raise when the job is over or the coordinator was lost."""
        if self._state.over is not None:
            cure = ""
            if self._is_first and not self._round and not is_here(self._host):  # nor if the name has no address
                cure = f"main_process_ip {self._host} is no address of this machine; the others look for it there."
            raise LaunchError(self._state.over, cure=cure)
        if self._lost:
            raise LaunchError(self._lost, cure="Start all machines again; the script goes on from its last checkpoint.")

    def _is_sent(self) -> bool:
        return self._sent is self._status

    def _may_go(self) -> bool:
        """Whether the last message has arrived, no node needs this one, and it has the news it waits for."""
        if not self._is_sent():
            return False
        if self._is_first:
            return not set(self._state.present) - {0}
        return self._status.done or {member.node for member in self._state.members} <= self._state.departures.keys()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (self._lost or condition()):
            time.sleep(_POLL)


def _route_to(host: str) -> str:
    """This node's own address on the route to ``host``; empty when there is no route or no such host.

    Sends nothing: connecting a datagram socket only chooses a route.
    """
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def is_here(host: str) -> bool | None:
    """Whether ``host`` names an address of this node; ``None`` for a name that has none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return None
    with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
        probe.bind(address)
        return True
    return False


def _interface_of(address: str) -> str:
    """Name of the interface with this IPv4 address; empty when there is none or it cannot be determined."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
