"""``TrainingCurves``: plot the metrics of a run to a PNG while it trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.validation import check_integer

DEFAULT_CURVES = (
    ("reward", ("rollout/reward", "val/reward")),
    ("KL (nats per token)", ("policy/ref_kl", "policy/approx_kl")),
    ("entropy (nats per token)", ("policy/entropy",)),
    ("completion length (tokens)", ("rollout/length",)),
    ("|log-prob, trainer - engine|", ("rollout_corr/logprob_abs_diff_mean",)),
)


class TrainingCurves(Callback):
    """Plot metrics over iterations to a PNG, which is replaced as the run goes on.

    Args:
        path: The PNG; relative paths are under ``trainer.log_dir`` (or the working directory without a logger).
        curves: Panels from left to right: a title, and the metrics in it. Metrics that are never logged are left out.
        title: Title of the figure.
        every_n_iterations: Plot after iterations n, 2n ... and at the end.

    Attributes:
        saved: Path of the PNG; ``None`` before it was first written.
    """

    def __init__(
        self,
        path: str = "curves.png",
        *,
        curves: Sequence[tuple[str, Sequence[str]]] = DEFAULT_CURVES,
        title: str | None = None,
        every_n_iterations: int = 10,
    ) -> None:
        check_integer("every_n_iterations", every_n_iterations, minimum=1)
        self.every_n_iterations = every_n_iterations
        self.path = path
        self.curves = curves
        self.title = title
        self.history: dict[str, list[tuple[int, float]]] = {}
        self.saved: Path | None = None
        self._ended: tuple[L.Trainer, int] | None = None  # the epoch whose last hooks run, until the next one begins

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the metrics of a validation."""
        if not trainer.sanity_checking:
            self._record(trainer, "val/")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the previous iteration, whose epoch means are known only after its last hook."""
        self._ended = None
        self._update(trainer, draw=trainer.current_epoch % self.every_n_iterations == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Have a checkpoint of the end of this iteration hold its metrics too."""
        self._ended = trainer, trainer.current_epoch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Plot the whole run."""
        self._update(trainer, draw=True)

    def _update(self, trainer: L.Trainer, *, draw: bool) -> None:
        if trainer.current_epoch < 1:
            return
        folder = Path(trainer.log_dir or ".")  # a collective: every rank asks
        if trainer.is_global_zero:
            self._record(trainer, "", trainer.current_epoch - 1)
            if draw:
                self.saved = self.draw(folder / self.path)

    def _record(self, trainer: L.Trainer, prefix: str, iteration: int | None = None) -> None:
        x = trainer.current_epoch if iteration is None else iteration
        for _, names in self.curves:
            for name in names:
                value = trainer.callback_metrics.get(name)
                if value is None or not name.startswith(prefix) or (not prefix and name.startswith("val/")):
                    continue
                points = self.history.setdefault(name, [])
                if not points or points[-1][0] < x:
                    points.append((x, float(value)))

    def draw(self, path: Path) -> Path:
        """Plot everything recorded so far to a PNG, replaced atomically, and return its path."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        panels = [(title, [name for name in names if name in self.history]) for title, names in self.curves]
        panels = [(title, names) for title, names in panels if names]
        if not panels:
            return path
        figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name in names:
                x, y = zip(*self.history[name], strict=True)
                axes.plot(x, y, marker="." if len(x) < 40 else None, label=name)
            drawn = sorted(abs(y) for name in names for _, y in self.history[name] if y)
            if drawn and drawn[-1] > 100 * drawn[len(drawn) // 2]:  # a spike would flatten everything else
                axes.set_yscale("symlog", linthresh=drawn[len(drawn) // 2])
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("iteration")
            axes.grid(alpha=0.3)
            if len(names) > 1:
                axes.legend(fontsize=7)
        if self.title:
            figure.suptitle(self.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.png")
        figure.savefig(partial, dpi=110)
        partial.replace(path)
        return path

    def state_dict(self) -> dict[str, Any]:
        """The recorded metrics, so that a resumed run plots all of them."""
        if self._ended is not None:  # a checkpoint is saved after the hooks that log
            trainer, iteration = self._ended
            self._record(trainer, "", iteration)
        return {"history": {name: [list(point) for point in points] for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the recorded metrics."""
        self.history = {name: [(int(x), float(y)) for x, y in points] for name, points in state_dict["history"].items()}
