"""The branch in two shots: each rank sums some columns of every row, and sends its sums to all ranks.

A block of 128 columns is what a warp has of a row's vectors. Block b belongs to rank b mod world, where it has place
b // world: so every warp sends a vector to one rank, in one piece, and every CTA of every rank owns some.
"""

# ruff: noqa: INP001 - kernel folders are namespace packages

import cutlass
from cutlass import cute

from kernel_specs.primitives.exchange import Inbox, full, receive, send, send_if, sum_in_rank_order, values_of
from kernel_specs.primitives.residual_boundary import WIDTH, BoundaryRow
from kernel_specs.primitives.row_split import VECTOR

LANES = 32
COUNT = VECTOR // WIDTH  # vectors of a thread, of four columns: a packet of BF16 each
SUM_PACKETS = 2  # of a vector's sums, FP32


class TwoShot:
    """One row's exchange. Traced: made before `griddepcontrol.wait`, `branch` is called behind it."""

    def __init__(
        self,
        row: BoundaryRow,
        inboxes: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
        rank: cutlass.Int32,
        num_tokens: cutlass.Int32,
        world_size: int,
        shard_size: int,
    ) -> None:
        row_inbox, row_peers, sum_inbox, sum_peers = inboxes
        packets = shard_size // WIDTH
        self.row, self.rank, self.world_size = row, rank, world_size
        self.row_mail = Inbox(row_inbox, row_peers, rank, world_size, num_tokens, packets)
        self.sum_mail = Inbox(sum_inbox, sum_peers, rank, world_size, num_tokens, SUM_PACKETS * packets)
        blocks = [vector // LANES for vector in row.mine]
        self.owners = [block % world_size for block in blocks]
        self.places = [
            block // world_size * LANES + vector % LANES for block, vector in zip(blocks, row.mine, strict=True)
        ]
        self.aheads = [self._ahead(owner) for owner in self.owners]
        self.row_targets = [self.row_mail.address_of(ahead) for ahead in self.aheads]
        self.sum_targets = [self.sum_mail.address_of(ahead) for ahead in range(world_size)]

    def _ahead(self, owner: cutlass.Int32) -> cutlass.Int32:
        ahead = owner - self.rank
        return cutlass.Int32(cutlass.select_(ahead < 0, ahead + self.world_size, ahead))

    def send_row(self, own: list[cutlass.Int64], epoch: cutlass.Int32) -> None:
        """Each of the thread's packets to its owner."""
        self.row_mail.open(epoch)
        self.sum_mail.open(epoch)
        for i in range(COUNT):
            send(self.row_mail.place(self.row_targets[i], self.aheads[i], self.row.token, self.places[i]), own[i])

    def branch(self, limit: cutlass.Int64, failure: cute.Tensor) -> cute.TensorSSA:
        """The thread's columns of the sum, FP32. An owner that waits in vain sends NaN, so who is silent is named."""
        warps = self.row.boundary.threads // LANES
        alike = warps % self.world_size == 0  # then a warp owns all of its vectors, or none
        for vectors in [tuple(range(COUNT))] if alike else [(i,) for i in range(COUNT)]:
            self._share_sums(vectors, limit, failure)
        arriving = []
        for place, owner in zip(self.places, self.owners, strict=True):
            for piece in range(SUM_PACKETS):
                packet = place * SUM_PACKETS + piece
                arriving.append((self.sum_mail.place_from(owner, self.row.token, packet), owner))
        packets = receive(arriving, 2 * limit, failure)
        return values_of(packets, 0, len(arriving), cutlass.Float32)

    def _share_sums(self, vectors: tuple[int, ...], limit: cutlass.Int64, failure: cute.Tensor) -> None:
        """Where these vectors are this rank's: sum them over the ranks, in rank order, and send the sums to all."""
        is_owner = self.owners[vectors[0]] == self.rank
        count = len(vectors)
        arriving = [
            (self.row_mail.place_from(source, self.row.token, self.places[vector]), source)
            for source in range(self.world_size)
            for vector in vectors
        ]
        packets = receive(arriving, limit, failure, is_owner)
        total = sum_in_rank_order(packets, self.world_size, count, cutlass.BFloat16)
        sums = cute.make_rmem_tensor((count * WIDTH,), cutlass.Float32)
        sums.store(total)
        words = cute.recast_tensor(sums, cutlass.Int64)
        for i in range(self.world_size):
            ahead = (i + 1) % self.world_size  # this rank's own inbox last: others wait longer
            for vector in range(count):
                for piece in range(SUM_PACKETS):
                    packet = self.places[vectors[vector]] * SUM_PACKETS + piece
                    target = self.sum_mail.place(self.sum_targets[ahead], ahead, self.row.token, packet)
                    send_if(is_owner, target, full(words[vector * SUM_PACKETS + piece], "float32"))
