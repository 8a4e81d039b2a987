"""What papers say about the bubble and the activations of schedules of p stages, m microbatches and v chunks."""

from megajax.core.pipeline.deferral import PassTimes, most_pending


def published_bubble(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> float | None:
    """Bubble over ideal time, (p-1)/(v·m) (arXiv 2104.04473, §2.2); None for a schedule that is not in that paper."""
    published = name in ("gpipe", "1f1b", "interleaved")
    return (num_stages - 1) / (num_chunks * num_microbatches) if published else None


def published_in_flight(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> list[int] | None:
    """Chunks in flight per stage: all for GPipe; for Megatron-LM, which interleaves only if p divides m, the warm-up
    forwards and the one after them. None if nothing is published."""
    p, m, v = num_stages, num_microbatches, num_chunks
    if name not in ("gpipe", "1f1b", "interleaved") or (v > 1 and m % p):
        return None
    if name == "gpipe":
        return [m] * p
    warm_up = [(p - s - 1) * 2 + (v - 1) * p if v > 1 else p - s - 1 for s in range(p)]
    return [m * v if v > 1 and m == p else min(forwards + 1, m * v) for forwards in warm_up]


def deferred_bubble(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, times: PassTimes
) -> float | None:
    """A stage's idle time with deferred weight gradients, by formula. None if there is no formula: with fewer than 2p
    microbatches."""
    steps = num_stages - 1
    forward, backward, weight = times.forward, times.input_gradient, times.weight_gradient
    waiting = steps if name == "gpipe" else most_pending(num_stages)
    if name not in ("gpipe", "1f1b", "interleaved") or num_microbatches < 2 * num_stages:
        return None
    if name == "gpipe" or weight <= min(forward, backward):
        return (steps * (forward + backward + weight) - waiting * weight) / num_chunks
    longer = max(forward, weight) + max(backward, weight) - weight
    return steps * min(forward + backward, longer) / num_chunks


def published_zero_bubble(num_stages: int, times: PassTimes) -> dict[str, tuple[float, int]]:
    """Idle time and microbatches in flight of the schedules in arXiv 2401.10241, which have one chunk per stage. ZB-H2
    has no bubble if the formula is negative."""
    steps, both = num_stages - 1, times.forward + times.input_gradient
    return {
        "ZB-H1": (max(0.0, steps * (both - times.weight_gradient)), num_stages),
        "ZB-H2": (max(0.0, steps * (both - 2 * times.weight_gradient)), 2 * num_stages - 1),
    }
