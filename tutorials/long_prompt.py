"""A row that is longer than a rank has room for: two ranks compute it together, each half of its tokens.

``python tutorials/long_prompt.py --sequence-ranks 2`` makes a tiny model and needles in haystacks: a prompt of 1,000
characters, all dots but for eight equal digits somewhere in its first half, and the digit as its answer. It fine-tunes
the model with ``RLHFDeepSpeedStrategy(sequence_parallel_size=2)`` on two ranks, and prints how many tokens each of them
computes in a step, how much it keeps for the backward pass, and the losses. ``--sequence-ranks 1`` makes the same
updates on one rank, which computes and keeps twice as much.
"""

import argparse
import logging
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhfkit import Optimization, RLHFDeepSpeedStrategy, SFTDataModule, SFTModule
from rlhfkit.distributed import gather_objects


def make_model(folder: Path, seed: int) -> Path:
    """A random Llama of 80,000 parameters, one token per character; it is made once."""
    if folder.exists():
        return folder
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789.?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=16384
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        pad_token_id=wrapped.pad_token_id,
        eos_token_id=wrapped.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    wrapped.save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def haystacks(count: int, tokens: int, seed: int) -> list[dict[str, str]]:
    """Prompts of so many tokens, and their answers."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        digit, place = generator.choice("0123456789"), generator.randrange(tokens // 2 - 8)
        prompt = ("." * place + 8 * digit).ljust(tokens - 1, ".") + "?"
        rows.append({"prompt": prompt, "completion": digit})
    return rows


class Watch(L.Callback):
    """Tokens that this rank computes in a step, bytes that it keeps for the backward pass, and losses."""

    def __init__(self) -> None:
        self.tokens, self.bytes = 0, 0
        self.losses: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Count what the embeddings are given."""
        language_model = getattr(pl_module.policy, "module", pl_module.policy)

        def count(_layer: Any, arguments: tuple[Tensor, ...]) -> None:
            if pl_module.training:
                self.tokens = arguments[0].numel()

        language_model.get_input_embeddings().register_forward_pre_hook(count)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """See what autograd keeps of this forward pass, weights left out."""
        seen = {parameter.untyped_storage().data_ptr() for parameter in pl_module.parameters()}
        self.bytes = 0

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
            return tensor

        self.hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        self.hooks.__enter__()

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        """The forward pass is over."""
        self.hooks.__exit__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Remember the loss of the step, which is of the rows of all ranks."""
        self.losses.append(float(trainer.callback_metrics["loss"]))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train; return losses of the steps, the held-out losses, and of each rank tokens and bytes of the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/long_prompt"))
    parser.add_argument("--sequence-ranks", type=int, default=2)
    parser.add_argument("--kind", choices=["ulysses", "ring"], default="ulysses")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)

    module = SFTModule(
        str(make_model(options.folder / "model", options.seed)), lr=1e-2, optimization=Optimization(warmup_steps=5)
    )
    data = SFTDataModule(
        haystacks(4 * options.steps, options.tokens, options.seed),
        validation_data=haystacks(40, options.tokens, options.seed + 1),
        micro_batch_size=4,  # of all ranks that compute a forward pass together
        max_length=options.tokens + 2,
    )
    strategy: Any = "auto"
    if options.sequence_ranks > 1:
        strategy = RLHFDeepSpeedStrategy(
            stage=2, sequence_parallel_size=options.sequence_ranks, sequence_parallel=options.kind
        )
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=options.sequence_ranks, strategy=strategy, max_epochs=1, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[watch],
    )  # fmt: skip
    trainer.fit(module, data)
    found = {"losses": watch.losses, "held_out": float(trainer.callback_metrics["val/loss"])}
    found["ranks"] = gather_objects({"tokens": watch.tokens, "bytes": watch.bytes})
    if trainer.is_global_zero:
        for rank, numbers in enumerate(found["ranks"]):
            print(
                f"rank {rank}: {numbers['tokens']:,} tokens a step, {numbers['bytes'] / 1e6:.1f} MB kept for backward"
            )
        print(f"loss {watch.losses[0]:.4f} → {watch.losses[-1]:.4f}, held out {found['held_out']:.4f}")
    return found


if __name__ == "__main__":
    main()
