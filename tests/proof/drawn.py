"""Random mutants: a seeded generator of small mistakes in the shipped source, area by area."""

import ast
import copy
import importlib
import inspect
import random
import textwrap
from dataclasses import dataclass
from types import FunctionType

from proof.mutant import Mutant

# Areas of the source that are mutated, and the modules of each.
AREAS = {
    "masks and positions": ("batch", "spec.draft"),
    "caches": ("kvcache.blocks", "kvcache.cache", "models.runner"),
    "prefixes": ("kvcache.prefix",),
    "processors": ("spec.sampling",),
    "verification": ("spec.verify", "spec.step", "drafters._choices"),
    "scheduler": ("engine.scheduler", "engine.running", "engine.engine"),
    "ends": ("engine.running",),
    "grammars": ("grammar",),
    "drafters' state": ("drafters._followers", "drafters.draft_model"),
    "operations": ("ops.reference",),
    "server's parameters": tuple(f"server.{name}" for name in ("service", "text", "replies", "frames")),
}
# Functions that affect no text: output for people, sizes, time limits, and which level drafted a node.
NO_TEXT = ("__repr__", "__str__", "num_bytes", "metrics", "_metrics", "__enter__", "__exit__", "node_levels")
SILENT = (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arguments)  # syntax that affects no text
TOLD = {"log", "warnings", "cast", "TypeVar"}  # calls of these names do not, either

OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.LShift: ast.RShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter"}


@dataclass(frozen=True)
class DrawnMutant:
    """A mutant with its area and its kind of mistake."""

    mutant: Mutant
    area: str
    kind: str


def draw(seed, areas=AREAS):
    """Yield distinct mutants until all are used. Areas take turns; in an area, functions are drawn, then edits."""
    rng, seen = random.Random(seed), set[str]()
    left = {area: {f.__qualname__: (f, _sites(f)) for f in _functions(names)} for area, names in areas.items()}
    while any(left.values()):
        for area, functions in left.items():
            name = rng.choice(sorted(functions)) if functions else ""
            function, sites = functions.get(name, (None, []))
            if function is None or not sites:
                functions.pop(name, None)
                continue
            mutant, kind = _made(function, *sites.pop(rng.randrange(len(sites))))
            same = mutant.code().co_code == function.__code__.co_code and kind != "a constant"
            if not same and mutant.name not in seen:
                seen.add(mutant.name)
                yield DrawnMutant(mutant, area, kind)


def _functions(names):
    """Functions and methods written in these modules whose code can be replaced: no closures, no cached functions."""
    for module in (importlib.import_module(f"sameseed.{name}") for name in names):
        for space in (vars(module), *(vars(c) for c in vars(module).values() if inspect.isclass(c))):
            for value in space.values():
                found = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                found = None if hasattr(found, "cache_clear") or not callable(found) else inspect.unwrap(found)
                if not isinstance(found, FunctionType) or found.__code__.co_filename != module.__file__:
                    continue
                if not found.__code__.co_freevars and found.__name__ not in ("<lambda>", *NO_TEXT):
                    yield found


def _tree(function):
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
    return source, tree


def _sites(function):
    """Where a function can be mutated: the number of a node, and of its edits."""
    nodes = enumerate(_open(_tree(function)[1]))
    return [(number, which) for number, node in nodes for which, _ in enumerate(edits(node))]


def _made(function, number, which):
    """The mutant of a site, and its kind."""
    source, tree = _tree(function)
    node = list(_open(tree))[number]
    kind, new = list(edits(copy.deepcopy(node)))[which]
    text = f"{_short(node)} -> {_short(new)}"
    place = f"{function.__code__.co_firstlineno + node.lineno - 1}:{node.col_offset}"
    _Replace(node, new).visit(tree)
    wrong = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(f"{function.__module__}.{function.__qualname__}:{place} {text}", function, source, wrong), kind


def _open(tree):
    """Yield the nodes that may be mutated."""
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        value = node.value if isinstance(node, ast.Expr) else None
        names = {n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)} if isinstance(node, ast.Call) else set()
        if isinstance(node, SILENT) or isinstance(value, ast.Constant) or names & TOLD:
            continue
        if hasattr(node, "lineno"):
            yield node
        for name, child in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "ctx"):
                children = child if isinstance(child, list) else [child]
                stack += [c for c in children if isinstance(c, ast.AST)]


def edits(node):
    """Yield the mistakes that can be made at this node."""
    if isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "a statement is left out", ast.Pass()
    elif isinstance(node, (ast.If, ast.IfExp)):
        negated = copy.copy(node)
        negated.test = ast.UnaryOp(ast.Not(), node.test)
        yield "a condition is negated", negated
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        is_bool = isinstance(node.value, bool)
        yield "a constant", ast.Constant(not node.value if is_bool else node.value + 1)
    elif isinstance(node, ast.Compare):
        yield "a comparison", ast.Compare(node.left, [OTHER[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp):
        if type(node.op) in OTHER:
            yield "an operator", ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)):
            yield "operands are swapped", ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.BoolOp):
        yield "and for or", ast.BoolOp(OTHER[type(node.op)](), node.values)
        yield "one condition is left out", ast.BoolOp(node.op, node.values[:-1]) if node.values[2:] else node.values[0]
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Store):
        yield from _places(node)


def _calls(node):
    args, name = node.args, node.func.id if isinstance(node.func, ast.Name) else ""
    if name in CALLED:
        yield "another function", ast.Call(ast.Name(CALLED[name], ast.Load()), args, node.keywords)
    elif len(args) > 1 and not any(isinstance(a, ast.Starred) for a in args):
        yield "arguments are swapped", ast.Call(node.func, [args[1], args[0], *args[2:]], node.keywords)
    for i, named in enumerate(node.keywords):
        if named.arg not in (None, "strict"):
            rest = [*node.keywords[:i], *node.keywords[i + 1 :]]
            yield "an argument is forgotten", ast.Call(node.func, args, rest)


def _places(node):
    """Yield an index, or an end of a slice, that is one off; constants are mutated by themselves."""
    part = node.slice
    if isinstance(part, ast.Slice):
        if part.lower is not None:
            yield "a slice is one off", ast.Subscript(node.value, ast.Slice(_more(part.lower), part.upper), node.ctx)
        if part.upper is not None:
            yield "a slice is one off", ast.Subscript(node.value, ast.Slice(part.lower, _more(part.upper)), node.ctx)
    elif isinstance(part, (ast.Name, ast.BinOp)):
        yield "an index is one off", ast.Subscript(node.value, _more(part), node.ctx)


def _more(value):
    return ast.BinOp(value, ast.Add(), ast.Constant(1))


class _Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def _short(node):
    return " ".join(ast.unparse(node.test if isinstance(node, ast.If) else node).split())[:80]
