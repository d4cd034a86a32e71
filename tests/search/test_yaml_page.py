"""The page of YAML files is what the code declares."""

from pathlib import Path

from search.pruning.training.recipe import RECIPE_KEYS, Recipe, read_recipe
from search.yaml_page import format_yaml_page, list_defaults

ROOT = Path(__file__).parents[2]


def test_the_page_is_of_today() -> None:
    assert (ROOT / "docs/reference/yaml_files.md").read_text() == format_yaml_page(), "make docs"


def test_a_recipe_of_the_defaults_on_the_page_is_the_default_recipe(tmp_path: Path) -> None:
    defaults = list_defaults(Recipe)
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"{name}: {defaults[name].strip('`')}\n" for name in RECIPE_KEYS if name in defaults))
    assert read_recipe(str(path)) == Recipe()
