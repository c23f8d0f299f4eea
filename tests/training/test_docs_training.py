"""docs/reference/training-settings.md names every setting, with its default, and no setting that does not exist."""

import re
import typing

import pytest
from pydantic import BaseModel

from hashseek.training.config import Config
from support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "training-settings.md").read_text()


def sections() -> dict[str, type[BaseModel]]:
    found = {}
    for name, field in Config.model_fields.items():
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


SETTINGS = [f"{section}.{key}" for section, model in sections().items() for key in model.model_fields]


def test_all_sections_are_looked_at():
    assert sections().keys() == Config.model_fields.keys()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_described(setting):
    assert f"`{setting}`" in PAGE


@pytest.mark.parametrize("section", sections())
def test_a_setting_that_is_described_exists(section):
    named = re.findall(rf"`{section}\.([a-z_]+)[` =]", PAGE)
    extra = {"quantization"} if section == "loss" else set()  # of the losses themselves
    assert named
    assert set(named) - extra <= set(sections()[section].model_fields)


def test_defaults_in_the_tables_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| ([^|]*) \|", PAGE, re.M)
    assert len(rows) > 40
    for section, key, shown in rows:
        field = sections()[section].model_fields[key]
        if shown in ("none", "`lr`", "the backbone's"):
            assert field.default is None, (section, key)
        elif shown == "":
            assert field.is_required() or key == "space", (section, key)
        else:
            text = shown.strip("`")
            expected = (
                text.strip('"')
                if text.startswith('"')
                else {"true": True, "false": False}.get(text)
                if text in ("true", "false")
                else float(text)
            )
            assert field.default == expected, (section, key)
