"""The inbox protocol as a model: ranks in any order, packets under way for any time.

What the kernels rely on holds, and each precaution is needed: without it the model goes wrong.
"""

import random

import pytest

from kernel_specs.primitives import inbox

EXCHANGES = 12


class Torn(Exception):
    """A packet was lost, overwritten, or taken for another exchange's."""


class Rank:
    """What a rank has in memory, and where it stands in its launches."""

    def __init__(self):
        self.memory = {}  # (slot, half) -> (source, exchange)
        self.exchange = 0
        self.to_send = []
        self.to_take = []


class Model:
    """`size` ranks, `halves` of an inbox; `waits`: a launch begins behind the end of the one before."""

    def __init__(self, size, seed, *, halves=inbox.HALVES, waits=True):
        self.size, self.halves, self.waits = size, halves, waits
        self.random = random.Random(seed)
        self.under_way = []
        self.ranks = [Rank() for _ in range(size)]
        for rank in range(size):
            self.begin(rank)

    def begin(self, rank):
        here = self.ranks[rank]
        here.to_send = list(range(self.size))
        here.to_take = list(range(self.size))
        self.random.shuffle(here.to_send)
        self.random.shuffle(here.to_take)

    def moves(self):
        for rank, here in enumerate(self.ranks):
            if here.exchange < EXCHANGES:
                yield from ((self.send, rank, other) for other in here.to_send[:1])
                yield from ((self.take, rank, source) for source in here.to_take if self.arrived(rank, source))
                if not here.to_send and (not here.to_take or not self.waits):
                    yield (self.finish, rank, None)
        # of packets to the same place the older arrives first
        yield from ((self.arrive, at, None) for at, packet in enumerate(self.under_way) if self.is_next(at, packet))

    def is_next(self, at, packet):
        return all(other[:3] != packet[:3] for other in self.under_way[:at])

    def place(self, source, destination, exchange):
        return inbox.slot_of(source, destination, self.size), exchange % self.halves

    def arrived(self, rank, source):
        return self.place(source, rank, self.ranks[rank].exchange) in self.ranks[rank].memory

    def send(self, rank, other):
        here = self.ranks[rank]
        here.to_send.remove(other)
        self.under_way.append((other, *self.place(rank, other, here.exchange), (rank, here.exchange)))

    def arrive(self, at, _):
        destination, slot, half, packet = self.under_way.pop(at)
        if (slot, half) in self.ranks[destination].memory:
            raise Torn(f"{packet} overwrites {self.ranks[destination].memory[slot, half]} at rank {destination}")
        self.ranks[destination].memory[slot, half] = packet

    def take(self, rank, source):
        here = self.ranks[rank]
        packet = here.memory.pop(self.place(source, rank, here.exchange))
        if packet != (source, here.exchange):
            raise Torn(f"rank {rank} takes {packet} for {source, here.exchange}")
        here.to_take.remove(source)

    def finish(self, rank, _):
        self.ranks[rank].exchange += 1
        self.begin(rank)

    def run(self):
        while moves := list(self.moves()):
            move, *what = self.random.choice(moves)
            move(*what)
        return [rank.exchange for rank in self.ranks]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_order_of_events_gives_every_rank_every_packet_of_its_exchange(size):
    for seed in range(60):
        model = Model(size, seed)

        assert model.run() == [EXCHANGES] * size
        assert all(not rank.memory for rank in model.ranks)


@pytest.mark.parametrize(
    ("what", "changed"), [("a single half", {"halves": 1}), ("launches that overlap", {"waits": False})]
)
def test_the_model_finds_what_goes_wrong_without_a_precaution(what, changed):
    def ends_well(seed):
        try:
            return Model(3, seed, **changed).run() == [EXCHANGES] * 3
        except Torn:
            return False

    assert not all(ends_well(seed) for seed in range(60)), f"nothing went wrong with {what}"


@pytest.mark.parametrize("size", inbox.WORLD_SIZES)
def test_a_rank_that_only_knows_itself_fills_all_of_its_slots(size):
    for rank in range(size):
        assert {inbox.slot_of(rank, other, size) for other in range(size)} == set(range(size))
        assert {inbox.slot_of(other, rank, size) for other in range(size)} == set(range(size))
        assert inbox.slot_of(rank, rank, size) == 0
