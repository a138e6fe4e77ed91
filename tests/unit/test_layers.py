"""Imports point down only and form no circle; torch loads last; rooms have one name."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from graphkit.lazy_names import stub_names

ROOT = Path(__file__).resolve().parents[2]

LEVELS = (
    ("cli",),
    ("testing", "autoload"),
    ("audit",),
    ("models",),
    ("engine",),
    ("views", "distributed"),
    ("runners",),
    ("buffers",),
    ("graphs",),
    ("spec",),
    ("ops",),
    ("errors", "config", "records", "version", "lazy_names"),
)
"""Rooms from the top down. A room may import those of lower levels."""

FACE = "graphkit"
SIDEWAYS = {
    ("cli", FACE),
    ("config", "errors"),
    ("records", "errors"),
    ("records", "lazy_names"),
    ("models", "audit"),
}
"""Imports that are allowed within one level, and that of the package itself."""

CORE = {
    "errors", "config", "version", "lazy_names", "records", "ops", "spec", "graphs", "buffers",
    "runners",
}  # fmt: skip
"""Rooms that a server with its own engine needs. They import nothing else."""
CORE_OPS = {
    "argument_rules", "docstrings", "inference", "kernel_requests", "logits", "packed", "refresh",
    "registration", "rows", "step_rows", "tree", "tree_growth",
}  # fmt: skip
"""Files of ops that the core imports, and those that these import."""
DOOR = "graphkit.runners.capture_checks"
BEHIND = {"graphkit.audit.host_objects", "graphkit.audit.attention_check"}
"""The only file of the core that imports another room, inside functions, and what it imports:
captures note the numbers that a forward can read, and compare attention with chains."""

WITHOUT_TORCH = (
    "version", "errors", "config", "records", "audit.foreign", "spec", "views.diff", "cli",
    "testing", "autoload",
)  # fmt: skip
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def allowed(importer, imported):
    if imported in (importer, None) or (importer, imported) in SIDEWAYS:
        return True
    return LEVEL_OF.get(imported, -1) > LEVEL_OF[importer]


def python_files(*folders):
    for top in folders:
        for folder, subfolders, files in os.walk(ROOT / top, followlinks=True):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            yield from (Path(folder) / file for file in files if file.endswith(".py"))


@cache
def imports_of(source, package, *, with_types=False):
    """Return (line, module, names) of every import that runs, inside functions too.

    With ``with_types`` also of those that only type checkers follow.
    """
    return tuple(_imports_in(ast.parse(source), package.split("."), with_types))


def imports_in(file, *, with_types=False):
    package = package_of(file.relative_to(ROOT))
    return imports_of(file.read_text(encoding="utf-8"), package, with_types=with_types)


def package_of(path):
    return ".".join(path.parent.parts)


def _imports_in(node, package, with_types):
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if is_typing and not with_types:
            yield from _imports_in(ast.Module(child.orelse, []), package, with_types)
        elif isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name, ()) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *filter(None, [child.module])])
            yield child.lineno, module, tuple(alias.name for alias in child.names)
        else:
            yield from _imports_in(child, package, with_types)


def rooms_of(module, names):
    """Return the rooms that an import reaches; ``FACE`` is the package itself."""
    first, _, rest = module.partition(".")
    if first != "graphkit":
        return set()
    if rest:
        return {rest.split(".")[0]}
    return {name if name in LEVEL_OF else FACE for name in names} or {FACE}


def violations(path, source, room):
    for line, module, names in imports_of(source, package_of(path)):
        for imported in rooms_of(module, names):
            is_door = module_of(path) == DOOR and module in BEHIND
            if not (allowed(room, imported) or is_door):
                yield f"{path}:{line}: {room} imports {imported}"


def module_of(path):
    return ".".join(path.with_suffix("").parts)


def room_of(path):
    return path.parts[1].removesuffix(".py")


def test_every_room_has_a_level():
    rooms = {room_of(path.relative_to(ROOT)) for path in python_files("graphkit")}
    assert rooms - {"__init__", "__main__"} <= set(LEVEL_OF)


@pytest.mark.slow
def test_imports_point_down():
    found = []
    for file in python_files("graphkit"):
        path = file.relative_to(ROOT)
        if room_of(path) not in ("__init__", "__main__"):
            found += violations(path, file.read_text(encoding="utf-8"), room_of(path))
    assert not found, "\n".join(found)


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def has_stub(file):
    return file.name == "__init__.py" and file.with_suffix(".pyi").exists()


def file_imports():
    """Return the modules that each module of the package imports, for types as well.

    A name of a package that loads names on first use is an import of the module that has it.
    """
    files = {module_name(file): file for file in python_files("graphkit")}
    stubs = {name: stub_names(file) for name, file in files.items() if has_stub(file)}
    graph = {}
    for name, file in files.items():
        named = [
            f"{module}.{each}"
            if f"{module}.{each}" in files
            else stubs.get(module, {}).get(each, module)
            for _, module, names in imports_in(file, with_types=True)
            for each in names or [""]
        ]
        graph[name] = {module for module in named if module in files} - {name}
    graph[DOOR] -= BEHIND
    return graph


@pytest.mark.slow
def test_the_core_imports_nothing_else():
    assert not {pair for pair in SIDEWAYS if pair[0] in CORE and pair[1] not in CORE}
    assert all(LEVEL_OF[room] >= LEVEL_OF["runners"] for room in CORE)
    graph = file_imports()
    outside = {
        (name, module)
        for name, modules in graph.items()
        if name.split(".")[1:2] and name.split(".")[1] in CORE
        for module in modules
        if module.split(".")[1:2] and module.split(".")[1] not in CORE
    }
    assert not outside


@pytest.mark.slow
def test_the_core_imports_few_files_of_ops():
    graph, door = file_imports(), "graphkit.ops."
    core_ops = {f"{door}{name}" for name in CORE_OPS}
    reached = {
        module
        for name, modules in graph.items()
        for module in modules
        if module.startswith("graphkit.ops")
        and (name in core_ops or (name.split(".")[1:2] or [""])[0] in CORE - {"ops"})
    }
    assert reached == core_ops


def test_views_import_records_alone():
    """So that everything people see can be made from a saved record."""
    found = {
        room
        for file in python_files("graphkit/views")
        for _, module, names in imports_in(file, with_types=True)
        for room in rooms_of(module, names)
    }
    assert found == {"views", "records", "errors"}


@pytest.mark.slow
def test_no_circle_between_files():
    graphlib.TopologicalSorter(file_imports()).prepare()  # raises CycleError


def test_imports_of_types_count_for_circles():
    source = "if TYPE_CHECKING:\n    import graphkit.cli\nelse:\n    import graphkit.views.tui"
    assert [module for _, module, _ in imports_of(source, "graphkit")] == ["graphkit.views.tui"]
    typed = imports_of(source, "graphkit", with_types=True)
    assert [module for _, module, _ in typed] == ["graphkit.cli", "graphkit.views.tui"]


@pytest.mark.slow
def test_the_search_for_circles_finds_one():
    graph = file_imports()
    assert len(graph) > 200
    graph["graphkit.graphs.backend"].add("graphkit.runners.runner")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def test_the_package_imports_no_room_before_a_name_is_used():
    imports = imports_in(ROOT / "graphkit" / "__init__.py")
    found = [module for _, module, _ in imports if module.startswith("graphkit")]
    assert found == ["graphkit.lazy_names", "graphkit.version"]


@pytest.mark.slow
@pytest.mark.parametrize("top", ["graphkit", "tests", "tools"])
def test_no_file_imports_a_bare_room(top):
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in python_files(top)
        for line, module, _ in imports_in(file)
        if module.split(".")[0] in ("runners", "buffers")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source", "lines"),
    [
        ("ops", "from graphkit.spec import ForwardMode", [1]),
        ("ops", "\nimport graphkit.runners.step", [2]),
        ("ops", "def f():\n    from graphkit.graphs import SizeTable", [2]),
        ("ops", "from graphkit import runners", [1]),
        ("ops", "from graphkit import TargetVerifyRunner", [1]),
        ("ops", "from ..runners import Runner", [1]),
        ("ops", "if TYPE_CHECKING:\n    from graphkit.runners import Runner", []),
        ("ops", "if typing.TYPE_CHECKING:\n    pass\nelse:\n    import graphkit.cli", [4]),
        ("ops", "from graphkit.errors import ConfigError\nfrom . import refresh", []),
        ("graphs", "import graphkit\nfrom graphkit import __version__", [1, 2]),
        ("graphs", "from graphkit.version import __version__", []),
        ("cli", "import graphkit", []),
        ("engine", "from graphkit.models import load", [1]),
        ("models", "from graphkit.engine.kv import ReqToTokenPool", []),
        ("runners", "from graphkit.ops.refresh import refresh", []),
        ("runners", "from graphkit.audit.host_objects import ForwardObjects", [1]),
        ("buffers", "from graphkit.engine.attention import PagedAttention", [1]),
        ("errors", "try:\n    import graphkit.config\nexcept ImportError:\n    pass", [2]),
    ],
)
def test_the_check_of_imports_finds(room, source, lines):
    path = Path("graphkit") / room / "module.py"
    assert [int(text.split(":")[1]) for text in violations(path, source, room)] == lines


def loaded_after(*codes):
    """Return the top-level modules that a new interpreter has loaded after each of the codes."""
    report = "\nimport sys; print('LOADED', *{name.split('.')[0] for name in sys.modules})\n"
    code = "".join(f"{code}{report}" for code in codes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    return [{*line.split()[1:]} for line in found]


def test_rooms_without_torch_stay_without():
    found = loaded_after(*(f"import graphkit.{room}" for room in WITHOUT_TORCH))
    for room, modules in zip(WITHOUT_TORCH, found, strict=True):
        assert not {"torch", "numpy", "triton"} & modules, room


@pytest.mark.slow
def test_the_package_stays_without_torch():
    (found,) = loaded_after(
        "import graphkit; dir(graphkit); graphkit.SpecConfig('EAGLE', 3, 1, 4).plan()"
    )
    assert not {"torch", "numpy", "triton"} & found
    assert "torch" in loaded_after("import graphkit; graphkit.Runner")[0]


def test_help_stays_without_torch_and_the_screen():
    commands = ["", "capture", "inspect", "audit", "diff", "export", "record", "generate", "bench",
                "doctor"]  # fmt: skip
    code = """
from graphkit.cli import main
try: main([*{!r}.split(), '--help'])
except SystemExit as exit: assert exit.code == 0
"""
    found = loaded_after(*map(code.format, commands))
    for command, modules in zip(commands, found, strict=True):
        assert not {"torch", "numpy", "triton", "textual"} & modules, command
