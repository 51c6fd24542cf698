"""``TextDataModule``: what all DataModules share: sources, streams, the tokenizer of the run and its chat template."""

import copy
import os
from collections.abc import Collection
from typing import Any, TypeVar

import lightning as L

from rlhfkit.argument_names import AnswersNames
from rlhfkit.datamodules.streaming import MixedStream, RowReader, SourceStream, Transform
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokensInText, check_special_tokens_in_text
from rlhfkit.datamodules.tokenization.mixture import Sources, as_mixture, list_sources
from rlhfkit.datamodules.tokenization.sources import describe
from rlhfkit.mesh import Mesh, mesh_of
from rlhfkit.protocols import HasModelLimits, HasTokenizer, SeesImages, TakesTokenizer
from rlhfkit.validation import check_integer

T = TypeVar("T")


class TextDataModule(L.LightningDataModule, metaclass=AnswersNames):
    """Base of the DataModules, which say what their rows become.

    Args:
        data: A source, or several with their weights.
        split: Split of ``data``, if it has several.
        validation_split: Split of the validation data, if it has several.
        subset: Configuration of a hub data set.
        shuffle: Shuffle each pass over the data.
        seed: Seed of the shuffling.
        apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template.
        system: System message before each conversation.
        chat_template_kwargs: Passed to the template.
        special_tokens_in_text: What to do with control tokens in the data.
        tokenizer: A tokenizer or its name; ``None``: that of the LightningModule.
        allow_image_urls: Fetch images of rows from ``http`` and ``https`` URLs.
        streaming: Read and tokenise the data during training.
        shuffle_buffer_size: Rows of a source that are read into memory and shuffled together.
        passes: End the run when the data of a stream was read that often; ``None``: the Trainer's limits end it.

    Raises:
        ValueError: If an argument is out of range, or ``passes`` is given without a stream.
    """

    def __init__(
        self,
        data: Sources,
        *,
        split: str,
        validation_split: str,
        subset: str | None,
        shuffle: bool,
        seed: int,
        apply_chat_template: bool | None,
        system: str | None,
        chat_template_kwargs: dict[str, Any] | None,
        special_tokens_in_text: SpecialTokensInText | None,
        tokenizer: Any,
        allow_image_urls: bool,
        streaming: bool,
        shuffle_buffer_size: int,
        passes: int | None,
    ) -> None:
        super().__init__()
        check_integer("seed", seed)
        check_integer("shuffle_buffer_size", shuffle_buffer_size, minimum=1)
        check_integer("passes", passes, minimum=1, optional=True)
        if passes is not None and not streaming:
            raise ValueError(
                f"passes={passes} ends a run over a stream: give streaming=True, or Trainer(max_epochs=...)"
            )
        check_special_tokens_in_text(special_tokens_in_text)
        self.data = as_mixture(data)
        self.split = split
        self.validation_split = validation_split
        self.subset = subset
        self.shuffle = shuffle
        self.seed = seed
        self.apply_chat_template = apply_chat_template
        self.system = system
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.special_tokens_in_text = special_tokens_in_text
        self.tokenizer = tokenizer
        self.allow_image_urls = allow_image_urls
        self.streaming = streaming
        self.shuffle_buffer_size = shuffle_buffer_size
        self.passes = passes
        self._tokenized_with: Any = None
        self._own_tokenizer: Any = None

    # ------------------------------------------------------------------ the one tokenizer of a run

    def _load_tokenizer(self) -> Any:
        """Return the tokenizer that data, episodes, engines and exports of the run share.

        The DataModule's own, or one with the chat template that it was given, becomes the LightningModule's; without
        either it is that of the LightningModule.

        Raises:
            ValueError: If there is none, the module or an earlier run of this DataModule has another, or it has tokens
                that the model does not know.
        """
        module: Any = None if self.trainer is None else self.trainer.lightning_module
        name, template = type(self).__name__, self.chat_template_kwargs.get("chat_template")
        giver = f"{name}({'tokenizer' if template is None else 'chat_template_kwargs'}=...)"
        if self._own_tokenizer is None:
            self._own_tokenizer = self._make_own_tokenizer(module, template)
        own = self._own_tokenizer
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
        _check_same(found, self._tokenized_with, where, f"an earlier run of this {name}")
        self._tokenized_with = found
        _check_vocabulary(found, module.vocabulary_size if isinstance(module, HasModelLimits) else None)
        return found

    def _make_own_tokenizer(self, module: Any, template: str | None) -> Any:
        """The DataModule's own tokenizer, with its own template; ``None``: it has neither."""
        from rlhfkit.models.load import load_tokenizer, with_padding_token

        own = self.tokenizer
        if isinstance(own, str | os.PathLike):
            own = load_tokenizer(os.fspath(own), trust_remote_code=getattr(module, "trust_remote_code", False))
        if template is not None:
            own = module.tokenizer if own is None and isinstance(module, HasTokenizer) else own
            if own is not None:
                own = copy.deepcopy(own)
                own.chat_template = own.get_chat_template(template)
        return None if own is None else with_padding_token(own)

    # ------------------------------------------------------------------ what rows become

    def _formatter(self, tokenizer: Any) -> PromptFormatter:
        style: dict[str, Any] = {
            "apply_chat_template": self.apply_chat_template,
            "system": self.system,
            "chat_template_kwargs": self.chat_template_kwargs,
            "special_tokens_in_text": self.special_tokens_in_text,
        }
        module: Any = None if self.trainer is None else self.trainer.lightning_module
        processor = module.image_processor if isinstance(module, SeesImages) else None
        if processor is None:
            return PromptFormatter(tokenizer, **style)
        from rlhfkit.datamodules.tokenization.images import VisionFormatter

        return VisionFormatter(tokenizer, processor, allow_urls=self.allow_image_urls, **style)

    def _reader(self, source: Any) -> RowReader:
        return RowReader(source, split=self.split, subset=self.subset)

    def _source_stream(
        self,
        reader: RowReader,
        transform: Transform[T],
        columns: Collection[str | None],
        what: str = "a token to learn",
    ) -> SourceStream[T]:
        """The stream of what the rows of a source become; ``columns`` that are ``None`` are not read."""
        return SourceStream(
            reader,
            transform,
            columns=[column for column in columns if column is not None],
            block=self.shuffle_buffer_size,
            seed=self.seed if self.shuffle else None,
            what=what,
        )

    def _stop_after_passes(self, stream: MixedStream[Any], position: Any) -> None:
        if self.trainer is not None:
            stream.stop_after(self.passes, self.trainer, position)

    @property
    def _description(self) -> str:
        return " and ".join(describe(source) for source in list_sources(self.data))

    @property
    def _mesh(self) -> Mesh:
        return Mesh() if self.trainer is None else mesh_of(self.trainer)

    def _attached_trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer: pass it to trainer.fit(module, datamodule)"
            )
        return self.trainer


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
