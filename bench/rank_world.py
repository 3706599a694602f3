"""The ranks of an exchange: their arguments, and what each must end with. Simulated on one GPU, or one per process.

In a simulated world every rank has memory and a stream of its own on the same GPU, and tables of peers that hold the
others' addresses: the kernels cannot tell.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitspark.checking.arguments import reference_function, reference_module, shape_of, tensor_args, torch_dtype
from jitspark.spec import Specialization

Values = dict[str, Any]  # by argument, in call order


@dataclass(frozen=True, slots=True)
class World:
    """What all ranks have alike, and the payloads [world, ...] of several rounds, in rank order."""

    specialization: Specialization
    axes: Mapping[str, int]
    common: Values
    rounds: Sequence[torch.Tensor]

    @property
    def size(self) -> int:
        return self.specialization.axes["world_size"]

    @property
    def payload(self) -> str:
        name: str = reference_module(self.specialization).PAYLOAD
        return name

    @property
    def tables(self) -> dict[str, str]:
        """The inbox of each table of peers."""
        inboxes: Sequence[str] = reference_module(self.specialization).INBOXES
        present = {arg.name for arg in tensor_args(self.specialization)}
        return {name.replace("inbox", "peers"): name for name in inboxes if name in present}

    @property
    def written(self) -> tuple[str, ...]:
        """What an exchange writes for others than itself."""
        own = ("epochs", "failure", *self.tables.values())
        return tuple(arg.name for arg in tensor_args(self.specialization) if arg.role != "in" and arg.name not in own)

    def values(self, rank: int, timeout_us: int) -> Values:
        """A rank's arguments before its first launch. Tables of peers are still to be filled."""
        fresh: Values = {"rank": rank, "timeout_us": timeout_us}
        for name in ("epochs", "failure", *self.tables.values()):
            fresh[name] = torch.zeros_like(self.common[name])
        for arg in tensor_args(self.specialization):
            if arg.role == "out":
                shape = shape_of(self.specialization, arg, self.axes)
                fresh[arg.name] = torch.zeros(
                    shape, dtype=torch_dtype(self.specialization, arg), device=self.rounds[0].device
                )
        fresh[self.payload] = self.rounds[0][rank].clone()
        copied = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in self.common.items()}
        return {
            arg.name: fresh[arg.name] if arg.name in fresh else copied[arg.name] for arg in self.specialization.args
        }

    def expected(self, rank: int, number: int) -> Values:
        """What the reference writes on this rank in a round."""
        values = self.values(rank, 0)
        values[self.payload].copy_(self.rounds[number][rank])
        reference_module(self.specialization).deliver(self.rounds[number], values)
        reference_function(self.specialization)(*values.values(), **self.specialization.statics)
        return {name: values[name] for name in self.written}


def draw_world(
    specialization: Specialization, axes: Mapping[str, int], seed: int, rounds: int, device: torch.device | str
) -> World:
    """The same on every process that has the same kind of device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    module = reference_module(specialization)
    drawn = [module.random_world(specialization, axes, generator) for _ in range(rounds)]
    # What is NaN in a draw, as it must not be read, the first draw's other arguments may read in the others.
    rounds_drawn = [every if number == 0 else every.nan_to_num(0.25) for number, (_, every) in enumerate(drawn)]
    return World(specialization, axes, drawn[0][0], rounds_drawn)


def wire_simulated(world: World, every: Sequence[Values]) -> None:
    """Fill the tables of all ranks with each other's addresses."""
    for table, inbox in world.tables.items():
        addresses = torch.tensor([values[inbox].data_ptr() for values in every], dtype=torch.int64)
        for values in every:
            values[table].copy_(addresses)


def launcher(kernel: Callable[..., Any], values: Values) -> Callable[[], None]:
    arguments = list(values.values())

    def launch() -> None:
        kernel(*arguments)

    return launch
