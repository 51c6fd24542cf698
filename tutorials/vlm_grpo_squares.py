"""A vision-language model learns by reward to answer about small pictures: which colour, how many.

``python tutorials/vlm_grpo_squares.py`` makes a model of 180,000 parameters and pictures of coloured squares, lets it
imitate 512 answers, after which it answers with a colour or a number and guesses which, and trains it with GRPO, whose
only reward is whether the answer is right. It prints the accuracy on held-out pictures before and after. The page
``runs/vlm_grpo_squares/grpo/version_0/report.html`` shows samples of each iteration with their pictures.
"""

import argparse
import json
import logging
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import PIL.Image
import PIL.ImageDraw
import torch
import transformers
from lightning.pytorch.loggers import CSVLogger
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from rlhfkit import (
    GRPOModule,
    LocalEngine,
    Optimization,
    PromptDataModule,
    RolloutCallback,
    RunReport,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.modules.parts.entropy import EntropyBonus
from rlhfkit.rewards import exact_match

SIDE = 28
"""Pixels of a picture's sides."""
COLOURS = {"r": (255, 40, 40), "g": (40, 220, 40), "b": (70, 70, 255), "y": (240, 240, 40)}
LARGEST = 3
"""Squares in a picture: 1 .. 3."""
COUNTS = {"demonstrations": 512, "train": 1600, "heldout": 300}
"""Pictures of each kind; one half is asked for its colour, the other for its squares."""
SAMPLING = SamplingSpec(group_size=16, max_new_tokens=2)
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
)


def save_model(folder: Path, seed: int) -> None:
    """Write a randomly initialised Idefics3, whose pictures have four tokens, and its processor."""
    special = ["<pad>", "<eos>", "<unk>"]
    words = {token: index for index, token in enumerate([*special, *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": 128,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": True,
            **size,
        },
        vision_config={"image_size": SIDE, "patch_size": 7, "initializer_range": 0.1, **size},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    edge = {"longest_edge": SIDE}
    pixels = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)


def draw(colour: str, count: int, chance: random.Random) -> PIL.Image.Image:
    """A dark picture of some squares of one colour."""
    ground = tuple(chance.randrange(50) for _ in range(3))
    picture = PIL.Image.new("RGB", (SIDE, SIDE), ground)
    pencil = PIL.ImageDraw.Draw(picture)
    for place in chance.sample(range(16), count):
        x, y = 7 * (place % 4), 7 * (place // 4)
        pencil.rectangle([x + 1, y + 1, x + 5, y + 5], fill=COLOURS[colour])
    return picture


def make(folder: Path, seed: int = 0) -> Path:
    """Write the model, pictures, and rows of a question, the path of its picture and the answer."""
    save_model(folder / "model", seed)
    chance = random.Random(seed)
    for name, number in COUNTS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.jsonl").open("w") as rows:
            for index in range(number):
                colour, count = chance.choice(list(COLOURS)), chance.randint(1, LARGEST)
                path = folder / name / f"{index}.png"
                draw(colour, count, chance).save(path)
                asked, answer = ("colour?", colour) if index % 2 else ("count?", str(count))
                question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked}]}
                row = {"prompt": [question], "completion": answer, "answer": answer, "image": str(path)}
                rows.write(json.dumps(row) + "\n")
    return folder


def trainer_of(folder: Path, **arguments: Any) -> L.Trainer:
    """A Trainer that prints and saves nothing."""
    quiet = {"logger": False, "enable_progress_bar": False} | arguments
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **quiet,
    )


def supervised_start(folder: Path, steps: int) -> Path:
    """Imitate some answers, and stop early: the model knows what an answer is, and hardly which is right."""
    warm = Optimization(warmup_steps=10)
    module = SFTModule(str(folder / "model"), lr=2e-3, optimization=warm, loading={"train_vision": True})
    data = SFTDataModule(str(folder / "demonstrations.jsonl"), completion="completion", micro_batch_size=32)
    trainer_of(folder, max_steps=steps).fit(module, data)
    return module.save_pretrained(folder / "sft")


def prompts_of(folder: Path) -> PromptDataModule:
    """Pictures to train on by reward, and those that are held out."""
    return PromptDataModule(
        str(folder / "train.jsonl"),
        validation_data=str(folder / "heldout.jsonl"),
        validation_split="train",
        answer="answer",
        rollout_batch_size=32,
        micro_batch_size=256,
        validation_batch_size=300,
    )


def heldout_accuracy(folder: Path, model: Path) -> float:
    """Share of the held-out questions that a model answers right, greedily."""
    rollouts = RolloutCallback(exact_match, engine=LocalEngine(max_sequences=300), sampling=SAMPLING)
    found = trainer_of(folder, callbacks=[rollouts]).validate(GRPOModule(str(model)), prompts_of(folder), verbose=False)
    return found[0]["val/reward"]


def learn_by_reward(folder: Path, start: Path, iterations: int) -> tuple[Path, Path | None]:
    """GRPO; returns the folder of the model and the page of the run."""
    module = GRPOModule(
        str(start),
        lr=5e-4,
        optimization=Optimization(warmup_steps=10, lr_schedule="linear"),
        parts=[EntropyBonus(0.03)],  # without it some seeds give the same answer to every question of a kind
        loading={"train_vision": True},
    )
    report = RunReport(name="GRPO on pictures")
    rollouts = RolloutCallback(exact_match, engine=LocalEngine(max_sequences=512), sampling=SAMPLING)
    trainer = trainer_of(
        folder,
        max_epochs=iterations,
        limit_val_batches=0,
        logger=CSVLogger(folder, "grpo"),
        log_every_n_steps=1,
        callbacks=[rollouts, report],
    )
    trainer.fit(module, prompts_of(folder))
    return module.save_pretrained(folder / "grpo_model"), report.saved


def main(words: Sequence[str] | None = None) -> tuple[float, float]:
    """Run the program; returns the accuracy before and after GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/vlm_grpo_squares"), help="where everything is written"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, pictures and samples")
    parser.add_argument("--sft_steps", type=int, default=16, help="updates before GRPO, of 32 answers each")
    parser.add_argument("--iterations", type=int, default=120, help="of GRPO, 2 updates each")
    given = parser.parse_args(words)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # a second thread slows down a model this small

    began = time.perf_counter()
    L.seed_everything(given.seed, verbose=False)
    folder = make(given.folder, given.seed)
    start = supervised_start(folder, given.sft_steps)
    before = heldout_accuracy(folder, start)
    print(f"held-out accuracy before GRPO: {before:.1%}  ({time.perf_counter() - began:.0f} s)", flush=True)
    model, report = learn_by_reward(folder, start, given.iterations)
    after = heldout_accuracy(folder, model)
    print(f"held-out accuracy after GRPO:  {after:.1%} ({100 * (after - before):+.1f} points)")
    print(f"model:  {model}\nreport: {report}\ntook {time.perf_counter() - began:.0f} s")
    return before, after


if __name__ == "__main__":
    main()
