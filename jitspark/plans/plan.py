"""A plan: one step of the model as data, which two interpreters run (`executor`, `reference_executor`).

Frozen buffers and launches, for one number of rows. A plan is made from a geometry, a TP size, a target and a provider
for each part of the step; it holds no address, no weight and nothing of this machine, so all ranks have the same one.
Imports the standard library only: a serving process reads plans without the libraries that made them.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jitspark.key import Key

# Raised when the meaning of a stored plan changes: an older or newer file is refused.
VERSION = 1

CUTE = "cute"  # served by a kernel of ours; any other provider is a callable bound under (provider, operation)

READS = ("in", "inout")  # roles that read what a buffer holds

Size = int | str  # a name is bound when the plan is: num_blocks, max_blocks, max_positions


class Kind(enum.StrEnum):
    """Who owns a buffer's memory, and for how long what it holds is kept."""

    INPUT = "input"  # the caller's, read or updated in each step
    OUTPUT = "output"  # kept for the caller until the next step
    WORKSPACE = "workspace"  # a place in the arena, shared with buffers that are not alive at the same time
    WEIGHT = "weight"  # bound once
    KV_CACHE = "kv_cache"  # the caller's; bound once, and again when vLLM allocates anew
    SYMMETRIC = "symmetric"  # a place in the memory that all ranks map
    PEERS = "peers"  # device addresses of `of` on every rank, int64 [tp]
    SIGNAL = "signal"  # counters of an exchange in symmetric memory; zero when bound, never reset


# whose shapes depend on the number of rows, or who have a place in an arena
SIZED = frozenset(Kind) - {Kind.WEIGHT, Kind.KV_CACHE}


class Stage(enum.StrEnum):
    """What a plan covers."""

    DECODE = "decode"  # the backbone's layers and final norm, inside the CUDA graph
    LOGITS = "logits"  # lm_head and soft cap, outside of it
    DRAFT = "draft"  # the draft's forward over its query rows
    DRAFT_CONTEXT = "draft_context"  # keys and values of the rows that the draft takes over
    MARKOV = "markov"  # the draft's sampling loop


# what is done to a weight once, at binding (`backbone_weights` says what), and when it is taken
LAYOUTS = (
    "as_is", "down_slice", "gate_up_slice", "nvfp4_down_slice", "nvfp4_gate_up_slice", "one_of_all",
    "reciprocal_of_largest", "rows_of_rank", "stacked", "times_input_scale",
)  # fmt: skip
TAPS = ("loaded", "checkpoint")


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a weight comes from, which is the plan's contract with whoever binds it.

    tensor: the parameter's name in vLLM's model, below the text model: `layers.3.self_attn.qkv_proj.weight`.
    layout: `as_is` when the kernel reads what vLLM holds; otherwise the name of what is done to it once, at binding.
    tap: `loaded` when the parameter still holds it after vLLM's post-processing; `checkpoint` when that destroys it.
    shared: the kernel reads vLLM's own memory. Otherwise the bytes are held twice, as long as stock needs its own.
    """

    tensor: str
    layout: str = "as_is"
    tap: str = "loaded"
    shared: bool = True


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of the plan: shape and dtype are what every launch that names it must agree with.

    strides: None for a compact row-major tensor; otherwise elements per axis, names where they are known at binding.
    offset: of WORKSPACE and SYMMETRIC buffers, in bytes into their arena.
    of: of a PEERS buffer, the SYMMETRIC or SIGNAL buffer whose addresses it holds.
    """

    name: str
    kind: Kind
    shape: tuple[Size, ...]
    dtype: str
    strides: tuple[Size, ...] | None = None
    offset: int = 0
    of: str | None = None
    source: WeightSource | None = None


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A buffer in an argument's place.

    role: in, out, inout, or part: written in part, nothing of it read (rows of routes that nobody holds stay).
    early: of what is read: before the kernel waits for the launch before (`griddepcontrol.wait`), so it must have been
    complete one launch earlier than that. Of what is written: complete before the next launch can begin.
    shape: what the launch sees of a compact buffer, where that is not the buffer's own shape but as many elements.
    """

    buffer: str
    role: str
    early: bool = False
    shape: tuple[Size, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A number known when the plan is made, or (a text) the name of one known when it is bound: `rank`."""

    value: float | int | str
    dtype: str


Argument = TensorArgument | ScalarArgument


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: of the kernel `operation` (provider `cute`, by `key`), or of another provider's callable.

    name: where in the step it stands, `layers.3.qkv_gate`. part: of `runtime.parts`, what its provider was chosen for.
    An operation has the same arguments in the same order whoever serves it: that is the seam.
    triggers_early: the next launch may begin before this one has waited for the launch before.
    """

    name: str
    part: str
    provider: str
    operation: str
    key: Key | None
    arguments: tuple[Argument, ...]
    statics: Mapping[str, bool | int | float | str]
    triggers_early: bool = False

    def __post_init__(self) -> None:
        if type(self.statics) is not MappingProxyType:
            object.__setattr__(self, "statics", MappingProxyType(dict(self.statics)))

    def tensors(self) -> list[TensorArgument]:
        return [argument for argument in self.arguments if type(argument) is TensorArgument]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step for `rows` rows of `rows // query_length` requests. See ARCHITECTURE.md, "Plans and executor".

    workspace_bytes, symmetric_bytes: sizes of the two arenas that offsets point into.
    """

    stage: Stage
    geometry: str
    tp: int
    query_length: int
    rows: int
    target: str
    host: str
    providers: Mapping[str, str]
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    workspace_bytes: int
    symmetric_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "providers", MappingProxyType(dict(self.providers)))

    def keys(self) -> tuple[Key, ...]:
        """The entries that its launches need, each once, in the order of first use."""
        return tuple(dict.fromkeys(launch.key for launch in self.launches if launch.key is not None))

    def buffer_named(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}
