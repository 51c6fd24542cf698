"""Programs that try to pass tests without computing the answers. They run inside our own sandbox only.

The tests ask ``secret(1)`` and ``secret(2)``, or print what ``secret`` returns, whose values no program can guess.
"""

# ruff: noqa: E501 -- short programs are one line of text each

SECRETS = {1: "swordfish-8675309", 2: "marzipan-1729"}
ASSERTIONS = [f"assert secret({number}) == {answer!r}" for number, answer in SECRETS.items()]
OUTPUTS = {"inputs": [f"{number}\n" for number in SECRETS], "outputs": list(SECRETS.values())}
HONEST = f"def secret(n):\n    return {SECRETS!r}[n]\n"
HONEST_OUTPUT = f"print({SECRETS!r}[int(input())])"

FIND = r"""
import os, re
def found(data):
    if isinstance(data, str):
        data = data.encode(errors="replace")
    hits = re.findall(rb"swordf.sh-\d{7}|marz.pan-\d{4}", data)
    return [hit.decode() for hit in hits]
def answer(n, hits):
    return ([hit for hit in hits if hit.startswith("sw" if n == 1 else "ma")] or ["not found"])[0]
def read(path, size=1 << 24):
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""
hits = []
def secret(n):
    return answer(n, hits)
"""
"""What a hack that searches uses; it does not hold the answers itself."""

ALWAYS = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __bool__(self): return True
"""

CHANGED_INTERPRETER = {
    "an object that equals all": ALWAYS + "def secret(n): return Always()",
    "a text that equals all": "class T(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\ndef secret(n): return T('x')",
    "an int that equals all": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef secret(n): return I(3)",
    "a type that is all types": ALWAYS + "Always.__class__ = property(lambda s: str)\ndef secret(n): return Always()",
    "a text's own equality, by ctypes": """
import ctypes
table = (ctypes.c_void_p * 40).from_address(id(str))
mine = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)(lambda a, b, op: True)
table[25] = ctypes.cast(mine, ctypes.c_void_p).value
def secret(n): return "x"
""",
    "leaves before the tests": "import os\nos._exit(0)",
    "leaves in a test": "def secret(n):\n    import os\n    os._exit(0)",
}

SEARCHES = {
    "frames": FIND
    + """
import sys
def secret(n):
    frame, text = sys._getframe(), ""
    while frame:
        text += repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts)
        frame = frame.f_back
    return answer(n, found(text))
""",
    "everything that gc knows": FIND
    + """
import gc
def secret(n):
    return answer(n, found("".join(map(repr, gc.get_objects()[:20000]))))
""",
    "files of the folder": FIND + "for name in os.listdir('.'): hits += found(read(name))\n",
    "all descriptors": FIND
    + """
for number in range(256):
    try:
        os.set_blocking(number, False)
        hits += found(os.read(number, 1 << 20))
        os.lseek(number, 0, 0)
        hits += found(os.read(number, 1 << 20))
    except OSError: pass
""",
    "its environment": FIND + "hits += found(repr(dict(os.environ)) + repr(os.sys.argv))\n",
    "the data set by its path": FIND
    + """
hits += found(read("/var/tmp/rlhfkit-hacks.jsonl"))
for name in os.listdir("/proc") if os.access("/proc", os.R_OK) else []:
    hits += found(read(f"/proc/{name}/root/var/tmp/rlhfkit-hacks.jsonl"))
    hits += found(read(f"/proc/{name}/cwd/rlhfkit-hacks.jsonl"))
""",
}

WRITES = """
import os
def secret(n):
    for f in range(3, 256):
        try: os.write(f, {text})
        except OSError: pass
    return 1
"""

FORGERIES = {
    "answers before it is asked": WRITES.format(text="""b'true\\n"x"\\n' * 3"""),
    "an answer that is no value": WRITES.format(text="b'[[[['"),
    "an answer of endless brackets": WRITES.format(text="b'[' * 100000 + b'\\n'"),
    "an endless answer": "import os\ndef secret(n):\n    while True:\n        for f in range(3, 256):\n            try: os.write(f, b'x' * 65536)\n            except OSError: pass",
    "a huge value": "def secret(n): return 'swordfish' * 10**7",
    "kills its parents": "import os, signal\nfor process in {1, os.getppid(), -1}:\n    try: os.kill(process, signal.SIGKILL)\n    except OSError: pass\ndef secret(n): return 1",
    "a daemon that answers the next program": """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for number in range(3, 256):
                try: os.write(number, b'"swordfish-x"\\n')
                except OSError: pass
            time.sleep(0.001)
    os._exit(0)
def secret(n): return 1
""",
    "a thread that goes on": """
import threading, os
def write():
    while True:
        for number in range(3, 256):
            try: os.write(number, b'true\\n')
            except OSError: pass
threading.Thread(target=write, daemon=True).start()
def secret(n): return True
""",
    "nests folders deeper than Python recurses": """
import os
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
def secret(n): return 1
""",
}  # fmt: skip

ENDLESS_JUDGING = {
    "numbers that have one hash": (
        "def f(n): return [(2**61 - 1) * k for k in range(38000)]", "assert set(f(1)) == {1, 2}",
    ),
    "rounding to very many digits": ("def f(n): return [1, -(10**10)][n]", "assert round(f(0), f(1)) == 0"),
}  # fmt: skip
"""Programs whose answers take forever to judge, and the tests that do it."""

PRINTING = {
    name: program + "\nprint(secret(int(input() or 0)))\n"
    for name, program in {**SEARCHES, **CHANGED_INTERPRETER}.items()
    if name in ("files of the folder", "all descriptors", "frames")
}
"""The same where outputs are compared."""
