"""``make gpu-check``: its whole list runs on a CPU, so that no error of its own waits for a GPU.

Covers ``benchmarks/gpu_check/``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the installed package

from benchmarks.gpu_check.check import CHECKS, Check, Figure, Setting, load_checks
from benchmarks.gpu_check.report import rows, summary, table
from benchmarks.gpu_check.runner import Result, next_group

ROOT = Path(__file__).parents[1]
BLOCKED = ("vllm", "ray", "datasets", "jsonargparse", "deepspeed")
"""What a machine with little more than torch, Transformers, Lightning and peft does not have."""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Environment variables of a Python in which packages are not installed."""
    (folder / "sitecustomize.py").write_text(f"""
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {packages!r} else found(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
""")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def command(
    folder: Path, *words: str, variables: dict[str, str] | None = None
) -> tuple[int, str, list[dict[str, Any]]]:
    """Run it on the CPU; returns the exit status, what it printed, and the lines of its report."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--quick", "--output", str(folder), *words],
        cwd=ROOT,
        env=os.environ | (variables or {}),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    report = folder / "report.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return done.returncode, done.stdout + done.stderr, lines


@pytest.mark.slow
@pytest.mark.distributed
def test_the_whole_list_runs_on_a_cpu_without_vllm_ray_datasets_and_jsonargparse(tmp_path: Path) -> None:
    status, output, (machine, *lines) = command(tmp_path, variables=without(tmp_path, *BLOCKED[:4]))
    assert status == 0, output
    packages = machine["machine"]["packages"]
    assert packages["torch"]
    assert not any(packages[name] for name in BLOCKED[:4])
    assert [line["check"] for line in lines] == list(load_checks())
    assert [line for line in lines if "error" in line] == []
    skipped = {line["check"]: line["skipped"] for line in lines if "skipped" in line}
    assert {name for name, check in CHECKS.items() if check.gpus} <= set(skipped)
    for name, reason in skipped.items():
        assert reason.startswith("not installed: ") or (reason.startswith("needs") and CHECKS[name].gpus), (
            name,
            reason,
        )
    assert "| check" in (tmp_path / "report.md").read_text()


def test_the_core_needs_no_deepspeed_either(tmp_path: Path) -> None:
    status, output, (_, *lines) = command(
        tmp_path, "--only", "training/sft", "deepspeed/stages", variables=without(tmp_path, *BLOCKED)
    )
    assert status == 0, output
    assert "missing: flash_attn, datasets, jsonargparse, deepspeed, ray, vllm" in output
    assert [line["passed"] for line in lines] == [True, None]
    assert lines[1]["skipped"] == "not installed: deepspeed"


def test_a_figure_passes_within_its_bound_only() -> None:
    assert Figure("a", 1.0, 1.0).passed is True
    assert Figure("a", 1.1, 1.0).passed is False
    assert Figure("a", float("nan"), 1.0).passed is False
    assert Figure("a", "an error", 1.0).passed is False
    assert Figure("a", 5.0).passed is None


def test_checks_of_one_process_run_together_up_to_the_next_of_another() -> None:
    names = ["", "", "fresh", "", "deepspeed", "deepspeed"]
    checks = [Check(str(number), failing, 1.0, process=name) for number, name in enumerate(names)]
    assert [each.name for each in next_group(checks, together=False)] == ["0", "1"]
    assert [each.name for each in next_group(checks[2:], together=False)] == ["2"]
    assert [each.name for each in next_group(checks[4:], together=False)] == ["4", "5"]
    assert next_group(checks, together=True) == checks


def test_engines_start_after_all_measurements() -> None:
    names = [name for name in load_checks() if CHECKS[name].run.__module__.startswith("benchmarks.gpu_check")]
    first_engine = next(place for place, name in enumerate(names) if "vllm" in CHECKS[name].packages)
    last_measurement = max(place for place, name in enumerate(names) if name.startswith("measure/"))
    assert first_engine > last_measurement


def failing(setting: Setting) -> Any:
    yield Figure("close enough", 0.5, 1.0)
    yield Figure("too far", 2.0, 1.0)


def test_results_say_what_passed_failed_and_was_skipped() -> None:
    check = Check("a/b", failing, 1.0)
    good, bad = Result(check, [Figure("close", 0.5, 1.0)]), Result(check, list(failing(Setting("cpu"))))
    skipped, broken = Result(check, skipped="no GPU"), Result(check, [Figure("close", 0.5, 1.0)], error="OSError: x")
    empty, measurement = Result(check), Result(Check("measure/a", failing, 1.0), [Figure("seconds", 3.0)])
    results = [good, bad, skipped, broken, empty, measurement]
    assert [result.passed for result in results] == [True, False, None, False, False, None]
    assert "1 checks passed, 3 failed, 1 skipped" in summary(results, 1.0)
    assert [row[1] for row in rows(bad)] == ["yes", "NO"]
    assert len({len(line) for line in table(results).splitlines()}) == 1  # columns are aligned


MISBEHAVING = """
import os, signal, time
from benchmarks.gpu_check import check
@check.check("a/first", seconds=20)
def first(setting):
    yield check.Figure("one", 1.0, 2.0)
@check.check("a/hangs", seconds=1)
def hangs(setting):
    yield check.Figure("before it hangs", 1.0, 2.0)
    time.sleep(60)
@check.check("a/raises", seconds=20)
def raises(setting):
    raise ValueError("of its own")
    yield
@check.check("a/dies", seconds=20)
def dies(setting):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield
@check.check("a/lacks", seconds=20)
def lacks(setting):
    yield check.Figure("before", 1.0, 2.0)
    try:
        import nowhere_to_be_found.part
    except ImportError as error:
        raise RuntimeError("pip install something") from error
@check.check("a/broken", seconds=20)
def broken(setting):
    import json.nowhere
    yield
@check.check("a/skips", seconds=20)
def skips(setting):
    raise check.SkippedError("for a reason")
    yield
@check.check("measure/last", seconds=20)
def last(setting):
    yield check.Figure("rate", 5.0)
"""


def test_checks_that_hang_die_or_raise_do_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    status, output, (_, *lines) = command(tmp_path, "--modules", "misbehaving", variables={"PYTHONPATH": str(tmp_path)})
    assert status == 1, output
    by_name = {line["check"]: line for line in lines}
    assert by_name["a/first"]["passed"]
    assert "took longer than its time limit, 1 s" in by_name["a/hangs"]["error"]
    assert by_name["a/hangs"]["figures"][0]["case"] == "before it hangs"
    assert by_name["a/raises"]["error"] == "ValueError: of its own"
    assert "ended with status -11" in by_name["a/dies"]["error"]
    assert by_name["a/skips"]["skipped"] == "for a reason"
    assert by_name["a/lacks"]["skipped"] == "not installed: nowhere_to_be_found"
    assert by_name["a/broken"]["error"].startswith("ModuleNotFoundError")
    assert by_name["measure/last"]["figures"][0]["value"] == 5.0
