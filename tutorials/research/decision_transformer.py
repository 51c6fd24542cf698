"""A decision transformer: each step is trained with the return that followed it; then the highest return is asked for.

Each character of an answer is a step with reward 0 when right and -1 when wrong, so the highest return is 0. From each
step on, an answer is an example of how to get its return-to-go (Chen et al., 2021, arXiv:2106.01345): the wrong answer
``57`` to ``33+14=`` shows how to get -1 from the start, and how to get 0 once ``5`` has been written.
``python tutorials/research/decision_transformer.py`` prints the held-out accuracy by the return that is asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from recipe_steps import accuracy, fine_tune, scored, start
from recipes import condition_prompts, returns_to_go

from rlhfkit import SamplingSpec

TEMPLATE = "{wrong}={prompt}"
"""The return without its sign: the tokenizer knows only digits, + and =."""


def steps(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rest of a sampled answer from each of its steps on; the last step is the end of the answer."""
    text = line["completion"]
    rewards = [float(step == right) - 1 for step, right in zip_longest([*text, ""], [*line["answer"], ""])]
    for said, to_go in enumerate(returns_to_go(rewards)[: len(text) + 1]):
        yield {"question": line["question"] + text[:said], "completion": text[said:], "wrong": round(-to_go)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    folder, model, questions, heldout, samples, _ = start(__doc__, arguments)
    before = accuracy(model, heldout, folder)

    lines = scored(model, questions, folder, SamplingSpec(group_size=samples, max_new_tokens=5))
    rows = condition_prompts((row for line in lines for row in steps(line)), TEMPLATE, prompt="question")
    model = fine_tune(model, rows, folder / "decision_transformer", epochs=1)

    asked = [condition_prompts(heldout, TEMPLATE, prompt="question", wrong=wrong) for wrong in (2, 1, 0)]
    two, one, after = (accuracy(model, prompts, folder) for prompts in asked)
    print(f"held-out accuracy asked for a return of -2: {two:.1f}%, of -1: {one:.1f}%")
    print(f"held-out accuracy before: {before:.1f}%, after, asked for 0: {after:.1f}% ({after - before:+.1f} points)")


if __name__ == "__main__":
    main()
