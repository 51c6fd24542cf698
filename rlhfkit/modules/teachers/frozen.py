"""The frozen teacher of a distillation: the model, its tokens, and how it is compared."""

from torch import nn

from rlhfkit.losses.distillation import Remainder
from rlhfkit.models import load_causal_lm, load_tokenizer
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.base import PolicyModule, freeze
from rlhfkit.roles import FrozenModel
from rlhfkit.validation import check_integer, check_number


def check_comparison(
    divergence: object,
    *,
    teacher_weight: float,
    top_k: int | None,
    remainder: Remainder,
    chunk_size: int,
) -> None:
    """Check what says how distributions of student and teacher are compared.

    Args:
        divergence: ``None``: they are not.
        teacher_weight: Of ``jsd``.
        top_k: Of the teacher's likeliest tokens.
        remainder: Treatment of the others.
        chunk_size: Tokens whose logits exist at a time.

    Raises:
        ValueError: If one is out of range, or has no effect beside the others.
    """
    check_number("teacher_weight", teacher_weight, minimum=0, maximum=1)
    check_integer("top_k", top_k, minimum=1, optional=True)
    check_integer("chunk_size", chunk_size, minimum=1, why="it is in tokens")
    if divergence is None and top_k is not None:
        raise ValueError("without a divergence only the sampled token is compared: leave top_k out, or give one")
    if divergence is None:
        refuse_without_effect({"chunk_size": chunk_size != 1024}, "divergence=None, which makes no logits of a teacher")
    if divergence != "jsd":
        refuse_without_effect({"teacher_weight": teacher_weight != 0.5}, f"{divergence=}: it belongs to 'jsd'")
    if top_k is None:
        refuse_without_effect({"remainder": remainder != "bucket"}, "top_k=None, which compares all tokens")


def ask_for_likeliest(teacher: FrozenModel, top_k: int | None, *, reference: FrozenModel | None) -> None:
    """Have a teacher elsewhere give its likeliest tokens, for a divergence.

    Args:
        teacher: The teacher.
        top_k: How many.
        reference: The reference, which is asked for the sampled tokens.

    Raises:
        ValueError: If the number is missing, or both are one.
    """
    if top_k is None:
        raise ValueError(
            "a divergence compares the teacher's probabilities of all tokens, and a model elsewhere gives those of "
            "its likeliest: give top_k, as in top_k=20, or the teacher's name, so that it is a child"
        )
    if teacher is reference:
        raise ValueError(
            "the teacher is asked for its likeliest tokens and the reference for the sampled ones: give each a "
            "ModelPool or ServedModel of its own"
        )
    teacher.top = top_k


def check_teacher_tokens(name: str, student: PolicyModule) -> None:
    """Raise ValueError if the tokens of teacher and student differ."""
    trusted = student.trust_remote_code
    vocabulary = student.tokenizer.get_vocab()
    teacher_vocabulary = load_tokenizer(name, trust_remote_code=trusted).get_vocab()
    if vocabulary != teacher_vocabulary:
        different = sorted({token for token, _ in vocabulary.items() ^ teacher_vocabulary.items()})
        raise ValueError(
            f"the teacher {name!r} has other tokens than the student {student.model_name!r} "
            f"({len(teacher_vocabulary)} and {len(vocabulary)}; {len(different)} differ, e.g. {different[:4]}): "
            "distillation compares the probabilities of the same tokens, so take a teacher of the same family"
        )


def load_teacher(name: str, student: PolicyModule) -> nn.Module:
    """Load a frozen teacher without dropout, like the student; raises ValueError if its tokens differ."""
    check_teacher_tokens(name, student)
    trusted = student.trust_remote_code
    teacher = load_causal_lm(name, dtype=student.model_dtype, attention=student.attention, trust_remote_code=trusted)
    disable_dropout(teacher)
    return freeze(teacher)
