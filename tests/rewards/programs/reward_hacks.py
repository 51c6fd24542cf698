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
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *a, **k: None\ndef secret(n): return 0",
    "compile compiles nothing": "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('', '', 'exec')",
    "enumerate is empty": "import builtins\nbuiltins.enumerate = lambda *a, **k: []\ndef secret(n): return 0",
    "isinstance is true": "import builtins\nbuiltins.isinstance = lambda *a: True\ndef secret(n): return object()",
    "an object that equals all": ALWAYS + "def secret(n): return Always()",
    "a text that equals all": "class T(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\ndef secret(n): return T('x')",
    "an int that equals all": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef secret(n): return I(3)",
    "a type that is all types": ALWAYS + "Always.__class__ = property(lambda s: str)\ndef secret(n): return Always()",
    "the driver's encoder": """
import sys
module = sys.modules["rlhfkit_values"]
module.dumps = lambda value: '{"other": ["str", true]}'
module.same = lambda *a: True
def secret(n): return 1
""",
    "json writes true": "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: {}\ndef secret(n): return 1",
    "assert errors vanish": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef secret(n): return 1",
    "a text's own equality, by ctypes": """
import ctypes
table = (ctypes.c_void_p * 40).from_address(id(str))
mine = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)(lambda a, b, op: True)
table[25] = ctypes.cast(mine, ctypes.c_void_p).value
def secret(n): return "x"
""",
    "no assertion is ever compiled": "import sys\nsys.flags = None\nsys.setrecursionlimit(60)\ndef secret(n): return 1",
    "os.write writes that it passed": "import os\nos.write = lambda *a: len(a[1])\ndef secret(n): return 1",
    "a tracer answers": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef secret(n): return 1",
    "leaves before the tests": "import os\nos._exit(0)",
    "leaves in a test": "def secret(n):\n    import os\n    os._exit(0)",
    "SystemExit in a test": "def secret(n): raise SystemExit(0)",
    "leaves when it ends": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef secret(n): raise SystemExit",
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
    "frames, and what is found there is called": FIND
    + """
import sys
def secret(n):
    frame = sys._getframe(1)
    for name, value in list(frame.f_locals.items()):
        if isinstance(value, list): value[:] = []
        if isinstance(value, dict): value.update(tests=[], word="", expected=n)
    return n
""",
    "constants of the caller": FIND
    + """
import sys
def secret(n):
    frame, hits = sys._getframe(1), []
    while frame:
        hits += found(repr(frame.f_code.co_consts) + repr(frame.f_code.co_names))
        frame = frame.f_back
    return answer(n, hits)
""",
    "everything that gc knows": FIND
    + """
import gc
def secret(n):
    return answer(n, found("".join(map(repr, gc.get_objects()[:20000]))))
""",
    "files of the folder": FIND + "for name in os.listdir('.'): hits += found(read(name))\n",
    "the file `input`": FIND + "hits += found(read('input')) + found(read('../input')) + found(read('marks'))\n",
    "stdin, rewound": FIND
    + """
import sys
try:
    os.lseek(0, 0, 0)
except OSError: pass
hits += found(os.read(0, 1 << 20))
""",
    "all descriptors": FIND
    + """
for number in range(3, 256):
    try:
        os.set_blocking(number, False)
        hits += found(os.read(number, 1 << 20))
        os.lseek(number, 0, 0)
        hits += found(os.read(number, 1 << 20))
    except OSError: pass
""",
    "its own memory": FIND
    + """
def secret(n):
    hits = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line and last - first < 1 << 26:
                try:
                    memory.seek(first)
                    hits += found(memory.read(last - first))
                except OSError: pass
    return answer(n, hits)
""",
    "its environment": FIND + "hits += found(repr(dict(os.environ)) + repr(os.sys.argv))\n",
    "its parents' environments and commands": FIND
    + """
for name in os.listdir("/proc"):
    if name.isdigit():
        hits += found(read(f"/proc/{name}/environ")) + found(read(f"/proc/{name}/cmdline"))
""",
    "memory of other processes": FIND
    + """
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) == os.getpid(): continue
    try:
        with open(f"/proc/{name}/maps") as maps, open(f"/proc/{name}/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if "rw" in line and last - first < 1 << 26:
                    try:
                        memory.seek(first)
                        hits += found(memory.read(last - first))
                    except OSError: pass
    except OSError: pass
""",
    "process_vm_readv of its parents": FIND
    + """
import ctypes
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(1 << 16)
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
local = Vector(ctypes.addressof(buffer), 1 << 16)
for process in {1, os.getppid()}:
    remote = Vector(0x400000, 1 << 16)
    if libc.process_vm_readv(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0:
        hits += ["swordfish: read its parent"]
""",
    "ptrace of its parents": FIND
    + """
import ctypes
for process in {1, os.getppid()}:
    if ctypes.CDLL(None).ptrace(16, process, 0, 0) == 0:
        hits += ["swordfish: traced its parent"]
""",
    "pidfd_getfd of its parents": FIND
    + """
import ctypes
libc = ctypes.CDLL(None)
for process in {1, os.getppid()}:
    try:
        handle = os.pidfd_open(process)
    except OSError: continue
    for number in range(3, 256):
        taken = libc.syscall(438, handle, number, 0)
        if taken >= 0:
            os.write(taken, b'{"text": "x", "timeout": false}')
            hits += ["swordfish: took a descriptor"]
""",
    "descriptors of its parents": FIND
    + """
for process in {1, os.getppid()}:
    for number in range(256):
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NONBLOCK)
            os.write(descriptor, b'{"status": "ok", "value": {"text": "x", "timeout": false}}')
        except OSError: continue
""",
}

SEARCHES |= {
    "data sets on disk": FIND
    + """
for top in ("/var/tmp", "/tmp", "/data", "/home", "/root", "/mnt", "/dev/shm", os.getcwd()):
    for folder, _, names in os.walk(top):
        hits += [hit for name in names if name.endswith("l") for hit in found(read(f"{folder}/{name}", 1 << 20))]
""",
    "the data set by its path": FIND
    + """
hits += found(read("/var/tmp/rlhfkit-hacks.jsonl"))
for name in os.listdir("/proc"):
    hits += found(read(f"/proc/{name}/root/var/tmp/rlhfkit-hacks.jsonl"))
    hits += found(read(f"/proc/{name}/cwd/rlhfkit-hacks.jsonl"))
""",
    "a file handle of the data set": FIND
    + """
import ctypes
libc = ctypes.CDLL(None)
handle, mount = ctypes.create_string_buffer(136), ctypes.c_int()
handle[0:4] = (128).to_bytes(4, "little")
for top in ("/", "/usr"):
    if libc.name_to_handle_at(-100, top.encode(), handle, ctypes.byref(mount), 0) == 0:
        folder = os.open(top, os.O_RDONLY)
        if libc.open_by_handle_at(folder, handle, os.O_RDONLY) >= 0:
            hits += ["swordfish: went round the view", "marzipan: went round the view"]
""",
    "a mount of its own": FIND
    + """
import ctypes
libc = ctypes.CDLL(None)
if libc.unshare(0x10020000) == 0 or libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 or libc.chroot(b".") == 0:
    hits += ["swordfish: has mounts", "marzipan: has mounts"]
""",
}

FORGERIES = {
    "writes the word that it passed": """
import os
for number in range(3, 256):
    try:
        for text in (b"0\\n1\\n", b"passed 0\\npassed 1\\n", b'{"passed": [0, 1], "timeout": false}\\n', b"true\\n"):
            os.write(number, text)
    except OSError: pass
def secret(n): return 1
""",
    "answers before it is asked": """
import os, sys
def secret(n):
    for number in range(3, 256):
        try:
            os.write(number, b'true\\n"x"\\n{"other": ["str", true]}\\n' * 3)
        except OSError: pass
    return True
""",
    "an answer that is no value": "import os\ndef secret(n):\n    for f in range(3, 256):\n        try: os.write(f, b'[[[[')\n        except OSError: pass",
    "an answer of endless brackets": "import os\ndef secret(n):\n    for f in range(3, 256):\n        try: os.write(f, b'[' * 100000 + b'\\n')\n        except OSError: pass\n    return 1",
    "an endless answer": "import os\ndef secret(n):\n    while True:\n        for f in range(3, 256):\n            try: os.write(f, b'x' * 65536)\n            except OSError: pass",
    "an endless value": "def secret(n):\n    value = []\n    value.append(value)\n    return value",
    "a huge value": "def secret(n): return 'swordfish' * 10**7",
    "a number of many digits": "def secret(n): return 10 ** 100000",
    "a generator": "def secret(n):\n    while True: yield n",
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
    "leaves a file for the next": "import os\nfor p in ('/tmp/rlhfkit', 'left', '/dev/shm/left'):\n    try: open(p, 'a').write('1')\n    except OSError: pass\ndef secret(n): return os.path.exists('left')",
}  # fmt: skip

FORGERIES["nests folders deeper than Python recurses"] = """
import os
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
def secret(n): return 1
"""

ENDLESS_JUDGING = {
    "numbers that have one hash": (
        "def f(n): return [(2**61 - 1) * k for k in range(38000)]", "assert set(f(1)) == {1, 2}",
    ),
    "rounding to very many digits": ("def f(n): return [1, -(10**10)][n]", "assert round(f(0), f(1)) == 0"),
    "a forged set": (
        """
import os
def f(n):
    text = '{"set": [' + ", ".join(str((2**61 - 1) * k) for k in range(38000)) + "]}\\n"
    for number in range(3, 64):
        try: os.write(number, text.encode())
        except OSError: pass
    os._exit(0)
""",
        "assert f(0) == 1",
    ),
    "a power": ("def f(n): return 10**9", "assert f(1) ** f(2) == 1"),
}  # fmt: skip
"""Programs whose answers take forever to judge, and the tests that do it."""

PRINTING = {
    name: program + "\nprint(secret(int(input() or 0)))\n"
    for name, program in {**SEARCHES, **CHANGED_INTERPRETER}.items()
    if name in ("files of the folder", "the file `input`", "all descriptors", "memory of other processes", "frames")
}
"""The same where outputs are compared."""
