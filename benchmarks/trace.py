"""The files and functions of rlhfkit that one iteration runs, in order; one JSON line.

    python benchmarks/trace.py            # print those of GRPO and of DPO
    python benchmarks/trace.py --write    # and write docs/dev/one_iteration.md

Both runs have one process and random tiny models that are made on the spot: GRPO with ``LocalEngine``, iterations of
two updates of two micro-batches; DPO with a reference model, epochs of two updates. Two epochs run, and what is counted
lies between ``on_train_epoch_start`` of the second and ``on_train_end``, imports excluded: the first epoch also starts
the engine and tries out what the model can do.

``files`` and ``functions`` count those of rlhfkit that were entered, ``changes`` the calls that go to another file than
the call before. A nested function counts as the one it is defined in.
"""

import argparse
import ast
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "rlhfkit"
PAGE = PACKAGE.parent / "docs" / "dev" / "one_iteration.md"

STEPS = {
    "RolloutCallback.collect": "Start of the iteration",
    "RolloutCallback.sync_weights": "Sync weights",
    "RolloutCallback.collect_groups": "Collect groups: draw prompts",
    "BatchedGroupStream.collect": "Collect groups: generate",
    "GroupCollector._score": "Collect groups: score and select",
    "Experience.from_samples": "Plan micro-batches",
    "OnPolicyModule.prepare": "Prepare: old and reference log-probs, advantages",
    "RolloutCallback._iteration_metrics": "Metrics",
    "micro_batch": "Micro-batches",
    "StepLoader.__iter__": "Load a batch",
    "ExactResume.on_train_batch_start": "Before a micro-batch",
    "OnPolicyModule.training_step": "Learn",
    "PreferenceModule.training_step": "Learn",
    "PolicyModule.on_before_optimizer_step": "Optimizer step",
    "RolloutCallback.on_train_epoch_end": "Log",
}
"""Functions that begin a step of an iteration, and its heading on the page."""

HEAD = """# One iteration, file by file

Written by `python benchmarks/trace.py --write`; do not edit. The files of rlhfkit that one iteration runs between
`on_train_epoch_start` and the end of training: each under the step that enters it first, with the functions that run in
it, in order of their first call. One process, tiny models; what happens only once (checks, loading models, starting
the engine) is left out.
"""


@dataclass
class Trace:
    """What was entered, in order."""

    steps: dict[str, str] = field(default_factory=dict)
    """The step in which each file was first entered."""
    files: dict[str, dict[str, None]] = field(default_factory=dict)
    """Functions of each file, both in the order in which they were first entered."""
    changes: int = 0
    """Calls that went to another file than the call before."""

    @property
    def functions(self) -> int:
        """Different functions."""
        return sum(map(len, self.files.values()))


class Tracer:
    """Records the functions of the package that are entered, in every thread."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._step = self._last = ""
        self._imports = threading.local()

    def start(self) -> None:
        """Record from now on."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # the documented way to remove it

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":  # an import: what runs inside is not the iteration's
            depth = getattr(self._imports, "depth", 0)
            self._imports.depth = depth + (event == "call") - (event == "return")
        if event != "call" or getattr(self._imports, "depth", 0) or not code.co_flags & 1:  # 1: a class body has it not
            return
        path = Path(code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        file, function = str(path.relative_to(PACKAGE)), code.co_qualname.split(".<locals>")[0]
        self._step = STEPS.get(code.co_qualname, self._step)
        self.trace.steps.setdefault(file, self._step or "Start of the iteration")
        self.trace.files.setdefault(file, {})[function] = None
        self.trace.changes += file != self._last
        self._last = file


def make_model(folder: Path) -> str:
    """A random Llama with one token per printable character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def fit(module: Any, data: Any, folder: Path, callbacks: list[Any], **arguments: Any) -> Trace:
    """Train and trace."""
    import lightning as L

    tracer = Tracer()

    class Window(L.Callback):
        """First of all callbacks, so that the others' hooks are inside."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                tracer.start()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            tracer.stop()

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Window(), *callbacks],
        **arguments,
    )
    try:
        trainer.fit(module, datamodule=data)
    finally:
        tracer.stop()
    return tracer.trace


def trace_grpo(folder: Path) -> Trace:
    """Eight prompts, four samples of each, two updates of two micro-batches."""
    from rlhfkit import GRPOModule, PromptDataModule, RolloutCallback, SamplingSpec
    from rlhfkit.callbacks import Alarms

    prompts = [{"prompt": f"{number}+{number}="} for number in range(8)]
    rollouts = RolloutCallback(
        lambda samples: [float(len(sample.token_ids) % 2) for sample in samples],
        sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        parts=[Alarms([])],
    )
    data = PromptDataModule(prompts, rollout_batch_size=8, micro_batch_size=8)
    module = GRPOModule(make_model(folder / "model"), lr=1e-3)
    return fit(module, data, folder, [rollouts], accumulate_grad_batches=2)


def trace_dpo(folder: Path) -> Trace:
    """Eight pairs, two updates of two micro-batches."""
    from rlhfkit import DPOModule, PreferenceDataModule

    pairs = [{"prompt": f"{number}+{number}=", "chosen": str(2 * number), "rejected": "no"} for number in range(8)]
    data = PreferenceDataModule(pairs, micro_batch_size=2)
    module = DPOModule(make_model(folder / "model"), lr=1e-3)
    return fit(module, data, folder, [], accumulate_grad_batches=2)


RUNS: dict[str, Callable[[Path], Trace]] = {"GRPO": trace_grpo, "DPO": trace_dpo}


def purpose(file: str) -> str:
    """First sentence of a file's docstring."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def render(traces: dict[str, Trace]) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for name, trace in traces.items():
        parts.append(f"## {name}\n\n{len(trace.files)} files, {trace.functions} functions.")
        step = ""
        for number, (file, functions) in enumerate(trace.files.items(), start=1):
            if trace.steps[file] != step:
                step = trace.steps[file]
                parts.append(f"\n### {step}\n")
            names = ", ".join(f"`{function}`" for function in functions)
            parts.append(f"{number}. **`{file}`**: {purpose(file)}\\\n   {names}")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Trace both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/dev/one_iteration.md")
    options = parser.parse_args()
    traces = {}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            traces[name] = run(Path(folder))
    page = render(traces)
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
    print(page)
    counts = {
        name: {"files": len(trace.files), "functions": trace.functions, "changes": trace.changes}
        for name, trace in traces.items()
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
