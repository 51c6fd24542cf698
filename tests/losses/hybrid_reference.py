"""How a text goes on in the tokens of student and teacher, with dictionaries of texts and plain numbers."""

import math
from collections.abc import Mapping, Sequence


def outcomes(tokens: Mapping[str, float], span: Sequence[str], later: float, *, other_is_one: bool) -> dict[str, float]:
    """Probabilities of each token as the next, and of the span, whose name is in brackets.

    Args:
        tokens: Probability of each text.
        span: The tokens of the span.
        later: Log-prob of all but its first token.
        other_is_one: Whether the other side writes the span with one token.
    """
    found, whole = dict(tokens), "".join(span)
    probability = found[span[0]] * math.exp(later)
    found[span[0]] -= probability
    if other_is_one and whole in found and whole != span[0]:
        probability += found[whole]
        found[whole] = 0.0
    return found | {"(span)": probability}


def compare(
    student: Mapping[str, float], teacher: Mapping[str, float], divergence: str, weight: float
) -> tuple[float, float]:
    """The divergence of what both have, and the distance of the sorted rest."""

    def kl(first: Mapping[str, float], second: Mapping[str, float]) -> float:
        pairs = [(first[text], second[text]) for text in student.keys() & teacher.keys()]
        return sum((one * math.log(one / other) if one > 1e-12 else 0.0) - one + other for one, other in pairs)

    mean = {text: weight * teacher[text] + (1 - weight) * student[text] for text in student.keys() & teacher.keys()}
    jsd = weight * kl(teacher, mean) + (1 - weight) * kl(student, mean)
    sides = (student, teacher), (teacher, student)
    left = [sorted((side[text] for text in side.keys() - other.keys()), reverse=True) for side, other in sides]
    size = max(map(len, left))
    first, second = (values + [0.0] * (size - len(values)) for values in left)
    distance = sum(abs(one - other) for one, other in zip(first, second, strict=True))
    return {"forward_kl": kl(teacher, student), "reverse_kl": kl(student, teacher), "jsd": jsd}[divergence], distance
