"""Which machines are there, which were lost, and when a round of training may begin: what machine 0 decides. No torch.

The machines of a run train in rounds. A round begins when all of them are ready, or, where fewer suffice, when no
other has come for a while. It ends when a machine is lost, when the workers of one fail, or when a machine joins; then
all get ready for the next one, and the script goes on from its last checkpoint. Machine 0 alone decides, so that no
two machines can think differently; the others tell it about themselves and read what it decided.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

Fate = Literal["finished", "failed", "gone", "stopped"]
"""Why a machine left: its workers finished; they failed for good; it was told to go; the run was over for all."""


@dataclass(frozen=True)
class Card:
    """What one machine says about itself.

    Args:
        machine: its ``machine_rank``.
        id: other for each start of its launcher.
        host: its name.
        address: its own address on the way to machine 0; of machine 0, where it is reached.
        ready: the round that it is ready for; its workers run in an earlier one, or in none.
        fate: why it left; ``None`` while it is there.
        why: the sentence to that.
        bye: it waits for nothing any more.
    """

    machine: int
    id: str
    host: str
    address: str
    ready: int = 0
    fate: Fate | None = None
    why: str = ""
    bye: bool = False

    def __str__(self) -> str:
        return f"machine {self.machine} ({self.host}, {self.address})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Card:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Board:
    """What machine 0 decided, for all to read.

    Args:
        round: the last round that began; 0 before the first.
        members: who trains in it, in the order of ``machine_rank``.
        port: of the store where the workers of this round meet, on machine 0.
        called: the round that machines shall get ready for; the same as ``round`` while that goes on.
        fates: a sentence for each machine that was lost or left, empty for one that finished or was stopped.
        here: machines that are there, or still wait for what becomes of the others.
        over: why nothing will be trained any more; ``None`` while the run goes on.
    """

    round: int = 0
    members: tuple[Card, ...] = ()
    port: int = 0
    called: int = 1
    fates: dict[int, str] = field(default_factory=dict)
    here: tuple[int, ...] = ()
    over: str | None = None

    def place_of(self, id: str) -> int | None:  # noqa: A002 - the field's name
        """Index among the members; ``None`` when this launcher is not one of them."""
        return next((place for place, card in enumerate(self.members) if card.id == id), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Board:
        said = json.loads(text)
        members = tuple(Card(**card) for card in said.pop("members"))
        fates = {int(machine): sentence for machine, sentence in said.pop("fates").items()}
        return cls(members=members, fates=fates, here=tuple(said.pop("here")), **said)


@dataclass(frozen=True)
class Rules:
    """What machine 0 decides by.

    Args:
        minimum, maximum: machines with which a round may begin.
        max_restarts: rounds that may end by a failure or a loss before the run is over.
        timeout: seconds within which the machines of a round have to come.
        last_call: seconds to wait for a further machine once there are enough.
        lost_after: seconds without a sign of life after which a machine is lost.
    """

    minimum: int
    maximum: int
    max_restarts: int = 0
    timeout: float = 600.0
    last_call: float = 30.0
    lost_after: float = 15.0


@dataclass
class _Heard:
    """The last that was heard of a machine: its card, its count of heartbeats, and when that last grew."""

    card: Card
    beat: int
    at: float


class RollCall:
    """The decisions of machine 0, from what it heard. Times are those of its own clock, so that no two are compared.

    ``hear`` what each machine says, then ``look``; :attr:`board` is what all shall read.
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.board = Board()
        self._heard: dict[int, _Heard] = {}
        self._called_at = now
        self._ready: tuple[str, ...] = ()
        self._ready_at = now
        self._failures = 0

    def hear(self, card: Card, beat: int, now: float) -> None:
        """Take note of what a machine says, and of how often it gave a sign of life."""
        known = self._heard.get(card.machine)
        if known is None or (known.card.id, known.beat) != (card.id, beat):
            self._heard[card.machine] = _Heard(card, beat, now)
        else:
            known.card = card

    def look(self, now: float) -> bool:
        """Bring the board up to date. ``True``: the round that was called is complete; :meth:`begin` it."""
        self.board = replace(self.board, fates=self._fates(now), here=self._here(now))
        if self.board.over is not None:
            return False
        failed = next((heard.card for heard in self._heard.values() if heard.card.fate == "failed"), None)
        if failed is not None:
            self._end(f"{failed}: {failed.why}")
        elif self.board.called == self.board.round:
            self._watch(now)
        else:
            return self._is_complete(now)
        return False

    def begin(self, port: int) -> None:
        """The round that was called goes on with the machines that are ready, and workers that meet at this port."""
        ready = sorted((heard.card for heard in self._heard.values() if heard.card.id in self._ready), key=_number)
        self.board = replace(self.board, round=self.board.called, members=tuple(ready), port=port)

    def _watch(self, now: float) -> None:
        """While a round goes on: who is missing, whose workers failed, who wants to join?"""
        finished = [card for card in self._cards(self.board.members) if card.fate == "finished"]
        trouble = [sentence for member in self.board.members if (sentence := self._trouble(member, now))]
        if trouble:
            self._failures += 1
            if finished:
                self._end(f"{trouble[0]}; {finished[0]} had finished, so that the others cannot start again")
            elif self._failures > self.rules.max_restarts:
                self._end(trouble[0])
            else:
                self._call(now)
        elif any(self.board.place_of(card.id) is None for card in self._living(now)) and not finished:
            self._call(now)

    def _trouble(self, member: Card, now: float) -> str | None:
        """Why this member cannot go on in the round in which it is; ``None`` when it can."""
        heard = self._heard[member.machine]
        if heard.card.id != member.id:
            return f"{member} was started again"
        if heard.card.fate != "finished" and (sentence := self._sentence(heard, now)):
            return sentence
        return f"workers of {member} failed" if heard.card.ready > self.board.round else None

    def _is_complete(self, now: float) -> bool:
        """Before a round: are all there that will come?"""
        rules, living = self.rules, self._living(now)
        ready = sorted((card for card in living if card.ready >= self.board.called), key=_number)
        if (names := tuple(card.id for card in ready)) != self._ready:
            self._ready, self._ready_at = names, now
        late = [card for card in living if card not in ready and self.board.place_of(card.id) is not None]
        finished = [heard.card for heard in self._heard.values() if heard.card.fate == "finished"]
        if finished:
            self._end(f"{finished[0]} had finished, so that the others cannot start again")
        elif len(ready) == rules.maximum:
            return True
        elif len(ready) >= rules.minimum and not late:
            return now - self._ready_at >= rules.last_call
        elif now - self._called_at > rules.timeout:
            self._end(self._absent(ready))
        return False

    def _absent(self, ready: list[Card]) -> str:
        here = {card.machine for card in ready}
        absent = [str(machine) for machine in range(self.rules.maximum) if machine not in here]
        came = ", ".join(map(str, ready)) or "no machine"
        many = "machines" if len(absent) > 1 else "machine"
        needed = "" if self.rules.minimum == self.rules.maximum else f" (at least {self.rules.minimum} are needed)"
        return f"after {self.rules.timeout:g} seconds {came} came, {many} {', '.join(absent)} did not{needed}"

    def _call(self, now: float) -> None:
        self.board = replace(self.board, called=self.board.round + 1)
        self._called_at, self._ready, self._ready_at = now, (), now

    def _end(self, why: str) -> None:
        self.board = replace(self.board, over=why)

    def _cards(self, members: Iterable[Card]) -> list[Card]:
        return [self._heard[member.machine].card for member in members]

    def _living(self, now: float) -> list[Card]:
        return [heard.card for heard in self._heard.values() if self._sentence(heard, now) is None]

    def _sentence(self, heard: _Heard, now: float) -> str | None:
        """Why this machine is not there, ``None`` when it is."""
        card = heard.card
        if card.fate is not None:
            return f"{card}: {card.why}" if card.fate in ("failed", "gone") else ""
        if self._is_silent(heard, now):
            return f"{card} was lost: no sign of life for {self.rules.lost_after:g} seconds"
        return None

    def _here(self, now: float) -> tuple[int, ...]:
        kept = (machine for machine, it in self._heard.items() if not (it.card.bye or self._is_silent(it, now)))
        return tuple(sorted(kept))

    def _is_silent(self, heard: _Heard, now: float) -> bool:
        return now - heard.at > self.rules.lost_after

    def _fates(self, now: float) -> dict[int, str]:
        sentences = {machine: self._sentence(heard, now) for machine, heard in sorted(self._heard.items())}
        return {machine: sentence for machine, sentence in sentences.items() if sentence is not None}


def _number(card: Card) -> int:
    return card.machine
