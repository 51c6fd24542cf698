"""Attacks of a hostile program on the trainer, and a trainer to attack. Run as a program by ``test_isolation.py``.

The trainer holds a secret in a file that everybody may read, in its memory and in its environment, and listens on a
port. It prints the active isolation layers, and which attacks of the program inside its sandbox succeeded.
"""

import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

ATTACKS = r"""
import ctypes, json, os, resource, socket, sys
target = json.loads(input())
libc = ctypes.CDLL(None, use_errno=True)
SECRET = target["secret"][::-1].encode()

def parents():
    found, process = [target["trainer"]], os.getppid()
    while process > 0 and process not in found:
        found.append(process)
        try:
            process = int(open(f"/proc/{process}/stat").read().rsplit(")", 1)[1].split()[1])
        except OSError:
            break
    return [process for process in found if process != os.getpid()]

def read_data():
    return SECRET in open(target["data"], "rb").read()

def other_views():
    # Of file systems: whether calls that make one, or open a file without its path, are there at all.
    reached = []
    for name in ("unshare", "mount", "chroot", "open_by_handle_at"):
        ctypes.set_errno(0)
        getattr(libc, name)(*[-1] * 5)
        reached.append(ctypes.get_errno() != 38)
    return any(reached)

def read_memory():
    for process in parents():
        with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if "rw" in line and last - first < 1 << 27:
                    memory.seek(first)
                    try:
                        if SECRET in memory.read(last - first): return True
                    except OSError: pass
    return False

def read_memory_by_call():
    buffer = ctypes.create_string_buffer(8)
    class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    local, remote = Vector(ctypes.addressof(buffer), 8), Vector(target["address"], 8)
    return libc.process_vm_readv(target["trainer"], ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0

def read_environment():
    return any(SECRET in open(f"/proc/{process}/environ", "rb").read() for process in parents())

def open_descriptors():
    for process in parents():
        for name in os.listdir(f"/proc/{process}/fd"):
            try:
                if os.readlink(f"/proc/{process}/fd/{name}").startswith("socket:"): return True
            except OSError: pass
    return False

def take_descriptors():
    for process in parents():
        handle = os.pidfd_open(process)
        if any(libc.syscall(438, handle, number, 0) >= 0 for number in range(3, 32)): return True
    return False

def trace():
    for process in parents():
        if libc.ptrace(16, process, 0, 0) == 0:
            os.waitpid(process, 0x40000000)
            libc.ptrace(17, process, 0, 0)
            return True
    return False

def signal():
    os.kill(target["trainer"], 0)
    return True

def write_outside():
    open(os.path.dirname(target["data"]) + "/written", "w").write("x")
    return True

def connect():
    socket.create_connection(("127.0.0.1", target["port"]), 3).close()
    return True

def other_networks():
    made = []
    for family, kind in ((16, 3), (40, 1)):  # netlink, vsock
        try:
            made.append(socket.socket(family, kind))
        except OSError: pass
    return bool(made)

def memory():
    held = bytearray(300 << 20)
    return True

def uncounted_memory():
    held = 0
    for number in range(3):
        made = libc.syscall(319 if os.uname().machine == "x86_64" else 279, b"m", 0)
        if made >= 0:
            os.ftruncate(made, 60 << 20)
            for _ in range(60): held += os.write(made, b"x" * (1 << 20))
        identity = libc.shmget(0, 60 << 20, 0o1600)
        if identity >= 0:
            held += 60 << 20
            libc.shmctl(identity, 0, None)
    return held > 300 << 20

def processes():
    made = []
    try:
        for _ in range(40):
            process = os.fork()
            if process == 0:
                import time
                time.sleep(30)
            made.append(process)
        return True
    finally:
        for process in made: os.kill(process, 9)

def attempt(attack):
    try:
        return bool(attack())
    except (OSError, AttributeError, ValueError, MemoryError):
        return False

print(json.dumps({name: attempt(attack) for name, attack in list(globals().items())
                  if isinstance(attack, type(attempt)) and name not in ("attempt", "parents")}))
"""

DAEMON = r"""
import json, os, sys, time
target = json.loads(input())
running, closed_by_exec = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", target["marker"]])
    os._exit(0)
os.close(closed_by_exec)
os.read(running, 1)
process = os.getppid()
for _ in range(2):  # the worker, the supervisor
    try:
        above = int(open(f"/proc/{process}/stat").read().rsplit(")", 1)[1].split()[1])
    except OSError:
        break
    if above > 1 and above != target["trainer"]:
        try:
            os.kill(above, 9)
        except OSError:
            pass
    process = above
time.sleep(1)
"""


def main() -> None:
    """Arguments: the repository, the folder of the data, whether to use bubblewrap, the secret backwards, a marker.

    With "nothing" in place of bubblewrap the attacks run outside of any sandbox, and what came of them is printed.
    """
    repository, folder, bubblewrap, backwards, marker = sys.argv[1:]
    for name in ("rlhfkit", "rlhfkit.rewards"):  # as packages without what they import, which takes seconds
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [f"{repository}/{name.replace('.', '/')}"]
    from rlhfkit.rewards.sandbox import ResourceLimits, SandboxPool, WorkerSpec, process

    if bubblewrap == "no":
        process.bubblewrap_works = lambda: False

    secret = bytearray(backwards[::-1].encode())
    programs = Path(repository) / "rlhfkit" / "rewards" / "programs"
    work = WorkerSpec(
        name="the test", program=programs / "worker.py", factory="runner", arguments=("", 1 << 20), packages=False,
        trusted=False, files=(programs / "driver.py", programs / "values.py"), required=("reads", "trainer", "network"),
    )  # fmt: skip
    limits = ResourceLimits(memory_gib=0.25, processes=24, file_mib=16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = id(secret)
        target = {
            "trainer": os.getpid(), "data": f"{folder}/data.jsonl", "port": server.getsockname()[1], "address": address,
            "marker": marker, "secret": backwards,
        }  # fmt: skip
        if bubblewrap == "nothing":
            command = [sys.executable, "-S", "-c", ATTACKS]
            print(subprocess.run(command, input=json.dumps(target), stdout=subprocess.PIPE, text=True).stdout)
            return
        job = {"do": "run", "input": json.dumps(target), "seconds": 120.0}
        options = {"workers": 1, "timeout": 240.0, "limits": limits, "fresh_process": True}
        one = SandboxPool(work, allow_partial_isolation=True, **options)
        outcome = one.run({**job, "program": [ATTACKS]})
        one.run({**job, "program": [DAEMON]})
        one.close()
        try:
            SandboxPool(work, **options).run({**job, "program": ["pass"]})
            refused = ""
        except RuntimeError as error:
            refused = str(error)
        print(
            json.dumps(
                {"isolation": one.isolation, "text": outcome.value and outcome.value["text"], "refused": refused}
            )
        )
    print(outcome.message, file=sys.stderr)


if __name__ == "__main__":
    main()
