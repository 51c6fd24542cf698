"""A real notebook, in a real IPython kernel, trains on two ranks; a single rank stays in the kernel.

Covers strategies/ray/launcher.py in notebooks.
"""

import json

import pytest

SETUP = """
import json
import lightning as L
import ray
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
import rlhfkit.strategies

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        if index == 0:
            print(f"hello from {self.global_rank}")
        loss = (self.net(batch) - batch.sum(-1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

def distance(module):  # from the line that is to be found
    return float(torch.cat([module.net.weight[0] - 1, module.net.bias]).norm())

def fit(module, devices):
    loader = torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=2)
    trainer = L.Trainer(
        strategy="rlhf_zero2", accelerator="cpu", devices=devices, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[TQDMProgressBar()],
    )
    trainer.fit(module, loader)
    print(json.dumps({
        "launcher": type(trainer.strategy.launcher).__name__,
        "steps": trainer.global_step,
        "logged": "loss" in trainer.callback_metrics,
        "distance": distance(module),
        "ray": ray.is_initialized(),
    }))

torch.manual_seed(0)
module = Line()
print(json.dumps({"start": distance(module)}))
"""


@pytest.mark.ray
@pytest.mark.distributed
def test_a_notebook_trains_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a second fit goes on where the first has stopped in test_ray_launcher_fit.py."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # the fit starts Ray
    cells = [SETUP, "fit(Line(), devices=1)", "fit(module, devices=2)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=600, startup_timeout=600, kernel_name="python3").execute()
    texts = ["".join(out["text"] for out in cell.outputs if out["output_type"] == "stream") for cell in notebook.cells]
    results = [
        json.loads(line) for text in texts for line in text.replace("\r", "\n").splitlines() if line.startswith("{")
    ]
    start = results.pop(0)["start"]
    assert [one["launcher"] for one in results] == ["NoneType", "RayLauncher"]
    assert [one["steps"] for one in results] == [16, 8]
    assert [one["ray"] for one in results] == [False, True]
    assert all(one["logged"] for one in results)
    assert results[1]["distance"] < 0.8 * start, "each step brings the line nearer"
    for words in ("hello from 0", "[rank 1] hello from 1", "Epoch 1: 100%"):
        assert words in texts[2]
