"""Requests in the middle of decoding: transformers' model runs each alone, a plan runs them all from a paged cache.

A paged cache holds NaN wherever no query of a step may look, and block 0 is nobody's.
"""

import copy
from dataclasses import dataclass

import torch
from muse_spark_on_transformers import cached_keys_and_values
from transformers import DynamicCache

LENGTH = 8  # rows of a request
BLOCK = 16
MAX_BLOCKS = 16
CLEAR = 0.015  # how far apart scores must be for BF16 not to change a choice of experts
TRIES = 200


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model computes for one request's rows: the step's embeddings, and all that is compared."""

    embeds: torch.Tensor
    hidden: torch.Tensor
    taps: dict[int, torch.Tensor]
    clear: bool


class Request:
    """One request with `prior` tokens before the first step, run by transformers' model."""

    def __init__(self, model, taps, prior):
        self.model, self.taps, self.prior, self.steps = model, taps, prior, 0
        self.cache = DynamicCache(config=model.config)
        if prior:
            self._forward(torch.randint(1, model.config.vocab_size, (1, prior)), self.cache)
        self.history = [
            cached_keys_and_values(self.cache, layer) if prior else None for layer in range(len(model.layers))
        ]

    @property
    def seq_len(self):
        """With the tokens of the step that was made last."""
        return self.prior + LENGTH * self.steps

    def step(self):
        """Rows whose choices of experts are clear, and what the model makes of them."""
        for _ in range(TRIES):
            cache = copy.deepcopy(self.cache)
            found = self._forward(torch.randint(1, self.model.config.vocab_size, (1, LENGTH)), cache)
            if found.clear:
                self.cache, self.steps = cache, self.steps + 1
                return found
        raise AssertionError("no clear choices found")

    def _forward(self, ids, cache):
        taps, gaps, handles = {}, [], []
        for number, layer in enumerate(self.model.layers):
            keep = lambda _, __, out, number=number: taps.__setitem__(number, out[0])  # noqa: E731
            handles.append(layer.register_forward_hook(keep))
            gate = layer.mlp.gate
            handles.append(gate.register_forward_hook(lambda m, _, out: gaps.append(_gap(m, out[0]))))
        with torch.no_grad():
            embeds = self.model.embed_tokens(ids).bfloat16()
            out = self.model(inputs_embeds=embeds.float(), past_key_values=cache, use_cache=True)
        for handle in handles:
            handle.remove()
        taps = {layer: taps[layer] for layer in self.taps}
        return Expected(embeds[0], out.last_hidden_state[0], taps, min(gaps) > CLEAR)


def _gap(gate, logits):
    """The smallest distance between the last chosen score and the first that is not."""
    scores = (torch.sigmoid(logits) + gate.e_score_correction_bias).sort(dim=-1, descending=True).values
    return float((scores[:, gate.top_k - 1] - scores[:, gate.top_k]).min())


class PagedCache:
    """Blocks of one layer for some requests, in the order of `permutation`; None is a padded request."""

    def __init__(self, backbone, layer, requests, permutation, *, token_major=False, rank=0, tp=1):
        attention = backbone.attention
        heads = attention.num_key_value_heads // tp
        self.window = 0 if layer in backbone.full_attention_layers else attention.sliding_window
        self.requests = requests
        shape = (1 + MAX_BLOCKS * len(requests), BLOCK, heads, 2 * attention.head_dim)
        by_token = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        self.tensor = by_token.transpose(1, 2) if token_major else by_token.transpose(1, 2).contiguous()
        self.blocks = (1 + permutation).view(len(requests), MAX_BLOCKS)
        for number, request in enumerate(requests):
            if request is not None and request.prior:
                kept = request.history[layer][:, rank * heads : (rank + 1) * heads]
                slots = self.slots(number, torch.arange(request.prior - len(kept), request.prior))
                self.tensor[slots // BLOCK, :, slots % BLOCK] = kept.bfloat16()

    def slots(self, number, positions):
        return self.blocks[number, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def block_table(self):
        """For the step that the requests made last: block 0 where no query of it looks."""
        table = torch.zeros(self.blocks.shape, dtype=torch.int32)
        for number, request in enumerate(self.requests):
            if request is not None:
                first = max(request.seq_len - LENGTH - self.window + 1, 0) if self.window else 0
                used = slice(first // BLOCK, -(-request.seq_len // BLOCK))
                table[number, used] = self.blocks[number, used].int()
        return table

    def slot_mapping(self):
        rows = [
            torch.full((LENGTH,), -1) if each is None else self.slots(number, positions_of(each))
            for number, each in enumerate(self.requests)
        ]
        return torch.cat(rows)


def positions_of(request):
    return torch.arange(request.seq_len - LENGTH, request.seq_len)


def step_inputs(requests, found, caches):
    """A plan's inputs for the step that `found` (by request) describes, from each layer's cache."""
    width = next(each.embeds.shape[1] for each in found if each is not None)
    padding = torch.full((LENGTH, width), torch.nan, dtype=torch.bfloat16).zero_()
    per_layer = {
        f"layers.{layer}.{name}": tensor
        for layer, cache in enumerate(caches)
        for name, tensor in (("block_table", cache.block_table()), ("slot_mapping", cache.slot_mapping()))
    }
    return per_layer | {
        "inputs_embeds": torch.cat([padding if each is None else each.embeds for each in found]),
        "positions": torch.cat([torch.zeros(LENGTH).long() if r is None else positions_of(r) for r in requests]),
        "is_padding": torch.tensor([r is None for r in requests], dtype=torch.uint8).repeat_interleave(LENGTH),
        "seq_lens": torch.tensor([0 if r is None else r.seq_len for r in requests], dtype=torch.int32),
    }
