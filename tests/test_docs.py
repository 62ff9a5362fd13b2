"""Whatever the words show as code runs: docstring examples, and ``python`` blocks of README and docs.

A fragment that cannot run by itself is marked ``py``.
"""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import jagged_attn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Kernels and what is imported for them alone need Triton or a GPU.
SKIP = ("backends.triton.", "backends.tlx", "backends._jit", "testing.emulator", "testing.aot", "bench.__main__")
SKIP += ("perfmodel.microbench",)
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(jagged_attn.__path__, "jagged_attn.")
    if not any(part in module.name for part in SKIP)
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch} | {x: getattr(jagged_attn, x) for x in dir(jagged_attn) if not x.startswith("_")}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        line = page.read_text()[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    words = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words):
        assert (page.parent / target).exists(), target
