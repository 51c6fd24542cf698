"""The frozen teacher of a distillation."""

from torch import nn

from rlhfkit.models import load_causal_lm, load_tokenizer
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.base import PolicyModule, freeze


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
    """Load a frozen teacher without dropout, like the student; raises ValueError if their tokens differ."""
    check_teacher_tokens(name, student)
    trusted = student.trust_remote_code
    teacher = load_causal_lm(name, dtype=student.model_dtype, attention=student.attention, trust_remote_code=trusted)
    disable_dropout(teacher)
    return freeze(teacher)
