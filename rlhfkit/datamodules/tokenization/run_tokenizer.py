"""``RunTokenizer``: a DataModule's side of the one tokenizer of a run."""

import copy
import os
from typing import Any

from rlhfkit.protocols import HasModelLimits, HasTokenizer, TakesTokenizer


class RunTokenizer:
    """Finds the tokenizer of a run, which data, episodes, engines and exports share.

    A DataModule's own, or one with the chat template that it was given, becomes the module's; without either it is that
    of the module.

    Args:
        data: A DataModule with ``tokenizer`` (a tokenizer, its folder or hub name, or ``None``) and
            ``chat_template_kwargs``; a ``chat_template`` among these replaces the tokenizer's.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._found: Any = None  # what the data was tokenised with
        self._own: Any = None  # what this DataModule brings

    def find(self, module: Any = None) -> Any:
        """Return the tokenizer of a run of ``module``, which takes it over.

        Raises:
            ValueError: If there is none, the module or an earlier run of this DataModule has another, or it has tokens
                that the model does not know.
        """
        owner = type(self._data).__name__
        template = self._data.chat_template_kwargs.get("chat_template")
        giver = f"{owner}({'tokenizer' if template is None else 'chat_template_kwargs'}=...)"
        own = self._own = self._bring(module, template) if self._own is None else self._own
        if own is not None and isinstance(module, TakesTokenizer):
            module.take_tokenizer(own, giver)
        found = module.tokenizer if isinstance(module, HasTokenizer) else None
        found = own if found is None else found
        if found is None:
            raise ValueError(
                "no tokenizer: the LightningModule has none (attribute `tokenizer`), so give the DataModule one, "
                "tokenizer='folder or hub name'"
            )
        where = f"{type(module).__name__}.tokenizer"
        _check_same(found, own, where, giver)
        _check_same(found, self._found, where, f"an earlier run of this {owner}")
        self._found = found
        _check_vocabulary(found, module.vocabulary_size if isinstance(module, HasModelLimits) else None)
        return found

    def _bring(self, module: Any, template: str | None) -> Any:
        """The DataModule's own tokenizer, with its own template; ``None``: it has neither."""
        from rlhfkit.models.load import load_tokenizer, with_padding_token

        own = self._data.tokenizer
        if isinstance(own, str | os.PathLike):
            own = load_tokenizer(os.fspath(own), trust_remote_code=getattr(module, "trust_remote_code", False))
        if template is not None:
            own = module.tokenizer if own is None and isinstance(module, HasTokenizer) else own
            if own is not None:
                own = copy.deepcopy(own)
                own.chat_template = own.get_chat_template(template)
        return None if own is None else with_padding_token(own)


def _check_same(found: Any, other: Any, where: str, elsewhere: str) -> None:
    """Raise ValueError if there is another tokenizer, and it differs."""
    from rlhfkit.models.load import tokenizer_differences

    differences = [] if other is None else tokenizer_differences(found, other)
    if differences:
        raise ValueError(
            f"a run has one tokenizer, and those of {where} and {elsewhere} differ in {', '.join(differences)}: give "
            "both the same, or make a new DataModule without a tokenizer for this module"
        )


def _check_vocabulary(tokenizer: Any, known: int | None) -> None:
    """Raise ValueError if a tokenizer has tokens that the model has no embedding of."""
    vocabulary = tokenizer.get_vocab() if known is not None else {}
    beyond = [token for token, index in vocabulary.items() if index >= (known or 0)]
    if beyond:
        raise ValueError(
            f"the tokenizer has {len(beyond)} tokens that the model does not know, such as {beyond[0]!r} "
            f"({vocabulary[beyond[0]]}): the model has embeddings of the tokens 0 to {(known or 0) - 1}. Use the "
            "model's own tokenizer, or resize its embeddings before (model.resize_token_embeddings(len(tokenizer)), "
            "save_pretrained)"
        )
