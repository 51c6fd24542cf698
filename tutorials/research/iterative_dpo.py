"""Iterative DPO: sample answers, pair the best with the worst of each question, train on the pairs, and again.

Each round samples from the policy of the last one, which is also its reference. Where answers differ in one token, DPO
alone may make both unlikely, so the likelihood of the chosen one is maximised too: iterative RPO (Pang et al., 2024,
arXiv:2404.19733). ``python tutorials/research/iterative_dpo.py`` prints the held-out accuracy before and after.
"""

from collections.abc import Sequence

from recipe_steps import accuracy, quiet_trainer, scored, start
from recipes import best_and_worst_pairs

from rlhfkit import DPOModule, Optimization, PreferenceDataModule, SamplingSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    folder, model, questions, heldout, samples, rounds = start(__doc__, arguments, rounds=3)
    before = after = accuracy(model, heldout, folder)
    for number in range(rounds):
        sampling = SamplingSpec(group_size=samples, max_new_tokens=5, seed=number)
        pairs = best_and_worst_pairs(scored(model, questions, folder, sampling), prompt="question")
        module = DPOModule(
            str(model), lr=1e-4, optimization=Optimization(warmup_steps=5), nll_coef=1.0, precompute_ref_log_probs=True
        )
        data = PreferenceDataModule(pairs, prompt="question", micro_batch_size=64, max_length=64)
        quiet_trainer(folder, max_epochs=1).fit(module, data)
        model = module.save_pretrained(folder / "iterative_dpo")
        after = accuracy(model, heldout, folder)
        print(f"round {number + 1}: {len(pairs)} of {len(questions)} questions give a pair; now {after:.1f}%")
    print(f"held-out accuracy before: {before:.1f}%, after: {after:.1f}% ({after - before:+.1f} points)")


if __name__ == "__main__":
    main()
