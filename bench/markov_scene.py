"""What the Markov measurements run on: inputs of one draft step at a deployment's sizes, and the call of the kernel."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from jitspark.checking.packed import load_kernels
from jitspark.key import recipe_of
from jitspark.spec import Specialization
from kernel_specs.markov_gumbel_sampling.spec import NUM_STEPS, specialize
from kernel_specs.markov_gumbel_sampling.tiling import STUCK

VOCAB_SIZE, MARKOV_RANK, MAX_REQUESTS = 202048, 512, 8
NUM_TENSORS = 12  # in a call without peers
MULTIPLIER, SOFT_CAP = 0.1767766952966369, 20.0


@dataclass(frozen=True, slots=True)
class Scene:
    """Inputs for `num_requests` requests over a shard of `vocab_rows` tokens that begins at `first_token`."""

    num_requests: int
    vocab_rows: int
    first_token: int
    base_logits: torch.Tensor
    markov_w1: torch.Tensor
    markov_w2: torch.Tensor
    input_ids: torch.Tensor
    anchor_idx: torch.Tensor
    sample_idx_mapping: torch.Tensor
    sample_pos: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    exchange: torch.Tensor

    def arguments(self, *, capped: bool = True) -> tuple[Any, ...]:
        """What the kernel is called with."""
        tensors = (
            self.base_logits, self.markov_w1, self.markov_w2, self.input_ids, self.anchor_idx, self.sample_idx_mapping,
            self.sample_pos, self.seeds, self.temperature, self.draft_tokens, self.draft_logits, self.exchange,
        )  # fmt: skip
        return (*tensors, self.first_token, *((MULTIPLIER, SOFT_CAP) if capped else (1.0,)))

    def exchanged_arguments(
        self, rank: int, shard_logits: torch.Tensor, winners: torch.Tensor, peers: torch.Tensor
    ) -> tuple[Any, ...]:
        """The same for a rank of several: its logits go to `shard_logits`, its winners to the memory at `peers`."""
        *tensors, _, exchange = self.arguments()[:NUM_TENSORS]
        return (*tensors, shard_logits, exchange, winners, peers, self.first_token, rank, MULTIPLIER, SOFT_CAP)

    def shard(self, rank: int, ranks: int, exchange_words: int) -> "Scene":
        """What one rank of several has of a scene over the whole vocabulary."""
        rows = self.vocab_rows // ranks
        own = slice(rank * rows, (rank + 1) * rows)
        return replace(
            self,
            vocab_rows=rows,
            first_token=own.start,
            base_logits=self.base_logits[..., own].contiguous(),
            markov_w2=self.markov_w2[own].contiguous(),
            draft_tokens=torch.zeros_like(self.draft_tokens),
            exchange=torch.zeros(exchange_words, dtype=torch.int64, device=self.exchange.device),
        )

    def to(self, device: str) -> "Scene":
        """The same on another GPU."""
        moved = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: v.to(device) for name, v in moved.items() if isinstance(v, torch.Tensor)})

    def take(self, whole: "Scene") -> None:
        """Have what `refresh` gave the whole vocabulary's scene, as far as it is this shard's."""
        self.base_logits.copy_(whole.base_logits[..., self.first_token : self.first_token + self.vocab_rows])
        for name in ("input_ids", "sample_pos", "seeds", "temperature"):
            getattr(self, name).copy_(getattr(whole, name))

    def refresh(self, generator: torch.Generator) -> None:
        """Other logits, anchors, seeds, positions and temperatures, in place."""
        self.base_logits.normal_(0, 8, generator=generator)
        self.input_ids.random_(0, len(self.markov_w1), generator=generator)
        self.sample_pos.random_(1, 1 << 20, generator=generator)
        self.seeds.random_(-(2**63), 2**63 - 1, generator=generator)
        self.temperature.uniform_(0.3, 1.5, generator=generator)

    def stuck(self) -> bool:
        return bool(self.exchange[STUCK])


def make_scene(
    num_requests: int,
    vocab_rows: int,
    generator: torch.Generator,
    exchange_words: int,
    vocab_size: int = VOCAB_SIZE,
    markov_rank: int = MARKOV_RANK,
) -> Scene:
    """Weights whose biases are of the logits' order; every request in a state of its own."""
    device = generator.device

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(0, scale, generator=generator)

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    states = torch.arange(num_requests, device=device).flip(0)
    scene = Scene(
        num_requests=num_requests,
        vocab_rows=vocab_rows,
        first_token=vocab_rows if vocab_rows < vocab_size else 0,
        base_logits=normal(num_requests, NUM_STEPS, vocab_rows),
        markov_w1=normal(vocab_size, markov_rank),
        markov_w2=normal(vocab_rows, markov_rank, scale=4 * markov_rank**-0.5),
        input_ids=integers(NUM_STEPS * num_requests).int(),
        anchor_idx=torch.arange(num_requests, device=device) * NUM_STEPS,
        sample_idx_mapping=states[:, None].repeat(1, NUM_STEPS),
        sample_pos=integers(num_requests, NUM_STEPS),
        seeds=integers(MAX_REQUESTS),
        temperature=torch.ones(MAX_REQUESTS, device=device),
        draft_tokens=integers(num_requests, NUM_STEPS),
        draft_logits=torch.zeros(MAX_REQUESTS, NUM_STEPS, vocab_size, dtype=torch.bfloat16, device=device),
        exchange=integers(exchange_words),
    )
    scene.refresh(generator)
    return scene


def specialization(vocab_rows: int, *, capped: bool = True, world_size: int = 1) -> Specialization:
    return specialize(VOCAB_SIZE, vocab_rows, MARKOV_RANK, NUM_STEPS, capped=capped, world_size=world_size)


def kernels(root: Path, wanted: list[Specialization], target: str) -> list[Any]:
    """The kernels' functions, from a read-only cache root, in order."""
    loaded = load_kernels(root, wanted, target)
    return [loaded[recipe_of(each, target).key].function for each in wanted]
