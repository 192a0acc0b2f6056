"""Edits: the small mistakes that can be made at a node of source code; code that affects no text is left alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.LShift: ast.RShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter"}
_TOLD = ("log", "warnings", "cast", "TypeVar")  # calls of these names change no text

Edit = tuple[str, ast.AST | None]  # kind of mistake, and the node to put there; None: `pass`


def edits(node: ast.AST, early: bool = False) -> Iterator[Edit]:
    """Yield the mistakes that can be made at this node; `early`: a return here leaves before the function's end."""
    if isinstance(node, ast.stmt):
        yield from _dropped(node, early)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.IfExp)):
        yield from _operators(node)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Subscript):
        yield from _places(node)


def silent(node: ast.AST) -> bool:
    """Does nothing in this node affect a text? True for raised errors, logging, docstrings, imports and types."""
    if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arguments)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Call):
        names = {n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)}
        return bool(names & set(_TOLD))
    return False


def _dropped(node: ast.stmt, early: bool) -> Iterator[Edit]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "a statement is left out", None
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    ):
        yield "an assignment is left out", None
    elif isinstance(node, (ast.Continue, ast.Break)) or (early and isinstance(node, ast.Return)):
        yield "an early exit is left out", None
    elif isinstance(node, ast.If):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield "a condition is negated", ast.If(negated, node.body, node.orelse)


def _constants(value: object) -> Iterator[Edit]:
    if isinstance(value, bool):
        yield "a constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "a constant", ast.Constant(value + 1)
        yield "a constant", ast.Constant(value - 1)
    elif isinstance(value, float):
        yield "a constant", ast.Constant(value * 2 if value else 1.0)


def _operators(node: ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.IfExp) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARED[type(op)](), *node.ops[i + 1 :]]
            yield "a comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp):
        if type(node.op) in _COMPUTED:
            yield "an operator", ast.BinOp(node.left, _COMPUTED[type(node.op)](), node.right)
        if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)):
            yield "operands are swapped", ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield "and for or", ast.BoolOp(other, node.values)
        yield "one condition is left out", ast.BoolOp(node.op, node.values[:-1]) if node.values[2:] else node.values[0]
    elif isinstance(node, ast.IfExp):
        yield "a condition is negated", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node.op, ast.Not):
        yield "a condition is negated", node.operand


def _calls(node: ast.Call) -> Iterator[Edit]:
    args, starred = node.args, any(isinstance(a, ast.Starred) for a in node.args)
    if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        yield "another function", ast.Call(ast.Name(_CALLED[node.func.id], ast.Load()), args, node.keywords)
    if len(args) > 1 and not starred and not (isinstance(node.func, ast.Name) and node.func.id in ("min", "max")):
        yield "arguments are swapped", ast.Call(node.func, [args[1], args[0], *args[2:]], node.keywords)
    for i, named in enumerate(node.keywords):
        if named.arg is not None and named.arg != "strict":
            rest = [*node.keywords[:i], *node.keywords[i + 1 :]]
            yield "an argument is forgotten", ast.Call(node.func, args, rest)


def _places(node: ast.Subscript) -> Iterator[Edit]:
    """Yield an index, or an end of a slice, that is one off; constant indices are left to `_constants`."""
    part = node.slice
    if isinstance(part, ast.Slice):
        for step in (1, -1):
            for name in ("lower", "upper"):
                end = getattr(part, name)
                if end is not None and not isinstance(end, ast.Constant):
                    moved = _more(end, step)
                    low, high = (moved, part.upper) if name == "lower" else (part.lower, moved)
                    yield "a slice is one off", ast.Subscript(node.value, ast.Slice(low, high, part.step), node.ctx)
        if part.lower is not None and part.upper is None and part.step is None:
            yield "a slice is left out", node.value
    elif isinstance(part, (ast.Name, ast.BinOp)) and not isinstance(node.ctx, ast.Store):
        yield "an index is one off", ast.Subscript(node.value, _more(part, 1), node.ctx)
        yield "an index is one off", ast.Subscript(node.value, _more(part, -1), node.ctx)


def _more(value: ast.expr, step: int) -> ast.BinOp:
    return ast.BinOp(value, ast.Add() if step > 0 else ast.Sub(), ast.Constant(1))
