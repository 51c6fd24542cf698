"""Write ``reference/losses.md`` from signatures and docstrings of ``rlhfkit.losses``: it cannot drift from the code.

    python docs/generate_losses.py            # write the page
    python docs/generate_losses.py --check    # fail when it is stale

The convention it reads: the first line of a docstring is its summary, the next paragraph (with a table below it, if
there is one) its formula, and papers are named by their arXiv number anywhere in it.
"""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import rlhfkit.losses
from rlhfkit.losses.preference.dpo import DIVERGENCES, PAIR_LOSSES
from rlhfkit.modules.on_policy.presets import PRESETS

PAGE = Path(__file__).with_name("reference") / "losses.md"
# Modules in the order of the page; others follow by name.
ORDER = ("policy.ppo", "policy.sequence", "policy.reinforce", "policy.trust_region", "policy.entropy")
ORDER += (
    "importance_sampling",
    "kl",
    "value",
    "advantages.group",
    "advantages.gae",
    "advantages.rewards",
)
ORDER += ("supervised", "distillation", "preference.dpo", "preference.reference_free")
ORDER += (
    "preference.unpaired",
    "preference.reward_model",
)
ORDER += ("fused_head.logprobs", "policy.base", "aggregation", "metrics")

HEADER = """\
# Losses

<!-- Written by docs/generate_losses.py from the docstrings; edit those and run it again. -->

Every objective of `rlhfkit.losses`: pure functions on tensors that import torch and nothing else. The docstring of each
function tells the shapes, the sources of the defaults, and where a value differs from another library on purpose.

```python
from rlhfkit.losses import dpo_loss, sequence_logprobs

chosen, rejected = sequence_logprobs(chosen_logprobs, chosen_mask), sequence_logprobs(rejected_logprobs, rejected_mask)
output = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)
output.loss.backward()
output.metrics["rewards/margins"]
```

What they have in common:

- Tensors come first, other arguments are keywords. B are sequences, T tokens on the next-token axis
  (`logprobs[:, t]` belongs to token `t + 1`), V the vocabulary; `sg` stops the gradient; a loss `ℓ` per token,
  sequence or pair is averaged.
- Masks select: a masked entry may be NaN and reaches neither loss nor gradient.
- All policy losses have one signature, `(logprobs, old_logprobs, advantages, mask, *, ...)`, so that any of them is the
  `policy_loss` of a module.
- Half precision is computed in float32; gradients come back in the dtype of the input.
- Nothing is reduced over ranks. `denominator` is the count of tokens (or sequences, or pairs) of the *whole* optimizer
  step divided by the number of micro-batches that are averaged; with it every split over micro-batches and ranks gives
  the same gradient. Without it the local count is taken.
- The result is `LossOutput(loss, metrics, tokens)`; metrics are detached scalars. One that is no mean over what
  the loss counts is a `Metric`, a scalar that says how it reduces over micro-batches and ranks.
- Wrong shapes and arguments raise `ValueError` at once.

The site has a page for each function, with its arguments and their defaults.
"""

DIVISORS = """\
## What a policy loss is divided by

A sample whose reward is missing (`None`), or that was cut off under `MaskTruncated`, is a row without a trained
token. The function counts in the tensors that it is given, a module over the whole optimizer step; both count the same.
"""
DIVIDED_BY = {
    "token-mean": ("trained tokens", "is not counted"),
    "sequence-mean-token-mean": ("rows with a trained token, and in each row its trained tokens", "is not counted"),
    "sequence-mean-token-sum": ("rows with a trained token", "is not counted"),
    "constant-length": ("all rows times `max_length`, as in TRL", "is counted"),
}
OTHER_DIVISORS = """\
`bnpo_loss` divides by the tokens of the micro-batch. Critics (`value_loss`) and supervised losses divide by trained
tokens, process rewards by labelled steps, losses of pairs by pairs of which both answers have a token, KTO and BCO by
answers. The KL penalty and the entropy bonus are divided as the policy loss beside them is. Tokens that clips, filters
and importance weights set to 0 are counted.
"""


def render() -> str:
    """The whole page."""
    public = {name: getattr(rlhfkit.losses, name) for name in rlhfkit.losses.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    parts = [HEADER, DIVISORS, _divisors(), OTHER_DIVISORS]
    for module in _modules(functions):
        members = [name for name, value in functions.items() if value.__module__ == module.__name__]
        parts.append(f"## {_heading(module)}\n\n{_markdown(_first_line(module))}\n")
        rows = [_function_row(name, functions[name]) for name in vars(module) if name in members]
        parts.append(_table(["Function", "Formula", "Papers"], rows))
        if "dpo_loss" in members:
            parts.append("### Loss types of `dpo_loss`\n\n" + _notation() + "\n")
            rows = [_pair_loss_row(name, loss) for name, loss in PAIR_LOSSES.items()]
            parts.append(_table(["`loss_type`", "Formula", "Name", "Papers"], rows))
            parts.append("### Divergences of `dpo_loss`\n")
            rows = [_pair_loss_row(name, score) for name, score in DIVERGENCES.items()]
            parts.append(_table(["`divergence`", "Score `s(Δ)`", "Name", "Papers"], rows))
    others = sorted(set(public) - set(functions))
    parts.append("## Types and registries\n\n" + ", ".join(f"`{name}`" for name in others) + "\n")
    return "\n".join(parts)


def _divisors() -> str:
    """The table of aggregations with the losses and presets that use them."""
    presets = {name: rlhfkit.losses.__dict__[str(preset["policy_loss"])] for name, preset in PRESETS.items()}
    losses = [rlhfkit.losses.__dict__[name] for name in rlhfkit.losses.__all__ if name.endswith("_loss")]
    rows = []
    for aggregation, (divisor, untrained) in DIVIDED_BY.items():
        of_policies = [loss for loss in losses if {"old_logprobs", "aggregation"} <= _parameters(loss).keys()]
        using = [loss for loss in of_policies if _parameters(loss)["aggregation"].default == aggregation]
        named = ", ".join(f"`{loss.__name__}`" for loss in using)
        of_presets = ", ".join(f"`{name}`" for name, loss in presets.items() if loss in using)
        rows.append([f"`{aggregation}`", divisor, untrained, named, of_presets])
    return _table(["`aggregation`", "Divides by", "A row without a trained token", "Default of", "Presets"], rows)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def formula(function: Callable[..., Any]) -> str:
    """The formula of a function as Markdown; the function it is a preset of when it has none; else empty."""
    summary, text, *rest = [*_paragraphs(function), "", ""][:3]
    table = next((part for part in (text, *rest) if part.startswith("===")), "")
    if table:
        intro = "" if text == table else text + " "
        return _markdown(intro + "; ".join(" ".join(row[:2]) for row in _simple_table(table)))
    has_equation = re.search(r"``[^`]*=[^`]*``", text) and not re.search(r"\b(19|20)\d\d\b", text)
    if text.startswith("``") or has_equation:
        return _markdown(text)
    preset_of = re.search(r":func:`(\w+_loss)`", summary)
    return f"as `{preset_of.group(1)}`" if preset_of else ""


def pair_loss_formula(loss: Callable[..., Any]) -> str:
    """The formula of a per-pair loss or divergence, whose docstring is one line: formula, name and paper."""
    return _markdown(_paragraphs(loss)[0].partition(". ")[0])


def papers(function: Callable[..., Any]) -> list[str]:
    """The arXiv numbers of a docstring in order of appearance."""
    return list(dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", inspect.getdoc(function) or "")))


def citations(function: Callable[..., Any]) -> list[str]:
    """Sources that have no arXiv number, as ``Williams (1992)``."""
    names = r"[A-Z]\w+(?: and [A-Z]\w+| et al\.)? \(\d{4}\)"
    return list(dict.fromkeys(re.findall(names, inspect.getdoc(function) or "")))


def _modules(functions: dict[str, Any]) -> list[ModuleType]:
    names = {function.__module__ for function in functions.values()}
    ranks = {f"rlhfkit.losses.{name}": rank for rank, name in enumerate(ORDER)}
    return [
        importlib.import_module(name) for name in sorted(names, key=lambda name: (ranks.get(name, len(ORDER)), name))
    ]


def _heading(module: ModuleType) -> str:
    return f"`{module.__name__}`"


def _first_line(module: ModuleType) -> str:
    return _join((inspect.getdoc(module) or "").split("\n\n")[0])


def _summary(function: Callable[..., Any]) -> str:
    return _markdown(_paragraphs(function)[0])


def _notation() -> str:
    """The notation of the per-pair losses, from the end of their module's docstring."""
    module = importlib.import_module("rlhfkit.losses.preference.dpo")
    return _markdown(_join((inspect.getdoc(module) or "").split("\n\n")[-1]))


def _paragraphs(function: Callable[..., Any]) -> list[str]:
    """Paragraphs of a docstring up to its first section, each on one line, tables as they are."""
    body = re.split(r"\n(?:Args|Returns|Raises|Attributes):\n", inspect.getdoc(function) or "")[0]
    return [text if text.startswith("===") else _join(text) for text in body.strip().split("\n\n")]


def _simple_table(text: str) -> Iterator[list[str]]:
    """Rows of a reStructuredText simple table, without its head."""
    lines = text.splitlines()
    starts = [match.start() for match in re.finditer(r"=+", lines[0])]
    for line in lines[3:]:
        if not line.startswith("==="):
            yield [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _join(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str) -> str:
    """ReStructuredText inline markup to Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def _function_row(name: str, function: Callable[..., Any]) -> list[str]:
    head = f"**`{name}`**<br>{_summary(function)}"
    return [head, formula(function), _links(function)]


def _pair_loss_row(name: str, loss: Callable[..., Any]) -> list[str]:
    title = re.sub(r" \(arXiv:[^)]*\)", "", _paragraphs(loss)[0].partition(". ")[2]).rstrip(".")
    return [f"`{name}`", pair_loss_formula(loss), _markdown(title), _links(loss)]


def _links(function: Callable[..., Any]) -> str:
    links = [f"[{number}](https://arxiv.org/abs/{number})" for number in papers(function)]
    return ", ".join(links + citations(function))


def _table(columns: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", r"\|") or "–" for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *escaped]]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Write docs/reference/losses.md from the docstrings of rlhfkit.losses."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 when the page is stale")
    if not parser.parse_args().check:
        PAGE.write_text(render(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == render():
        return 0
    print("docs/reference/losses.md is stale: run python docs/generate_losses.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
