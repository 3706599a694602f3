"""When a forward of vLLM's is a decode step that a plan serves, and what its attention reads and writes.

Decided from shapes and from vLLM's forward context alone, which are equal on all ranks: all of them take over, or none.
Imports neither vLLM nor torch. Refuses whatever it does not recognise: that forward is stock's.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Where one layer's step lies in the paged cache. Tensors on the device, with addresses that stay.

    block_table: int32 [requests, blocks], column c the block of tokens [16c, 16c + 16).
    seq_lens: int32 [requests], the step's own tokens included; 0 for padding.
    slot_mapping: int64 [rows], -1 where nothing is stored.
    """

    block_table: Any
    seq_lens: Any
    slot_mapping: Any


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A uniform decode step of `rows` rows: each layer's tables by its name, and which rows are padding.

    is_padding: bool [rows], or None where vLLM does not say.
    """

    rows: int
    layers: Mapping[str, LayerTables]
    is_padding: Any


def decode_step(
    context: Any,
    rows: int,
    *,
    query_length: int,
    served_rows: Collection[int],
    layers: Collection[str],
    in_capture: Callable[[Any], bool],
) -> DecodeStep | None:
    """The step that vLLM captures a full graph of, or None for any other forward.

    context: vLLM's forward context, or None. in_capture: whether a forward with this attention metadata is part of a
    capture, the eager run before it included.
    """
    if context is None or rows not in served_rows or context.cudagraph_runtime_mode.name == "PIECEWISE":
        return None
    metadata = context.attn_metadata
    if not isinstance(metadata, dict) or not in_capture(metadata):  # a list: two microbatches
        return None
    tables = {name: layer_tables(metadata.get(name), rows, query_length) for name in layers}
    found = {name: table for name, table in tables.items() if table is not None}
    return DecodeStep(rows, found, context.is_padding) if len(found) == len(tables) else None


def layer_tables(metadata: Any, rows: int, query_length: int) -> LayerTables | None:
    """A layer's tables if all of its `rows` rows are requests of `query_length` tokens, else None.

    Reads the metadata of vLLM's FLASH_ATTN and FLASHINFER backends; any other is not recognised.
    """
    read = _READERS.get(type(metadata).__name__)
    return None if read is None or rows % query_length else read(metadata, rows, query_length)


def _flash_attn(metadata: Any, rows: int, query_length: int) -> LayerTables | None:
    requests = rows // query_length
    # a graph that prefills may replay too says so by a longer query than the rows of a request
    uniform = metadata.max_query_len == query_length and metadata.num_actual_tokens == rows
    if not uniform or metadata.causal is not True or len(metadata.block_table) != requests:
        return None
    return LayerTables(metadata.block_table, metadata.seq_lens[:requests], metadata.slot_mapping[:rows])


def _flashinfer(metadata: Any, rows: int, query_length: int) -> LayerTables | None:
    decode = metadata.decode
    tables = getattr(decode, "block_tables", None)  # its other decode wrapper keeps none
    uniform = metadata.num_prefills == 0 and metadata.num_decode_tokens == metadata.num_actual_tokens == rows
    if tables is None or not uniform or not metadata.causal or decode.q_len_per_req != query_length:
        return None
    if metadata.num_decodes != rows // query_length:
        return None
    return LayerTables(tables, decode.seq_lens, metadata.slot_mapping[:rows])


_READERS: Mapping[str, Callable[[Any, int, int], LayerTables | None]] = {
    "FlashAttentionMetadata": _flash_attn,
    "FlashInferMetadata": _flashinfer,
}
