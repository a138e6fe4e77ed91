"""The page Audits describes every class of finding, and no other."""

import ast
import re
from pathlib import Path

from graphkit import audit
from graphkit.audit import bugs

PAGE = Path(__file__).parents[2] / "docs" / "audits.md"


def literals(node):
    """Return the strings that an expression may be."""
    if isinstance(node, ast.IfExp):
        return {*literals(node.body), *literals(node.orelse)}
    if isinstance(node, ast.Tuple):
        return literals(node.elts[0])
    if isinstance(node, ast.Name):
        value = getattr(bugs, node.id, None)
        return {value} if isinstance(value, str) else set()
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def kinds_in(tree):
    """Return the kinds that a module gives to findings: arguments, variables and results."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and "report" in ast.unparse(node.func):
            yield from literals(node.args[0])
        elif isinstance(node, ast.Assign) and "kind" in ast.unparse(node.targets[0]):
            yield from literals(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("finding"):
            for each in ast.walk(node):
                yield from literals(each.value) if isinstance(each, ast.Return) else ()


def test_every_kind_of_finding_is_in_the_catalogue():
    folder = Path(audit.__file__).parent
    files = [path for path in folder.rglob("*.py") if "foreign" not in path.parts]
    found = {kind for path in files for kind in kinds_in(ast.parse(path.read_text()))}
    found |= {bug.kind for bug in bugs.Bug}
    described = re.findall(r"^([a-z -]+)\n: ", PAGE.read_text(), re.MULTILINE)
    assert len(described) == len({*described})
    assert {*described} == found


def test_every_audit_has_a_section():
    sections = re.findall(r"^### ([a-z-]+): ", PAGE.read_text(), re.MULTILINE)
    assert {*sections} == {*audit.AUDITS, "lock"}
