"""House rules on the package as a whole. Each rule is first shown to catch what it forbids; figures are printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.house import structure

SOURCES = structure.read_package(Path(__file__).resolve().parents[2] / "megatron_rl")
MODULES = structure.parse(SOURCES)

# At most. Each figure may only fall.
MODULES_IN_CYCLES = 0
DOUBLED_TYPES = 0
ANY = 8.0
ATTRIBUTE_CALLS = 0.5

Figure = Callable[[str, float, float], None]


def test_no_import_goes_round(house_figure: Figure):
    cycles = structure.import_cycles(MODULES)
    house_figure("modules in import cycles", sum(map(len, cycles)), MODULES_IN_CYCLES)
    assert sum(map(len, cycles)) <= MODULES_IN_CYCLES, cycles


def test_a_type_has_one_name_and_one_home(house_figure: Figure):
    doubled = structure.doubled_types(MODULES)
    house_figure("types defined twice", len(doubled), DOUBLED_TYPES)
    assert len(doubled) <= DOUBLED_TYPES, "\n".join(doubled)


def test_any_is_rare(house_figure: Figure):
    figure = structure.per_thousand_lines(structure.count_any, SOURCES)
    house_figure("Any per 1,000 lines", figure, ANY)
    assert figure <= ANY


def test_attributes_are_declared(house_figure: Figure):
    figure = structure.per_thousand_lines(structure.count_attribute_calls, SOURCES)
    house_figure("getattr and hasattr per 1,000 lines", figure, ATTRIBUTE_CALLS)
    assert figure <= ATTRIBUTE_CALLS


def modules(**texts: str) -> dict[str, str]:
    return {f"p.{name}": text for name, text in texts.items()}


def test_the_cycle_rule_sees_imports_in_functions_and_for_types():
    sources = modules(
        a="from p.b import x",
        b="def f():\n    import p.c",
        c="if TYPE_CHECKING:\n    from p import a",
        d="from p.a import x",
    )
    assert structure.import_cycles(structure.parse(sources)) == [["p.a", "p.b", "p.c"]]
    assert structure.import_cycles(structure.parse(sources | modules(c="from p import x"))) == []


def test_the_rule_on_types_sees_classes_and_aliases():
    sources = modules(
        a="class Request: ...\nRow = list[int]\nKEYS = 1", b="Request = int\nKEYS = 2", c="from p.a import Row"
    )
    assert structure.doubled_types(structure.parse(sources)) == ["Request: p.a, p.b"]


def test_the_counts_see_annotations_and_calls():
    text = "from typing import Any\ndef f(x: Any) -> dict[str, Any]:\n    return getattr(x, 'y') or hasattr(x, 'z')\n"
    assert structure.per_thousand_lines(structure.count_any, {"p.a": text}) == 2 / 3 * 1000
    assert structure.per_thousand_lines(structure.count_attribute_calls, {"p.a": text}) == 2 / 3 * 1000
