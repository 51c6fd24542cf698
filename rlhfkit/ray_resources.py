"""What a process needs of Ray's cluster, and where it is when a :class:`~rlhfkit.Placement` holds it already."""

from collections.abc import Mapping, Sequence
from typing import Any


class PlacementError(RuntimeError):
    """Ray's cluster cannot hold the processes of a run."""


class ReservedResources(dict[str, float]):
    """Ray resources of each process of a role, which bundles of a placement group hold.

    It can be given wherever resources are: ``ModelPool(resources=...)``,
    ``RLHFDeepSpeedStrategy(resources_per_rank=...)``. Plain values, so it can be pickled and sent to the process that
    starts the role; that process must be connected to the same cluster, and the one that made the group must live.

    Args:
        resources: Of each process.
        group: Hexadecimal id of the placement group.
        bundles: Index of the bundle of each process.
    """

    def __init__(self, resources: Mapping[str, float], group: str, bundles: Sequence[int]) -> None:
        super().__init__(resources)
        self.group = group
        self.bundles = tuple(bundles)

    def placement_group(self) -> Any:
        """Return Ray's object for the group."""
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(PlacementGroupID.from_hex(self.group))

    def check_processes(self, processes: int, what: str) -> None:
        """Raise PlacementError unless there is a bundle for each of so many processes."""
        if processes != len(self.bundles):
            raise PlacementError(
                f"Placement holds resources for {len(self.bundles)} {what}, and {processes} are to be started: give "
                "both the same number"
            )


def check_whole_gpus(resources: Mapping[str, float] | None) -> None:
    """Raise ValueError if the ranks of a group, with these resources each, would share GPUs."""
    gpus = (resources or {}).get("GPU", 0)
    if gpus % 1:
        raise ValueError(
            f"resources={dict(resources or {})}: a rank of several needs whole GPUs, as NCCL does not share them; "
            "give each 1, or have one rank"
        )


def actor_options(resources: Mapping[str, float] | None, process: int) -> dict[str, Any]:
    """Return the options of the Ray actor of a process.

    Args:
        resources: Of each process; ``None``: none that are counted.
        process: Its number, from 0; says which bundle of :class:`ReservedResources` it has.
    """
    others = dict(resources or {})
    options: dict[str, Any] = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0), "resources": others}
    if isinstance(resources, ReservedResources):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            resources.placement_group(), placement_group_bundle_index=resources.bundles[process]
        )
    return options
