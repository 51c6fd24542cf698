"""bubblewrap (https://github.com/containers/bubblewrap), where it is installed: a well-kept program for such walls.

Imported in the guard as part of a package that brings nothing else, and by the trainer; standard library only.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_KEPT = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN", "CAP_DAC_READ_SEARCH")
"""What root needs to become another user."""


def command(
    program: Sequence[str], folder: str, limits: dict[str, Any], view: Sequence[str] | None, network: bool
) -> list[str]:
    """A command that runs a program inside bubblewrap.

    Args:
        program: With its arguments.
        folder: That it may write to; in memory.
        limits: The fields of :class:`~rlhfkit.rewards.sandbox.Limits`.
        view: Paths that it may read; ``None``: all.
        network: Whether it has the network.
    """
    words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += [] if network else ["--unshare-net"]
    if os.geteuid() == 0:
        words += ["--cap-drop", "ALL", *(word for one in _KEPT for word in ("--cap-add", one))]
    above = {str(parent) for path in view or () for parent in Path(path).parents if str(parent) != "/"}
    for path in sorted(above):  # bubblewrap would make them for root only
        words += ["--perms", "0755", "--dir", path]
    for path in ["/"] if view is None else view:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind-try", path, path]
    words += ["--dev", "/dev"] if view is not None else ["--dev-bind", "/dev", "/dev"]  # a reward may use a GPU
    words += ["--proc", "/proc", "--perms", "0755", "--dir", os.path.dirname(folder)]
    for mode, path in (("0700", folder), ("1777", "/dev/shm")):
        words += ["--perms", mode, "--size", str(limits["file_mib"] << 20), "--tmpfs", path]
    return [*words, "--chdir", "/", "--", *program]


@cache
def works() -> bool:
    """Whether it is installed, and allowed to put up what is asked of it."""
    if shutil.which("bwrap") is None:
        return False
    probe = command(["true"], "/tmp", {"file_mib": 1}, None, network=False)
    try:
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
