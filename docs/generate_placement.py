"""Writes the estimates of docs/placement.md: ``python docs/generate_placement.py``; a test compares.

PPO with four models of one size on as many GPUs in each recipe. Formulas (``rlhfkit.costs``), not measurements.
"""

from functools import cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen2Config

from rlhfkit.costs import (
    EngineShape,
    ModelShape,
    PlacedModel,
    Run,
    Sharding,
    estimate_run,
    find_gpu,
    model_shape,
)
from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.memory.parts import TRAINING

PAGE = Path(__file__).with_name("placement.md")
BEGIN, END = "<!-- estimates: written by docs/generate_placement.py -->", "<!-- end of estimates -->"
CONFIGURATIONS: dict[str, Any] = {
    "7B": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
    ),
    "70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
    ),
}  # fmt: skip
SPLITS: dict[str, dict[str, dict[str, int]]] = {
    "7B": {
        "separate all": {"trainer": 4, "critic": 4, "engines": 4, "reference": 2, "reward": 2},
        "hybrid": {"trainer": 8, "engines": 6, "reward": 2},
    },
    "70B": {
        "separate all": {"trainer": 32, "critic": 32, "engines": 40, "reference": 12, "reward": 12},
        "hybrid": {"trainer": 72, "engines": 48, "reward": 8},
    },
}
"""GPUs of each role; together 16 and 128."""
TENSOR = {"7B": 1, "70B": 4}
"""GPUs of an engine, and of a replica of a frozen model."""


@cache
def shape_of(name: str) -> ModelShape:
    """Sizes of Qwen2.5 7B and of Llama 3.1 70B."""
    return model_shape(CONFIGURATIONS[name])


def run_of(name: str, recipe: str) -> Run:
    """PPO on 1,024 prompts of 512 tokens with one answer each, 1,024 tokens in the mean and 4,096 at most."""
    shape, tensor = shape_of(name), TENSOR[name]
    split = SPLITS[name]["hybrid" if recipe == "async" else recipe] if recipe != "colocate all" else {}
    everything = sum(SPLITS[name]["hybrid"].values())
    ranks, engines = split.get("trainer", everything), split.get("engines", everything)
    apart = {"reference": "reference", "reward": "reward model"}
    placed = [
        PlacedModel(role=role, shape=shape, replicas=split[short] // tensor, gpus=tensor)  # type: ignore[arg-type]
        for short, role in apart.items()
        if short in split
    ]
    placed += [PlacedModel(role="critic", shape=shape, gpus=split["critic"])] if "critic" in split else []
    return Run(
        policy=shape,
        critic=None if "critic" in split else shape,
        reference=None if "reference" in split else shape,
        reward_model=None if "reward" in split else shape,
        placed=tuple(placed),
        gpu=find_gpu("H100"),
        sharding=Sharding(ranks=ranks, stage=3),
        engine=EngineShape(
            count=engines // tensor,
            tensor_parallel=tensor,
            colocated=not split,
            memory_share=0.9 if split else 0.5,
        ),
        offload_training=not split,
        gradient_checkpointing=True,
        sequences=1024,
        prompt_tokens=512,
        answer_tokens=1024,
        max_answer_tokens=4096,
        micro_batch_tokens=8192,
        updates=4,
        max_staleness=1 if recipe == "async" else 0,
    )


def line(name: str, recipe: str) -> str:
    """A row of the table."""
    run = run_of(name, recipe)
    found = estimate_run(run)
    assert not found.problems, (name, recipe, found.problems)
    split = SPLITS[name]["hybrid" if recipe == "async" else recipe] if run.placed else {}
    gpus = ", ".join(f"{role} {count}" for role, count in split.items()) or f"all roles {run.gpus}"
    seconds = found.seconds
    scored = seconds["prepare"] + seconds["score"] + seconds.get("placed_models", 0.0)
    trained = seconds["train"] + seconds["communication"] + seconds["optimizer"]
    moved = seconds["weight_sync"] + seconds.get("offload", 0.0)
    hidden = ", ".join(f"{role} {share:.0%}" for role, share in found.hidden.items()) or "-"
    times = [f"{value:,.0f}" for value in (seconds["generate"], scored, trained, moved)]
    peak = f"{found.peak[TRAINING] / GIB:.0f}"
    return "| " + " | ".join([name, recipe, gpus, peak, *times, hidden, f"{found.iteration_seconds:,.0f}"]) + " |"


def table() -> str:
    """The estimates as Markdown."""
    head = ["model", "recipe", "GPUs", "GiB on a training GPU", "generate, s", "score and prepare, s", "train, s"]
    head += ["move weights and states, s", "hidden of placed models", "iteration, s"]
    recipes = ("colocate all", "separate all", "hybrid", "async")
    rows = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head))]
    return "\n".join([*rows, *(line(name, recipe) for name in CONFIGURATIONS for recipe in recipes)])


def page(text: str) -> str:
    """The page with new estimates."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
