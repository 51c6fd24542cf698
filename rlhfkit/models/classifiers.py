"""Classes of classifiers: Transformers' own, or one made of its general parts for a family that has none."""

from functools import cache
from typing import Any


def classifier_class(config: Any, *, stepwise: bool) -> Any:
    """The class of a family's sequence or token classifier.

    Many families (Cohere, Granite, OLMoE, Falcon-H1 ...) have no classifier in Transformers. For these a class is made
    of the parts of which Transformers makes most of its own: a backbone, and a linear layer ``score`` on it. It has the
    name that Transformers would give it; what it saves is loaded by this function, not by Transformers' Auto classes.

    Args:
        config: A Transformers model configuration.
        stepwise: A token classifier instead of a sequence classifier.

    Returns:
        A class, or an Auto class, with ``from_pretrained``.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto: Any = AutoModelForTokenClassification if stepwise else AutoModelForSequenceClassification
    if type(config) in auto._model_mapping or type(config) not in AutoModel._model_mapping:
        return auto
    return _made(AutoModel._model_mapping[type(config)], stepwise)


@cache
def _made(backbone: Any, stepwise: bool) -> Any:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    general: Any = GenericForTokenClassification if stepwise else GenericForSequenceClassification
    family = next(kind for kind in backbone.__mro__ if PreTrainedModel in kind.__bases__)
    task = general.__name__.removeprefix("Generic")
    name = family.__name__.removesuffix("PreTrainedModel") + task
    return type(name, (general, family), {"base_model_prefix": family.base_model_prefix, "__module__": __name__})
