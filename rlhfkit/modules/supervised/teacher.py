"""The frozen teacher of a distillation: loaded beside the student, once it is known that both have the same tokens."""

import warnings
from typing import TYPE_CHECKING

from torch import nn

from rlhfkit.models import load_causal_lm, load_tokenizer
from rlhfkit.models.load import disable_dropout

if TYPE_CHECKING:
    from rlhfkit.modules.base import PolicyModule


def load_teacher(name: str, student: "PolicyModule") -> nn.Module:
    """Load a teacher, frozen and without dropout.

    Args:
        name: Folder or hub name.
        student: Whose teacher it is: tells its tokens, the type of the weights and the attention.

    Raises:
        ValueError: If its tokens are not the student's.
    """
    trusted = student.trust_remote_code
    ours, theirs = student.tokenizer.get_vocab(), load_tokenizer(name, trust_remote_code=trusted).get_vocab()
    if ours != theirs:
        different = sorted({token for token, _ in ours.items() ^ theirs.items()})
        raise ValueError(
            f"the teacher {name!r} has other tokens than the student {student.model_name!r} ({len(theirs)} and "
            f"{len(ours)}; {len(different)} differ, e.g. {different[:4]}): distillation compares the probabilities "
            "of the same tokens, so take a teacher of the same family"
        )
    teacher = load_causal_lm(name, dtype=student.model_dtype, attention=student.attention, trust_remote_code=trusted)
    disable_dropout(teacher)
    # Lightning 2.6 warns of every module in eval mode when fitting starts; this one is meant to be.
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
    return teacher.requires_grad_(False).eval()
