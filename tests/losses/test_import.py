import subprocess
import sys

HEAVY = """
import sys, torch
before = set(sys.modules)
import rlhfkit.losses
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(" ".join(sorted(added - set(sys.stdlib_module_names))))
"""


def test_importing_the_losses_loads_torch_and_nothing_else():
    result = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True, timeout=120)
    # torch may load more of itself, and of what it installs.
    assert set(result.stdout.split()) - {"torch", "sympy", "mpmath"} == {"rlhfkit"}


def test_importing_the_losses_loads_no_other_part_of_the_package():
    code = "import sys, rlhfkit.losses; print(*(name for name in sys.modules if name.startswith('rlhfkit.')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    allowed = ("rlhfkit.losses", "rlhfkit._version", "rlhfkit.validation")  # the last needs the standard library only
    assert [name for name in result.stdout.split() if not name.startswith(allowed)] == []
