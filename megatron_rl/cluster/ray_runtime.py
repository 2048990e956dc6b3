"""The Ray cluster of this process: started or joined by the first worker group, left by the last."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron_rl.cluster import janitor, readiness, stop
from megatron_rl.cluster.addresses import ray_address
from megatron_rl.cluster.environment import accept_read_only_tensors, port_in_use
from megatron_rl.cluster.resources import Device, device_of_nodes, resolve_device
from megatron_rl.config.sections.cluster import ClusterConfig
from megatron_rl.errors import ClusterError

ANSWER_S = 20.0
"""Longest wait for an answer at cluster.ray_address."""
STORE_S = 10.0
"""Longest wait for the cluster's key-value store."""

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_users = 0
_is_ours = False


def acquire(cluster: ClusterConfig, device: Device) -> None:
    """Have Ray running in this process. A Ray that something else has started is used as it is and left running.

    ClusterError if cluster.ray_port is in use or nothing answers at cluster.ray_address (or RAY_ADDRESS).
    """
    global _users, _is_ours
    with _lock:
        import ray

        accept_read_only_tensors()
        if _users == 0:
            _is_ours = not ray.is_initialized()
            if _is_ours:
                folder = janitor.acquire()
                try:
                    _start(cluster, device, str(folder))
                except BaseException:
                    ray.shutdown()
                    janitor.release()
                    raise
        _users += 1


def release() -> None:
    """Release one use; the last one shuts down (or leaves) the Ray that `acquire` started (or joined)."""
    global _users
    with _lock:
        import ray

        _users -= 1
        assert _users >= 0, "release without acquire"
        if _users == 0 and _is_ours:
            try:
                ray.shutdown()
            finally:
                janitor.release()


@contextmanager
def joined(cluster: ClusterConfig) -> Iterator[None]:
    """Inside the block this process is in the Ray cluster that the run joins; nothing where the run starts its own."""
    if ray_address(cluster) is None:
        yield
        return
    acquire(cluster, "cpu")
    try:
        yield
    finally:
        release()


def workers_device(cluster: ClusterConfig, device: str) -> Device:
    """The device of ranks: by the nodes' GPUs if the run joins a Ray cluster, else by what torch sees here.

    device: cluster.device, or another wish in its place. See resources.device_of_nodes and resolve_device.
    """
    if ray_address(cluster) is None:
        return resolve_device(device)
    with joined(cluster):
        chosen = device_of_nodes(replace(cluster, device=device), node_resources())
    if device == "auto" and chosen == "cpu":
        logger.warning("no node of the Ray cluster has a GPU: the ranks run on CPU (cluster.device=cpu says so too)")
    return chosen


def require_free_port(port: int) -> None:
    """ClusterError if the port is taken."""
    if port_in_use(port):
        raise ClusterError(
            f"cluster.ray_port: {port} -- something on this machine already listens there (another Ray?) "
            "-- take another port, leave cluster.ray_port out (Ray then finds a free one), or join that Ray "
            f"with cluster.ray_address=127.0.0.1:{port}"
        )


def node_resources() -> list[Mapping[str, float]]:
    """Total resources of each live machine of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def live_nodes() -> dict[str, tuple[str, int]] | None:
    """Id of each live node -> address and port of its raylet; None if Ray's head does not say."""
    from ray.exceptions import RayError

    try:
        # Not ray.nodes(): without a head it waits until the library ends the process.
        nodes = _store().get_all_node_info(timeout=STORE_S).items()
    except (RayError, OSError):
        return None
    return {node.hex(): (one.node_manager_address, one.node_manager_port) for node, one in nodes if one.state == 0}


def own_node() -> str:
    """Id of the node of this process."""
    import ray

    return ray.get_runtime_context().get_node_id()


def _store() -> Any:
    """The cluster's key-value store. RaySystemError in a process that has left its Ray."""
    from ray.exceptions import RaySystemError
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    client = internal_kv_get_gcs_client()
    if client is None:
        raise RaySystemError("this process has left its Ray")
    return client


def keep(key: str, text: str) -> None:
    """Keep a text in the cluster's key-value store, where the controller on any node finds it.

    Nothing is kept while the store does not answer: Ray ends a process that has lost its head for too long.
    """
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, OSError):
        _store().internal_kv_put(key.encode(), text.encode(), True, None, timeout=STORE_S)


def kept(keys: Sequence[str]) -> dict[str, str]:
    """What `keep` has kept under the keys; nothing while the store does not answer."""
    from ray.exceptions import RayError

    names = [key.encode() for key in keys]
    try:
        found = _store().internal_kv_multi_get(names, None, timeout=STORE_S)
    except (RayError, OSError):
        return {}
    return {key.decode(): text.decode() for key, text in found.items()}


def forget(prefix: str) -> None:
    """Remove what is kept under keys that begin so."""
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, OSError):
        _store().internal_kv_del(prefix.encode(), True, None, timeout=STORE_S)


def _require_answer(address: str) -> None:
    """ClusterError within ANSWER_S where no Ray answers at host:port; ray.init would try for minutes.

    Ray's own question is asked by a process of its own: the library ends the process that asks in vain.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: ray.init looks on this machine, and knows at once
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            pass
    except (OSError, OverflowError) as error:
        raise _no_answer(address, str(error)) from error
    try:
        asked = subprocess.run(
            [sys.executable, "-m", readiness.__name__, address], capture_output=True, text=True, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired as error:
        raise _no_answer(address, "what listens there does not answer as Ray") from error
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines() or ["what listens there does not answer as Ray"]
        raise _no_answer(address, lines[-1][:200])
    if "token" in asked.stdout:
        # ray.init takes the token by itself only where it is given no address.
        from ray._private.authentication import authentication_token_setup

        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _no_answer(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"cluster.ray_address: {address!r} -- no Ray cluster answers there ({reason}) "
        "-- start one (`ray start --head`), or leave cluster.ray_address out for a local one"
    )


@contextmanager
def _without_rays_handler() -> Iterator[None]:
    """Inside the block Ray does not take SIGTERM: its handler would end the process in the middle of the start, with
    exit code 15 and no word, when the signal reaches a thread that does not wait for the block's end.
    """
    from ray._private import utils

    before = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda sigterm_handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


def _start(cluster: ClusterConfig, device: Device, folder: str) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Says at every start that Ray's own token authentication is on, which is its default.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    quiet = {"logging_level": logging.WARNING, "log_to_driver": True}
    address = ray_address(cluster)
    if address is not None:
        _require_answer(address)
        try:
            with stop.unheard_by_children(), stop.handlers_kept(), _without_rays_handler():
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_answer(address, str(error)) from error
        return
    before = os.environ.pop("RAY_GCS_SERVER_PORT", None)
    if cluster.ray_port:
        require_free_port(cluster.ray_port)
        # The head of a local Ray takes its port from this variable; ray.init has no argument for it.
        os.environ["RAY_GCS_SERVER_PORT"] = str(cluster.ray_port)
    try:
        # Ranks have environments of their own, so workers that Ray starts ahead of time would only sit by.
        options = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
        options["_temp_dir"] = folder
        with stop.unheard_by_children(), stop.handlers_kept(), _without_rays_handler():
            ray.init(address="local", num_gpus=0 if device == "cpu" else None, **options, **quiet)
    finally:
        os.environ.pop("RAY_GCS_SERVER_PORT", None)
        if before is not None:
            os.environ["RAY_GCS_SERVER_PORT"] = before
