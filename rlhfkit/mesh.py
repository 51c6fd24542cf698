"""``Mesh``: how the ranks of a run are divided into groups that compute forward passes together.

A mesh has three dimensions: data x sequence x tensor, tensor innermost, so that the ranks that exchange most are
neighbours. The ranks with one data index form a **forward group**: each brings a micro-batch of its own, they compute
all of them together (each a part of the tokens, and a part of the weights), and each gets the outputs of its own rows
back. So every rank has rows, losses and metrics of its own, whatever the mesh is, and gradients are averaged over all
ranks as without one. What differs is how many tokens fit: a row may be as long as the group together has room for.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rlhfkit.validation import check_integer

if TYPE_CHECKING:
    import lightning as L

T = TypeVar("T")

SequenceParallel = Literal["ulysses", "ring"]
"""How attention sees all tokens: each rank some heads of all (Jacobs et al. 2023, arXiv 2309.14509), or keys and values
go around (Liu et al. 2023, arXiv 2310.01889), or the first among neighbours and the second among their groups (Fang &
Zhao 2024, arXiv 2405.07719)."""


@dataclass(frozen=True)
class Mesh:
    """The place of one rank among all.

    Raises:
        ValueError: If the ranks cannot be divided so.
    """

    rank: int = 0
    world_size: int = 1
    sequence: int = 1
    """Parts into which the tokens of a forward pass are divided."""
    tensor: int = 1
    """Parts into which weights are divided."""

    def __post_init__(self) -> None:
        check_integer("sequence_parallel_size", self.sequence, minimum=1)
        check_integer("tensor_parallel_size", self.tensor, minimum=1)
        check_integer("world_size", self.world_size, minimum=1)
        check_integer("rank", self.rank, minimum=0, maximum=self.world_size - 1)
        if self.world_size % self.forward_group_size:
            raise ValueError(
                f"sequence_parallel_size {self.sequence} * tensor_parallel_size {self.tensor} = "
                f"{self.forward_group_size} ranks compute a forward pass together, which does not divide the "
                f"{self.world_size} rank(s) of this run: change Trainer(devices=..., num_nodes=...) or the two sizes"
            )

    @property
    def forward_group_size(self) -> int:
        """Ranks that compute a forward pass together."""
        return self.sequence * self.tensor

    @property
    def data(self) -> int:
        """Number of forward groups."""
        return self.world_size // self.forward_group_size

    @property
    def data_rank(self) -> int:
        """This rank's forward group, from 0."""
        return self.rank // self.forward_group_size

    @property
    def member(self) -> int:
        """This rank's place in its forward group, from 0."""
        return self.rank % self.forward_group_size

    @property
    def sequence_rank(self) -> int:
        """Which part of the tokens this rank computes, from 0."""
        return self.member // self.tensor

    @property
    def tensor_rank(self) -> int:
        """Which part of the weights this rank has, from 0."""
        return self.member % self.tensor

    def forward_groups(self) -> list[list[int]]:
        """The ranks of each forward group, by member."""
        size = self.forward_group_size
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def sequence_groups(self) -> list[list[int]]:
        """The ranks of each group with the same part of the weights, by part of the tokens."""
        return [ranks[part :: self.tensor] for ranks in self.forward_groups() for part in range(self.tensor)]

    def tensor_groups(self) -> list[list[int]]:
        """The ranks of each group with the same tokens, by part of the weights."""
        return [
            ranks[first : first + self.tensor]
            for ranks in self.forward_groups()
            for first in range(0, self.forward_group_size, self.tensor)
        ]


@dataclass(frozen=True, eq=False)
class ForwardGroup:
    """The process groups of this rank's forward group; ``None`` for those of one rank."""

    mesh: Mesh
    members: Any
    """All ranks of the forward group, by member."""
    sequence: Any
    """Those with the same part of the weights, by part of the tokens."""
    tensor: Any
    """Those with the same tokens, by part of the weights."""
    sequence_parallel: SequenceParallel = "ulysses"
    members_on_cpu: Any = None
    """Those of :attr:`members`, for objects, which never pass through NCCL."""

    @classmethod
    def create(cls, mesh: Mesh, sequence_parallel: SequenceParallel = "ulysses") -> "ForwardGroup":
        """Make the process groups and connect their ranks. A collective of all, on the default group's backend."""
        members = _own_group(mesh.forward_groups(), mesh.rank)
        sequence = _own_group(mesh.sequence_groups(), mesh.rank)
        tensor = _own_group(mesh.tensor_groups(), mesh.rank)
        on_cpu = members if dist.get_backend() == "gloo" else _own_group(mesh.forward_groups(), mesh.rank, "gloo")
        return cls(mesh, members, sequence, tensor, sequence_parallel, on_cpu)

    def gather(self, value: T) -> list[T]:
        """The values of all members, by member, picklable. A collective of the members."""
        if self.members_on_cpu is None:
            return [value]
        values: list[Any] = [None] * self.mesh.forward_group_size
        dist.all_gather_object(values, value, group=self.members_on_cpu)
        return values

    def __deepcopy__(self, memo: Any) -> "ForwardGroup":
        """Process groups are not copied: a copy of a model is computed by the same ranks."""
        return self


def _own_group(all_ranks: list[list[int]], rank: int, backend: str | None = None) -> Any:
    own = None
    for ranks in all_ranks:  # every rank must take part in making every group
        made = dist.new_group(ranks, backend=backend) if len(ranks) > 1 else None
        if rank in ranks:
            own = made
    if own is not None:
        _connect(own)
    return own


def _connect(group: Any) -> None:
    """Run a first collective of all members, in which NCCL connects them.

    All of them must make its first call. A ring's exchange may be made by some only: a packed row whose sequences end
    where a rank's tokens end leaves ranks without a message, and the others would wait for them.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    dist.all_reduce(torch.zeros(1, device=device), group=group)


# ---------------------------------------------------------------- which mesh a run and a model have


def mesh_of(trainer: "L.Trainer") -> Mesh:
    """The mesh of a Trainer's strategy; without one every rank computes its forward passes alone."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else Mesh(trainer.global_rank, trainer.world_size)


FORWARD_GROUP = "rlhfkit_forward_group"
"""Attribute of a Hugging Face model whose forward passes a group computes together."""


FORWARD = "rlhfkit_forward"
"""Attribute of a Hugging Face model that holds how it computes batches; chosen anew when it is not there."""


def set_forward_group(model: nn.Module, group: ForwardGroup | None) -> None:
    """Let a group compute a bare Hugging Face model's forward passes together; ``None``: each rank alone."""
    for name in (FORWARD_GROUP, FORWARD):
        model.__dict__.pop(name, None)
    if group is not None:
        setattr(model, FORWARD_GROUP, group)


def forward_group_of(model: nn.Module) -> ForwardGroup | None:
    """The group that a bare Hugging Face model's forward passes are computed by; ``None``: each rank alone."""
    group = getattr(model, FORWARD_GROUP, None)
    return group if isinstance(group, ForwardGroup) else None
