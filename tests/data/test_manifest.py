import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knapformer.data import Manifest, read_manifest, write_manifest
from knapformer.errors import DataError, KnapFormerWarning, SpecError
from tests.data.files import picture, write_clip


def write_image(path: Path, width: int = 40, height: int = 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(width, height)).save(path)
    return path


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    write_image(root / "b.png")
    write_image(root / "sub" / "a.JPG", 20, 50)
    write_clip(root / "c.mp4", 6)
    (root / "b.txt").write_text("  A grey picture – ünïcode.\n")
    (root / "notes.md").write_text("not media")
    write_image(root / ".cache" / "hidden.png")
    return root


def test_folder(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert [(i.id, i.path.name, i.kind, i.caption, i.source) for i in manifest] == [
        (0, "b.png", "image", "A grey picture – ünïcode.", "images"),
        (1, "c.mp4", "video", "c", "clips"),
        (2, "a.JPG", "image", "a", "images"),
    ]
    assert [(i.width, i.height, i.num_frames) for i in manifest] == [(40, 30, 1), (64, 48, 6), (20, 50, 1)]
    assert manifest[1].duration == pytest.approx(0.6) and manifest[0].duration == 0
    ids = manifest.ids_by_source()
    assert {name: values.tolist() for name, values in ids.items()} == {"clips": [1], "images": [0, 2]}
    assert ids["clips"].dtype == np.int64


def test_jsonl(folder: Path) -> None:
    file = write_lines(
        folder / "list.jsonl",
        {"path": "c.mp4", "caption": "late", "start": 0.2, "end": 0.5, "fps": 5, "source": "mine"},
        "",
        {"path": "sub/a.JPG"},
        {"path": "c.mp4", "caption": "", "note": "for people"},
        {"path": "b.png", "caption": None},
    )
    manifest = read_manifest(file)
    assert [(i.path.name, i.caption, i.start, i.end, i.fps, i.source) for i in manifest] == [
        ("b.png", "A grey picture – ünïcode.", 0.0, None, None, "images"),
        ("c.mp4", "", 0.0, None, None, "clips"),
        ("c.mp4", "late", 0.2, 0.5, 5, "mine"),
        ("a.JPG", "a", 0.0, None, None, "images"),
    ]
    assert (manifest[2].num_frames, manifest[2].duration) == (3, pytest.approx(0.3))


def test_ids_do_not_depend_on_the_order_of_lines(folder: Path) -> None:
    lines = [{"path": "c.mp4", "start": 0.2}, {"path": "b.png"}, {"path": "sub/a.JPG"}, {"path": "c.mp4"}]
    one = read_manifest(write_lines(folder / "1.jsonl", *lines))
    two = read_manifest(write_lines(folder / "2.jsonl", *lines[::-1]))
    assert one.items == two.items
    assert [item.id for item in one] == [0, 1, 2, 3] and one[2].start == 0.2


def test_a_manifest_in_the_folder_comes_first(folder: Path) -> None:
    write_lines(folder / "manifest.jsonl", {"path": "b.png", "caption": "only this"})
    assert [item.caption for item in read_manifest(folder)] == ["only this"]


def test_written_manifests_need_no_media(folder: Path) -> None:
    write_lines(folder / "list.jsonl", {"path": "c.mp4", "start": 0.2, "end": 0.5, "fps": 5}, {"path": "b.png"})
    manifest = read_manifest(folder / "list.jsonl")
    (folder.parent / "lists").mkdir()
    write_manifest(manifest, folder.parent / "lists" / "full.jsonl")
    for item in manifest:
        item.path.write_bytes(b"not opened")
    back = read_manifest(folder.parent / "lists" / "full.jsonl")
    for old, new in zip(manifest, back, strict=True):
        assert os.path.samefile(old.path, new.path)
        for name in ("id", "kind", "caption", "width", "height", "num_frames", "duration", "start", "end", "fps"):
            assert getattr(old, name) == getattr(new, name)


BAD_LINES = [
    ("{", "not JSON"),
    ([1], "Expected `object`, got `array`"),
    ({"caption": "x"}, "missing required field `path`"),
    ({"path": ""}, "path is ''"),
    ({"path": 3}, "Expected `str`, got `int` - at `$.path`, which is 3"),
    ({"path": "b.png", "caption": 3}, "got `int` - at `$.caption`, which is 3"),
    ({"path": "b.png", "caption": ["a"]}, "got `array` - at `$.caption`"),
    ({"path": "b.png", "width": 10**400, "height": 1}, "width is 1000"),
    ('{"path": "b.png", "width": 1e999}', "out of range"),
    ('{"path": "b.png", "caption": "\\ud800"}', "not JSON"),
    ('{"path": ' + "[" * 100_000, "not JSON"),
    ({"path": "c.mp4", "fps": 1e300}, "fps is 1"),
    ({"path": "none.png"}, "none.png' does not exist"),
    ({"path": "notes.md"}, "file type .md is not supported"),
    ({"path": "c.mp4", "start": -1}, "start is -1"),
    ({"path": "c.mp4", "start": "1"}, "got `str` - at `$.start`, which is '1'"),
    ({"path": "c.mp4", "start": True}, "got `bool` - at `$.start`, which is True"),
    ('{"path": "c.mp4", "start": NaN}', "not JSON"),
    ({"path": "c.mp4", "start": 0.4, "end": 0.4}, "end 0.4 s is not after start 0.4 s"),
    ({"path": "c.mp4", "start": 7}, "the clip ends after 0.600 s"),
    ({"path": "c.mp4", "fps": 0}, "fps is 0"),
    ({"path": "c.mp4", "source": ""}, "source is ''"),
    ({"path": "b.png", "start": 1}, "is an image; start, end and fps are for clips"),
    ({"path": "b.png", "width": 0, "height": 3}, "width is 0"),
    ({"path": "broken.png"}, "'broken.png' cannot be opened as an image"),
    ({"path": "broken.mp4"}, "'broken.mp4' cannot be read as a clip"),
]


@pytest.mark.parametrize(("line", "cause"), BAD_LINES, ids=[cause for _, cause in BAD_LINES])
def test_bad_lines_name_file_line_and_cause(folder: Path, line: object, cause: str) -> None:
    for name in ("broken.png", "broken.mp4"):
        (folder / name).write_text("broken")
    file = write_lines(folder / "list.jsonl", {"path": "b.png"}, "", line, {"path": "c.mp4"})
    with pytest.raises(DataError) as error:
        read_manifest(file)
    assert "1 of 3 entries" in str(error.value)
    assert f"{file}:3: " in str(error.value)
    assert cause in str(error.value)
    with pytest.warns(KnapFormerWarning) as caught:
        kept = read_manifest(file, on_error="skip")
    assert [item.path.name for item in kept] == ["b.png", "c.mp4"] and [item.id for item in kept] == [0, 1]
    assert len(caught) == 1 and f"{file}:3: " in str(caught[0].message)


def test_all_problems_come_in_one_message(folder: Path) -> None:
    file = write_lines(folder / "list.jsonl", {"path": "b.png"}, *({"path": f"none{k}.png"} for k in range(13)))
    with pytest.raises(DataError) as error:
        read_manifest(file)
    assert "13 of 14 entries" in str(error.value) and "and 3 more" in str(error.value)
    assert str(error.value).count("does not exist") == 10


def test_media_of_a_folder_that_cannot_be_used_are_problems(folder: Path) -> None:
    (folder / "photo.heic").write_bytes(b"x")
    (folder / "bad.webp").write_bytes(b"x")
    with pytest.raises(DataError) as error:
        read_manifest(folder)
    assert "2 of 5" in str(error.value) and "photo.heic" in str(error.value) and "bad.webp" in str(error.value)


def test_unknown_keys_are_said_to_be_ignored(folder: Path) -> None:
    file = write_lines(folder / "list.jsonl", {"path": "b.png", "captoin": "x"}, {"path": "c.mp4", "wdith": 3})
    with pytest.warns(KnapFormerWarning, match=r"\['captoin', 'wdith'\] are ignored") as caught:
        read_manifest(file)
    assert len(caught) == 1


def test_nothing_usable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no usable entry"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="neither a folder nor a file"):
        read_manifest(tmp_path / "none")
    with pytest.raises(DataError, match="UTF-8"):
        (tmp_path / "latin.jsonl").write_bytes(b'{"path": "\xe9.png"}')
        read_manifest(tmp_path / "latin.jsonl")
    with pytest.raises(SpecError, match="on_error"):
        read_manifest(tmp_path, on_error="ignore")  # type: ignore[arg-type]


def test_animations_are_clips(tmp_path: Path) -> None:
    frames = [Image.fromarray(picture(16, 16, level)) for level in (10, 90, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100)
    write_image(tmp_path / "b.gif")
    manifest = read_manifest(tmp_path)
    assert [(i.kind, i.num_frames) for i in manifest] == [("video", 3), ("image", 1)]
    write_manifest(manifest, tmp_path / "full.jsonl")
    assert [i.kind for i in read_manifest(tmp_path / "full.jsonl")] == ["video", "image"]


def test_the_buckets_that_lost_samples_elsewhere(tmp_path: Path) -> None:
    # 18 pictures in 7 sizes, which bucketing at batch 18 turned into 7 steps of 1 to 9 pictures: here all are items.
    sizes = [(640, 1440), (720, 1280), *[(832, 1104)] * 9, (848, 1072), *[(960, 960)] * 2, *[(1104, 832)] * 2]
    sizes += [(1280, 720)] * 2
    for number, (width, height) in enumerate(sizes):
        write_image(tmp_path / f"{number:02}.png", width // 8, height // 8)
    manifest = read_manifest(tmp_path)
    assert isinstance(manifest, Manifest) and len(manifest) == 18
    assert [(8 * i.width, 8 * i.height) for i in manifest] == sizes
