"""An agent learns to call a tool and to repeat its result. One minute on a CPU, from a random model.

``python tutorials/tool_agent.py`` makes a tiny chat model and a game: each prompt names a drawer, and only the tool
``open_drawer`` knows the digit in it. The model calls it with ``?`` and answers with the digit. A guess is right one
time in ten; a model that calls the tool and repeats its result is always right.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhfkit import GRPOModule, LocalEngine, Prompt, PromptDataModule, RolloutCallback, SamplingSpec
from rlhfkit.episodes import Action, Episodes, Step, ToolEnvironment
from rlhfkit.episodes.tool_calls import ToolCall
from rlhfkit.rewards import EnvironmentReward

TEMPLATE = (  # "A", the turn of the model up to <eos>, "=7", the next turn of the model
    "{% for message in messages %}{% if message['role'] == 'tool' %}={% endif %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_model(folder: Path, seed: int) -> Path:
    """A random Llama of 80,000 parameters, one token per character, with a chat template."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789?=ABCDEFGH"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=64
    )
    wrapped.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=wrapped.pad_token_id,
        eos_token_id=wrapped.eos_token_id,
        bos_token_id=None,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def make_prompts(file: Path, rows: int = 400) -> Path:
    """Write names of drawers as prompts, and the digits in them as answers."""
    generator = random.Random(0)
    lines = [{"prompt": generator.choice("ABCDEFGH"), "answer": str(generator.randrange(10))} for _ in range(rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def question_mark(action: Action) -> list[ToolCall]:
    """Parse a call of this model, ``?``. By default calls are JSON, which larger models write."""
    return [ToolCall("open_drawer")] if action.text.startswith("?") else []


class Drawers(ToolEnvironment):
    """One drawer: reward 0.5 for opening it with the tool, then 0.25 for any digit or 1 for the right one."""

    def __init__(self) -> None:
        super().__init__([self.open_drawer], tool_call_parser=question_mark)
        self.opened = 0

    def reset(self, prompt: Prompt) -> None:
        """Fill the drawer."""
        self.content = prompt.answer

    def open_drawer(self) -> str:
        """Look into the drawer."""
        self.opened += 1
        return self.content

    async def step(self, action: Action) -> Step:
        """Return the result of the tool, and the reward for the call."""
        step = await super().step(action)
        return step if step.done else Step(step.observation, reward=0.5 * (self.opened == 1), info=step.info)

    def answer_reward(self, action: Action) -> float:
        """1 for the right digit, 0.25 for another one; 0 if the drawer was not opened."""
        return self.opened * (0.25 * action.text[:1].isdigit() + 0.75 * action.text.startswith(self.content))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train; return the mean reward of the first and last five iterations, and the share of episodes with a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tool_agent"))
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a second thread slows down a model this small
    options.folder.mkdir(parents=True, exist_ok=True)
    model = make_model(options.folder / "model", options.seed)
    data = PromptDataModule(
        str(make_prompts(options.folder / "prompts.jsonl")),
        answer="answer",
        rollout_batch_size=32,
        micro_batch_size=256,
    )
    rollouts = RolloutCallback(
        EnvironmentReward(),
        engine=LocalEngine(max_sequences=256),
        group=Episodes(Drawers, max_turns=2),
        sampling=SamplingSpec(group_size=8, max_new_tokens=2, seed=options.seed),
    )
    history: list[tuple[float, float]] = []

    class Progress(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            right = [sample.info["reward"] for sample in rollouts.samples]
            asked = [sample.info["turns"] > 1 for sample in rollouts.samples]
            history.append((sum(right) / len(right), sum(asked) / len(asked)))
            if trainer.current_epoch % 10 == 0:
                print(f"iteration {trainer.current_epoch:3d}: reward {history[-1][0]:.2f}, asks {history[-1][1]:.0%}")

    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=options.iterations, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[rollouts, Progress()],
    )  # fmt: skip
    trainer.fit(GRPOModule(str(model), lr=options.lr), data)
    last = history[-5:]
    reward, asks = (sum(column) / len(last) for column in zip(*last, strict=True))
    print(f"reward {reward:.2f} of 1.5, asks {asks:.0%}")
    return {"first_reward": history[0][0], "reward": reward, "asks": asks}


if __name__ == "__main__":
    main()
