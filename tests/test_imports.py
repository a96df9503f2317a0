"""Imports point down: every module of the package is in a layer, and no import breaks the order of the layers."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ds_dflash"

LAYERS = {
    0: "errors accelerator setting_errors sections deepspeed_keys config stopping topology attention head pieces phases"
    " read_ahead kernels peers",
    1: "data batching target channel anchors drafter loss schedule metrics sampling caches",
    2: "decode checkpoint export engine step job run_directory evaluate figures prompts teacher_forcing planner",
    3: "trainer train cli",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def room(file):
    """The module that a file is, or the package that it is a part of."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(file):
    """The dotted names that a file imports, relative ones made absolute."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(file):
    """The rooms of this package that a file imports, its own left out."""
    names = (name.split(".") for name in imported(file))
    return {parts[1] for parts in names if parts[0] == "ds_dflash" and len(parts) > 1} - {room(file), "__version__"}


def graph():
    edges = {}
    for file in FILES:
        edges.setdefault(room(file), set()).update(own_imports(file))
    return edges


def test_every_module_is_in_a_layer_and_every_name_is_a_module():
    assert {room(file) for file in FILES} == set(LAYER_OF)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_module_imports_from_its_own_layer_or_from_below(file):
    layer = LAYER_OF[room(file)]
    above = {name for name in own_imports(file) if LAYER_OF[name] > layer}
    assert not above, f"layer {layer} imports from above"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_of_layer_1_do_not_import_each_other(file):
    if LAYER_OF[room(file)] == 1:
        assert not {name for name in own_imports(file) if LAYER_OF[name] == 1}


def test_there_are_no_cycles():
    left = graph()
    while left:
        free = {name for name, imports in left.items() if not imports & set(left)}
        assert free, f"these import each other: {sorted(left)}"
        left = {name: imports for name, imports in left.items() if name not in free}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_all_imports_stand_at_the_top_of_a_module(file):
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = [node.lineno for function in functions for node in ast.walk(function) if is_import(node)]
    assert not inside


def is_import(node):
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize("file", sorted((PACKAGE / "batching").glob("*.py")), ids=lambda file: file.name)
def test_batching_needs_numpy_only(file):
    roots = {name.split(".")[0] for name in imported(file)}
    assert not roots & {"torch", "transformers", "deepspeed", "datasets"}
