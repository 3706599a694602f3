"""Plans and their kernels out of a pack (of bench.decode_pack, draft_pack, ranks_pack), where neither can be made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.packed_cache import read_manifest
from jitspark.cache.store import PLANS
from jitspark.checking.packed import Kernels, load_keys
from jitspark.errors import PackError
from jitspark.plans.plan import Plan
from jitspark.plans.reader import PlanReader


@dataclass(frozen=True, slots=True)
class Packed:
    """A plan, and what the manifest says of it: purpose, geometry, layers, num_experts, provider."""

    plan: Plan
    about: Mapping[str, Any]

    @property
    def title(self) -> str:
        about, plan = self.about, self.plan
        return f"{about['geometry']}, {about['layers']} layers, TP {plan.tp}, {plan.rows} rows, {plan.stage}"


def read_plans(root: Path, purpose: str, target: str) -> list[Packed]:
    """The plans for `purpose`, in the manifest's order. Raises PackError where there are none for this target."""
    manifest = read_manifest(root)
    listed = [each for each in manifest.get("plans", ()) if each["purpose"] == purpose]
    if manifest["target"] != target or not listed:
        raise PackError(
            where="pack",
            found=f"{len(listed)} plans for {purpose}, for {manifest['target']}",
            needed=f"plans for {purpose}, for {target}, as this GPU is",
            remedy=f"Make the pack with bin/make-decode-pack --target {target}.",
        )
    reader = PlanReader()
    made = []
    for each in listed:
        path = root / PLANS / f"{each['plan']}.json"
        plan, _ = reader.read(path.read_bytes(), str(path))
        made.append(Packed(plan, each))
    return made


def load_plan_kernels(root: Path, plans: Sequence[Packed]) -> Kernels:
    return load_keys(root, [key for each in plans for key in each.plan.keys()])  # noqa: SIM118 - a plan's own method
