"""Makes the reference: a page for each public module with an entry for each name of its `__all__`, and the commands.

Names are read from the sources, never imported, so the site builds without torch; what an entry says is its docstring
(mkdocstrings). A name that is added to an `__all__` has its entry from then on.
"""

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

SOURCE = Path(__file__).parents[2] / "src"

MODULES = {
    "knapformer.balancer": "Plan a step, move its tokens, get the layout",
    "knapformer.attention": "What a model sees of a plan, and attention kernels",
    "knapformer.attention.conformance": "Is a kernel right?",
    "knapformer.plan": "Sequences, clusters, prices, planners, placements",
    "knapformer.plan.planners": "The planners themselves",
    "knapformer.data": "Workloads, data sets, samplers, profiles",
    "knapformer.models": "Packed diffusion transformers",
    "knapformer.train": "The trainer, its configuration, loss weights",
    "knapformer.integrations.diffusers": "Packed forwards for models of diffusers",
    "knapformer.comm": "Collectives",
    "knapformer.report": "Run records",
    "knapformer.files": "Reading and writing files",
    "knapformer.errors": "Every error",
}
TOP = "knapformer"
COMMANDS = "reference/commands.md"


def source_of(module: str) -> Path:
    """The file of a module or package."""
    path = SOURCE / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """The names in a module's `__all__`; where it has none, its public functions and classes."""
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    defined = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [name for name in defined if not name.startswith("_")]


def page_of(module: str) -> str:
    """Where a module's page lies in the site."""
    return f"reference/{module}.md"


def module_page(module: str) -> str:
    """A module's page: what its docstring says, then every name that its parent's page does not have."""
    parent = module.rpartition(".")[0]
    elsewhere = public_names(parent) if parent in MODULES else []
    parts = [f"# {module}", entry(module, members=False, show_root_heading=False, show_root_toc_entry=False)]
    parts += [entry(f"{module}.{name}") for name in public_names(module) if name not in elsewhere]
    return "\n\n".join(parts) + "\n"


def entry(path: str, **options: Any) -> str:
    """What makes mkdocstrings write about one object."""
    lines = [f"::: {path}"]
    if options:
        lines.append("    options:")
        lines += [f"      {name}: {str(value).lower()}" for name, value in options.items()]
    return "\n".join(lines)


def top_page() -> str:
    """The names at the top level, each with a link to the module that has its entry."""
    lines = [f"# {TOP}", "Names at the top level, and where they are described.", "| name | entry |\n|---|---|"]
    for name in public_names(TOP):
        if f"{TOP}.{name}" in MODULES:
            lines[-1] += f"\n| `{TOP}.{name}` | [{TOP}.{name}]({TOP}.{name}.md) |"
            continue
        module = next((module for module in MODULES if name in public_names(module)), None)
        if module is None:
            raise ValueError(f"{TOP}.{name} is in none of the modules of the reference: {', '.join(MODULES)}")
        lines[-1] += f"\n| `{TOP}.{name}` | [{module}.{name}]({module}.md#{module}.{name}) |"
    return "\n\n".join(lines) + "\n"


def index_page() -> str:
    """A line for each module."""
    lines = ["# Reference", "From the docstrings of the sources.", "| module | |\n|---|---|"]
    lines[-1] += f"\n| [{TOP}]({TOP}.md) | Names at the top level |"
    for module, what in MODULES.items():
        lines[-1] += f"\n| [{module}]({module}.md) | {what} |"
    lines[-1] += "\n| [commands](commands.md) | `knapformer COMMAND` |"
    return "\n\n".join(lines) + "\n"


def command_functions() -> dict[str, str]:
    """Name of each command and the import path of its function, as cli/app.py registers them."""
    named = source_of("knapformer.cli.app").read_text(encoding="utf-8")
    listed = re.findall(r'^    "(\w+)": "', named, re.MULTILINE)
    commands = {name: f"knapformer.cli.{name}.{name}" for name in listed}
    for file in sorted((SOURCE / "knapformer" / "tools").glob("*/command.py")):
        commands[file.parent.name] = f"knapformer.tools.{file.parent.name}.command.command"
    return commands


def commands_page() -> str:
    """Every command with its arguments; `knapformer COMMAND --help` says the same."""
    lines = [
        "# Commands",
        "`knapformer COMMAND --help` says the same. `max_pixels` here is `--max-pixels` there, `as_json` is `--json`.",
    ]
    for name, function in sorted(command_functions().items()):
        shown = {"show_root_heading": False, "show_root_toc_entry": False, "show_signature": False}
        lines += [f"## knapformer {name}", entry(function, docstring_style="numpy", **shown)]
    return "\n\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """All pages of the reference: where they lie, and their Markdown."""
    made = {"reference/index.md": index_page(), page_of(TOP): top_page()}
    made |= {page_of(module): module_page(module) for module in MODULES}
    return made | {COMMANDS: commands_page()}


def on_config(config: Any) -> Any:
    """mkdocs: give the reference its place in the navigation."""
    for section in config.nav:
        if section.get("Reference") == "reference/index.md":
            section["Reference"] = [
                {"Overview" if place.endswith("/index.md") else Path(place).stem: place} for place in pages()
            ]
    return config


def on_files(files: "Files", config: Any) -> "Files":
    """mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files
