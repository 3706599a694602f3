"""Expert tensor parallelism: the routed experts cut anew, so that each rank holds its share of every expert.

vLLM loads them by expert (EP: rank r has experts r * E / tp and those behind it) and then reorders them in place, for
good. So each layer is taken just before that (`tap` puts itself before the method's post-processing, in the layers it
is given and nowhere else), exchanged in equal parts within the TP group, and written in the grouped GEMMs' own layout.
vLLM's copy stays for its prefill. Where this rank already has its share (TP 1, or experts that vLLM sharded by TP),
nothing is exchanged and the rest is the same.

Bounded: beside what stays, at most `staging_bytes` for what is sent and received, and a few experts being repacked.
A round takes as many experts of each rank as fit. Fails on all ranks, or on none (`ranks`): memory is compared before
the first layer, ranks agree before and after each exchange. Refuses what `expert_sources` does not know.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jitspark.errors import WeightsError
from jitspark.runtime import device_memory, expert_sources
from jitspark.runtime.expert_forms import BFLOAT16, ExpertSizes, Form, carved, form_of
from jitspark.runtime.expert_sources import Source
from jitspark.runtime.fallback import attempted
from jitspark.runtime.ranks import RankGroup

if TYPE_CHECKING:  # a geometry is anything with these fields: the library that reads one need not be installed
    from jitspark.geometry import Experts

MIB = 1 << 20
STAGING_BYTES = 1024 * MIB
# Codes of one repacking step. Its temporaries are eight times as much at most (tests measure it).
REPACK_BYTES = 16 * MIB
REPACK_FACTOR = 8


class ExpertShares:
    """This rank's share of every routed expert of a model, layer by layer.

    experts: the geometry's. layers: the indices of all layers that will be taken, in vLLM's order of post-processing.
    reserve_bytes: what must stay free on the device beside all this. free_bytes: asks a device for its free memory.
    may_give_up: where a rank cannot take a layer, all of them take none, and vLLM loads as if nobody had asked.
    """

    def __init__(
        self,
        experts: "Experts",
        layers: Sequence[int],
        ranks: RankGroup,
        *,
        staging_bytes: int = STAGING_BYTES,
        reserve_bytes: int = 0,
        free_bytes: Callable[[torch.device], int] = device_memory.free_bytes,
        may_give_up: bool = False,
    ) -> None:
        self._ranks = ranks
        self._sizes = ExpertSizes.of(experts, ranks.size)
        self._dtypes = {layer: BFLOAT16 if layer in experts.bf16_layers else experts.weight_dtype for layer in layers}
        self._forms = {dtype: form_of(dtype, self._sizes) for dtype in sorted(set(self._dtypes.values()))}
        self._staging_bytes = staging_bytes
        self._reserve_bytes = reserve_bytes
        self._free_bytes = free_bytes
        self._may_give_up = may_give_up
        self.given_up = False
        self._held: dict[int, dict[str, Tensor]] = {}

    def tap(self, layers: Mapping[int, Any]) -> None:
        """Take each of vLLM's routed-experts layers (by layer index) when vLLM has loaded it and before it reorders it.

        To be called when the model is made and nothing is loaded; then load, then `finish`.
        """
        for index, layer in layers.items():
            expert_sources.forget_scales(layer)
            self._tap(index, layer)

    def take(self, index: int, layer: Any) -> None:
        """This rank's share of every expert of the layer, which holds them as loaded. On all ranks, in one order.

        Taking a layer again writes to the same memory. Raises WeightsError for a layout that is not known,
        DeviceMemoryError before the first one is taken, RankError where another rank fails.
        """
        where = f"layer {index}, routed experts"
        with self._ranks.together(f"{where}: checking", self._digest()):
            form = self._form(index)
            source = expert_sources.read(where, layer, self._dtypes[index], form, self._ranks.rank, self._ranks.size)
            device = next(iter(source.parts.values())).device
            self._check_memory(device)
            held = self._held.get(index) or _allocated(form, device)
        if source.whole and self._ranks.size > 1:
            self._exchange(where, form, source, held)
        else:
            with self._ranks.together(f"{where}: repacking"):
                _place(form, held, 0, source.parts)
        self._write_scales(where, source, held)
        self._held[index] = held

    def finish(self) -> bool:
        """All layers are taken, on all ranks; False where they were given up.

        Raises WeightsError for one that vLLM did not post-process, RankError.
        """
        if not self.given_up:
            self._attempt("routed experts: all taken", self._finish)
        return not self.given_up

    def drop(self) -> None:
        """Give them up, and the memory that they have on the device."""
        self.given_up = True
        self._held.clear()

    def _attempt(self, step: str, part: Callable[[], None]) -> None:
        def done() -> bool:
            part()
            return True

        if not attempted(done, self._ranks, step, "decode", may_give_up=self._may_give_up):
            self.drop()

    def _finish(self) -> None:
        with self._ranks.together("routed experts: all taken", self._digest()):
            missing = sorted(set(self._dtypes) - set(self._held))
            if missing:
                raise WeightsError(
                    where="routed experts",
                    found=f"no weights of layers {missing} when all were loaded",
                    needed="every layer to be post-processed by vLLM",
                    remedy="Report this: vLLM loads this model in a way that is not known here.",
                )

    def tensors(self, index: int) -> Mapping[str, Tensor]:
        """What a plan names `layers.<index>.experts.<name>`, by name: all of the layer's, written once it is taken."""
        return self._held[index]

    def _tap(self, index: int, layer: Any) -> None:
        method = layer.quant_method
        stock = method.process_weights_after_loading

        def taken_first(given: Any) -> None:
            if not self.given_up:
                self._attempt(f"layer {index}, routed experts", lambda: self.take(index, given))
            if self.given_up:
                stock(given)  # nobody waits for a word any more
                return
            with self._ranks.telling(f"layer {index}, routed experts: vLLM's own order"):
                stock(given)

        method.process_weights_after_loading = taken_first

    def _form(self, index: int) -> Form:
        return self._forms[self._dtypes[index]]

    def _digest(self) -> str:
        """Equal on ranks that will exchange the same."""
        told = (self._sizes, self._dtypes, self._staging_bytes)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def needed_bytes(self) -> int:
        """Of the device: what stays of all layers, what is sent and received at one time, and the reserve."""
        stays = sum(self._form(index).held_bytes for index in self._dtypes)
        return stays + max(map(self._passing_bytes, self._forms.values())) + self._reserve_bytes

    def _passing_bytes(self, form: Form) -> int:
        """Beside what stays, while a layer of this form is taken."""
        repacked = REPACK_FACTOR * max(REPACK_BYTES, form.share_bytes(self._ranks.size))
        if self._ranks.size == 1:
            return repacked
        return 2 * self._ranks.size * self._round_experts(form) * form.share_bytes(self._ranks.size) + repacked

    def _check_memory(self, device: torch.device) -> None:
        if not self._held:
            device_memory.check("routed experts", device, self.needed_bytes(), self._free_bytes(device))

    def _round_experts(self, form: Form) -> int:
        """Experts of each rank that one exchange takes: what is sent and received fits `staging_bytes`, or is one."""
        tp = self._ranks.size
        fitting = self._staging_bytes // (2 * tp * form.share_bytes(tp))
        return max(1, min(self._sizes.num_experts // tp, fitting))

    def _exchange(self, where: str, form: Form, source: Source, held: Mapping[str, Tensor]) -> None:
        here = self._sizes.num_experts // self._ranks.size
        at_once = self._round_experts(form)
        for first in range(0, here, at_once):
            self._round(f"{where} {first}+ of each rank", form, source, held, range(first, min(first + at_once, here)))

    def _round(self, where: str, form: Form, source: Source, held: Mapping[str, Tensor], experts: range) -> None:
        ranks = self._ranks
        with ranks.together(f"{where}: packing"):
            sent = _packed(form, source, experts, ranks.size)
            received = torch.empty_like(sent)
        ranks.swap(received, sent)
        del sent
        with ranks.together(f"{where}: unpacking"):
            for rank, buffer in enumerate(received):
                first = rank * self._sizes.num_experts // ranks.size + experts.start
                _place(form, held, first, carved(buffer, form.parts, ranks.size))
            device_memory.wait_for(received.device)

    def _write_scales(self, where: str, source: Source, held: Mapping[str, Tensor]) -> None:
        """a13 * s13, a2 * s2, 1 / a13, 1 / a2, in FP32: the specs of the grouped GEMMs say what they are for."""
        if not source.input_scales.numel():
            return
        with self._ranks.together(f"{where}: scales"):
            pass
        scales, largest = source.scales, self._ranks.gather(source.input_scales).amax(dim=0)
        if source.whole:
            scales = self._ranks.gather(scales).flatten(0, 1)
        input_scale, intermediate_scale = largest[0:1], largest[1:2]
        with self._ranks.telling(f"{where}: writing scales"):
            held["gate_up.gate_up_scales"].copy_(input_scale * scales[:, :2])
            held["down.down_scales"].copy_(intermediate_scale * scales[:, 2])
            held["input.global_scale"].copy_(1.0 / input_scale)
            held["gate_up.global_scale"].copy_(1.0 / intermediate_scale)


def _allocated(form: Form, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in form.held.items()}


def _packed(form: Form, source: Source, experts: range, tp: int) -> Tensor:
    """[tp, experts, bytes of a share]: what each rank gets of these experts of this rank."""
    device = next(iter(source.parts.values())).device
    sent = torch.empty(tp, len(experts), form.share_bytes(tp), dtype=torch.uint8, device=device)
    for rank, buffer in enumerate(sent):
        for name, view in carved(buffer, form.parts, tp).items():
            whole = source.parts[name][experts.start : experts.stop]
            view.copy_(whole.chunk(tp, dim=2)[rank])
    return sent


def _place(form: Form, held: Mapping[str, Tensor], first: int, shares: Mapping[str, Tensor]) -> None:
    """A few experts at a time, so that repacking needs little memory."""
    for start, stop in _spans(shares):
        form.place(held, first + start, {name: share[start:stop] for name, share in shares.items()})


def _spans(shares: Mapping[str, Tensor]) -> Iterator[tuple[int, int]]:
    experts = len(next(iter(shares.values())))
    per_expert = sum(share[0].nbytes for share in shares.values())
    at_once = max(1, REPACK_BYTES // per_expert)
    for start in range(0, experts, at_once):
        yield start, min(start + at_once, experts)
