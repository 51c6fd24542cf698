"""Conditional SFT: train on good and bad answers alike, with their reward in the prompt; then ask for good ones.

SteerLM (arXiv:2310.05344) and OpenRLHF's conditional SFT: no sample is discarded, and the reward in the prompt steers
the model. ``python tutorials/research/conditional_sft.py`` prints the accuracy on held-out additions when good and bad
answers are asked for.
"""

from collections.abc import Sequence

from recipe_steps import accuracy, fine_tune, scored, start
from recipes import bin_rewards, condition_prompts

from rlhfkit import SamplingSpec

TEMPLATE = "{level}={prompt}"
"""The tokenizer knows digits, + and =. For a real model e.g. ``"{prompt}\\nquality:{level}\\n"``."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    folder, model, questions, heldout, samples, _ = start(__doc__, arguments)
    plain = accuracy(model, heldout, folder)

    lines = scored(model, questions, folder, SamplingSpec(group_size=samples, max_new_tokens=5))
    rows = condition_prompts(bin_rewards(lines, edges=[0.5]), TEMPLATE, prompt="question")
    model = fine_tune(model, rows, folder / "conditional_sft", epochs=3)

    asked = [condition_prompts(heldout, TEMPLATE, prompt="question", level=level) for level in (0, 1)]
    bad, good = (accuracy(model, prompts, folder) for prompts in asked)
    print(f"held-out accuracy asked for bad answers: {bad:.1f}%")
    print(f"held-out accuracy before: {plain:.1f}%, after, asked for good: {good:.1f}% ({good - plain:+.1f} points)")


if __name__ == "__main__":
    main()
