"""``RunReport``: what is in the page of a run, that it stays small, goes on after a resume, and can be compared."""

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import PIL.Image
import pytest
import torch
from modules.data_runs import trainer
from rl_runs import digits, fit_run, prompts_file
from tiny_models import tiny_model

from callbacks.test_ema import SaveAfterEpoch
from rlhfkit import RolloutCallback, RunReport, SamplingSpec, SFTDataModule, SFTModule
from rlhfkit.callbacks.report.page import BINS, MOST_POINTS, Curve, Histogram, RunData, read_page, write_page
from rlhfkit.callbacks.report.run_report import MOST_IMAGES, shown_prompt
from rlhfkit.callbacks.report.timeline import Interval, merged, recorded_intervals
from rlhfkit.callbacks.rollout.parts.alarms import Alarm, Alarms
from rlhfkit.cli.main import main
from rlhfkit.costs import Throughput
from rlhfkit.data.images import Image
from rlhfkit.data.types import Prompt, Sample


def fit(folder: Path, *callbacks: L.Callback, epochs: int = 3, **arguments: Any) -> tuple[RunData, Any, Any]:
    """What the page of a run shows, its trainer and its rollouts."""
    report = RunReport(str(folder / "report.html"), name="a test")
    trainer, _, rollouts = fit_run(folder, callbacks=[report, *callbacks], max_epochs=epochs, **arguments)
    [found] = read_page(folder / "report.html")
    assert report.saved == folder / "report.html"
    return found, trainer, rollouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(folder: Path) -> tuple[RunData, L.Trainer, RolloutCallback]:
    alarm = Alarm(metric="rollout/length", high=0.5, advice="answers are long")
    sampling = SamplingSpec(group_size=4, max_new_tokens=8)
    return fit(folder, Throughput(), rollouts=RolloutCallback(digits, sampling=sampling, parts=[Alarms([alarm])]))


Run = tuple[RunData, L.Trainer, RolloutCallback]


def test_every_metric_has_a_point_for_each_iteration_and_distributions_count_every_sample(run: Run) -> None:
    found, trainer, rollouts = run
    assert found.curves["time/update"].xs == [0, 1, 2]
    assert min(found.curves["time/update"].ys) > 0
    for name in ("loss", "rollout/reward", "policy/entropy", "time/generate"):
        assert found.curves[name].xs == [0, 1, 2]
        assert found.curves[name].ys[-1] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-4)
    assert found.curves.keys().isdisjoint({"reward", "hours left", "GFLOP/s"})  # names on the bar
    assert found.state == "finished"
    [alarm] = found.alarms
    assert (alarm["iteration"], alarm["metric"], alarm["advice"]) == (0, "rollout/length", "answers are long")
    assert dict(found.facts)["optimizer steps"] == "6 of 6"
    assert set(found.histograms) == {"reward", "completion length (tokens)", "advantage"}
    for kept in found.histograms.values():
        assert [sum(one.counts) for one in kept] == [len(rollouts.samples)] * 3


def test_groups_with_the_most_different_rewards_are_shown_with_numbers_of_each_token(run: Run) -> None:
    found, _, rollouts = run
    assert [one["iteration"] for one in found.samples] == [0, 1, 2]
    groups: dict[int, dict[int, Sample]] = {}
    for sample in rollouts.samples:
        groups.setdefault(sample.prompt.index, {})[sample.sample_index] = sample
    rewards = {index: [float(own[place].reward or 0.0) for place in sorted(own)] for index, own in groups.items()}
    widest = sorted((max(each) - min(each) for each in rewards.values()), reverse=True)[:2]
    shown = found.samples[-1]["groups"]
    assert [max(each) - min(each) for each in (rewards[group["prompt_id"]] for group in shown)] == widest
    for group in shown:
        own = groups[group["prompt_id"]]
        assert group["prompt"] == own[0].prompt.text
        assert [one["reward"] for one in group["samples"]] == rewards[group["prompt_id"]]
        for one, place in zip(group["samples"], sorted(own), strict=True):
            assert one["length"] == len(one["tokens"]) == len(one["difference"]) == len(one["entropy"])
            assert max(one["difference"]) < 1e-4  # engine and trainer agree on a CPU
            assert all(0 < value <= math.log(128) for value in one["entropy"])  # a vocabulary of 128
            assert "".join(one["tokens"]).replace("<pad>", "").removesuffix("<eos>") == own[place].text


def test_the_page_has_the_arguments_of_everything_and_what_follows_from_them(run: Run, tmp_path: Path) -> None:
    found = run[0].configuration
    assert found["module: GRPOModule"]["lr"] == 1e-3
    assert found["module: GRPOModule"]["advantages"] is None
    assert found["sampling: SamplingSpec"]["group_size"] == 4
    assert found["trainer"]["accumulate_grad_batches"] == 2
    assert {"engine: LocalEngine", "reward: digits"} <= set(found)
    sizes = found["data: PromptDataModule"]
    assert sizes["answer_extractor"].endswith(".final_answer")  # and no address, which differs from run to run
    assert sizes["updates_per_iteration"] == 2  # 8 prompts x 4 samples / (8 a micro-batch x 2 of an update)
    assert (sizes["sequences of an iteration"], sizes["sequences of an update"]) == (32, 16)
    assert "Probe()" in found["rollouts: RolloutCallback"]["parts"].splitlines()
    assert run[0].versions["torch"] == torch.__version__

    sizes = {"micro_batch_size": None, "max_tokens_per_micro_batch": 200, "updates_per_iteration": 4}
    other, *_ = fit(
        tmp_path,
        epochs=1,
        module_arguments={"preset": "rloo", "clip_high": 0.3},
        data_arguments=sizes | {"epochs_per_iteration": 2},
        accumulate_grad_batches=1,
    )
    data, module = (other.configuration[name] for name in ("data: PromptDataModule", "module: GRPOModule"))
    assert {name: data[name] for name in sizes} == sizes
    assert (data["sequences of an iteration"], data["sequences of an update"]) == (32, 8)
    assert (module["clip_low"], module["clip_high"], module["advantage_scale"]) == (0.2, 0.3, "group")
    assert "KLInReward(coef=0.05)" in module["parts"].splitlines()
    assert "rloo_loss" in module["order"]


def test_times_of_the_trainer_and_of_an_engine_in_its_process_are_shown(run: Run) -> None:
    found, trainer, _ = run
    [report] = [one for one in trainer.callbacks if isinstance(one, RunReport)]
    times = report.times
    assert {"update", "prepare"} <= {one.phase for one in times.intervals if one.lane == "trainer"}
    assert 0 < times.busy_shares()["trainer"] <= 1
    start, end = times.window
    assert all(start <= one.start < one.end <= end for one in times.intervals)
    lane, engine = found.timeline["lanes"]  # type: ignore[index]
    assert (engine["name"], {span[0] for span in engine["spans"]}) == ("engine", {"sample"})
    assert lane["name"] == "trainer"


def test_a_run_that_ends_with_an_error_says_so(tmp_path: Path) -> None:
    class Broken(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 2:
                raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fit(tmp_path, Broken())
    [found] = read_page(tmp_path / "report.html")
    assert found.state == "stopped by OSError: the disk is full"
    assert found.curves["rollout/reward"].xs == [0, 1]


def test_a_resumed_run_continues_the_page_of_the_one_before(tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    first, *_ = fit(tmp_path / "first", SaveAfterEpoch(saved), epochs=2)
    second, *_ = fit(tmp_path / "second", epochs=3, resume=str(saved))
    for name in ("rollout/reward", "policy/entropy"):
        assert second.curves[name].xs == [0, 1, 2]
        assert second.curves[name].ys[:2] == first.curves[name].ys
    assert [one["iteration"] for one in second.samples] == [0, 1, 2]
    assert second.samples[:2] == first.samples


def test_modules_that_learn_from_data_have_curves_over_steps(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    data = SFTDataModule(
        prompts_file(tmp_path),
        validation_data=prompts_file(tmp_path),
        validation_split="train",
        completion="answer",
        micro_batch_size=10,
    )
    report = RunReport(str(tmp_path / "report.html"))
    trainer(tmp_path, callbacks=[report], log_every_n_steps=2).fit(SFTModule(str(tmp_path / "model")), data)
    [found] = read_page(tmp_path / "report.html")
    assert found.axis == "step"
    assert found.curves["loss"].xs == [1, 2, 4, 6, 8]
    assert found.curves["val/loss"].xs == [4, 8]
    assert not found.samples


def test_a_page_of_a_thousand_iterations_is_below_five_megabytes(tmp_path: Path) -> None:
    data = RunData("long")
    tokens = {"tokens": ["token"] * 400, "difference": [0.123] * 400, "entropy": [1.23] * 400}
    samples = [{"reward": 0.5, "length": 400, **tokens} for _ in range(8)]
    noise = PIL.Image.effect_noise((600, 400), 200).convert("RGB")  # what takes the most bytes
    prompt = Prompt(7, [1], text="x" * 2000, answer="12", attachments=(Image.of(noise, "a picture"),) * 9)
    group = shown_prompt(prompt) | {"samples": samples}
    assert [len(one) < 50_000 for one in group["images"]] == [True] * MOST_IMAGES
    shown = Image.of(group["images"][0], "a picture").open()
    assert shown.size == (160, 107)
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for iteration in range(1000):
        data.add_metrics({f"group/metric_{number}": math.sin(iteration + number) for number in range(80)}, iteration)
        data.add_values("reward", values + iteration / 100, iteration)
        if iteration % 27 == 0:  # of 999 too
            data.add_samples([group, group], iteration)
    path = write_page(tmp_path / "report.html", [data])
    assert path.stat().st_size < 5e6
    [found] = read_page(path)
    assert found.samples[-1]["iteration"] == 999
    assert found.samples[0]["iteration"] == 0
    assert len(found.curves["group/metric_3"].xs) <= MOST_POINTS


def test_a_thinned_curve_keeps_its_mean_and_its_last_point() -> None:
    curve = Curve()
    for x in range(MOST_POINTS + 1):
        curve.add(x, float(x))
    assert curve.xs[-1] == curve.ys[-1] == MOST_POINTS
    assert len(curve.xs) == MOST_POINTS // 2 + 1
    earlier = [y for y in curve.ys[:-1] if y is not None]
    assert sum(earlier) / len(earlier) == pytest.approx((MOST_POINTS - 1) / 2)


def test_values_that_are_not_finite_are_gaps() -> None:
    data = RunData("gaps")
    for x, y in enumerate([1.0, math.nan, math.inf, 2.0]):
        data.add_metrics({"loss": y}, x)
    assert data.curves["loss"].ys == [1.0, None, None, 2.0]
    assert json.loads(json.dumps(data.as_json(), allow_nan=False))["series"]["loss"][1][1] is None


def test_a_histogram_in_a_wider_range_keeps_all_counts_near_their_values() -> None:
    found = Histogram.of(torch.tensor([0.0, 0.0, 1.0, math.nan]), 3)
    assert found is not None
    assert sum(found.counts) == 3
    wider = found.rebinned(-1.0, 2.0)
    assert sum(wider) == 3
    assert wider[BINS // 3] == 2  # 0 is a third of the way
    assert Histogram.of(torch.tensor([math.nan]), 3) is None


def test_a_text_in_a_sample_cannot_end_the_data(tmp_path: Path) -> None:
    data = RunData("</script><script>alert(1)</script>")
    path = write_page(tmp_path / "report.html", [data])
    assert path.read_text().count("</script>") == 2  # of the data, and of the program
    assert read_page(path)[0].name == data.name


def test_runs_are_compared_in_one_page(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_page(tmp_path / name / "report.html", [run[0]])
    main(["report", str(tmp_path / "a"), str(tmp_path / "b" / "report.html"), "--output", str(tmp_path / "both.html")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both.html")
    names = [one.name for one in read_page(tmp_path / "both.html")]
    assert names == [f"a test ({tmp_path / 'a'})", f"a test ({tmp_path / 'b' / 'report.html'})"]


@pytest.mark.parametrize("content", [None, "<html></html>"])
def test_what_is_no_report_is_named(tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "other.html").write_text(content)
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--output", str(tmp_path / "both.html")])
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_without_a_network(run: Run, folder: Path, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000", "--enable-logging=stderr", "--dump-dom"]
    for tab, expected in (("Overview", "rollout/reward"), ("Samples", "advantage"), ("Configuration", "group_size")):
        shown = subprocess.run(
            ["chromium", *options, f"file://{folder}/report.html#{tab}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        body = shown.stdout[: shown.stdout.index('<script type="application/json"')]
        assert expected in body
        assert "Uncaught" not in shown.stderr


# ---------------------------------------------------------------------- who worked when


def call(worker: str, name: str, start: float, seconds: float, category: str | None = None) -> dict[str, Any]:
    """A line of ``ray.timeline``, of Ray 2.60."""
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"cat": category or f"task::Actor.{name}", "name": name, "tid": f"worker:{worker}", **times}


def created(worker: str, actor: str) -> dict[str, Any]:
    return call(worker, "__init__", 0, 1, f"task::{actor}:Actor.__init__")


def test_calls_are_assigned_to_roles_by_the_names_of_their_actors() -> None:
    events = [
        created("a", "engine-1f-0"),
        created("b", "logprobs-2e-0"),
        created("c", "logprobs-2e-1"),
        created("d", "reward-3d-0"),
        created("e", "mailbox"),
        call("a", "generate", 10, 2),
        call("a", "health", 11, 1),
        call("a", "update", 12, 1),
        call("b", "compute", 10, 1),
        call("c", "compute", 11, 1),
        call("d", "compute", 12, 1),
        call("d", "execute", 12, 1, "task:execute"),
        call("e", "compute", 12, 1),
        call("nobody", "compute", 12, 1),
    ]
    assert recorded_intervals(events) == [
        Interval("engine", "sample", 10, 12),
        Interval("engine", "weight_sync", 12, 13),
        Interval("reference 0", "compute", 10, 11),
        Interval("reference 1", "compute", 11, 12),
        Interval("reward model", "compute", 12, 13),
    ]


def test_spans_that_overlap_are_one() -> None:
    assert merged([(5, 6), (1, 3), (2, 4), (7, 7), (4, 4.5)]) == [(1, 4.5), (5, 6)]


def test_a_long_run_keeps_the_times_that_are_shown_and_no_more(tmp_path: Path) -> None:
    kept = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            [report] = [one for one in trainer.callbacks if isinstance(one, RunReport)]
            kept.append((len(report.times._starts), len(report.times._updates)))

    fit(tmp_path, Watch(), epochs=6)
    # Four micro-batches an iteration; the iteration that runs is kept beside three.
    assert kept == [(1, 4), (2, 8), (3, 12), (4, 16), (5, 20), (5, 20)]
