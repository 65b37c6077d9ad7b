"""Is balancing worth it? In words, from the policies' figures.

no        it is hardly faster than drawing at random
depends   it is hardly faster than the best policy of today that does not run out of memory within a day
yes       it is faster than all of those
"""

from typing import Any

WORTHWHILE = 1.03
"""Least speed-up that counts; below it lies what the model cannot tell apart."""

_SAME_BUCKET = (
    "Same-bucket steps each see one size only, lose what is left over in a bucket, and want a new table when the mix "
    "changes."
)


def verdict(policies: list[dict[str, Any]], memory: dict[str, Any], batch: int) -> dict[str, Any]:
    """What to say of policies (today's first, then balanced ones), memory and samples a rank, all of `advise`."""
    today = [p for p in policies if not p["name"].startswith("balanced")]
    after, fullest = policies[len(today)], policies[-1]
    base, lasting = today[0], [p for p in today if _lasts(p)]
    best = max(lasting or today, key=lambda p: p["computing"])
    gain, over_best = base["speedup_of_balancing"], fullest["computing"] / best["computing"]
    compared = f"{gain:.2f} times as fast as {base['name']}"
    if best is not base:
        more = "" if fullest is after else f"with {fullest['text'].split(',')[0]} "
        compared += f"; {more}{over_best:.2f} times as fast as {best['name']}, the best of today ({best['text']})"
    if gain < WORTHWHILE:
        worth = "no"
        reason = (
            f"Not worth it: {compared}. Samples are so alike, or so many in a step, that ranks compute "
            f"{base['computing']:.0%} of the time without it."
        )
    elif over_best < WORTHWHILE:
        worth, reason = "depends", f"Balanced it is {compared}. If you do the latter already, balancing gains no speed."
    else:
        worth, reason = "yes", f"Balanced it is {compared}."
    reasons = [reason]
    if best["name"] == "same-bucket":
        reasons.append(_SAME_BUCKET)
    reasons += [
        f"As {p['name']} it would be {p['speedup_of_balancing']:.2f} times as fast, were there memory for it."
        for p in today
        if lasting and p not in lasting and p["computing"] > best["computing"]
    ]
    return {"worth": worth, "speedup": gain, "speedup_over_best": over_best, "best_today": best["name"],
            "reasons": reasons + _memory_reasons(base, after, memory, batch)}  # fmt: skip


def _lasts(policy: dict[str, Any]) -> bool:
    """Whether a policy is not expected to run out of memory within a day."""
    hours = policy["heaviest_step"]["hours_until_one"]
    return hours is None or hours > 24


def _memory_reasons(base: dict[str, Any], after: dict[str, Any], memory: dict[str, Any], batch: int) -> list[str]:
    reasons: list[str] = []
    heaviest = base["heaviest_step"]
    if (hours := heaviest["hours_until_one"]) is not None:
        reasons.append(
            f"As {base['name']}, a step that does not fit memory comes after about {hours:,.2g} hours: up to "
            f"{heaviest['tokens_of_a_rank']:,} tokens on a rank, {heaviest['memory_bytes'] / 1e9:,.0f} GB."
        )
    if after["refused_steps"] or after["heaviest_step"]["hours_until_one"] is not None:
        reasons.append(
            f"Even all ranks together cannot hold some steps of {batch} samples a rank; take fewer, or limit sizes."
        )
    elif memory["batch_balanced"] >= 2 * max(1, memory["batch_unbalanced"]):
        unbalanced = memory["batch_unbalanced"]
        reasons.append(
            f"Balanced, {memory['batch_balanced']} samples a rank fit memory; unbalanced, "
            f"{f'only {unbalanced} surely' if unbalanced else 'not even one of the longest'}."
        )
    return reasons
