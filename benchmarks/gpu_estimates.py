"""Part of gpu.py: compares a step's predicted memory with the count of the card's allocator."""

from __future__ import annotations

import statistics

from gpu_common import run_part

# At most 5 % off in the median, and never more than 5 % too low.
_GOAL = 0.05
_LEAST_S = 10.0


def estimates(findings, options):
    """Compare model by model, smallest first, as time allows."""
    from estimates import LANGUAGE, MODELS, error_of, measure  # noqa: PLC0415 - it imports torch

    chosen = list(LANGUAGE)[:1] if options.tiny else MODELS
    kind = "cpu" if options.device == "cpu" else "cuda"
    errors = []
    for precision in ("fp32", "bf16"):
        for name in chosen:
            if findings.left_s() < _LEAST_S:
                break
            row = measure(name, precision, kind)
            errors.append(error_of(row))
            reserved = error_of(row, "predicted_reserved_bytes", "real_reserved_bytes") if kind == "cuda" else None
            taken = "" if reserved is None else f", of what is taken from the card {reserved:+.1%}"
            findings.add(f"{name}, {precision}", f"{errors[-1]:+.1%}{taken}", ok=errors[-1] >= -_GOAL, **row)
    if errors:
        median = statistics.median(map(abs, errors))
        findings.add("median error", f"{median:.1%} of {len(errors)}", ok=median <= _GOAL)


if __name__ == "__main__":
    run_part(estimates, __doc__)
