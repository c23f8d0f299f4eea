"""The page of training settings has the table of every section, with the defaults and meanings that the code has."""

import json
import re

import pytest

from hashseek.training.config import Config, section_model
from support.paths import ROOT

PAGE_FILE = ROOT / "docs" / "reference" / "training-settings.md"
PAGE = PAGE_FILE.read_text()


def settings_table(section: str) -> str:
    """The table as it must stand on the page."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in section_model(Config.model_fields[section]).model_fields.items():
        shown = (
            json.dumps(field.default).replace("null", "none") if not field.is_required() and field.default != {} else ""
        )
        code = f" `{shown}`" if shown.startswith('"') else f" {shown}" if shown else ""
        rows.append(f"| `{section}.{name}` |{code} | {field.description} |")
    return "\n".join(rows)


@pytest.mark.parametrize("section", Config.model_fields)
def test_the_table_of_a_section_is_that_of_the_code(section):
    assert settings_table(section) in PAGE, f"copy this table to {PAGE_FILE}:\n{settings_table(section)}"


def test_every_setting_that_is_named_exists():
    for section, field in Config.model_fields.items():
        named = re.findall(rf"`{section}\.([a-z_]+)[` =]", PAGE)
        own = {"quantization"} if section == "loss" else {"on_error", "root"} if section == "data" else set()
        assert named
        assert set(named) - own <= set(section_model(field).model_fields)
