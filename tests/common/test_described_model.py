"""Models whose JSON schema repeats the docstrings of their fields."""

from typing import Generic, TypeVar

from pydantic import Field

from motet.described_model import DescribedModel

Item = TypeVar("Item")


class Plain:
    pass


class Named(DescribedModel):
    name: str
    """What it is called."""


class Page(Named, Plain, Generic[Item]):
    maximum: int = Field(3, alias="maxItems")
    """How many items
    there may be."""
    first: int = 0


def test_a_models_schema_describes_its_fields_and_those_of_its_bases_in_whatever_module_they_are():
    properties = Page.model_json_schema()["properties"]
    assert properties["name"]["description"] == "What it is called."
    assert properties["maxItems"]["description"] == "How many items\nthere may be."
    assert "description" not in properties["first"]
