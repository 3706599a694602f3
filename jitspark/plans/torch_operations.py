"""The glue of a plan that is no kernel: copies, by torch. Their names are those that the plan's maker uses.

Imports nothing: an operation asks its tensors. Each writes into a tensor that exists, on torch's current stream.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def copy_embeddings(inputs_embeds: "Tensor", stream: "Tensor") -> None:
    """The residual stream, FP32, from the embeddings."""
    stream.copy_(inputs_embeds)


def allgather_columns(shard: "Tensor", out: "Tensor") -> None:
    """What a rank alone can do of a gather: its own columns in every rank's place."""
    rows, columns = shard.shape
    out.view(rows, -1, columns).copy_(shard[:, None])


TORCH_OPERATIONS = {("torch", each.__name__): each for each in (copy_embeddings, allgather_columns)}
