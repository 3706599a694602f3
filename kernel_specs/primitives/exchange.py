"""Packets between ranks: sent with 64-bit stores into peers' memory, waited for in this rank's own (see `inbox`)."""

import cutlass
from cutlass import cute

from kernel_specs.primitives.inbox import HALVES, PACKET_BYTES

NANOSECONDS = 1000  # of a microsecond
POLLS = 64  # between two looks at the clock, which takes longer than a poll

NAN_PACKET = -1  # NaN in BF16 and in FP32: nobody takes what never came for a number

# Eight bytes that are zero as numbers, and not as bits: -0 first
ZERO_PACKETS = {"bfloat16": 0x8000, "float32": 0x80000000}


class Inbox:
    """One half of this rank's inbox, and of the same inbox on all peers. Traced: make one per launch and inbox.

    Made before `griddepcontrol.wait`, where the addresses of the peers may be read; `open` comes behind it. A row is
    `row_packets` packets, and a half has `num_rows` rows.
    """

    def __init__(
        self,
        inbox: cute.Tensor,
        peers: cute.Tensor,
        rank: cutlass.Int32,
        world_size: int,
        num_rows: cutlass.Int32,
        row_packets: int,
    ) -> None:
        self.own = inbox.iterator.toint()
        self.peers = peers
        self.rank = rank
        self.world_size = world_size
        self.half_bytes = cutlass.Int64(num_rows) * (row_packets * PACKET_BYTES)
        self.row_bytes = row_packets * PACKET_BYTES

    def open(self, epoch: cutlass.Int32) -> None:
        """Take the half that belongs to this exchange."""
        self.half = cutlass.Int64(epoch & (HALVES - 1)) * self.half_bytes

    def address_of(self, ahead: int | cutlass.Int32) -> cutlass.Int64:
        """Where the inbox of the rank that comes `ahead` places behind this one begins; it has slot `ahead` for us."""
        place = self.rank + ahead
        return self.peers[cutlass.select_(place >= self.world_size, place - self.world_size, place)]

    def place(
        self, base: cutlass.Int64, slot: int | cutlass.Int32, row: cutlass.Int32, packet: cutlass.Int32
    ) -> cutlass.Int64:
        """A packet's address in the inbox that begins at `base`."""
        inside = cutlass.Int64(row) * self.row_bytes + cutlass.Int64(packet) * PACKET_BYTES
        return base + cutlass.Int64(slot) * (HALVES * self.half_bytes) + self.half + inside

    def place_from(self, source: int | cutlass.Int32, row: cutlass.Int32, packet: cutlass.Int32) -> cutlass.Int64:
        """Where a packet of rank `source` arrives."""
        slot = self.rank - source
        return self.place(self.own, cutlass.select_(slot < 0, slot + self.world_size, slot), row, packet)


def full(packet: cutlass.Int64, dtype: str) -> cutlass.Int64:
    """The packet as it travels: never zero."""
    return cutlass.Int64(cutlass.select_(packet == 0, cutlass.Int64(ZERO_PACKETS[dtype]), packet))


def send(address: cutlass.Int64, packet: cutlass.Int64) -> None:
    cute.arch.store(_pointer(address), packet, sem="relaxed", scope="sys")


@cute.jit
def send_if(wanted: cutlass.Boolean | bool, address: cutlass.Int64, packet: cutlass.Int64) -> None:
    if wanted:
        send(address, packet)


def load_word(tensor: cute.Tensor, offset: cutlass.Int32) -> cutlass.Int32:
    """A word that another launch, or the other ranks' launches, may have written: never from a stale cache line."""
    return cute.arch.load(tensor.iterator + offset, cutlass.Int32, sem="relaxed", scope="sys")


def limit_of(failure: cute.Tensor, timeout_us: cutlass.Int32) -> cutlass.Int64:
    """Nanoseconds to wait: none once a rank was silent."""
    waits = load_word(failure, 0) == 0
    return cutlass.Int64(cutlass.select_(waits, cutlass.Int64(timeout_us) * NANOSECONDS, cutlass.Int64(0)))


def receive(
    arriving: list[tuple[cutlass.Int64, int | cutlass.Int32]],
    limit: cutlass.Int64,
    failure: cute.Tensor,
    wanted: cutlass.Boolean | None = None,
) -> cute.Tensor:
    """The packets that arrive at these places, in registers; zeros are left there.

    arriving: the address of each, and the rank that it comes from, to be named when it is silent. wanted: whether
    anything will come; if not, packets are zeros.
    """
    count = len(arriving)
    packets, places = (cute.make_rmem_tensor((count,), cutlass.Int64) for _ in range(2))
    sources = cute.make_rmem_tensor((count,), cutlass.Int32)
    for i, (place, source) in enumerate(arriving):
        places[i] = place
        sources[i] = cutlass.Int32(source)
    _await(packets, places, wanted, sources, count, limit, failure)
    return packets


@cute.jit
def _await(
    packets: cute.Tensor,
    places: cute.Tensor,
    wanted: cutlass.Boolean | None,
    sources: cute.Tensor,
    count: cutlass.Constexpr,
    limit: cutlass.Int64,
    failure: cute.Tensor,
) -> None:
    expected = cutlass.Boolean(True) if cutlass.const_expr(wanted is None) else wanted
    packets.fill(0)
    started = cutlass.Int64(0)
    polls = cutlass.Int32(0)
    waiting = expected
    while waiting:
        waiting = cutlass.Boolean(False)
        for i in cutlass.range_constexpr(count):
            packets[i] = cute.arch.load(_pointer(places[i]), cutlass.Int64, sem="relaxed", scope="sys")
        for i in cutlass.range_constexpr(count):
            waiting = waiting | (packets[i] == 0)
        polls += 1
        if waiting & (polls % POLLS == 0):
            now = cute.arch.globaltimer()
            if started == 0:
                started = now
            if now - started >= limit:
                waiting = cutlass.Boolean(False)
                for i in cutlass.range_constexpr(count):
                    if packets[i] == 0:
                        packets[i] = cutlass.Int64(NAN_PACKET)
                        if limit > 0:  # who was silent first is what counts
                            failure[0] = sources[i] + 1
    if expected:
        for i in cutlass.range_constexpr(count):
            send(places[i], cutlass.Int64(0))


def _pointer(address: cutlass.Int64) -> cute.Pointer:
    return cute.make_ptr(cutlass.Int64, address, cute.AddressSpace.gmem, assumed_align=PACKET_BYTES)


def values_of(packets: cute.Tensor, index: int, count: int, dtype: type) -> cute.TensorSSA:
    """Packets [index * count, (index + 1) * count) as FP32 values."""
    values = cute.make_rmem_tensor((count * PACKET_BYTES * 8 // dtype.width,), dtype)
    words = cute.recast_tensor(values, cutlass.Int64)
    for i in range(count):
        words[i] = packets[index * count + i]
    return values.load().to(cutlass.Float32)


def sum_in_rank_order(packets: cute.Tensor, world_size: int, count: int, dtype: type) -> cute.TensorSSA:
    """The sum over the ranks of `count` packets from each, FP32, one addition after the other."""
    total = values_of(packets, 0, count, dtype)
    for source in range(1, world_size):
        total = total + values_of(packets, source, count, dtype)
    return total


@cute.jit
def count_epoch(epochs: cute.Tensor, counter: cutlass.Int32, epoch: cutlass.Int32) -> None:
    """Count this launch; every thread of the CTA has read `epoch` before the first one comes here."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.store(epochs.iterator + counter, epoch + 1)
