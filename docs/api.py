"""Write docs/api.md: every public name with its signature and docstring, both as they stand in the source.

So the page depends neither on Python's version nor on a library's.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent

from pdllm_store import ChunkStore

PACKAGES = ("pdllm_rag", "langchain_pdllm", "llama_index.llms.pdllm", "llama_index.retrievers.pdllm",
            "llama_index.vector_stores.pdllm", "pdllm_store")  # fmt: skip
PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """<!-- fmt: off -->

# API reference

What can be imported, by package; made from the source by `python docs/api.py`. What several components share stands \
under [Bases](#bases); what they have from a framework's own classes, in that framework's reference. Axes of tensors: \
Y layers, T tokens of a chunk, BOS included, G key/value heads, D head dim. Words: [glossary](glossary.md).
"""
OURS = re.compile(r"(pdllm_rag|pdllm_store|langchain_pdllm|llama_index\.\w+\.pdllm)\b")
DECORATORS = re.compile(r"(cached_)?property|classmethod|staticmethod|dataclass.*|runtime_checkable")
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\n((?:(?: .*)?(?:\n|\Z))+)", re.MULTILINE)
ITEM = r"\*{0,2}\w+(?:, \*{0,2}\w+)*(?=: )"


def node_of(module: str, name: str) -> tuple[str, ast.AST]:
    """A module's text, and its class, function or constant of that name."""
    text = inspect.getsource(importlib.import_module(module))
    for node in ast.parse(text).body:
        named = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if name == getattr(node, "name", None) or (named is not None and name == ast.unparse(named)):
            return text, node
    raise LookupError(f"{module} has no {name}")


def lines_of(text: str, node: ast.AST) -> str:
    """A statement and the comment above it; a class or function up to its body, with decorators that matter."""
    if not hasattr(node, "body"):
        above = text.splitlines()[node.lineno - 2].strip().startswith("# ")
        return dedent("\n".join(text.splitlines()[node.lineno - 1 - above : node.end_lineno]))
    first = node.body[0]
    *lines, last = text.splitlines()[node.lineno - 1 : first.lineno]
    head = re.sub(r" +# (noqa|type:).*", "", dedent("\n".join([*lines, last[: first.col_offset]]))).rstrip()
    decorators = [one for one in map(ast.unparse, node.decorator_list) if DECORATORS.fullmatch(one)]
    return "".join(f"@{one}\n" for one in decorators) + head


def markdown(doc: str) -> str:
    """A docstring whose sections are lists."""

    def listed(section: re.Match[str]) -> str:
        items = re.split(rf"\n(?={ITEM})", dedent(section[2]).strip())
        lines = [re.sub(rf"^{ITEM}", r"`\g<0>`", " ".join(item.split())) for item in items]
        return "\n- ".join([f"{section[1]}:\n", *lines]) + "\n\n"

    return SECTION.sub(listed, doc).strip()


def entry(title: str, code: str, doc: str | None) -> str:
    return f"{title}\n\n```py\n{code}\n```\n" + (f"\n{markdown(doc)}\n" if doc else "")


def is_method(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")


def is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith(("_", "model_config"))


def bases_of(cls: type) -> list[type]:
    """Classes of ours that it has fields or methods from, the protocol of stores among them."""
    is_store = {name for name in vars(ChunkStore) if not name.startswith("_")} <= {*dir(cls)} and cls is not ChunkStore
    ours = [base for base in (*cls.__mro__[1:], *[ChunkStore] * is_store) if OURS.match(base.__module__)]
    return [b for b in ours if any(is_method(n) or is_field(n) for n in node_of(b.__module__, b.__name__)[1].body)]


def class_entries(cls: type) -> Iterator[str]:
    text, node = node_of(cls.__module__, cls.__name__)
    fields = [lines_of(text, n) for n in node.body if is_field(n)]
    inits = [lines_of(text, n) + " ..." for n in node.body if getattr(n, "name", "") == "__init__"]
    inside = indent("\n".join(["", *fields, *inits]), "    ") if fields or inits else " ..."
    yield entry(f"### {cls.__name__}", lines_of(text, node) + inside, ast.get_docstring(node))
    bases = bases_of(cls)
    if bases:
        yield "More of it: " + ", ".join(f"[{base.__name__}](#{base.__name__.lower()})" for base in bases) + ".\n"
    for method in filter(is_method, node.body):
        doc = ast.get_docstring(method)
        if doc or not any(hasattr(base, method.name) for base in bases):  # else its base says it
            yield entry(f"#### {cls.__name__}.{method.name}", lines_of(text, method) + " ...", doc)


def page() -> str:
    """The page's text."""
    parts: list[str] = [INTRODUCTION]
    public: list[type] = []
    for package in map(importlib.import_module, PACKAGES):
        parts.append(f"## {package.__name__}\n\n{package.__doc__}\n")
        imports = [n for n in ast.walk(ast.parse(inspect.getsource(package))) if isinstance(n, ast.ImportFrom)]
        homes = {alias.name: str(n.module) for n in imports for alias in n.names}
        for name in package.__all__:
            text, node = node_of(homes[name], name)
            if isinstance(node, ast.ClassDef):
                public.append(getattr(package, name))
                parts += class_entries(public[-1])
            elif isinstance(node, ast.FunctionDef):
                parts.append(entry(f"### {name}", lines_of(text, node) + " ...", ast.get_docstring(node)))
            else:  # its comment says what it is
                parts.append(entry(f"### {name}", lines_of(text, node), None))
    bases = sorted({b for cls in public for b in bases_of(cls)} - {*public}, key=lambda base: base.__name__)
    return "\n".join([*parts, "## Bases\n", *(part for base in bases for part in class_entries(base))])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
