"""Lets pages link to files of the repository: what lies outside docs/ becomes part of the site.

Links are written as a reader of the repository needs them, relative to the file they stand in. In the site a source
becomes a page that shows it, a record a file to download, and README, changelog and the like the pages named below.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?P<before>\]\()(?P<target>(?!\w+:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/programs.md",
}
"""Files of the repository that are pages of the site, and where."""
ALIASES = {"README.md": "index.md"}
"""Files of the repository whose place another page takes."""
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", ".yml": "yaml"}


def place_of(target: str) -> str:
    """Where a file outside docs/ lies in the site: a path relative to docs/."""
    if target in ALIASES:
        return ALIASES[target]
    if target in PAGES:
        return PAGES[target]
    shown = Path(target).suffix in LANGUAGES
    return f"repository/{target}.md" if shown else f"repository/{target}"


def targets(text: str, origin: str) -> Iterator[str]:
    """The files that a document links to, relative to the repository. `origin`: the document itself, likewise."""
    for found in LINK.finditer(text):
        yield normpath(join(dirname(origin), found["target"]))


def rewrite(text: str, origin: str, place: str) -> str:
    """A document's text with the links that the site needs. `place`: where the document lies in the site."""

    def link(found: re.Match[str]) -> str:
        target = normpath(join(dirname(origin), found["target"]))
        if not (ROOT / target).is_file():
            return found[0]  # mkdocs says what is wrong with it, if it is a link at all
        there = target.removeprefix("docs/") if target.startswith("docs/") else place_of(target)
        return f"{found['before']}{relpath(there, dirname(place) or '.')}{found['anchor'] or ''}"

    return LINK.sub(link, text)


def shown_source(target: str) -> str:
    """A page that shows a source."""
    text = (ROOT / target).read_text(encoding="utf-8")
    return f"# {target}\n\n``````{LANGUAGES[Path(target).suffix]}\n{text}\n``````\n"


def linked_files(documents: Iterable[tuple[str, str]]) -> set[str]:
    """The repository's files that documents, (origin, text) each, link to and that lie outside docs/."""
    found = {target for origin, text in documents for target in targets(text, origin)}
    outside = {target for target in found if not target.startswith("docs/") and (ROOT / target).is_file()}
    return outside - PAGES.keys() - ALIASES.keys()


def on_files(files: "Files", config: Any) -> "Files":
    """mkdocs: add the repository's files that pages are or link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for source, place in PAGES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    documents = [(origin_of(file), file.content_string) for file in files.documentation_pages()]
    for target in sorted(linked_files(documents) | records_of(documents)):
        place = place_of(target)
        if place.endswith(".md"):
            made = File.generated(config, place, content=shown_source(target), inclusion=InclusionLevel.NOT_IN_NAV)
        else:
            made = File.generated(config, place, abs_src_path=str(ROOT / target))
        files.append(made)
    return files


def records_of(documents: Iterable[tuple[str, str]]) -> set[str]:
    """The records that pages show tables of, which link to them."""
    names = {name for _, text in documents for name in re.findall(r"<!-- record: ([\w.-]+)", text)}
    return {f"benchmarks/results/{name.removesuffix('.jsonl')}.jsonl" for name in names}


def origin_of(file: "File") -> str:
    """The repository's path of a page's source."""
    for source, place in PAGES.items():
        if file.src_uri == place:
            return source
    return f"docs/{file.src_uri}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: point links out of docs/ to where the site has what they name."""
    if page.file.src_uri.startswith("repository/"):
        return markdown
    return rewrite(markdown, origin_of(page.file), page.file.src_uri)
