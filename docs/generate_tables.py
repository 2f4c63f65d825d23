"""Fills in the tables and figures of README.md and docs/ from the records in benchmarks/results/.

A page marks where one goes, and this writes between the marks what the record says now:

    <!-- table: steps h200/offload 32768x1 -->
    <!-- end -->

The first word is a function of `TABLES`, the others are what it is given.

    python docs/generate_tables.py           writes the pages
    python docs/generate_tables.py --check   writes nothing; says what differs, and exits with 1 where anything does
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from record_tables import checks, host, kernels, steps, storage, training

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
TABLES: dict[str, Callable[..., str]] = {
    "beside": kernels.beside,
    "demands": steps.demands,
    "families": checks.families,
    "files": storage.files,
    "front": steps.front,
    "gpu-beside-cpu": kernels.gpu_beside_cpu,
    "ladder": kernels.ladder,
    "learned": training.learned,
    "loader": storage.loader,
    "misses": steps.misses,
    "mlstm": kernels.mlstm,
    "models": steps.models,
    "mutations": checks.mutations,
    "small-steps": host.small_steps,
    "speeds": steps.speeds,
    "steps": steps.steps,
    "trained": training.trained,
}
MARKED = re.compile(r"^<!-- table: (?P<asked>.*?) -->$\n(?P<old>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (table\b|end\b)")


def filled(page: Path, text: str) -> str:
    """A page's text with every table as the records give it.

    Raises:
        ValueError: a mark without its other end, or of a table that is not known.
    """

    def fill(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match["asked"])
        if name not in TABLES:
            raise ValueError(f"{page}: no table is called {name!r}, but {', '.join(TABLES)}.")
        return f"<!-- table: {match['asked']} -->\n{TABLES[name](page, *arguments)}\n<!-- end -->"

    if _MARK.search(MARKED.sub("", text)):
        raise ValueError(f"{page}: a mark of a table stands alone, or not at the start of its line.")
    return MARKED.sub(fill, text)


def differences() -> list[tuple[Path, str, str]]:
    """(page, text it has, text it should have) of every page that differs."""
    texts = [(page, page.read_text()) for page in PAGES]
    return [(page, text, new) for page, text in texts if (new := filled(page, text)) != text]


def main(arguments: list[str]) -> int:
    """The command. Returns its exit code."""
    found = differences()
    for page, text, new in found:
        name = str(page.relative_to(REPOSITORY))
        if "--check" in arguments:
            lines = difflib.unified_diff(
                text.splitlines(), new.splitlines(), name, "what the records say (`make tables`)", lineterm="", n=1
            )
            print("\n".join(lines))
        else:
            page.write_text(new)
            print(f"{name} written")
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
