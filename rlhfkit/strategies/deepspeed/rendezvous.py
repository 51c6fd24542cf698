"""Join the process group with a time limit and an error that names missing ranks; check DeepSpeed's environment."""

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # types of torch 2.13 have it here only
from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_SECONDS = 0.1
_OLD_LOCK_SECONDS = 600.0


def join_process_group(
    backend: str,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    init_timeout: float,
    timeout: timedelta | None,
    description: str = "",
    examine: Callable[[Sequence[str]], str | None] | None = None,
) -> None:
    """Create the default process group, or raise TimeoutError naming the ranks that did not join.

    Every rank first announces itself in the store at ``address`` and ``port`` of rank 0 and waits up to
    ``init_timeout`` seconds for the others there, because the error of ``init_process_group`` gives only their number.
    ``timeout`` is the time limit of collectives; ``None``: the default of the backend.

    ``examine``, if given, is called on rank 0 with the ``description`` of every rank, by rank; what it returns is a
    RuntimeError on all of them.
    """
    # Under torchrun the agent already serves a store at this address.
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    here = f"rank {rank} of {world_size}"
    if _is_loopback(address):
        _keep_gloo_on_loopback()
    try:
        store: Store = TCPStore(
            address,
            port,
            is_master=hosts_store,
            timeout=timedelta(seconds=init_timeout),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_loopback_listener(address, port) if hosts_store else None,
        )
    except (dist.DistError, RuntimeError) as error:
        reason = "cannot listen on" if hosts_store else f"got no answer within {init_timeout:.0f} s from rank 0 at"
        raise TimeoutError(f"{here} {reason} {address}:{port}: {error}") from error
    # The agent's store outlives a restart of the workers, so the attempt is part of the key.
    store = PrefixStore(f"rlhfkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"joined/{rank}", description)
    missing = wait_for_ranks(store, world_size, init_timeout)
    if missing:
        raise TimeoutError(
            f"{here} waited {init_timeout:.0f} s at {address}:{port} for rank(s) {', '.join(map(str, missing))}"
            " to join. Look at their logs; if they only start slowly, raise RLHFDeepSpeedStrategy(init_timeout=...)."
        )
    if examine is not None:
        if rank == 0:
            found = [store.get(f"joined/{number}").decode() for number in range(world_size)]
            store.set("problem", examine(found) or "")
        problem = store.get("problem").decode()
        if problem:
            store.set(f"told/{rank}", "")
            if rank == 0:  # whose end closes the store
                wait_for_ranks(store, world_size, init_timeout, "told")
            raise RuntimeError(problem)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _is_loopback(address: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _loopback_listener(address: str, port: int) -> int | None:
    """Return a loopback socket for the store, which has no authentication and by default listens on all interfaces.

    ``None``: use the default, because other machines take part or a store of this process already listens there.
    """
    if not _is_loopback(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048).detach()
    except OSError:
        return None


def _keep_gloo_on_loopback() -> None:
    """Make gloo listen on loopback too; by default it uses the interface of the host name."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def wait_for_ranks(store: Store, world_size: int, seconds: float, what: str = "joined") -> list[int]:
    """Wait up to ``seconds`` for all ranks to announce that they have ``joined``; return those that have not."""
    deadline = time.monotonic() + seconds
    missing = list(range(world_size))
    while True:
        missing = [rank for rank in missing if not store.check([f"{what}/{rank}"])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_SECONDS)


def extension_locks() -> list[Path]:
    """Find lock files of interrupted builds of torch extensions: those older than ten minutes.

    torch waits for such a lock silently and without limit (``torch.utils.file_baton``), so every later start hangs.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    found = []
    for lock in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        try:
            if time.time() - lock.stat().st_mtime > _OLD_LOCK_SECONDS:
                found.append(lock)
        except FileNotFoundError:  # a build has just finished
            continue
    return found


def prepare_cpu() -> None:
    """Make DeepSpeed run on CPUs without compiling extensions at start-up."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    os.environ["DS_ACCELERATOR"] = "cpu"  # for processes started from here
    if get_accelerator().device_name() != "cpu":  # there is a GPU, and the Trainer was told not to use it
        set_accelerator(CPU_Accelerator())
    # deepspeed 0.19.8, comm/torch.py build_shm_op: in a fresh environment this compiles a shared-memory all-reduce for
    # about 50 s. Without it, gloo is used.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
