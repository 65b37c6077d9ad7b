"""What needs no built site: links, pictures, tables, and an entry for each public name."""

import re
from importlib import import_module

import pytest

from tests.docs.hooks import DOCS, ROOT, hook

PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
PUBLIC = [
    "knapformer",
    "knapformer.attention",
    "knapformer.balancer",
    "knapformer.comm",
    "knapformer.data",
    "knapformer.integrations.diffusers",
    "knapformer.models",
    "knapformer.plan",
    "knapformer.train",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists() or (page.parent / link).is_relative_to(DOCS / "reference"), link


def test_every_page_has_its_place_in_the_navigation():
    configured = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert f" {page.relative_to(DOCS).as_posix()}\n" in configured, page


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry(module):
    if module.endswith("diffusers"):
        pytest.importorskip("diffusers")
    reference = hook("reference")
    page = reference.pages()[reference.page_of(module)]
    for name in import_module(module).__all__:
        described = f"::: {module}.{name}\n" in page
        linked = re.search(rf"\| `{module}\.{name}` \| \[([\w.]+)\]\(([\w.]+\.md)", page)
        assert described or linked, f"{module}.{name}"
        if linked and not linked[2].startswith(linked[1]):  # a name of another page, which must have its entry
            assert f"::: {linked[1]}\n" in reference.pages()[f"reference/{linked[2]}"], linked[1]


def test_a_name_that_no_page_describes_is_refused(monkeypatch):
    reference = hook("reference")
    listed = reference.public_names
    monkeypatch.setattr(
        reference, "public_names", lambda module: [*listed(module), *["new"] * (module == "knapformer")]
    )
    with pytest.raises(ValueError, match=r"knapformer\.new is in none of the modules"):
        reference.pages()


def test_every_command_has_an_entry():
    app = pytest.importorskip("knapformer.cli.app").make_app()
    named = {name for name in app if not name.startswith("-")}
    assert set(hook("reference").command_functions()) == named


def test_pictures_are_those_of_the_program():
    pictures = hook("pictures")
    for name, draw in pictures.PICTURES.items():
        committed = (DOCS / "concepts" / name).read_text(encoding="utf-8")
        assert committed == draw().text, f"plans changed: run python docs/hooks/pictures.py, and look at {name}"


def test_tables_are_made_from_records():
    page = (DOCS / "benchmarks" / "index.md").read_text(encoding="utf-8")
    text = hook("records").render(page, "../../")
    assert "<!-- record" not in text
    assert text.count("\nRecord: [") == page.count("<!-- record: ") > 4
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 50
    assert not any("nan" in row for row in rows)


def test_a_table_has_the_statistic_that_it_asks_for(tmp_path, monkeypatch):
    from knapformer.report import RecordWriter

    records = hook("records")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    with RecordWriter(tmp_path / "some.jsonl", "one", {}) as writer:
        for step, seconds in enumerate((1.0, 2.0, 6.0)):
            writer.step(step=step, seconds=seconds)
    mean = records.render("<!-- record: some.jsonl\nrows: name\nseconds: seconds\nother: other\n-->", "")
    middle = records.render("<!-- record: some.jsonl\nrows: name\nstatistic: median\nseconds: seconds\n-->", "")
    assert "| one | 3 | - |" in mean
    assert "| one | 2 |" in middle


def test_links_out_of_the_pages_lead_into_the_site():
    repository = hook("repository")
    text = "[a](../../examples/fsdp2.py) [b](../adr/README.md#x) [c](../../CHANGELOG.md) [d](https://e) [e](none.md)"
    made = repository.rewrite(text, "docs/integrations/trainers.md", "integrations/trainers.md")
    there = "[a](../repository/examples/fsdp2.py.md) [b](../adr/README.md#x) [c](../changelog.md)"
    assert made == f"{there} [d](https://e) [e](none.md)"
    assert repository.linked_files([("docs/integrations/trainers.md", text)]) == {"examples/fsdp2.py"}
