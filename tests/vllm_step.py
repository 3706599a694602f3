"""A step of some requests as vLLM's forward sees it."""

from types import SimpleNamespace

import torch
from decode_steps import LENGTH, positions_of


class Step:
    """A step of some requests as vLLM's forward sees it: attention metadata by layer, and a forward context."""

    def __init__(self, decode, caches, requests, backend="FlashAttentionMetadata"):
        rows = LENGTH * len(requests)
        lens = torch.tensor([0 if each is None else each.seq_len for each in requests], dtype=torch.int32)
        self.positions = torch.cat([_positions(each) for each in requests])
        self.padding = torch.cat([torch.full((LENGTH,), each is None) for each in requests])
        self.metadata = {
            name: _metadata(backend, cache.block_table(), lens, cache.slot_mapping(), rows)
            for name, cache in zip(decode._layers, caches, strict=True)
        }
        mode = SimpleNamespace(name="NONE")
        self.context = SimpleNamespace(
            cudagraph_runtime_mode=mode, attn_metadata=self.metadata, is_padding=self.padding
        )


def _positions(request):
    return torch.zeros(LENGTH, dtype=torch.int64) if request is None else positions_of(request)


def _metadata(backend, table, lens, slots, rows):
    if backend == "FlashAttentionMetadata":
        content = {"max_query_len": LENGTH, "num_actual_tokens": rows, "causal": True, "block_table": table}
        content |= {"seq_lens": lens, "slot_mapping": slots}
    else:
        inner = SimpleNamespace(block_tables=table, seq_lens=lens, q_len_per_req=LENGTH)
        content = {"num_prefills": 0, "num_decodes": len(lens), "num_decode_tokens": rows, "num_actual_tokens": rows}
        content |= {"causal": True, "slot_mapping": slots, "decode": inner}
    return type(backend, (SimpleNamespace,), {})(**content)
