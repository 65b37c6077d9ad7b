import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.data import Trace, TraceStep, generate_trace, read_trace, write_trace
from knapformer.data.trace import decode_trace
from knapformer.errors import DataError, SpecError
from knapformer.plan import Sequences

GOOD = {
    "meta": {"name": "t", "world": 2, "d_model": 64, "heads": 4, "ranks_per_node": 2, "text": "joint"},
    "steps": [
        {"seq_lens": [[5, 7], []], "text_lens": [[0, 7], []]},
        {"seq_lens": [[3], [9, 2]], "text_lens": [[1], [4, 0]]},
    ],
}


def rows(trace: Trace) -> list:
    return [[[r.tolist() for r in s.seq_lens], [r.tolist() for r in s.text_lens]] for s in trace.steps]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    trace = decode_trace(json.dumps(GOOD).encode(), origin="t.json")
    write_trace(trace, tmp_path / name)
    back = read_trace(tmp_path / name)
    assert rows(back) == rows(trace) == [[s["seq_lens"], s["text_lens"]] for s in GOOD["steps"]]
    assert (back.name, back.world_size, back.num_steps, dict(back.meta)) == ("t", 2, 2, dict(trace.meta))
    assert back.meta["heads"] == 4 and back.text == "joint"
    write_trace(back, tmp_path / f"again-{name}")
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')


@given(
    st.lists(
        st.lists(st.lists(st.tuples(st.integers(1, 2**31 - 1), st.floats(0, 1)), max_size=3), min_size=3, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_any_lengths_survive(steps: list) -> None:
    trace = Trace(
        "any",
        3,
        tuple(
            TraceStep(
                tuple(np.array([n for n, _ in row], dtype=np.int64) for row in step),
                tuple(np.array([int(n * share) for n, share in row], dtype=np.int64) for row in step),
            )
            for step in steps
        ),
    )
    meta = {"name": trace.name, "world": 3}
    content = {"meta": meta, "steps": [dict(zip(("seq_lens", "text_lens"), s, strict=True)) for s in rows(trace)]}
    assert rows(decode_trace(json.dumps(content).encode(), origin="x")) == rows(trace)


def test_lengths_are_read_only_int64_and_plan_takes_them() -> None:
    step = generate_trace("g2b2i64f1s0", num_steps=1).steps[0]
    assert step.seq_lens[0].dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        step.seq_lens[0][0] = 1
    sequences = Sequences.from_ranks(step.seq_lens, step.text_lens)
    assert int(sequences.length.sum()) == step.num_tokens
    assert len(sequences) == step.num_sequences == 4


def change(path: tuple, value: object) -> dict:
    content = copy.deepcopy(GOOD)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    if value is KeyError:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (change(("meta",), KeyError), ["missing required field `meta`"]),
        (change(("steps",), KeyError), ["missing required field `steps`"]),
        (change(("meta", "world"), KeyError), ["missing required field `world` - at `$.meta`"]),
        (change(("steps", 1, "text_lens"), KeyError), ["missing required field `text_lens` - at `$.steps[1]`"]),
        (change(("meta", "world"), "2"), ["Expected `int`, got `str` - at `$.meta.world`, which is '2'"]),
        (change(("meta", "world"), True), ["Expected `int`, got `bool` - at `$.meta.world`, which is True"]),
        (change(("meta", "heads"), [1]), ["Expected `int | null`, got `array` - at `$.meta.heads`"]),
        (change(("meta", "world"), 0), ["world size is 0"]),
        (change(("meta", "n_steps"), 3), ["n_steps is 3 but there are 2"]),
        (change(("meta", "text"), "both"), ["'both'", "'joint' or 'cross'"]),
        (change(("steps",), []), ["no steps"]),
        (change(("steps",), {}), ["Expected `array`, got `object` - at `$.steps`"]),
        (change(("steps", 0), []), ["Expected `object`, got `array` - at `$.steps[0]`"]),
        (change(("steps", 1, "seq_lens", 1), [9, -2]), ["step 1", "sequence 2 (home rank 1) has length -2"]),
        (change(("steps", 1, "seq_lens", 1), [9, 0]), ["step 1", "rank 1", "length 0"]),
        (change(("steps", 1, "seq_lens", 1), [9, 2.5]), ["got `float` - at `$.steps[1].seq_lens[1][1]`, which is 2.5"]),
        (change(("steps", 1, "seq_lens", 1), [9, 2.0]), ["got `float` - at `$.steps[1].seq_lens[1][1]`, which is 2.0"]),
        (
            change(("steps", 1, "seq_lens", 1), [9, True]),
            ["`$.steps[1].seq_lens[1][1]`, which is True"],
        ),
        (change(("steps", 1, "seq_lens", 1), [9, "2"]), ["got `str` - at `$.steps[1].seq_lens[1][1]`, which is '2'"]),
        (change(("steps", 1, "seq_lens", 1), [9, 2**31]), ["rank 1: seq_lens holds", str(2**31), "at `$.steps[1]`"]),
        (change(("steps", 1, "text_lens", 1), [9, -(10**400)]), ["rank 1: text_lens holds -1000", "at `$.steps[1]`"]),
        (change(("steps", 1, "seq_lens", 1), 9), ["Expected `array`, got `int` - at `$.steps[1].seq_lens[1]`"]),
        (change(("steps", 1, "seq_lens", 1), [9]), ["step 1", "rank 1 has 1 sequences but 2 text lengths"]),
        (change(("steps", 0, "seq_lens"), [[5, 7]]), ["step 0", "seq_lens has 1 ranks", "world size is 2"]),
        (change(("steps", 0, "text_lens"), [[0, 7], [], []]), ["step 0", "text_lens has 3 ranks"]),
        (
            change(("steps", 0, "text_lens", 0), [0, 8]),
            ["sequence 1 (home rank 0) has text_length 8; allowed is from 0 to its length"],
        ),
        (change(("steps", 0, "text_lens", 0), [-1, 7]), ["step 0: sequence 0 (home rank 0) has text_length -1"]),
        ([], ["Expected `object`, got `array`"]),
    ],
)
def test_malformed_files(tmp_path: Path, content: object, said: list[str]) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        read_trace(file)
    for words in [str(file), *said]:
        assert words in str(error.value)


def test_cross_attended_text_may_be_longer_than_the_sequence() -> None:
    content = change(("steps", 0, "text_lens", 0), [0, 500])
    content["meta"]["text"] = "cross"
    assert decode_trace(json.dumps(content).encode(), origin="x").steps[0].text_lens[0].tolist() == [0, 500]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, gzip.compress(b"{}")[:-4], b"\x1f\x8bxx", b'{"meta": NaN'],
    ids=repr,
)
def test_no_json(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(data)
    with pytest.raises(DataError, match=r"bad\.json"):
        read_trace(tmp_path / "bad.json")


def test_missing_file_and_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(SpecError, match="must end in"):
        write_trace(decode_trace(json.dumps(GOOD).encode(), origin="x"), tmp_path / "t.txt")


def test_head() -> None:
    trace = decode_trace(json.dumps(GOOD).encode(), origin="x")
    assert rows(trace.head(1)) == rows(trace)[:1]
    with pytest.raises(SpecError, match="has 2 steps"):
        trace.head(3)
