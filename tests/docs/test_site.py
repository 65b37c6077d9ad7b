"""The site builds strictly: no broken link or anchor, no page left out, and every public name can be looked up."""

import os
import subprocess
import sys
import zlib

import pytest

from tests.docs.hooks import ROOT, hook
from tests.docs.test_pages import PUBLIC

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_public_name_is_in_its_inventory(site):
    header, _, body = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    assert header.startswith(b"# Sphinx inventory")
    described = {line.split()[0] for line in zlib.decompress(body).decode().splitlines()}
    reference = hook("reference")
    for module in PUBLIC[1:]:
        assert {f"{module}.{name}" for name in reference.public_names(module)} <= described


def test_it_has_tables_and_sources(site):
    benchmarks = (site / "benchmarks" / "index.html").read_text(encoding="utf-8")
    assert "flux-joint-32" in benchmarks
    assert "record: " not in benchmarks
    assert (site / "repository" / "examples" / "fsdp2.py.html").is_file()
    assert (site / "repository" / "benchmarks" / "results" / "planners.jsonl").is_file()


def test_it_asks_nothing_of_the_network_to_be_read(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert 'rel="stylesheet" href="http' not in page
