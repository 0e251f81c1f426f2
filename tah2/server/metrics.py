"""Prometheus metrics under vLLM's names, and those of a looped model beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tah2.server.messages import Counters, Delta

if TYPE_CHECKING:
    from tah2.server.async_engine import Ask

TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTHS = tuple(float(1 << power) for power in range(18))
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
COUNTED = {
    "prompt_tokens": "Prompt tokens taken in",
    "generation_tokens": "Tokens written",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found there",
    "num_preemptions": "Requests that gave up their memory and ran again",
    "engine_steps": "Passes of the engine",
    "engine_entries": "Entries (token, depth) of all passes",
    "decode_flops": "FLOPs of decoding, from recorded depths, of requests that have ended",
    "wavefront_drafted_tokens": "Drafts of next tokens that ran",
    "wavefront_agreed_tokens": "Drafts that turned out right",
    "wavefront_wasted_entries": "Entries that ran for drafts that turned out wrong",
    "depth_continue_decisions": "Decisions of the gate to run one more iteration",
    "depth_stop_decisions": "Decisions of the gate to stop",
}


class Metrics:
    def __init__(self, model: str, prefix: str = "tah2") -> None:
        self.registry = CollectorRegistry()
        self._model, self._prefix = model, prefix
        self._count = {name: self._counter(name, text) for name, text in COUNTED.items()}
        self._ended = Counter(
            f"{prefix}:request_success", "Samples that ended, by reason", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token", TIMES)
        self.between = self._histogram("inter_token_latency_seconds", "Between two news of a sample, per token", TIMES)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "After the first token, of a whole sample", TIMES
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end", TIMES)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to the first pass", TIMES)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", LENGTHS)
        self.output_length = self._histogram("request_generation_tokens", "Tokens of an output", LENGTHS)
        self.depth = self._histogram("token_depth", "Iterations spent on an output token", DEPTHS)
        self.state: Callable[[], Counters] = Counters
        """The engine's counters now; gauges read them."""
        self._depths = self._tokens = self._decoded = self._flops = 0
        self._continued = self._stopped = self._drafted = self._agreed = 0
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_running": ("Samples in the engine's passes", lambda: self.state().running),
            "num_requests_waiting": ("Samples that wait for room", lambda: self.state().waiting),
            "kv_cache_usage_perc": (
                "Share of KV slots that requests hold (1 is all of them)",
                lambda: share(self.state().kv_used, self.state().kv_slots),
            ),
            "kv_slots_used": ("KV slots that requests hold", lambda: self.state().kv_used),
            "kv_slots_cached": ("KV slots that only the prefix cache holds", lambda: self.state().kv_cached),
            "mean_depth": ("Iterations per output token", lambda: share(self._depths, self._tokens)),
            "continue_rate": (
                "Share of the gate's decisions that continue",
                lambda: share(self._continued, self._continued + self._stopped),
            ),
            "wavefront_agreement": (
                "Share of drafts that turned out right",
                lambda: share(self._agreed, self._drafted),
            ),
            "decode_flops_per_token": ("FLOPs per decoded token", lambda: share(self._flops, self._decoded)),
        }
        for name, (text, value) in gauges.items():
            gauge = Gauge(f"{prefix}:{name}", text, ["model_name"], registry=self.registry)
            gauge.labels(model).set_function(value)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def counters(self, old: Counters, new: Counters) -> None:
        """An engine has moved from `old` to `new`; after a worker's death `new` is all zero."""
        grown = {
            "prompt_tokens": new.prompt_tokens - old.prompt_tokens,
            "prefix_cache_queries": new.prompt_tokens - old.prompt_tokens,
            "prefix_cache_hits": new.cached_tokens - old.cached_tokens,
            "generation_tokens": new.output_tokens - old.output_tokens,
            "num_preemptions": new.preemptions - old.preemptions,
            "engine_steps": new.steps - old.steps,
            "engine_entries": new.entries - old.entries,
            "decode_flops": new.decode_flops - old.decode_flops,
            "wavefront_drafted_tokens": new.drafted - old.drafted,
            "wavefront_agreed_tokens": new.agreed - old.agreed,
            "wavefront_wasted_entries": new.wasted_entries - old.wasted_entries,
        }
        for name, more in grown.items():
            if more > 0:
                self._count[name].inc(more)
        self._flops += max(0, grown["decode_flops"])
        self._drafted += max(0, grown["wavefront_drafted_tokens"])
        self._agreed += max(0, grown["wavefront_agreed_tokens"])

    def depths(self, depths: list[int], ceiling: int) -> None:
        """Output tokens ran `depths` iterations, of at most `ceiling`."""
        for depth in depths:
            self.depth.observe(depth)
        deep = sum(depths)
        continued, stopped = deep - len(depths), sum(depth < ceiling for depth in depths)
        self._depths += deep
        self._tokens += len(depths)
        self._continued += continued
        self._stopped += stopped
        if continued:
            self._count["depth_continue_decisions"].inc(continued)
        if stopped:
            self._count["depth_stop_decisions"].inc(stopped)

    def ended(self, reason: str, tokens: int) -> None:
        self._decoded += max(0, tokens - 1)
        self._ended.labels(self._model, reason).inc()
        self.output_length.observe(tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"{self._prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model)


class Watch:
    """The times of one request, as its news come in."""

    def __init__(self, metrics: Metrics, asks: list[Ask], ceilings: list[int]) -> None:
        self.metrics, self.ceilings = metrics, ceilings
        self.started = time.monotonic()
        self._last: dict[tuple[int, int], tuple[float, float, int]] = {}
        """(request, sample) -> when its first and last news came, its tokens."""
        for ask in asks:
            metrics.prompt_length.observe(len(ask.prompt))

    def see(self, place: int, delta: Delta) -> None:
        now, metrics, key = time.monotonic(), self.metrics, (place, delta.index)
        first, last, tokens = self._last.get(key, (now, self.started, 0))
        if delta.tokens:
            if not tokens:
                metrics.first_token.observe(now - self.started)
            else:
                metrics.between.observe((now - last) / len(delta.tokens))
            metrics.depths(delta.depths, self.ceilings[place])
            tokens += len(delta.tokens)
            self._last[key] = (first, now, tokens)
        if delta.ending is not None:
            metrics.ended(delta.ending.reason, tokens)
            metrics.whole.observe(now - self.started)
            metrics.queued.observe(delta.ending.queued)
            if tokens > 1:
                metrics.per_token.observe((now - first) / (tokens - 1))


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
