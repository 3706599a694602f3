"""Where ranks leave data for each other, and why nobody overwrites what another still reads. Imports nothing.

Every rank has an inbox [world, 2, ...] in symmetric memory, zero when it is made. What rank s sends to rank d lies in
d's slot (d - s) mod world: relative, so that a rank whose table of peers holds nothing but its own address fills all of
its slots itself. Of a slot's two halves, exchange number e (of this inbox) uses half e mod 2.

**Packets.** Data travel in packets of 8 bytes, each stored and loaded as one 64-bit access, which is never torn. A
packet of zeros means that nothing has arrived; so eight bytes of +0 travel as -0 followed by +0. Data and the news that
they are there are thus one and the same: no flag, no fence, no order between packets is needed. A receiver polls its
own memory until each of its packets is there, and puts zeros back.

**Epochs** count the launches on an inbox: one counter per CTA, each only ever touched by the CTA of that place in the
grid, in the rank's own memory. They grow in device memory, so a replayed graph goes on counting. All launches on an
inbox have the same grid, and all ranks launch them in the same order.

**Two halves are enough.** Let A send for exchange e into B's half e mod 2, last used for e - 2. A sends behind its
`griddepcontrol.wait`, so A's launch e - 1 is complete, in which A received packets of B; B sent those in its launch
e - 1, behind its own wait, hence after B's launch e - 2 had completed: all packets of e - 2 were read by then and the
zeros put back. And B takes no packet of e - 2 for one of e, as it left none there. (The wait covers the launch before,
which is complete only when it has waited itself: completion goes down the whole stream.)

**A rank that is silent** is waited for `timeout_us`; then the waiter writes 1 + that rank into the `failure` word and
goes on with NaN. With the word set no later launch waits any more. It is never cleared: the exchange cannot be resumed,
and the host, which looks at the word, ends.
"""

HALVES = 2
EPOCH_COLUMNS = 8  # counters of a token: the most CTAs that share one
PACKET_BYTES = 8
WORLD_SIZES = (2, 4, 8, 16)


def slot_of(source: int, destination: int, world_size: int) -> int:
    """Where `source`'s data lie in `destination`'s inbox."""
    return (destination - source) % world_size
