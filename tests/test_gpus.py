"""What ``CUDA_VISIBLE_DEVICES`` means to torch, what the driver tells, and what is said of GPUs that cannot be used."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from simulated_driver import simulated_driver, simulated_uuid

from rlhfkit.gpus import (
    GIB,
    VARIABLE,
    DriverReport,
    RankGPU,
    VisibleGPU,
    ask_driver,
    explain_missing_cuda,
    gpu_is_taken,
    memory_is_tight,
    mixed_engine_kinds,
    mixed_kinds,
    name_of_uuid,
    same_gpu_twice,
    too_few_devices,
    unsupported_dtype,
    uuid_of_name,
    visible_devices_problem,
    visible_names,
    warn_if_cuda_is_missing,
    weights_do_not_fit,
    why_cuda_is_missing,
)

MANY = 1000  # torch does not know how many there are when it reads the variable
ENTRIES = st.sampled_from(["0", "1", "2", "-1", "", "x", "+1", "1gpu2", f"GPU-{simulated_uuid(0)}", "GPU-8f", "MIG-3e"])


@given(st.lists(ENTRIES, min_size=1, max_size=5))
def test_the_variable_means_what_it_means_to_torch(entries: list[str]) -> None:
    value = ",".join(entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, value)
        cuda: Any = torch.cuda
        theirs = cuda._parse_visible_devices()
    ours = visible_names(value, MANY)
    numbers = [name if "-" in name else int(name.lstrip("+")[:1]) for name in ours]
    assert numbers == theirs


def test_numbers_of_gpus_that_are_not_there_end_the_list() -> None:
    """CUDA C++ Programming Guide: only devices before the first invalid index are visible."""
    assert visible_names("1,7,0", 4) == ["1"]
    assert visible_names(None, 3) == ["0", "1", "2"]


def test_a_uuid_and_its_name_in_the_variable_say_the_same() -> None:
    uuid = simulated_uuid(3)
    assert uuid_of_name(name_of_uuid(uuid)) == uuid
    assert name_of_uuid(uuid, "NVIDIA A100-SXM4-40GB MIG 1g.5gb") == f"MIG-{uuid}"
    assert uuid_of_name("3") is None
    assert uuid_of_name("GPU-8f") is None  # CUDA takes the beginning of a UUID too
    assert uuid_of_name(None) is None


def test_without_a_driver_the_report_is_empty() -> None:
    """As on this machine, unless it has one."""
    found = ask_driver({"PATH": os.environ["PATH"]})
    assert found == DriverReport() or found.cuda is not None


def test_the_driver_tells_what_a_process_with_that_environment_sees(tmp_path: Path) -> None:
    driver = simulated_driver(tmp_path, 4)
    found = ask_driver(driver)
    assert [gpu.uuid for gpu in found.gpus] == [simulated_uuid(gpu) for gpu in range(4)]
    assert (found.cuda, found.error) == ((13, 0), None)
    assert (found.gpus[2].name, found.gpus[2].capability) == ("Simulated 2", (9, 0))
    assert found.gpus[2].memory == 80 * 2**30
    chosen = ask_driver(driver | {VARIABLE: f"3,GPU-{simulated_uuid(1)}"})
    assert [gpu.name for gpu in chosen.gpus] == ["Simulated 3", "Simulated 1"]
    assert ask_driver(driver | {VARIABLE: ""}).gpus == ()
    old = ask_driver(driver | {"SIMULATED_CUDA": "12020", "SIMULATED_ERROR": "803"})
    assert (old.cuda, old.error) == ((12, 2), 803)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_and_torch_describe_the_same_gpus() -> None:
    found = ask_driver().gpus
    assert len(found) == torch.cuda.device_count()
    for index, gpu in enumerate(found):
        theirs: Any = torch.cuda.get_device_properties(index)
        assert gpu.uuid == str(theirs.uuid)
        assert (gpu.name, gpu.capability) == (theirs.name, (theirs.major, theirs.minor))
        assert gpu.memory == pytest.approx(theirs.total_memory, rel=0.02)


# ---------------------------------------------------------------------- on machines that are only described

H100 = VisibleGPU("a", "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB)
T4 = VisibleGPU("b", "Tesla T4", (7, 5), 15 * GIB)


def on(*gpus: VisibleGPU) -> list[RankGPU]:
    """Ranks on one machine, on GPUs of their own of these kinds."""
    return [RankGPU(rank, "node1", dataclasses.replace(gpu, uuid=f"gpu{rank}")) for rank, gpu in enumerate(gpus)]


FIRST, SECOND, THIRD = on(H100, H100, H100)
UNKNOWN = [RankGPU(rank, "node1", dataclasses.replace(H100, uuid="")) for rank in range(2)]
TWO = DriverReport((H100,) * 2, (13, 0))
MODELS, WEIGHTS = {"policy 16 bit": 14 * GIB, "reference 16 bit": 14 * GIB}, {"weights": 20.0 * GIB}


def of_run(gib: float) -> dict[str, float]:
    return {"weights": gib / 4 * GIB, "activations": gib * 3 / 4 * GIB}


SAID: list[tuple[str | None, str | None]] = [
    (visible_devices_problem(None, 4), None),
    (visible_devices_problem("0,1", 4), None),
    (visible_devices_problem(f"GPU-{simulated_uuid(1)}", 4), None),
    (visible_devices_problem("", 4), "CUDA_VISIBLE_DEVICES='' hides all 4 GPU(s)"),
    (visible_devices_problem("-1", 4), "CUDA_VISIBLE_DEVICES='-1' hides all 4 GPU(s)"),
    (visible_devices_problem("1,0,1", 4), "names 1 twice, for which CUDA hides all GPUs"),
    (visible_devices_problem("0,4", 4), "'4' is none of this machine's 4 GPU(s) (numbers from 0, or UUIDs"),
    (visible_devices_problem("0,GPU-8f", 4), "'GPU-8f' is none of this machine's 4 GPU(s)"),
    (visible_devices_problem("two", 4), "'two' is none of this machine's 4 GPU(s)"),
    (visible_devices_problem("0,,1", 4), "CUDA shows the 1 before it only"),
    # torch would silently compute on the CPU
    (
        explain_missing_cuda(None, 2, None, DriverReport()),
        "This machine has 2 NVIDIA GPU(s), which torch cannot use: this torch was built without CUDA",
    ),
    (
        explain_missing_cuda("13.0", 2, None, DriverReport()),
        "no driver library (libcuda.so.1). In a container, start it with its GPUs",
    ),
    (
        explain_missing_cuda("13.0", 2, None, DriverReport(cuda=(12, 2), error=100)),
        "torch was built for CUDA 13.0, and the driver supports CUDA up to 12.2. Update the driver, or install a torch "
        "that was built for CUDA 12",
    ),
    (explain_missing_cuda("12.8", 2, None, DriverReport(cuda=(13, 0), error=802)), "Fabric Manager is not running"),
    (explain_missing_cuda("12.8", 2, None, DriverReport(cuda=(13, 0), error=803)), "restart the machine"),
    (explain_missing_cuda("12.8", 2, None, DriverReport(cuda=(13, 0), error=999)), "answers with error 999"),
    (explain_missing_cuda("13.0", 2, "", TWO), "CUDA_VISIBLE_DEVICES='' hides all 2 GPU(s)"),
    (explain_missing_cuda("13.2", 2, "0", TWO), "torch.utils.collect_env"),  # a newer minor version would run
    # ranks
    (same_gpu_twice(on(H100, H100, H100)), None),
    (same_gpu_twice(UNKNOWN), None),
    (
        same_gpu_twice([FIRST, SECOND, dataclasses.replace(THIRD, gpu=FIRST.gpu)]),
        "rank 0 on node1 and rank 2 on node1 are on one GPU (NVIDIA H100 80GB HBM3, GPU-gpu0)",
    ),
    (mixed_kinds(on(H100, H100, H100)), None),
    (
        mixed_kinds(on(H100, T4, H100, H100, H100, H100)),
        "NVIDIA H100 80GB HBM3 (80 GiB): rank 0 on node1, rank 2 on node1, rank 3 on node1 and 2 more; "
        "Tesla T4 (15 GiB): rank 1 on node1",
    ),
    (unsupported_dtype(on(H100, H100), "bfloat16"), None),
    (
        unsupported_dtype(on(H100, T4), "bfloat16"),
        "rank 1 on node1 of 2 cannot compute in bfloat16, which needs compute capability 8.0",
    ),
    (unsupported_dtype(on(H100, T4), "float16"), None),
    (unsupported_dtype(on(dataclasses.replace(H100, capability=(8, 0))), "float8_e4m3fn"), "float8_e4m3fn"),
    (unsupported_dtype(on(dataclasses.replace(H100, capability=(0, 0))), "bfloat16"), None),  # unknown
    (
        too_few_devices(2, 2, "0,1", 4),
        "rank 2 of this machine sees 2 GPU(s) (CUDA_VISIBLE_DEVICES='0,1')",
    ),
    (too_few_devices(2, 2, None, 4), "sees 2 GPU(s) (the machine has 4)"),
    (too_few_devices(2, 2, "0,1,9,2", 4), "CUDA_VISIBLE_DEVICES='0,1,9,2': '9' is none of this machine's 4 GPU(s)"),
    (mixed_engine_kinds([["H100"], ["H100"]], ["H100"] * 4), None),
    (mixed_engine_kinds([[], []], ["", "H100"]), None),  # unknown, or engines on CPUs
    (mixed_engine_kinds([["H100"]], [""]), None),
    (
        mixed_engine_kinds([["H100", "H100"], ["A100", "A100"], ["H100", "H100"]], ["H100"]),
        "A100: engine 1; H100: engine 0, engine 2",
    ),
    (mixed_engine_kinds([["L40S"], ["L40S"]], ["H100"] * 2), "engines have L40S and training ranks H100"),
    # memory: errors only where they are certain; estimates within a tenth are not
    (weights_do_not_fit(MODELS, "A100", 40 * GIB, ""), None),
    (
        weights_do_not_fit(MODELS, "RTX 4090", 24 * GIB, "use rlhf_zero3"),
        "reference 16 bit 14.0 GiB, policy 16 bit 14.0 GiB do not fit into RTX 4090 (24.0 GiB), before anything is "
        "computed: use rlhf_zero3",
    ),
    (gpu_is_taken(WEIGHTS, "H100", 30 * GIB, 80 * GIB), None),
    (gpu_is_taken(WEIGHTS, "T4", 10 * GIB, 15 * GIB), None),  # does not fit anyway
    (
        gpu_is_taken(WEIGHTS, "H100", 10 * GIB, 80 * GIB),
        "the 10.0 GiB that are free of H100 (80.0 GiB): another process",
    ),
    (memory_is_tight(of_run(71), "H100", 80 * GIB), None),
    (memory_is_tight(of_run(73), "H100", 80 * GIB), "may not fit into H100: about 73.0 of 80.0 GiB that are free"),
    (memory_is_tight(of_run(87), "H100", 80 * GIB), "may not fit into H100: about 87.0 of 80.0 GiB"),
    (memory_is_tight(of_run(89), "H100", 80 * GIB), "will probably not fit into H100"),
    (memory_is_tight(of_run(80), "H100", 80 * GIB), "(100%): activations 60.0 GiB, weights 20.0 GiB"),
]


@pytest.mark.parametrize(("found", "says"), SAID)
def test_gpus_that_cannot_be_used_or_do_not_go_together_are_named(found: str | None, says: str | None) -> None:
    assert found is None if says is None else found is not None and says in found


def test_nothing_is_said_where_cuda_works_or_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfkit.gpus.device_files", lambda: 8)
    assert why_cuda_is_missing("13.0", True, None) is None
    assert why_cuda_is_missing(None, False, None) is not None
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match=r"This machine has 8 NVIDIA GPU\(s\), which torch cannot use"):
            warn_if_cuda_is_missing()
    monkeypatch.setattr("rlhfkit.gpus.device_files", lambda: 0)
    assert why_cuda_is_missing(None, False, None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_cuda_is_missing()
