"""``SFTDataModule``: prompts with completions, conversations, or plain text, for supervised fine-tuning."""

import logging
from typing import TYPE_CHECKING, Any, Literal

import lightning as L

from rlhfkit.data.collate import collate_tokens
from rlhfkit.data.step_loader import CountedRows, StepLoader
from rlhfkit.datamodules.chat import PromptFormat
from rlhfkit.datamodules.examples import ExampleBuilder, TokenExamples
from rlhfkit.datamodules.sources import Source, check_columns, describe, load_tokenizer, no_loader, read_rows

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)


class SFTDataModule(L.LightningDataModule):
    """Tokenised examples from files, the hub or memory, in optimizer steps that are the same on any number of ranks.

    Three kinds of data, by the columns that are named:

    - prompt and completion (the default): only the completion and the end-of-sequence token are learned;
    - ``messages="messages"``: chat messages through the tokenizer's template; only what the assistant says is learned,
      by the template's ``{% generation %}`` marks where it has them;
    - ``text="text"``: everything is learned, as in pretraining.

    Example::

        data = SFTDataModule("sft.jsonl", prompt="question", completion="answer", micro_batch_size=16)
    """

    def __init__(
        self,
        data: Source,
        *,
        prompt: str = "prompt",
        completion: str = "completion",
        messages: str | None = None,
        text: str | None = None,
        validation_data: Source | None = None,
        split: str = "train",
        validation_split: str = "test",
        subset: str | None = None,
        micro_batch_size: int = 8,
        max_length: int = 2048,
        overlong: Literal["truncate", "drop", "error"] = "truncate",
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        apply_chat_template: bool | None = None,
        system: str | None = None,
        chat_template_arguments: dict[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Remember what to read; nothing is opened before ``setup``.

        Args:
            data: Where the examples are, see :data:`~rlhfkit.datamodules.sources.Source`.
            prompt: Column of the prompts: text or chat messages, written as ``PromptDataModule`` writes them.
            completion: Column of the completions: text, or the chat messages of the answer.
            messages: Column of whole conversations; takes the place of prompt and completion.
            text: Column of plain text; takes the place of prompt and completion.
            validation_data: Where the validation examples are; same columns.
            split: Split of ``data``, where it has several.
            validation_split: Split of ``validation_data``, where it has several.
            subset: Configuration of a hub data set.
            micro_batch_size: Sequences per micro-batch on average (micro-batches have equal tokens, not equal counts).
            max_length: Tokens per sequence.
            overlong: What happens to longer sequences; ``"truncate"`` cuts their end. Counts are logged, and what has
                nothing left to learn is left out.
            drop_last: Leave out the last optimizer step of an epoch when it is not full.
            shuffle: Shuffle each epoch; the order of the file when false.
            seed: Of the shuffling.
            apply_chat_template: Wrap text prompts as a user message; ``None``: when the tokenizer has a template.
            system: System message put in front; needs the chat template.
            chat_template_arguments: Passed to the template.
            tokenizer: A tokenizer or its name; ``None``: the LightningModule's attribute ``tokenizer``.

        Raises:
            ValueError: If an argument is out of range, or both ``messages`` and ``text`` are given.
        """
        super().__init__()
        if messages is not None and text is not None:
            raise ValueError(f"name messages={messages!r} or text={text!r}, not both: they are two kinds of data")
        if micro_batch_size < 1:
            raise ValueError(f"{type(self).__name__}(micro_batch_size=...) must be at least 1, got {micro_batch_size}")
        if max_length < 2:
            raise ValueError(
                f"max_length must be at least 2 (one token to learn and one in front of it), got {max_length}"
            )
        if overlong not in ("truncate", "drop", "error"):
            raise ValueError(f"overlong must be 'truncate', 'drop' or 'error', got {overlong!r}")
        self.data = data
        self.prompt = prompt
        self.completion = completion
        self.messages = messages
        self.text = text
        self.validation_data = validation_data
        self.split = split
        self.validation_split = validation_split
        self.subset = subset
        self.micro_batch_size = micro_batch_size
        self.max_length = max_length
        self.overlong = overlong
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.seed = seed
        self.apply_chat_template = apply_chat_template
        self.system = system
        self.chat_template_arguments = dict(chat_template_arguments or {})
        self.tokenizer = tokenizer
        self.examples: CountedRows | None = None
        """The training examples, after ``setup``."""
        self.validation_examples: CountedRows | None = None
        """The validation examples, after ``setup``."""

    def prepare_data(self) -> None:
        """Download and convert once per machine, so that the other ranks find it done."""
        read_rows(self.data, split=self.split, subset=self.subset)
        if self.validation_data is not None:
            read_rows(self.validation_data, split=self.validation_split, subset=self.subset)

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise; a second call does nothing.

        Args:
            stage: Not used.

        Raises:
            ValueError: If a column is missing, a value has the wrong type, or nothing is left to learn.
        """
        if self.examples is not None:
            return
        trainer = self.trainer
        tokenizer = load_tokenizer(self.tokenizer, None if trainer is None else trainer.lightning_module)
        if self.validation_data is not None:
            self.validation_examples = self._build(self.validation_data, self.validation_split, tokenizer)
        self.examples = self._build(self.data, self.split, tokenizer)

    def _build(self, source: Source, split: str, tokenizer: Any) -> CountedRows:
        """Read a source and make examples of it; override for other columns."""
        rows = read_rows(source, split=split, subset=self.subset)
        if self.messages is not None:
            return self._tokenised(rows, source, tokenizer, messages=self.messages)
        if self.text is not None:
            return self._tokenised(rows, source, tokenizer, text=self.text)
        return self._tokenised(rows, source, tokenizer, prompt=self.prompt, completion=self.completion)

    def _tokenised(self, rows: "Dataset", source: Source, tokenizer: Any, **columns: str) -> TokenExamples:
        """Examples of rows, by the columns that :meth:`ExampleBuilder.build` takes."""
        check_columns(rows, source, **columns)
        style = PromptFormat(
            tokenizer,
            apply_chat_template=self.apply_chat_template,
            system=self.system,
            chat_template_arguments=self.chat_template_arguments,
        )
        return ExampleBuilder(style, self.max_length, self.overlong, describe(source)).build(rows, **columns)

    def train_dataloader(self) -> StepLoader[Any]:
        """Micro-batches of this rank, with the exact totals of their optimizer step."""
        trainer = self._attached()
        return self._loader(
            self.examples,
            accumulate=trainer.accumulate_grad_batches,
            shuffle=self.shuffle,
            epoch=lambda: trainer.current_epoch,
            drop_last=self.drop_last,
        )

    def val_dataloader(self) -> Any:
        """Validation micro-batches whose plain mean of losses is the exact mean over all of them; or no loader."""
        if self.validation_data is None:
            return no_loader()
        return self._loader(self.validation_examples, accumulate=1, shuffle=False, whole_epoch=True)

    def _loader(self, examples: CountedRows | None, **arguments: Any) -> StepLoader[Any]:
        trainer = self._attached()
        if examples is None:
            raise RuntimeError(f"the data is not open yet: call {type(self).__name__}.setup() first (the Trainer does)")
        return self._step_loader(
            examples,
            lengths=examples.lengths,
            targets=examples.targets,
            micro_batch_size=self.micro_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            seed=self.seed,
            **arguments,
        )

    def _step_loader(self, examples: CountedRows, **arguments: Any) -> StepLoader[Any]:
        """The loader; override for batches of another kind."""
        return StepLoader(examples, collate_tokens, **arguments)

    def _attached(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError(f"{type(self).__name__} has no Trainer: pass it to trainer.fit(module, datamodule)")
        return self.trainer
