"""``TextDataModule``: what all DataModules share: sources, streams, the tokenizer of the run and its chat template."""

from collections.abc import Collection
from typing import Any, TypeVar

import lightning as L

from rlhfkit.argument_names import AnswersNames
from rlhfkit.datamodules.streaming import MixedStream, RowReader, SourceStream, Transform
from rlhfkit.datamodules.tokenization.chat import PromptFormatter, SpecialTokensInText, check_special_tokens_in_text
from rlhfkit.datamodules.tokenization.mixture import Sources, as_mixture, list_sources
from rlhfkit.datamodules.tokenization.run_tokenizer import RunTokenizer
from rlhfkit.datamodules.tokenization.sources import describe
from rlhfkit.mesh import Mesh, mesh_of
from rlhfkit.protocols import SeesImages
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
        self._run_tokenizer = RunTokenizer(self)

    def _load_tokenizer(self) -> Any:
        return self._run_tokenizer.find(None if self.trainer is None else self.trainer.lightning_module)

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
