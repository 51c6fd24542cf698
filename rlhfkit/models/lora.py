"""``LoRA``: which low-rank adapters are trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

from rlhfkit.validation import check_integer, check_number

INITS: dict[str, bool | str] = {"kaiming": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}
"""Our names of peft's ``init_lora_weights``."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train low-rank matrices instead of the model's weights: W + scale * B A (Hu et al., 2021, arXiv:2106.09685).

    Example::

        SFTModule("Qwen/Qwen3-0.6B", lr=2e-4, lora=LoRA(rank=16, alpha=32))
    """

    rank: int = 8
    """Rows of A and columns of B (peft's default)."""
    alpha: float = 16.0
    """The scale is ``alpha / rank`` (16: OpenRLHF's default)."""
    targets: str | tuple[str, ...] = "all-linear"
    """Last names of the layers that get an adapter; ``all-linear``: all of the backbone, not the output layer."""
    experts: bool = True
    """With ``all-linear``, also the experts of a mixture, each with matrices of ``rank``. Transformers holds a layer's
    experts in one tensor, and peft adds the adapters to it before it is used: a second copy of it exists until the
    backward pass. Neither ``dropout`` nor ``dora`` can be had for them."""
    dropout: float = 0.0
    """On the adapters' inputs; switched off, with a warning, where probabilities are compared."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` (Kalajdzievski, 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Train the length of each row of W too (DoRA, Liu et al., 2024, arXiv:2402.09353)."""
    init: Literal["kaiming", "gaussian", "orthogonal"] = "kaiming"
    """How A (B starts at 0) or both are drawn. Ways that change W itself (PiSSA, OLoRA) are left out: switching the
    adapter off would not give back the model that training started from."""

    def __post_init__(self) -> None:
        """Check every field once, where it is written."""
        check_integer("LoRA.rank", self.rank, minimum=1)
        check_number("LoRA.alpha", self.alpha, above=0)
        check_number("LoRA.dropout", self.dropout, minimum=0, below=1)
        rules: list[tuple[str, bool, str]] = [
            ("targets", bool(self.targets), "'all-linear' or names of layers"),
            ("init", self.init in INITS, f"one of {', '.join(INITS)}"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"LoRA.{name} must be {rule}, got {getattr(self, name)!r}")
        if not isinstance(self.targets, str):  # YAML hands over a list
            object.__setattr__(self, "targets", tuple(self.targets))

    @classmethod
    def of(cls, value: "LoRA | Mapping[str, Any] | None") -> "LoRA | None":
        """From the plain dictionary that a checkpoint holds.

        Args:
            value: That, or what is none of its business.

        Raises:
            ValueError: If the dictionary has other names.
        """
        if value is None or isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        unknown = sorted({*cast(Mapping[str, Any], value)} - {*known})
        if unknown:
            raise ValueError(f"LoRA has no {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**cast(Mapping[str, Any], value))

    def plain(self) -> dict[str, Any]:
        """As a dictionary of plain values, for checkpoints and logs."""
        values = asdict(self)
        return values | {"targets": self.targets if isinstance(self.targets, str) else list(self.targets)}
