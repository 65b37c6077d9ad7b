"""Bucket configs, and what policies make of a histogram: who draws what, and how much it can be."""

import json
from dataclasses import replace

import numpy as np
import pytest

from knapformer.errors import DataError
from knapformer.plan import Limits
from knapformer.tools.advise.buckets import Buckets, read_buckets
from knapformer.tools.advise.histogram import Histogram
from knapformer.tools.advise.memory import TokenMemory
from knapformer.tools.advise.policies import Policies, run_policy
from knapformer.tools.simulate.presets import model_preset
from knapformer.tools.simulate.scenario import Scenario

MODEL = model_preset("cogvideox-2b")
SCENARIO = Scenario.of(MODEL, "h100x4")
ROOM = TokenMemory.of(SCENARIO)
MIX = Histogram.of(np.array([300, 420, 1000, 9000]), np.array([10, 0, 30, 226]), np.array([50, 30, 15, 5]))
BUCKETS = Buckets.cut(MIX, SCENARIO.cost_model(), 2, ROOM.limit(split=False))


def policies():
    make = Policies(MIX, SCENARIO, ROOM, seed=3)
    random = make.random(2)
    return {p.name: p for p in (random, *make.bucketed(BUCKETS), make.fixed_degree(2, 2), make.balanced(random, 2))}


def test_buckets_have_equal_work_within_memory():
    assert BUCKETS.count.tolist() == [50, 30, 15, 5] and BUCKETS.longest.tolist() == [300, 420, 1000, 9000]
    work = MIX.work(SCENARIO.cost_model())
    assert BUCKETS.batch.tolist() == [int(2 * work[3] / w) for w in work]
    tight = Buckets.cut(MIX, SCENARIO.cost_model(), 2, 4000)
    assert tight.batch.tolist() == [13, 9, 4, 1]  # what 4,000 tokens hold, but at least one sample
    assert tight.dropped(4) == pytest.approx((50 + 30 + 15 + 1) / 100)  # a full step of small ones is 52 samples


def test_each_policy_draws_as_it_says():
    drawn = {name: [p.steps(i) for i in range(40)] for name, p in policies().items()}
    for step in drawn["random"]:
        assert np.bincount(step.home).tolist() == [2, 2, 2, 2]
    assert {len(set(step.length.tolist())) for step in drawn["same-bucket"]} == {1}  # a length is a bucket here
    assert len({step.length[0] for step in drawn["same-bucket"]}) > 1
    mixed = [step for step in drawn["bucket-by-rank"] if len(set(step.length.tolist())) > 1]
    assert mixed
    for step in mixed:
        for rank in range(4):
            lengths = step.length[step.home == rank]
            bucket = np.searchsorted(BUCKETS.longest, lengths[0])
            assert set(lengths.tolist()) == {BUCKETS.longest[bucket]} and len(lengths) == BUCKETS.batch[bucket]
    for step in drawn["fixed-degree"]:
        assert np.bincount(step.home, minlength=4).tolist() == [4, 0, 4, 0]
    assert drawn["balanced"] == drawn["random"]
    assert [policies()["random"].steps(i) for i in range(3)] == drawn["random"][:3]  # by address, not by state


def test_samples_come_in_the_data_sets_proportions():
    many = np.concatenate([Policies(MIX, SCENARIO, ROOM).random(8).steps(i).length for i in range(300)])
    share = [np.mean(many == length) for length in MIX.length]
    np.testing.assert_allclose(share, MIX.count / 100, atol=0.015)
    steps = policies()["bucket-by-rank"].steps
    lengths = np.concatenate([steps(i).length for i in range(2500)])
    # A rare bucket has few batches, so its share is coarse; without weighting by batches, it would be 4 % at most.
    assert np.mean(lengths == 9000) == pytest.approx(0.05, abs=0.02)
    assert np.mean(lengths == 300) == pytest.approx(0.5, abs=0.1)


def test_no_step_is_heavier_than_the_heaviest_legal_one():
    for policy in policies().values():
        assert policy.limits == (Limits(ROOM.limit(split=True)) if policy.name == "balanced" else Limits())
        outcome = run_policy(policy, SCENARIO, 12)
        assert outcome.rank_tokens.max() <= policy.worst_tokens
        assert 0 < outcome.efficiency <= 1 and outcome.refused == 0
    spread = run_policy(policies()["fixed-degree"], SCENARIO, 3)
    assert (spread.rank_tokens * 4 <= spread.tokens * 4).all() and (spread.traffic > 0).all()


def test_steps_that_do_not_fit_are_counted():
    tight = replace(policies()["balanced"], limits=Limits(2600))
    outcome = run_policy(tight, SCENARIO, 30)
    sizes = [policies()["balanced"].steps(i).num_tokens for i in range(30)]
    assert outcome.refused == sum(size > 4 * 2600 for size in sizes) > 0
    assert len(outcome.seconds) == 30 - outcome.refused


def test_bucket_configs(tmp_path):
    text = """
# a training configuration
lr = 1e-4
bucket_config = {
    "_delimiter": 1,
    "256px": {1: (1.0, 45), 5: (1.0, 12)},
    "144p": {1: (1.0, 100)},
    "512px": {1: (0.25, 10), 5: ((0.5, 0.5), 3), 9: (0.0, None)},
}
"""
    (tmp_path / "stage1.py").write_text(text)
    histogram, buckets = read_buckets(tmp_path / "stage1.py", MODEL)
    want = {
        MODEL.sequence_length(512, 512, 1): (0.25, 10),
        MODEL.sequence_length(256, 256, 1): (0.75, 45),  # so nothing is left for 144p
        MODEL.sequence_length(512, 512, 5): (0.25, 3),
        MODEL.sequence_length(256, 256, 5): (0.75, 12),
    }
    found = zip(histogram.length.tolist(), histogram.count.tolist(), buckets.batch.tolist(), strict=True)
    assert {length: (count / 10**6, batch) for length, count, batch in found} == want
    nested = {"256px": {"1": [1.0, 45]}}
    (tmp_path / "a.json").write_text(json.dumps({"bucket_config": nested}))
    assert read_buckets(tmp_path / "a.json", MODEL)[1].batch.tolist() == [45]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "does not assign 'bucket_config'"),
        ("bucket_config = {", "cannot be read as a bucket config"),
        ("bucket_config = {'256px': {1: (1.0, open('x'))}}", "cannot be read as a bucket config"),
        ("bucket_config = {'huge': {1: (1.0, 1)}}", "unknown resolution 'huge'"),
        ("bucket_config = {'256px': {1: (1.5, 1)}}", "bucket '256px', 1 frames is \\(1.5, 1\\)"),
        (
            "bucket_config = {'256px': {1: 4}}",
            r"'256px': Expected `array`, got `int` - at `\$\[1\]`, which is 4",
        ),
        ("bucket_config = {'256px': {1: (1.0, 'x')}}", r"`int | null`, got `str` - at `\$\[1\]\[1\]`, which is 'x'"),
        ("bucket_config = {'256px': {1: ((0.5, -0.5), 1)}}", r"\(\(0.5, -0.5\), 1\); expected"),
        ("bucket_config = {'256px': {1: (1e999, 1)}}", r"1 frames is \(inf, 1\)"),
        ("bucket_config = {'256px': {1: (0.5, -(10**400))}}", "cannot be read as a bucket config"),
        ("bucket_config = " + "[" * 5000, "cannot be read as a bucket config"),
        ("bucket_config = {'256px': 3}", "bucket '256px': Expected `object`, got `int`"),
        ("bucket_config = {'256px': {0: (1.0, 1)}}", "0 frames is .* expected frames of 1 or more"),
        ("bucket_config = {'256px': {1: (0.0, None)}}", "no bucket has a probability above 0"),
    ],
)
def test_bucket_configs_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "b.py").write_text(text)
    with pytest.raises(DataError, match=rf"b\.py.*{message}"):
        read_buckets(tmp_path / "b.py", MODEL)
