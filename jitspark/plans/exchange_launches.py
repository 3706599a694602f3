"""Exchanges between ranks in a plan: the memory that their kernels ask for, and a plain gather of columns.

An exchange has an inbox in symmetric memory, its addresses on every rank, and counters of its own; all exchanges of a
rank share the word that tells of a silent one. They serve every layer of a plan, hence one number of rows: a rank whose
addresses are all its own exchanges with itself. `rank` and `timeout_us` are known when a plan is bound.
"""

from jitspark.plans.builder import Given, Memory, PlanBuilder
from jitspark.plans.plan import Kind
from jitspark.spec import Specialization
from kernel_specs.allgather_columns import spec as allgather_columns

PART = "all_reduce"
RANK, TIMEOUT = "rank", "timeout_us"
FAILURE = "exchange.failure"
INBOX = "inbox"  # how the names of inboxes end


def exchange_memory(name: str, prefix: str = "") -> dict[str, Given]:
    """The inbox of the exchange `name` and its addresses, as the arguments `{prefix}inbox` and `{prefix}peers`."""
    inbox = f"{name}.{prefix}inbox"
    return {
        f"{prefix}inbox": Memory(inbox, Kind.SYMMETRIC),
        f"{prefix}peers": Memory(f"{name}.{prefix}peers", Kind.PEERS, of=inbox),
    }


def exchange_control(name: str) -> dict[str, Given]:
    """The counters of the exchange `name`, and what all exchanges share."""
    return {
        "epochs": Memory(f"{name}.epochs", Kind.SIGNAL),
        "failure": Memory(FAILURE, Kind.SIGNAL),
        "rank": RANK,
        "timeout_us": TIMEOUT,
    }


def exchange_of(served: Specialization, name: str) -> dict[str, Given]:
    """All that the exchange of `served` asks for: the memory of each of its inboxes, and its control."""
    inboxes = [arg.name for arg in served.args if arg.name.endswith(INBOX)]
    memory = {key: each for inbox in inboxes for key, each in exchange_memory(name, inbox.removesuffix(INBOX)).items()}
    return {**memory, **exchange_control(name)}


def gather_columns(builder: PlanBuilder, name: str, exchange: str, shard: str, out: str, columns: int, tp: int) -> None:
    """A launch `name` that puts the ranks' `shard` side by side as `out` [rows, columns], through `exchange`."""
    served = allgather_columns.serving(columns, tp)
    memory = {**exchange_memory(exchange), **exchange_control(exchange)}
    builder.launch(name, PART, served, {"shard": shard, **memory, "out": out})
