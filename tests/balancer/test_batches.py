"""What a batch says of its lengths."""

from types import SimpleNamespace

import numpy as np
import pytest

from knapformer.balancer.batches import RankBatches, Source, default_lengths
from knapformer.comm.gather import Contribution, Status


def contribution(batch, lengths=default_lengths) -> Contribution:
    return RankBatches(Source([batch], lengths, None)).make()[0]


@pytest.mark.parametrize(
    ("batch", "text", "context"),
    [
        ({"seq_lens": [5, 2]}, [0, 0], [0, 0]),
        ({"seq_lens": [5, 2], "text_lens": [3, 0]}, [3, 0], [0, 0]),
        ({"seq_lens": [5, 2], "context_lens": [7, 0]}, [0, 0], [7, 0]),
        ({"seq_lens": [5, 2], "text_lens": None, "context_lens": np.array([7, 9])}, [0, 0], [7, 9]),
    ],
)
def test_attributes(batch, text, context):
    mine = contribution(SimpleNamespace(**batch))
    assert (mine.lens.tolist(), mine.text.tolist(), mine.context.tolist()) == ([5, 2], text, context)


@pytest.mark.parametrize(
    ("lengths", "lens", "text", "context"),
    [
        (([5], [3], [8]), [5], [3], [8]),
        (([5], None, [8]), [5], [0], [8]),
        (([5], [3]), [5], [3], [0]),
        ((5, 6, 7), [5, 6, 7], [0] * 3, [0] * 3),  # three lengths, not three lists
        ((5, 6), [5, 6], [0] * 2, [0] * 2),
    ],
)
def test_what_a_function_returns(lengths, lens, text, context):
    mine = contribution(None, lambda _: lengths)
    assert (mine.lens.tolist(), mine.text.tolist(), mine.context.tolist()) == (lens, text, context)


def test_context_that_does_not_fit():
    mine = contribution(None, lambda _: ([5], None, [8, 9]))
    assert (mine.status, mine.details) == (Status.CONTEXT_COUNT, (2, 1))
