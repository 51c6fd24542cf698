"""Over how many machines an engine's processes are divided: as few as their devices need."""

from collections.abc import Mapping, Sequence


def machines_per_engine(processes: int, need: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int | None:
    """Return the fewest machines that hold an engine, with equally many of its processes on each.

    Args:
        processes: Processes of the engine.
        need: Resources of the whole engine, by Ray's names.
        nodes: Resources of each machine that engines may use.

    Returns:
        A divisor of ``processes``; ``None`` if there are too few machines that are large enough.
    """
    for count in range(1, processes + 1):
        if processes % count:
            continue
        part = {name: amount / count for name, amount in need.items()}
        fitting = sum(all(node.get(name, 0) >= amount for name, amount in part.items()) for node in nodes)
        if fitting >= count:
            return count
    return None
