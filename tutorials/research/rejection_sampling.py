"""Rejection sampling: sample n answers, keep the best, fine-tune on them, and again (RAFT, arXiv:2304.06767).

``python tutorials/research/rejection_sampling.py`` prints the accuracy on held-out additions before and after.
"""

from collections.abc import Sequence

from recipe_steps import accuracy, fine_tune, scored, start
from recipes import best_of_n

from rlhfkit import SamplingSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    folder, model, questions, heldout, samples, rounds = start(__doc__, arguments, rounds=3)
    before = after = accuracy(model, heldout, folder)
    for number in range(rounds):
        sampling = SamplingSpec(group_size=samples, max_new_tokens=5, seed=number)
        best = best_of_n(scored(model, questions, folder, sampling), minimum=1.0)
        model = fine_tune(model, best, folder / "rejection_sampling", epochs=4)
        after = accuracy(model, heldout, folder)
        print(f"round {number + 1}: {len(best)} of {len(questions)} questions have a right answer; now {after:.1f}%")
    print(f"held-out accuracy before: {before:.1f}%, after: {after:.1f}% ({after - before:+.1f} points)")


if __name__ == "__main__":
    main()
