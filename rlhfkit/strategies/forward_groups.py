"""``ForwardGroupMixin``: the strategy's part in forward passes that several ranks compute together.

It knows the mesh, makes the process groups once the ranks have joined, and attaches the group to every Hugging Face
model of the LightningModule while the Trainer runs; :mod:`rlhfkit.models` reads it there.
"""

from collections.abc import Iterator
from typing import Any, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from rlhfkit.mesh import ForwardGroup, Mesh, SequenceParallel, set_forward_group
from rlhfkit.validation import check_integer

PACKED = "rlhfkit_packed"
"""How the names of our attention begin, which alone knows of tokens on other ranks."""


class ForwardGroupMixin(DDPStrategy):
    """The part of a strategy that lets ranks compute forward passes together."""

    sequence_parallel_size: int = 1
    sequence_parallel: SequenceParallel = "ulysses"
    tensor_parallel_size: int = 1
    _forward_group: tuple[Any, ForwardGroup] | None = None  # with the default process group that it belongs to

    def divide_sequences(self, size: int, kind: SequenceParallel) -> None:
        """Check and keep the arguments; raises ValueError."""
        check_integer("sequence_parallel_size", size, minimum=1)
        if kind not in get_args(SequenceParallel):
            raise ValueError(f"sequence_parallel must be one of {get_args(SequenceParallel)}, got {kind!r}")
        self.sequence_parallel_size, self.sequence_parallel = size, kind

    @property
    def mesh(self) -> Mesh:
        """Which ranks compute forward passes together; before the ranks have joined, that of rank 0.

        Raises:
            ValueError: If the sizes do not divide the number of ranks.
        """
        started = dist.is_available() and dist.is_initialized()
        ranks = self.world_size if started else max(self.world_size, self.num_nodes * len(self.parallel_devices or ()))
        return Mesh(
            self.global_rank if started else 0,
            ranks,
            sequence=self.sequence_parallel_size,
            tensor=self.tensor_parallel_size,
        )

    def _configure_launcher(self) -> None:
        """Also refuse, when the Trainer is made, a number of ranks that cannot be divided so."""
        super()._configure_launcher()
        _ = self.mesh

    @property
    def forward_group(self) -> ForwardGroup | None:
        """The process groups of the mesh, made when first asked for; ``None``: each rank alone. Then a collective."""
        if self.mesh.forward_group_size == 1:
            return None
        if self._forward_group is None or self._forward_group[0] is not dist.group.WORLD:
            self._forward_group = dist.group.WORLD, ForwardGroup.create(self.mesh, self.sequence_parallel)
        return self._forward_group[1]

    def attach_forward_group(self, module: nn.Module) -> None:
        """Let the ranks of the group compute all models of a module together. A collective of all ranks.

        Raises:
            ValueError: If one of them cannot be computed so.
        """
        group = self.forward_group
        if group is None:
            return
        models = list(hugging_face_models(module))
        for name, model in models:
            check_model(name, model, group)
        for _, model in models:
            set_forward_group(model, group)

    def detach_forward_group(self, module: nn.Module) -> None:
        """Undo :meth:`attach_forward_group`."""
        for _, model in hugging_face_models(module):
            set_forward_group(model, None)


def hugging_face_models(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost Hugging Face models in a module, with their names."""
    if hasattr(type(module), "get_input_embeddings") and hasattr(module, "config"):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from hugging_face_models(child, f"{name}.{child_name}".strip("."))


def check_model(name: str, model: Any, group: ForwardGroup) -> None:
    """Raise ValueError if several ranks cannot compute a model together."""
    asked = f"sequence_parallel_size={group.mesh.sequence}, tensor_parallel_size={group.mesh.tensor}"
    text = model.config.get_text_config()
    attention, ranks = str(text._attn_implementation), group.mesh.sequence
    if not attention.startswith(PACKED):
        raise ValueError(
            f"{asked}: {name!r} ({type(model).__name__}) runs with attention {attention!r}, and only our packed "
            "attention lets tokens on one rank see those on others: load it with attention='auto'. Families that "
            "cannot be packed (recurrent and hybrid ones; the log says why) cannot be divided"
        )
    if text is not model.config:
        raise ValueError(f"{asked}: {name!r} ({type(model).__name__}) has other inputs than text, which is unsupported")
    heads = text.num_attention_heads
    if group.sequence_parallel == "ulysses" and heads // group.mesh.tensor % ranks:
        raise ValueError(
            f"sequence_parallel='ulysses' deals the attention heads to the {ranks} ranks of a sequence group, which do "
            f"not divide the {heads // group.mesh.tensor} of {name!r} ({type(model).__name__}) on each: use a "
            "sequence_parallel_size that does, or sequence_parallel='ring', which needs no heads"
        )


class SequenceParallelDDPStrategy(ForwardGroupMixin, DDPStrategy):
    """Lightning's DDP whose neighbouring ranks divide the tokens of each forward pass among themselves.

    DDP's mean of the gradients over all ranks is the right one as it is: see :mod:`rlhfkit.mesh`.

    Args:
        sequence_parallel_size: Ranks that compute forward passes together.
        sequence_parallel: How attention sees all tokens; both as in
            :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy`.
        **kwargs: Arguments of Lightning's ``DDPStrategy``.

    Raises:
        ValueError: If an argument is wrong.
    """

    strategy_name = "rlhf_sequence_ddp"

    def __init__(
        self, sequence_parallel_size: int, sequence_parallel: SequenceParallel = "ulysses", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.divide_sequences(sequence_parallel_size, sequence_parallel)

    def setup(self, trainer: pl.Trainer) -> None:
        """Attach the forward group, then wrap the module."""
        assert self.lightning_module is not None
        self.attach_forward_group(self.lightning_module)
        super().setup(trainer)

    def teardown(self) -> None:
        """Detach the forward group."""
        if self.lightning_module is not None:
            self.detach_forward_group(self.lightning_module)
        super().teardown()
