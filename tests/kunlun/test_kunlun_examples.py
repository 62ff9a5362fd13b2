"""The examples in the docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["gdpa", "seed_pooling", "rotary", "wukong", "kunlun_config", "kunlun_blocks", "kunlun"]
)
def test_docstring_examples(name):
    module = importlib.import_module(f"jagged_attn.modules.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted > 0
    assert result.failed == 0


def test_the_example_of_the_page():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs" / "kunlun.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    scope: dict = {}
    exec(code, scope)
    assert scope["logits"].shape == (3, 1)
