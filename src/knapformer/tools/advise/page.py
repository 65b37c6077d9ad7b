"""The advisor's findings as one HTML file that needs nothing else, figures included: verdict, data, policies, memory,
code, and what is wrong with the data. Its sentences and table cells are those of the terminal, too.

It shows the object that `knapformer advise --json` prints and computes nothing of its own.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.files import write_text
from knapformer.report.drawing import AFTER, AFTER_LIGHT, BEFORE, BEFORE_LIGHT, new_figure
from knapformer.report.html import bullets, escape, figure, page, table

OURS = ("balanced", "balanced-more")
"""Names of policies that are balanced; others are what one may do today."""

_GREY = "#BBBBBB"
_STYLE = """
.verdict { border-left: .5rem solid var(--good); background: var(--ours); padding: .6rem 1rem; margin: 1.2rem 0; }
.verdict.no { border-color: var(--dim); background: var(--faint); }
.verdict.depends { border-color: var(--unsure); background: var(--faint); }
"""
_WORTH = {
    "yes": "Balancing is worth it",
    "no": "Balancing is not worth it",
    "depends": "It depends on what you do today",
}


def headline(advice: Mapping[str, Any]) -> str:
    """The verdict in a line."""
    return _WORTH[advice["verdict"]["worth"]]


def summary(advice: Mapping[str, Any]) -> str:
    """What the advice is about, in a line."""
    source, cluster = advice["source"], advice["cluster"]
    amount = "" if source["samples"] is None else f", {source['samples']:,} {_SAMPLES[source['kind']]}"
    return f"{source['name']}{amount}; {advice['model']['title']} on {cluster['ranks']} {cluster['device']}"


_SAMPLES = {"manifest": "samples", "trace": "recorded sequences"}


def policy_rows(advice: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of policies, as text."""
    heads = ["policy", "compute", "wait", "traffic", "step", "seq/s", "tok/s", "memory", "balanced"]
    rows = [
        [
            policy["name"],
            *(f"{policy[part]:.1%}" for part in ("computing", "waiting", "traffic")),
            f"{policy['step_seconds']['mean']:.3g} s",
            short(policy["samples_per_second"]),
            short(policy["tokens_per_second"]),
            f"{policy['peak_memory_bytes'] / 1e9:.0f} GB",
            "" if policy["name"] in OURS else f"{policy['speedup_of_balancing']:.2f} x",
        ]
        for policy in advice["policies"]
    ]
    return heads, rows


def memory_rows(advice: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of heaviest legal steps, as text."""
    heads = ["policy", "tokens of a rank", "memory", "fits", "first that does not fit"]
    rows: list[list[str]] = []
    for policy in advice["policies"]:
        heaviest = policy["heaviest_step"]
        hours = heaviest["hours_until_one"]
        never = "never" if policy["heaviest_step"]["chance_a_step_too_large"] == 0 else "practically never"
        when = "refused" if policy["name"] in OURS else "fails"
        rows.append(
            [
                policy["name"],
                f"{heaviest['tokens_of_a_rank']:,}",
                f"{heaviest['memory_bytes'] / 1e9:,.0f} GB",
                "yes" if heaviest["fits"] else "no",
                never if hours is None else f"{when} after {duration(hours)}",
            ]
        )
    return heads, rows


def duration(hours: float) -> str:
    """Hours in the unit a person would use."""
    for size, unit in ((24 * 365, "years"), (24, "days"), (1, "hours"), (1 / 60, "minutes")):
        if hours >= size:
            return f"{hours / size:,.1f} {unit}"
    return f"{hours * 3600:,.1f} seconds"


def memory_sentence(advice: Mapping[str, Any]) -> str:
    """What fits a rank."""
    memory = advice["memory"]
    return (
        f"max_tokens_per_rank {memory['max_tokens_per_rank']:,} fits: {memory['usable']:.0%} of "
        f"{memory['device_bytes'] / 1e9:.0f} GB, of which {memory['without_tokens_bytes'] / 1e9:.1f} GB are taken "
        f"before any token. Samples too long for one rank: {memory['samples_too_long_for_a_rank']:.2%}."
    )


def quantile_rows(advice: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Shares and lengths of the table of percentiles, as text."""
    data = advice["distribution"]
    heads = [*(f"{float(q) * 100:g}%" for q in data["quantiles"]), "longest", "mean"]
    return heads, [short(n) for n in (*data["quantiles"].values(), data["longest"], data["mean_tokens"])]


def short(number: float) -> str:
    """A number of tokens in few letters: 876, 21.7k, 2.1M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.3g}"


def longest_sentence(advice: Mapping[str, Any]) -> str:
    """What the longest samples are and hold."""
    data, longest = advice["distribution"], advice["source"]["longest"]
    share = data["longest_1_percent"]
    text = (
        f"The longest 1 % of the samples hold {share['tokens']:.0%} of the tokens and {share['work']:.0%} of the work; "
        f"{data['mean_text_tokens'] / data['mean_tokens']:.1%} of the tokens are text."
    )
    if longest:
        size = f"{longest['width']} x {longest['height']}, {longest['frames']} frames"
        text += f" The longest sample is row {longest['row']:,} of {longest['file']} ({size})."
    return text


def write_advice(advice: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page. Raises `BackendUnavailableError` without matplotlib, `DataError` if it cannot be written."""
    return write_text(path, advice_page(advice))


def advice_page(advice: Mapping[str, Any]) -> str:
    """The page as text."""
    return page(f"knapformer advise: {advice['source']['name']}", _body(advice), style=_STYLE)


def _body(advice: Mapping[str, Any]) -> Iterator[str]:
    verdict = advice["verdict"]
    yield f"<h1>{escape(headline(advice))}</h1>"
    yield f'<p class="dim">{escape(summary(advice))}. Times, memory and chances are {escape(advice["basis"])}.</p>'
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in verdict["reasons"])
    yield f'<div class="verdict {verdict["worth"]}">{reasons}</div>'
    yield "<h2>The data</h2>"
    heads, lengths = quantile_rows(advice)
    yield table(heads, [lengths])
    yield f"<p>{escape(longest_sentence(advice))}</p>"
    yield figure(_draw_lengths(advice))
    yield "<h2>What it costs today, and balanced</h2>"
    yield table(*policy_rows(advice), ours=OURS)
    yield bullets(map(_policy_line, advice["policies"]))
    yield figure(_draw_policies(advice))
    yield "<h2>Memory, and the heaviest legal step</h2>"
    yield f"<p>{escape(memory_sentence(advice))}</p>"
    yield table(*memory_rows(advice), ours=OURS)
    yield "<p>Balanced, a step can only be too large for all ranks together; all refuse it before it starts.</p>"
    yield f"<h2>Three statements to add</h2><pre>{escape(chr(10).join(advice['lines']))}</pre>"
    yield "<h2>Rows and assumptions</h2>"
    yield from _rows(advice["source"])


def _policy_line(policy: Mapping[str, Any]) -> str:
    told = f"{policy['steps']} steps"
    told += f", {policy['refused_steps']} refused" if policy["refused_steps"] else ""
    told += f", {policy['dropped']:.2%} of the samples left over at the end of an epoch" if policy["dropped"] else ""
    return f"<b>{escape(policy['name'])}</b>: {escape(policy['text'])} ({told})"


def _rows(source: Mapping[str, Any]) -> Iterator[str]:
    problems: list[str] = []
    if source["kind"] == "manifest":
        yield f"<p>{source['rows']:,} rows read, {source['bad_rows']:,} of them cannot be used and are left out.</p>"
        problems = [f'<span class="bad">{escape(problem["message"])}</span>' for problem in source["problems"]]
    yield bullets([*problems, *map(escape, source["notes"])])


# ---- figures -------------------------------------------------------------------------------------------------------


def _draw_lengths(advice: Mapping[str, Any]) -> Any:
    drawn = new_figure(11, 3.4)
    axes = drawn.subplots()
    bins = advice["distribution"]["bins"]
    for what, colour, shift in (("samples", _GREY, 0), ("tokens", AFTER_LIGHT, 1), ("work", BEFORE, 2)):
        left, right = (
            np.array([b["from"] * (b["to"] / b["from"]) ** (shift * 0.3 + at) for b in bins]) for at in (0.05, 0.33)
        )
        axes.bar(
            left, [100 * b[what] for b in bins], right - left, align="edge", color=colour, label=f"share of {what}"
        )
    axes.set(xscale="log", xlabel="length [tokens]", ylabel="share [%]", title="Samples, tokens and work by length")
    axes.legend(frameon=False)
    return drawn


def _draw_policies(advice: Mapping[str, Any]) -> Any:
    drawn = new_figure(11, 3.8)
    shares, tokens = drawn.subplots(1, 2)
    policies = advice["policies"][::-1]
    names, left = [p["name"] for p in policies], [0.0] * len(policies)
    for part, colour in (("computing", AFTER), ("traffic", _GREY), ("waiting", BEFORE_LIGHT)):
        widths = [100 * policy[part] for policy in policies]
        shares.barh(names, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    shares.set(title="Time of all ranks", xlabel="share [%]")
    shares.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    limit = advice["memory"]["max_tokens_per_rank"]
    for row, policy in enumerate(policies):
        held = policy["rank_tokens"]
        colour = AFTER if policy["name"] in OURS else BEFORE
        tokens.scatter(held, [row] * len(held), s=14, alpha=0.35, color=colour, linewidths=0)
        told = {"label": "heaviest legal step"} if row == 0 else {}
        tokens.scatter([policy["heaviest_step"]["tokens_of_a_rank"]], [row], marker="|", s=220, color="black", **told)
    tokens.axvline(limit, color="black", linewidth=1, linestyle="--", label="max_tokens_per_rank")
    tokens.set(title="Fullest rank of each step", xscale="log", xlabel="tokens")
    tokens.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    tokens.set_yticks(range(len(names)), names)
    return drawn
