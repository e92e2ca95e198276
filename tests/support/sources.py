"""Rules about source code, as pure functions from a module's text to what breaks them.

A rule takes a parsed module and yields findings; `tests/architecture` runs each on a snippet that breaks
it, and then on the whole package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "PACKAGE",
    "REPOSITORY",
    "Module",
    "all_modules",
    "ambient_chance",
    "imports_of",
    "long_functions",
    "missing_header",
    "non_ascii_lines",
    "package_logic",
    "reads_environment",
    "reads_time",
    "unpickling",
]

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "wan_diloco"
GENERATED = "wire/generated/"

FUNCTION_LINES_MAX = 70
SEEDED = {
    "random": {"Random"},
    "numpy.random": {"Generator", "PCG64", "Philox", "SeedSequence", "BitGenerator", "default_rng"},
}
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


@dataclass(frozen=True, slots=True)
class Module:
    """One module: its path below the package, its text, and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, text: str, path: str = "snippet.py") -> Module:
        return cls(path, text, ast.parse(text))

    def dotted_names(self) -> Iterator[tuple[int, str]]:
        """Line and full name of everything imported, and of every attribute chain that starts at an import."""
        aliases: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    aliases[name.asname or name.name.partition(".")[0]] = (
                        name.name if name.asname else name.name.partition(".")[0]
                    )
                    yield node.lineno, name.name
            elif isinstance(node, ast.ImportFrom):
                for name in node.names:
                    aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                    yield node.lineno, f"{node.module}.{name.name}"
        for node in ast.walk(self.tree):
            chain = _chain(node)
            if chain and chain[0] in aliases and isinstance(node, (ast.Attribute, ast.Name)):
                yield node.lineno, ".".join([aliases[chain[0]], *chain[1:]])


def _chain(node: ast.AST) -> list[str]:
    """`a.b.c` as its words; empty for anything else."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else []


def all_modules() -> list[Module]:
    """Every module of the package that people write."""
    paths = sorted(path for path in PACKAGE.rglob("*.py"))
    modules = [Module.of(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()) for path in paths]
    return [module for module in modules if not module.path.startswith(GENERATED)]


def imports_of(module: Module, package: str) -> Iterator[str]:
    """Where the module imports or reaches into the package."""
    for line, name in module.dotted_names():
        if name == package or name.startswith(f"{package}."):
            yield f"{module.path}:{line} {name}"


def reads_environment(module: Module) -> Iterator[str]:
    for line, name in module.dotted_names():
        if name in {"os.environ", "os.getenv", "os.environb", "os.putenv"} or name.startswith("os.environ."):
            yield f"{module.path}:{line} {name}"


def reads_time(module: Module) -> Iterator[str]:
    for line, name in module.dotted_names():
        if name.startswith("time.") or name in {f"datetime.datetime.{f}" for f in ("now", "utcnow", "today")}:
            yield f"{module.path}:{line} {name}"
        if name == "datetime.date.today":
            yield f"{module.path}:{line} {name}"


def ambient_chance(module: Module) -> Iterator[str]:
    """Global generators, global seeds, and torch's draws without a generator of their own."""
    for line, name in module.dotted_names():
        for package, allowed in SEEDED.items():
            if name.startswith(f"{package}.") and name.removeprefix(f"{package}.").partition(".")[0] not in allowed:
                yield f"{module.path}:{line} {name}"
        if name in {"torch.manual_seed", "torch.seed", "torch.random.manual_seed", "torch.cuda.manual_seed"}:
            yield f"{module.path}:{line} {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            chain = _chain(node.func)
            if chain[:1] == ["torch"] and chain[-1] in DRAWS and "generator" not in {k.arg for k in node.keywords}:
                yield f"{module.path}:{node.lineno} {'.'.join(chain)} without generator="


def unpickling(module: Module) -> Iterator[str]:
    for line, name in module.dotted_names():
        if name.partition(".")[0] in UNPICKLERS or name in {"torch.load", "torch.save", "torch.serialization"}:
            yield f"{module.path}:{line} {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            allowed = isinstance(node.value, ast.Constant) and node.value.value is False
            if not allowed:
                yield f"{module.path}:{node.value.lineno} allow_pickle"


def long_functions(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{module.path}:{node.lineno} {node.name} has {length} lines"


def missing_header(module: Module) -> Iterator[str]:
    """Every module says what it is; every public one says what it offers."""
    name = module.path.rpartition("/")[2]
    if not ast.get_docstring(module.tree):
        yield f"{module.path} has no docstring"
    offers = any(
        isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in module.tree.body
    )
    only_docstring = name == "__init__.py" and len(module.tree.body) <= 1
    if not offers and not only_docstring and (name == "__init__.py" or not name.startswith("_")):
        yield f"{module.path} has no __all__"


def package_logic(module: Module) -> Iterator[str]:
    """A package's `__init__` holds a docstring and re-exports, nothing that runs."""
    for node in module.tree.body[1:]:
        if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)):
            yield f"{module.path}:{node.lineno} {type(node).__name__}"
        elif isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] != ["__all__"]:
            yield f"{module.path}:{node.lineno} assigns {ast.unparse(node.targets[0])}"


def non_ascii_lines(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if not line.isascii():
            yield f"{module.path}:{number}"
