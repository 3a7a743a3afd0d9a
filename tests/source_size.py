"""Print how many source lines the parts of the project have (blank lines, comments and docstrings left out)."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGINE_BUDGET, WHOLE_BUDGET = 4500, 10000
OUTSIDE_ENGINE = ("cli", "components", "evaluation", "bench", "distributed", "server", "training")


def source_lines(path: Path) -> int:
    """Lines that hold code."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                assert first.end_lineno is not None
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> None:
    sizes = {
        path: source_lines(path)
        for folder in ("pdllm_rag", "store", "integrations")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    engine = sum(
        size
        for path, size in sizes.items()
        if path.is_relative_to(ROOT / "store" / "pdllm_store")
        or (
            path.is_relative_to(ROOT / "pdllm_rag")
            and path.relative_to(ROOT / "pdllm_rag").parts[0] not in OUTSIDE_ENGINE
        )
    )
    print(f"engine and store: {engine} source lines of {ENGINE_BUDGET}")
    print(f"everything:       {sum(sizes.values())} source lines of {WHOLE_BUDGET}")
    largest = max(sizes, key=sizes.__getitem__)
    print(f"median file:      {statistics.median(sizes.values()):.0f} of {len(sizes)} files")
    print(f"largest file:     {sizes[largest]}, {largest.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
