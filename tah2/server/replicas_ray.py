"""Replicas on the machines of a Ray cluster: each runs the whole server; Ray Serve sends requests to the least busy.

    ray start --head                                  # on the first machine; `ray start --address=...` on the others
    serve run tah2.server.replicas_ray:app model=path/to/looped replicas=4 gpus=1

Ray looks at the queues of two replicas per request and takes the shorter one; it does not read prompts. What one
machine can hold is better served by `Replicas`, which also knows which cache holds a prompt's beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tah2.config.strict import ConfigError, build
from tah2.server.config import ServerConfig, WorkerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "tah2"


@dataclass(frozen=True)
class ClusterConfig:
    replicas: int = 2
    gpus: float = 0
    """Of each replica; Ray shows it only those."""
    cpus: float = 1
    """Of each replica, as Ray counts them."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"A server needs at least one replica, not {self.replicas}.")
        if self.gpus < 0 or self.cpus < 0:
            raise ConfigError("A replica's gpus and cpus must not be negative.")


@dataclass(frozen=True)
class ServeArguments(ClusterConfig):
    """What `serve run tah2.server.replicas_ray:app KEY=VALUE ...` takes."""

    model: str = ""
    device: str | None = None
    dtype: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()


def app(arguments: Mapping[str, Any]) -> Any:
    """The application that Ray Serve runs, from the words of its command line."""
    given = build(ServeArguments, arguments)
    if not given.model:
        raise ConfigError("Say which model to serve: model=path/to/looped.")
    worker = build(
        WorkerConfig, {"model": given.model, "device": given.device, "dtype": given.dtype, "engine": given.engine}
    )
    config = ServerConfig(served_model_names=given.served_model_names, api_keys=given.api_keys)
    return deployment(worker, config, ClusterConfig(given.replicas, given.gpus, given.cpus))


def deployment(worker: WorkerConfig, config: ServerConfig, cluster: ClusterConfig) -> Any:
    """The server as a Ray Serve application of `cluster.replicas` replicas."""
    serve = _serve()

    def replica() -> FastAPI:
        from tah2.server import logs
        from tah2.server.app import create_app

        logs.configure(config.log_level)
        return create_app(worker, replace(config, host="0.0.0.0"))  # Ray's proxies listen, not the replica

    made = serve.deployment(
        serve.ingress(replica)(),
        name=NAME,
        num_replicas=cluster.replicas,
        max_ongoing_requests=config.max_queue + 1024,
        graceful_shutdown_timeout_s=config.drain_timeout,
        ray_actor_options={"num_gpus": cluster.gpus, "num_cpus": cluster.cpus},
    )
    return made.bind()


def run(worker: WorkerConfig, config: ServerConfig, cluster: ClusterConfig, address: str | None = None) -> int:
    """Serve on the Ray cluster at `address` (None: one of this machine alone) until interrupted."""
    serve = _serve()
    import ray

    ray.init(address=address, ignore_reinit_error=True, log_to_driver=True)
    where = "HeadOnly" if address is None else "EveryNode"
    serve.start(http_options={"host": config.host, "port": config.port, "location": where})
    try:
        serve.run(deployment(worker, config, cluster), name=NAME, route_prefix="/", blocking=True)
    finally:
        serve.shutdown()
    return 0


def _serve() -> Any:
    try:
        from ray import serve
    except ImportError:
        raise ConfigError("Replicas over several machines need Ray: install tah2 with its 'ray' extra.") from None
    return serve
