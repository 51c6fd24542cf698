"""What docs/security.md promises and no other test shows: about the code as a whole, and about who listens where."""

import ast
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import rlhfkit
from rlhfkit.ray_session import unassigned_port
from rlhfkit.rollout.weight_sync.process_group.rendezvous import open_store

PACKAGE = Path(rlhfkit.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """File, dotted name and node of every call in the package."""
    return [
        (path, ast.unparse(node.func), node)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), None)


def test_pickles_are_read_from_our_own_processes_only() -> None:
    reading = ("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads")
    assert {path for path, name, _ in calls() if name.endswith(reading)} <= {
        "rewards/sandbox/child.py",  # a pipe from its parent, which reads JSON in return
        "strategies/ray/actor.py",  # both: actors of one Ray, which lets nobody in without its token
        "strategies/ray/ranks.py",
        "rank_store.py",  # between the ranks of one run, as torch.distributed sends objects itself
    }
    dangerous = {
        path for path, name, call in calls() if name == "torch.load" and keyword(call, "weights_only") != "True"
    }
    assert dangerous <= {
        "strategies/checkpoint/io.py",  # directories of the strategy: DeepSpeed's own files are pickles
        "strategies/checkpoint/universal.py",
    }
    assert not [path for path, name, _ in calls() if name in ("dill.load", "dill.loads", "joblib.load", "numpy.load")]


def test_no_text_is_run_as_code_and_no_shell_is_started() -> None:
    running = {path for path, name, _ in calls() if name in ("eval", "exec", "os.system")}
    assert running <= {"rewards/programs/driver.py"}  # code that a policy wrote, in a confined process
    assert not [path for path, _, call in calls() if keyword(call, "shell") not in (None, "False")]
    assert not [path for path, name, _ in calls() if name in ("yaml.load", "yaml.unsafe_load")]


def test_code_of_models_is_not_run_unless_asked() -> None:
    seen = 0
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            spec = node.args
            positional = spec.posonlyargs + spec.args
            padded = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
            for argument, default in zip(positional + spec.kwonlyargs, padded + list(spec.kw_defaults), strict=True):
                if argument.arg == "trust_remote_code":
                    seen += 1
                    assert default is None or ast.unparse(default) == "False", f"{path}: {node.name}"
    assert seen > 5
    assert not [path for path, _, call in calls() if keyword(call, "trust_remote_code") == "True"]


def test_certificates_are_verified_and_nothing_listens_everywhere_by_default() -> None:
    assert not [path for path, _, call in calls() if keyword(call, "verify") == "False"]
    everywhere = {"0.0.0.0", "::"}
    for path, tree in trees().items():
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not everywhere & {value for value in constants if isinstance(value, str)}, path


def test_the_store_of_engines_listens_on_its_address_only() -> None:
    store = open_store("127.0.0.1", 60.0)
    with pytest.raises(OSError, match="in use"):  # it is there ...
        socket.create_server(("127.0.0.1", store.port), reuse_port=False)
    with socket.create_server(("127.0.0.2", store.port)):  # ... and nowhere else
        pass


RANK = """
import importlib.util, os, sys, torch, torch.distributed as dist

spec = importlib.util.spec_from_file_location("rendezvous", sys.argv[1])  # alone, it loads in a moment
rendezvous = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rendezvous)
here = {"rank": 0, "world_size": 1, "address": "127.0.0.1", "port": int(sys.argv[2])}
rendezvous.join_process_group("gloo", init_timeout=60, timeout=None, **here)
dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
mine = set()
for number in os.listdir("/proc/self/fd"):
    try:
        mine.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").removesuffix("]"))
    except FileNotFoundError:  # of the listing itself
        pass
for family in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{family}").read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in mine:  # it listens
            print(family, words[1].split(":")[0])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the sockets of a process from Linux's /proc")
def test_ranks_on_one_machine_listen_on_loopback_only() -> None:
    file = PACKAGE / "strategies" / "deepspeed" / "rendezvous.py"
    command = [sys.executable, "-c", RANK, str(file), str(unassigned_port("127.0.0.1"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    listening = ran.stdout.split("\n")[:-1]
    assert len(listening) >= 2  # the store and gloo
    assert set(listening) == {"tcp 0100007F"}  # 127.0.0.1


@pytest.mark.ray
def test_ray_started_here_answers_nobody_without_its_token(ray_session: None) -> None:
    import grpc
    import ray

    address = ray.get_runtime_context().gcs_address
    for header in ((), (("authorization", "Bearer a-guess"),)):
        for method in ("NodeInfoGcsService/GetAllNodeInfo", "JobInfoGcsService/GetAllJobInfo"):
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=60, metadata=header)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
