import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.data import detokenize, pooled_features, tokenize
from knapformer.data.text import END_ID, PAD_ID, UNKNOWN_ID, VOCAB_SIZE
from knapformer.errors import SpecError


@given(st.text(st.characters(codec=None), max_size=60))  # lone surrogates included
def test_round_trip(caption: str) -> None:
    tokens = tokenize(caption)
    assert tokens.dtype == np.int32
    assert detokenize(tokens) == caption
    assert len(tokens) == len(caption.encode("utf-8", "surrogatepass"))


@given(st.text(max_size=40), st.integers(0, 30))
def test_cuts_fall_between_characters(caption: str, most: int) -> None:
    tokens = tokenize(caption, most)
    kept = detokenize(tokens)
    assert len(tokens) <= most
    assert caption.startswith(kept)
    if len(kept) < len(caption):  # the next character would not have fitted
        assert len(tokens) + len(caption[len(kept)].encode()) > most


def test_ids() -> None:
    assert tokenize("aé").tolist() == [97 + 3, 0xC3 + 3, 0xA9 + 3]
    assert tokenize("").shape == (0,)
    assert len(tokenize("x" * 500)) == 392
    assert VOCAB_SIZE == 259
    assert detokenize([PAD_ID, 100, END_ID, UNKNOWN_ID]) == "a"
    assert detokenize([0xC3 + 3]) == "\ufffd"
    with pytest.raises(SpecError, match="token 259"):
        detokenize([259])
    with pytest.raises(SpecError, match="max_tokens is -1"):
        tokenize("a", -1)


def test_pooled_features_are_pinned_and_sized() -> None:
    vector = pooled_features(tokenize("A cat."), 8, seed=1)
    assert vector.dtype == np.float32
    assert vector.tolist() == pytest.approx(
        [0.774597, -0.774597, -0.774597, 0.258199, -1.807392, 0.258199, -0.774597, -1.290994], abs=1e-5
    )
    assert pooled_features(tokenize(""), 8).tolist() == [0.0] * 8
    assert pooled_features(tokenize("a"), 5).shape == (5,)
    with pytest.raises(SpecError, match="dim is 0"):
        pooled_features(tokenize("a"), 0)


def test_similar_captions_have_similar_features() -> None:
    def cosine(a: str, b: str) -> float:
        x, y = (pooled_features(tokenize(text), 512) for text in (a, b))
        return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))

    near = cosine("A ginger cat with green eyes.", "A ginger cat with blue eyes.")
    far = cosine("A ginger cat with green eyes.", "Rocket launch; 1969, Florida!")
    assert near > 0.6 > 0.4 > far
    assert cosine("ab", "ba") < 0.99  # order counts
    assert cosine("A cat", "A cat") == pytest.approx(1)


def test_features_have_unit_variance_and_depend_on_the_seed() -> None:
    captions = [
        f"{a} and {b}" for a in ("dogs", "9 ships", "RED", "zebra") for b in ("fish", "Q", "hills", "two words")
    ]
    vectors = np.array([pooled_features(tokenize(caption), 256) for caption in captions])
    assert 0.5 < vectors.var() < 2
    assert not np.array_equal(vectors[0], pooled_features(tokenize(captions[0]), 256, seed=1))
